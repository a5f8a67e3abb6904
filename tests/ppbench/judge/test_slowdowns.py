"""By how much launches were slowed, from made-up references and counters."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from ppbench.judge.slowdowns import (
    DISTURBED,
    FEWEST,
    NEARBY,
    NOT_KNOWN,
    Cause,
    Control,
    is_disturbed,
    slowdowns,
)


def of_references(*times: float, **changes: object) -> list[float]:
    controls = [Control(reference_ns=time, **changes) for time in times]
    return [slowdown.fraction for slowdown in slowdowns(controls)]


def disturbed(*times: float) -> list[bool]:
    return list(map(is_disturbed, slowdowns([Control(reference_ns=time) for time in times])))


def test_a_slow_reference_is_measured_against_the_faster_half():
    assert of_references(100, 100, 130, 100, 100) == pytest.approx([0, 0, 0.3, 0, 0])


def test_what_is_usual_holds_while_half_of_the_launches_are_disturbed():
    assert disturbed(100, 140, 101, 125, 99, 135, 100, 120) == [False, True] * 4


def test_fewer_than_three_launches_show_nothing():
    assert FEWEST == 3
    assert all(map(math.isnan, of_references(100, 200)))
    assert not is_disturbed(NOT_KNOWN)


def test_a_launch_without_a_reference_is_unknown_and_the_others_are_not():
    found = of_references(100, math.nan, 100, 120)
    assert math.isnan(found[1])
    assert found[3] == pytest.approx(0.2)


def test_machines_and_kinds_of_work_are_never_mixed():
    times = (100.0, 100.0, 120.0)
    alone = of_references(*times)
    both = [Control(name, "", time) for time in times for name in ("fast", "slow")]
    both[1::2] = [Control("slow", "", 1000 * control.reference_ns) for control in both[1::2]]
    mixed = [slowdown.fraction for slowdown in slowdowns(both)]
    assert mixed[::2] == mixed[1::2] == alone == pytest.approx([0, 0, 0.2])


def test_a_machine_that_changes_for_good_is_usual_again_after_a_while():
    found = of_references(*[100.0] * 200, *[110.0] * 200)
    assert found[200] == pytest.approx(0.1)
    assert found[200 + NEARBY + 1 :] == [0] * (199 - NEARBY)


def test_counters_show_what_the_reference_did_not_see():
    usual = {"reference_ns": 100.0, "steal_fraction": 0.0, "cores_short": 0.0}
    stolen = Control(reference_ns=100.0, steal_fraction=0.2, cores_short=0.0)
    short = Control(reference_ns=100.0, steal_fraction=0.0, cores_short=0.25)
    found = slowdowns([*(Control(**usual) for _ in range(4)), stolen, short])
    assert [one.fraction for one in found] == pytest.approx([0, 0, 0, 0, 1 / 4, 1 / 3])
    assert [one.cause for one in found[4:]] == [Cause.steal, Cause.cores]


def test_a_quota_and_a_lowered_clock_are_slowdowns():
    usual = [Control(cpu_throttled_fraction=0.0, gpu_sm_mhz=1800.0)] * 3
    held = Control(cpu_throttled_fraction=0.5, gpu_sm_mhz=1800.0)
    cold = Control(cpu_throttled_fraction=0.0, gpu_sm_mhz=1500.0)
    found = slowdowns([*usual, held, cold])
    assert (found[3].cause, found[3].fraction) == (Cause.quota, pytest.approx(1.0))
    assert (found[4].cause, found[4].fraction) == (Cause.clock, pytest.approx(0.2))


def test_counters_compare_within_a_case_and_references_across_cases():
    controls = [
        Control(case=case, reference_ns=100.0, cores_short=0.3 * (case == "b"))
        for case in ("a", "b") * 3
    ]
    slow = Control(case="c", reference_ns=120.0, cores_short=0.9)
    assert [one.fraction for one in slowdowns([*controls, slow])] == pytest.approx([0] * 6 + [0.2])


def test_everything_taken_away_is_unknown_and_no_error():
    controls = [Control(steal_fraction=0.0, gpu_sm_mhz=1.0)] * 3
    found = slowdowns([*controls, Control(steal_fraction=1.0, gpu_sm_mhz=0.0)])
    assert math.isnan(found[-1].fraction)


def test_noise_disturbs_few_launches_and_hides_no_large_disturbance():
    draw = random.Random(3)
    quiet = [100 * math.exp(draw.gauss(0, 0.02)) for _ in range(2000)]
    assert statistics.fmean(disturbed(*quiet)) < 0.05
    every_fifth = [time * (1.25 if n % 5 == 0 else 1) for n, time in enumerate(quiet)]
    assert statistics.fmean(disturbed(*every_fifth)[::5]) > 0.99
    assert DISTURBED == 0.05


def test_a_machine_that_always_varies_much_keeps_most_of_its_launches():
    draw = random.Random(4)
    found = slowdowns([Control(reference_ns=math.exp(draw.gauss(0, 0.2))) for _ in range(2000)])
    assert statistics.fmean(one.fraction > DISTURBED for one in found) > 0.5
    assert statistics.fmean(map(is_disturbed, found)) < 0.15
    assert all(one.beyond_usual == 0 for one in found if not is_disturbed(one))
