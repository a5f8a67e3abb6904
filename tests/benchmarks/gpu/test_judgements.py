"""Each judgement on made-up measurements: what holds its bound, what misses it, what is open."""

import pytest

from benchmarks.gpu import (
    ahead,
    attached,
    clock,
    energy,
    exactness,
    failures,
    identity,
    memory,
    memory_full,
    messages,
    overhead,
    products,
    receives,
    spans,
    streams,
    synchronisation,
    turns,
)
from benchmarks.gpu.clock import Marks
from benchmarks.gpu.findings import Bound, Finding, Verdict
from benchmarks.gpu.memory import Peak

HELD, MISSED, OPEN = Verdict.HELD, Verdict.MISSED, Verdict.NOT_DECIDED


def verdicts(findings):
    return [finding.verdict for finding in findings]


def test_a_bound_is_open_where_the_error_reaches_over_it():
    bound = Bound(at_least=0.9, at_most=1.1)
    assert bound.judge(1.0, 0.05) is HELD
    assert bound.judge(1.08, 0.05) is OPEN
    assert bound.judge(1.3, 0.05) is MISSED
    assert bound.judge(0.5) is MISSED
    assert bound.judge(1.1) is HELD
    assert bound.judge(float("nan"), 0.1) is MISSED
    assert bound.judge(float("inf")) is MISSED
    assert str(bound) == "≥ 0.9, ≤ 1.1"


def marks(*, off_ns=0, error_ns=2000, number=2000):
    before = tuple(range(0, number * 10_000, 10_000))
    read = tuple(at + 3000 for at in before)
    after = tuple(at + 5000 for at in before)
    return Marks(before, (*read[:-1], after[-1] + off_ns), after, (error_ns,) * number)


def test_a_mark_beyond_its_error_is_counted():
    assert verdicts(clock.judge_marks(marks(off_ns=2000))) == [HELD, HELD]
    count, _ = clock.judge_marks(marks(off_ns=2001))
    assert (count.verdict, count.value, count.note) == (MISSED, 1, "the worst by 1 ns")


def test_too_few_marks_and_errors_that_excuse_everything_do_not_hold():
    assert verdicts(clock.judge_marks(marks(number=1999))) == [OPEN]
    assert verdicts(clock.judge_marks(marks(error_ns=1_000_000))) == [HELD, MISSED]


def sleeps(*ratios):
    return clock.Measurements(marks(), tuple(0.005 * r for r in ratios), (0.005,) * len(ratios))


def test_a_sleep_is_read_to_half_a_percent():
    assert clock.judge(sleeps(*[1.001, 0.999] * 5))[-1].verdict is HELD
    assert clock.judge(sleeps(*[1.02, 1.021] * 5))[-1].verdict is MISSED
    assert clock.judge(sleeps(*[1.0045, 0.98, 1.0046] * 3))[-1].verdict is OPEN


def peaks(*sizes, off=1.0):
    return tuple(
        Peak(number, size, round(size * off) if off else None)
        for number, size in zip(memory.NUMBERS, sizes, strict=True)
    )


def overhead_of(*percents):
    with_spans = tuple(round(1000 + 10 * percent) for percent in percents)
    return overhead.judge(overhead.Measurements(with_spans, (1000,) * len(percents)))


def turns_of(percent, gap=0.01, first_gap=0.01):
    with_spans = tuple(1 + (percent + one / 10) / 100 for one in range(8))
    return turns.judge(turns.Measurements(with_spans, (1.0,) * 8, (first_gap, *(gap,) * 10)))


def attached_of(num_steps=3, num_computations=8, span_s=0.9, said=()):
    took = (span_s,) * num_steps
    measured = attached.Measurements(said, num_steps, num_computations, (1.0,) * num_steps, took)
    return attached.judge(measured)


def receives_of(cost):
    return receives.judge(receives.Measurements((1 + cost, 1 + cost * 1.1) * 6, (1.0,) * 12))


def products_of(share, datasheet=989.4e12):
    return products.judge(products.Measurements("H100", share * 989.4e12, datasheet))


def messages_of(num_streams, backend="nccl"):
    exact = exactness.Measurements({"afab on 2 ranks": 0.0}, {"afab on 2 ranks": backend})
    return messages.judge(messages.Measurements(exact, 6, num_streams))


def streams_of(ratio):
    return streams.judge(streams.Measurements(31, (0.01,) * 8, (0.01 * ratio,) * 8))


def spans_of(span_s, most, kernels):
    return spans.judge(spans.Measurements((1.0,) * 8, (span_s,) * 8, most, kernels))


def ahead_of(issued_s):
    return ahead.judge(ahead.Measurements(64, issued_s, 64.0, 8))


def energy_of(energy_j):
    return energy.judge(energy.Measurements(energy_j, 500.0, 8.0, ""))


