"""Each judgement on made-up measurements: what holds its bound, what misses it, what is open."""

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


def test_a_schedule_that_synchronises_is_named_with_its_line():
    found = synchronisation.judge(synchronisation.Measurements({"afab": "", "zbv": "line 3"}))
    assert verdicts(found) == [HELD, MISSED]
    assert "zbv" in found[1].name
    assert found[1].note == "line 3"


def test_spans_fill_a_step_and_contain_its_kernels():
    good = spans.Measurements((1.0,) * 8, (0.95,) * 8, 1.0, 0.9)
    assert verdicts(spans.judge(good)) == [HELD, HELD]
    longer = spans.Measurements((1.0,) * 8, (1.05,) * 8, 1.0, 1.2)
    assert verdicts(spans.judge(longer)) == [MISSED, MISSED]
    without = spans.Measurements((1.0,) * 8, (0.95,) * 8, 1.0, None)
    assert verdicts(spans.judge(without)) == [HELD, OPEN]


def test_kernels_that_overlap_are_counted_once():
    assert spans._covered([(0, 10), (5, 12), (20, 30), (22, 25)]) == 22


def test_the_host_runs_ahead_as_far_as_it_is_asked_to():
    def verdict(issued_s):
        return ahead.judge(ahead.Measurements(64, issued_s, 64.0, 8))[0].verdict

    assert [verdict(issued_s) for issued_s in (56, 1, 63.9)] == [HELD, MISSED, MISSED]


def test_streams_run_beside_each_other():
    def verdict(ratio):
        measured = streams.Measurements(31, (0.01,) * 8, (0.01 * ratio,) * 8)
        return streams.judge(measured)[0].verdict

    assert [verdict(ratio) for ratio in (1.05, 4.0)] == [HELD, MISSED]


def test_a_device_is_known_by_its_uuid():
    uuid = "3f1c4d2a-0000-1111-2222-333344445555"
    same = identity.Measurements((uuid,), ("GPU-other", f"GPU-{uuid}"))
    other = identity.Measurements((uuid,), ("GPU-other",))
    none = identity.Measurements((uuid,), (), "no driver")
    found = [identity.judge(one)[0].verdict for one in (same, other, none)]
    assert found == [HELD, MISSED, OPEN]


def test_exactness_is_of_each_case():
    cases = {"1f1b on 2 ranks": 1e-13, "zbv on 2 ranks": 1e-6}
    found = exactness.judge(exactness.Measurements(cases, dict.fromkeys(cases, "nccl")))
    assert verdicts(found) == [HELD, MISSED]


def peaks(*sizes, off=1.0):
    return tuple(
        Peak(number, size, round(size * off))
        for number, size in zip(memory.NUMBERS, sizes, strict=True)
    )


def test_memory_of_afab_is_a_line_and_that_of_1f1b_flat():
    good = memory.Measurements(peaks(200, 300, 400, 500), peaks(200, 200, 204, 200))
    assert verdicts(memory.judge(good)) == [HELD] * 4
    bent = memory.Measurements(peaks(200, 350, 450, 500), peaks(200, 200, 220, 220))
    assert verdicts(memory.judge(bent)) == [MISSED, HELD, MISSED, HELD]
    assert memory.off_line(peaks(200, 200, 200, 200)) == float("inf")


def test_a_prediction_is_within_5_percent_or_there_is_none():
    line, flat = (200, 300, 400, 500), (200,) * 4
    off = memory.Measurements(peaks(*line, off=1.06), peaks(*flat))
    assert memory.judge(off)[-1].verdict is MISSED
    none = memory.Measurements(
        tuple(Peak(p.num_microbatches, p.peak_bytes, None) for p in peaks(*line)), peaks(*flat)
    )
    assert memory.judge(none)[-1].verdict is OPEN


