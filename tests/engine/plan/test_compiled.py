"""What is compiled gives what Python gives: one source, called in two ways."""

import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numba
import pytest
from brute_force import delivers_all, is_legal, naive_times
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import mutated_programs, mutated_transfers, with_rows
from schedule_grid import families, programs_of

from engine import arrays
from engine.plan import kernels
from engine.plan.action import CODES, JOINING_OPS, OPS, Action, Op
from engine.plan.check import check, prove_no_deadlock
from engine.plan.collectives import DataParallel
from engine.plan.lower import lower
from engine.plan.period import Step, periods
from engine.plan.predict import Durations, predict, predict_replicas, timed, uniform
from engine.plan.rules import ProgramError, peak_activations
from engine.plan.schedules.registry import build_program
from engine.plan.walk import Sharing, TransferModel, of_kinds

NAMES = [("interleaved_zb", 4, 8, 2), ("1f1b", 3, 7)]
PROGRAMS = [build_program(*name) for name in NAMES]
SLOW = TransferModel(latency_ns=7, overlaps=False)


def fresh(program):
    """The same program, of which nothing is proved or kept yet."""
    return with_rows(program, program.actions)


def reason(refuses, program, *arguments):
    try:
        refuses(fresh(program), *arguments)
    except ProgramError as error:
        row = program.actions[error.rank]
        at_end = error.position == len(row) and error.action == "end of program"
        assert at_end or str(row[error.position]) == error.action
        return str(error)
    return None


def results(program, durations, transfers=SLOW):
    """What every walk gives, as plain values."""
    program = fresh(program)
    simulation, lowered = predict(program, durations, transfers), fresh(lower(program))
    took = of_kinds(lowered, durations.by_kind(program.num_stages))
    replayed = timed(lowered, [took])
    reasons = [
        reason(check, with_rows(program, program.actions[::-1])),
        reason(prove_no_deadlock, lowered, Sharing.RANK),
        reason(prove_no_deadlock, program),
    ]
    return (
        (simulation.start_ns, simulation.end_ns, simulation.makespan_ns, simulation.compute_ns),
        (lowered.actions, list(simulation.spans()), simulation.critical_path()),
        (list(replayed.spans()), replayed.idle_ns, peak_activations(lowered)),
        reasons,
    )


def both(monkeypatch, work, *arguments):
    """The result as Python and as machine code."""
    for pays_from in (10**9, 0):
        with monkeypatch.context() as patched:
            patched.setattr(arrays, "PAYS_FROM", pays_from)
            yield work(*arguments)


def test_on_every_schedule_machine_code_python_and_brute_force_agree(monkeypatch, is_thorough):
    chance, num_programs = random.Random(1), 0
    for name, p, v in families((1, 2, 3, 4, 8, 16) if is_thorough else (1, 3)):
        shapes = list(programs_of(name, p, v).values())
        for program in shapes if is_thorough else shapes[:1]:
            costs = [[chance.randrange(50) for _ in range(p * v)] for _ in "FIW"]
            durations = Durations(*map(tuple, costs))
            latency, size, overlaps = chance.randrange(90), chance.randrange(50), chance.random()
            case = program, durations, TransferModel(latency, 1e9, size, overlaps < 0.5)
            as_python, as_code = both(monkeypatch, results, *case)
            assert as_code == as_python
            if program.table.num_actions < 200:
                times = naive_times(*case)
                starts_and_ends = [
                    [[times[action][end] for action in row] for row in program.actions]
                    for end in (0, 1)
                ]
                assert starts_and_ends == list(as_code[0][:2])
            num_programs += 1
    assert num_programs == 783 or not is_thorough


def test_machine_code_python_and_brute_force_agree_on_what_is_legal(monkeypatch, is_thorough):
    verdicts = Counter()

    @settings(max_examples=3000 if is_thorough else 300, derandomize=True)
    @given(mutated_programs(), mutated_transfers(), st.sampled_from(Sharing))
    def agree(program, lowered, sharing):
        order, hangs = (
            list(both(monkeypatch, reason, *call))
            for call in ((check, program), (prove_no_deadlock, lowered, sharing))
        )
        assert order[0] == order[1]
        assert hangs[0] == hangs[1]
        assert (order[0] is None) == is_legal(program)
        assert (hangs[0] is None) == delivers_all(lowered, sharing)
        verdicts.update([order[0] is None, hangs[0] is None])

    agree()
    assert min(verdicts[True], verdicts[False]) > 100


