"""What is compiled gives what Python gives: one source, called in two ways."""

import logging
import os
import random
import subprocess
import sys

import numba
import pytest
from brute_force import PlainWalk
from drawn_programs import FAMILIES, programs_of, with_rows

from engine import arrays
from engine.plan.action import JOINING_OPS
from engine.plan.collectives import DataParallel
from engine.plan.lower import lower
from engine.plan.period import Step, periods
from engine.plan.predict import Durations, predict, predict_replicas, timed, uniform
from engine.plan.rules import peak_activations
from engine.plan.schedules.registry import build_program
from engine.plan.walk import TransferModel, of_kinds

PROGRAM = build_program("1f1b", 3, 7)


def results(program, durations, transfers):
    """What every walk gives, as plain values, of a program of which nothing is kept yet."""
    program = with_rows(program, program.actions)
    step, lowered = predict(program, durations, transfers), lower(program)
    lowered = with_rows(lowered, lowered.actions)
    again = timed(lowered, [of_kinds(lowered, durations.by_kind(program.num_stages))])
    return (
        (step.start_ns, step.end_ns, step.makespan_ns, step.compute_ns),
        (lowered.actions, list(step.spans()), step.critical_path()),
        (list(again.spans()), again.idle_ns, peak_activations(lowered)),
    )


def test_on_every_schedule_machine_code_python_and_a_plain_walk_agree(monkeypatch, is_thorough):
    chance = random.Random(1)
    for (name, v), p in (
        (family, p) for family in FAMILIES for p in (1, 3, 4, 8)[: 4 if is_thorough else 2]
    ):
        shapes = list(programs_of(name, p, v))
        for program in shapes if is_thorough else shapes[:1]:
            costs = [[chance.randrange(50) for _ in range(p * v)] for _ in "FIW"]
            durations = Durations(*map(tuple, costs))
            overlaps, size = chance.random() < 0.5, chance.randrange(50)
            transfers = TransferModel(chance.randrange(90), 1e9, size, overlaps)
            found = []
            for pays_from in (10**9, 0):
                monkeypatch.setattr(arrays, "PAYS_FROM", pays_from)
                found.append(results(program, durations, transfers))
            assert found[0] == found[1]
            took = of_kinds(program, durations.by_kind(program.num_stages))
            times = PlainWalk(program, [took], transfers).times
            for starts_or_ends, column in zip(found[0][0], (0, 2), strict=False):
                assert starts_or_ends == [
                    [times[0, 0, rank, at][column] for at in range(len(row))]
                    for rank, row in enumerate(program.actions)
                ]


@pytest.mark.parametrize("pays_from", [0, 10**9])
def test_many_periods_come_in_the_order_of_their_costs(pays_from, monkeypatch):
    sets = [Durations((n, 1, 2), (3, n, 4), (5, 6, n)) for n in range(200)]
    steps = [Step(PROGRAM, [of_kinds(PROGRAM, one.by_kind(3))]) for one in sets]
    alone = [periods([step])[0] for step in steps]
    monkeypatch.setattr(arrays, "PAYS_FROM", pays_from)
    assert periods(steps) == alone


def test_times_too_large_for_64_bits_are_exact(monkeypatch):
    monkeypatch.setattr(arrays, "PAYS_FROM", 0)
    large, free = 10**25, dict.fromkeys(JOINING_OPS, (0,) * 3)
    one, many = (Durations(*[(ns,) * 3] * 3) for ns in (1, large))
    for step_of in (
        lambda costs: predict(PROGRAM, costs),
        lambda costs: predict_replicas(PROGRAM, [costs] * 2, DataParallel(), free),
    ):
        assert step_of(many).makespan_ns == large * step_of(one).makespan_ns


DAMAGED = """
import os
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
"""


@pytest.mark.thorough
def test_damaged_machine_code_is_compiled_anew(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", DAMAGED]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_where_nothing_can_be_compiled_python_gives_the_same(monkeypatch, caplog):
    case = PROGRAM, uniform(PROGRAM.placement, 12, 30, 6), TransferModel(7, overlaps=False)
    expected = results(*case)
    monkeypatch.setattr(arrays, "PAYS_FROM", 0)
    for forbid in (
        lambda patched: patched.setitem(sys.modules, "numba", None),
        lambda patched: patched.setattr(numba.config, "DISABLE_JIT", 1),
    ):
        arrays._can_compile.cache_clear()
        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
            forbid(patched)
            assert results(*case) == expected
    arrays._can_compile.cache_clear()
    assert "numba cannot be imported" in caplog.text