UUID = "3f1c4d2a-0000-1111-2222-333344445555"
EXACT = {"1f1b on 2 ranks": 1e-13, "zbv on 2 ranks": 1e-6}
LINE, FLAT = (200, 300, 400, 500), (200,) * 4
STATUSES = {"out_of_memory": "oom", "asserts": "crash", "is_killed": "crash", "stops": "timeout"}
SOUND = dict.fromkeys(STATUSES, "ok")


def memory_of(afab, f1b, off=1.0):
    return memory.judge(memory.Measurements(peaks(*afab, off=off), peaks(*f1b)))


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        (spans_of(0.95, 1.0, 0.9), [HELD, HELD]),
        (spans_of(1.05, 1.0, 1.2), [MISSED, MISSED]),
        (spans_of(0.95, 1.0, None), [HELD, OPEN]),
        (ahead_of(56), [HELD]),
        (ahead_of(1), [MISSED]),
        (ahead_of(63.9), [MISSED]),
        (streams_of(1.05), [HELD]),
        (streams_of(4.0), [MISSED]),
        (identity.judge(identity.Measurements((UUID,), ("GPU-1", f"GPU-{UUID}"))), [HELD]),
        (identity.judge(identity.Measurements((UUID,), ("GPU-1",))), [MISSED]),
        (identity.judge(identity.Measurements((UUID,), (), "no driver")), [OPEN]),
        (
            exactness.judge(exactness.Measurements(EXACT, dict.fromkeys(EXACT, "nccl"))),
            [HELD, MISSED],
        ),
        (memory_of(LINE, (200, 200, 204, 200)), [HELD] * 4),
        (memory_of((200, 350, 450, 500), (200, 200, 220, 220)), [MISSED, HELD, MISSED, HELD]),
        (memory_of(LINE, FLAT, off=1.06)[-1:], [MISSED]),
        (memory_of(LINE, FLAT, off=None)[-1:], [OPEN]),
        (overhead_of(*[0.2, 0.4] * 6), [HELD]),
        (overhead_of(*[2, 2.2] * 6), [MISSED]),
        (overhead_of(*[0, 2] * 6), [OPEN]),
        (turns_of(0.1), [HELD, HELD, HELD]),
        (turns_of(0.5), [OPEN, HELD, HELD]),
        (turns_of(2, gap=0.06), [MISSED, MISSED, HELD]),
        (turns_of(0.1, first_gap=-0.001), [HELD, HELD, MISSED]),
        (attached_of(), [HELD, HELD, HELD]),
        (attached_of(num_steps=2), [MISSED, HELD, HELD]),
        (attached_of(num_computations=7, span_s=1.2), [HELD, MISSED, MISSED]),
        (attached_of(num_steps=0, said=("no event",)), [MISSED]),
        (energy_of(4000), [HELD]),
        (energy_of(4300), [MISSED]),
        (energy_of(3700), [MISSED]),
        (energy_of(None), [OPEN]),
        (products_of(0.8), [HELD]),
        (products_of(0.6), [MISSED]),
        (products_of(0.95), [MISSED]),
        (products_of(0.8, None), [OPEN]),
        (failures.judge(failures.Measurements(STATUSES, SOUND)), [HELD] * 8),
        (failures.judge(failures.Measurements({}, {})), [MISSED] * 8),
        (messages_of(6), [HELD] * 3),
        (messages_of(5), [HELD, HELD, MISSED]),
        (messages_of(6, "gloo")[1:2], [MISSED]),
        (receives_of(0.02), [HELD]),
        (receives_of(0.2), [MISSED]),
        (
            memory_full.judge(
                memory_full.Measurements({"a": "ended", "b": "out of memory", "c": "it hangs"})
            ),
            [HELD, HELD, MISSED],
        ),
    ],
)
def test_what_holds_a_bound_what_misses_it_and_what_is_open(findings, expected):
    assert verdicts(findings) == expected


def test_a_schedule_that_synchronises_is_named_with_its_line():
    found = synchronisation.judge(synchronisation.Measurements({"afab": "", "zbv": "line 3"}))
    assert verdicts(found) == [HELD, MISSED]
    assert "zbv" in found[1].name
    assert found[1].note == "line 3"


def test_kernels_that_overlap_are_counted_once():
    assert spans._covered([(0, 10), (5, 12), (20, 30), (22, 25)]) == 22


def test_memory_that_does_not_grow_is_off_every_line():
    assert memory.off_line(peaks(200, 200, 200, 200)) == float("inf")


def test_a_failure_has_its_status_and_the_next_case_is_sound():
    measured = failures.Measurements({**STATUSES, "stops": "crash"}, {**SOUND, "asserts": "error"})
    assert verdicts(failures.judge(measured)).count(MISSED) == 2


def test_a_finding_is_the_same_read_back():
    from dataclasses import asdict

    for finding in (
        Finding.of("a", "b", 1.0, Bound(at_most=2.0), unit="s", error=0.1),
        Finding.not_run("a", "no GPU"),
    ):
        assert Finding.from_json(asdict(finding)) == finding