@pytest.mark.parametrize("pays_from", [0, 10**9])
def test_what_does_not_fit_a_program_is_refused_before_it_is_walked(pays_from, monkeypatch):
    monkeypatch.setattr(arrays, "PAYS_FROM", pays_from)
    program = fresh(PROGRAMS[1])
    for num_stages in (1, 4):
        durations = Durations(*[(1,) * num_stages] * 3)
        with pytest.raises(ValueError, match=rf"of {num_stages}.* stages .* program of 3"):
            predict(program, durations)
    with pytest.raises(ValueError, match=r"stages .* program of 3"):
        predict(program, Durations((1,) * 3, (1,) * 2, (1,) * 3))
    with pytest.raises(ValueError, match="the times of"):
        timed(lower(program), [[0] * 3])
    astray = replace(program, actions=((Action(9, Op.F, 0),), (), ()))
    for walk in (check, lower, prove_no_deadlock, lambda one: timed(one, [[0]])):
        with pytest.raises(ProgramError):
            walk(astray)
    assert sum(astray.num_of_kind) == 0


@pytest.mark.parametrize("pays_from", [0, 10**9])
def test_many_periods_come_in_the_order_of_their_costs(pays_from, monkeypatch):
    program = PROGRAMS[1]
    sets = [Durations((n, 1, 2), (3, n, 4), (5, 6, n)) for n in range(200)]
    steps = [Step(program, [of_kinds(program, one.by_kind(3))]) for one in sets]
    alone = [periods([step])[0] for step in steps]
    monkeypatch.setattr(arrays, "PAYS_FROM", pays_from)
    assert periods(steps) == alone


def test_times_too_large_for_64_bits_are_exact(monkeypatch):
    monkeypatch.setattr(arrays, "PAYS_FROM", 0)
    program, large = PROGRAMS[1], 10**25
    costs = [Durations(*[(ns,) * 3] * 3) for ns in (1, large)]
    one, many = (predict(program, each) for each in costs)
    assert many.makespan_ns == large * one.makespan_ns
    free = dict.fromkeys(JOINING_OPS, (0,) * 3)
    one, many = (predict_replicas(program, [each] * 2, DataParallel(), free) for each in costs)
    assert many.makespan_ns == large * one.makespan_ns


DAMAGED = """
import os, sys
from pathlib import Path
from engine import arrays
from engine.plan.predict import predict, uniform
from engine.plan.schedules.registry import build_program

def makespan():
    arrays._compiled.cache_clear()
    program = build_program("1f1b", 2, 4)
    return predict(program, uniform(program.placement, 1, 1, 1)).makespan_ns

arrays.PAYS_FROM = 0
expected, kept = makespan(), sorted(Path(os.environ["NUMBA_CACHE_DIR"]).glob("*/*.nb*"))
assert len(kept) >= 4, kept
for path in kept:
    for damage in (lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"no" * 99):
        path.write_bytes(damage(path.read_bytes()))
        assert makespan() == expected
        assert makespan() == expected
        if "all" not in sys.argv:
            break
    if "all" not in sys.argv and path.suffix == ".nbi":
        break
"""


def test_damaged_machine_code_is_compiled_anew(tmp_path, is_thorough):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", DAMAGED, "all" if is_thorough else "some"]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_where_nothing_can_be_compiled_python_gives_the_same(monkeypatch, caplog):
    expected = results(PROGRAMS[0], uniform(PROGRAMS[0].placement, 12, 30, 6))
    monkeypatch.setattr(arrays, "PAYS_FROM", 0)
    for forbid in (
        lambda patched: patched.setitem(sys.modules, "numba", None),
        lambda patched: patched.setattr(numba.config, "DISABLE_JIT", 1),
    ):
        arrays._can_compile.cache_clear()
        with monkeypatch.context() as patched:
            forbid(patched)
            assert results(PROGRAMS[0], uniform(PROGRAMS[0].placement, 12, 30, 6)) == expected
            assert not arrays._can_compile()
    arrays._can_compile.cache_clear()
    assert "numba cannot be imported" in caplog.text


def test_kernels_know_the_codes_of_ops():
    assert [getattr(kernels, op.name) for op in OPS] == [CODES[op] for op in OPS]