def overhead_of(*percents):
    with_spans = tuple(round(1000 + 10 * percent) for percent in percents)
    return overhead.judge(overhead.Measurements(with_spans, (1000,) * len(percents)))[0].verdict


def test_overhead_is_at_most_one_percent():
    assert overhead_of(*[0.2, 0.4] * 6) is HELD
    assert overhead_of(*[2, 2.2] * 6) is MISSED
    assert overhead_of(*[0, 2] * 6) is OPEN


def attached_of(num_steps=3, num_computations=8, span_s=0.9, said=()):
    took = (span_s,) * num_steps
    measured = attached.Measurements(said, num_steps, num_computations, (1.0,) * num_steps, took)
    return verdicts(attached.judge(measured))


def test_attach_records_each_step_whole():
    assert attached_of() == [HELD, HELD, HELD]
    assert attached_of(num_steps=2) == [MISSED, HELD, HELD]
    assert attached_of(num_computations=7, span_s=1.2) == [HELD, MISSED, MISSED]
    assert attached_of(num_steps=0, said=("no event",)) == [MISSED]


def energy_of(energy_j, power_w=500.0):
    return energy.judge(energy.Measurements(energy_j, power_w, 8.0, ""))[0].verdict


def test_energy_is_the_integral_of_power():
    assert [energy_of(joules) for joules in (4000, 4300, 3700)] == [HELD, MISSED, MISSED]
    assert energy_of(None) is OPEN


def products_of(share, datasheet=989.4e12):
    measured = products.Measurements("H100", share * 989.4e12, datasheet)
    return products.judge(measured)[0].verdict


def test_products_are_neither_too_slow_nor_too_fast():
    assert [products_of(share) for share in (0.8, 0.6, 0.95)] == [HELD, MISSED, MISSED]
    assert products_of(0.8, None) is OPEN


STATUSES = {"out_of_memory": "oom", "asserts": "crash", "is_killed": "crash", "stops": "timeout"}


def test_a_failure_has_its_status_and_the_next_case_is_sound():
    sound = dict.fromkeys(STATUSES, "ok")
    assert verdicts(failures.judge(failures.Measurements(STATUSES, sound))) == [HELD] * 8
    measured = failures.Measurements({**STATUSES, "stops": "crash"}, {**sound, "asserts": "error"})
    assert verdicts(failures.judge(measured)).count(MISSED) == 2
    assert verdicts(failures.judge(failures.Measurements({}, {}))) == [MISSED] * 8


def test_edges_have_a_stream_each():
    exact = exactness.Measurements({"afab on 2 ranks": 0.0}, {"afab on 2 ranks": "nccl"})
    assert verdicts(messages.judge(messages.Measurements(exact, 6, 6))) == [HELD] * 3
    assert verdicts(messages.judge(messages.Measurements(exact, 6, 5))) == [HELD, HELD, MISSED]
    staged = exactness.Measurements({"afab on 2 ranks": 0.0}, {"afab on 2 ranks": "gloo"})
    assert verdicts(messages.judge(messages.Measurements(staged, 6, 6)))[1] is MISSED


def test_an_open_receive_costs_little():
    def verdict(cost):
        measured = receives.Measurements((1 + cost, 1 + cost * 1.1) * 6, (1.0,) * 12)
        return receives.judge(measured)[0].verdict

    assert [verdict(cost) for cost in (0.02, 0.2)] == [HELD, MISSED]


def test_a_full_gpu_ends_or_is_out_of_memory():
    ends = {"a": "ended", "b": "out of memory", "c": "the pipeline hangs"}
    assert verdicts(memory_full.judge(memory_full.Measurements(ends))) == [HELD, HELD, MISSED]


def test_a_finding_is_the_same_read_back():
    from dataclasses import asdict

    for finding in (
        Finding.of("a", "b", 1.0, Bound(at_most=2.0), unit="s", error=0.1),
        Finding.not_run("a", "no GPU"),
    ):
        assert Finding.from_json(asdict(finding)) == finding
