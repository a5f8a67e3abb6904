"""How much slower than usual a machine was beside a launch, by what was recorded there.

Each launch runs a short fixed reference before and after its measured steps, and the machine's
counters are sampled meanwhile. The reference sees what slows any work down (another job, a lowered
clock, a hypervisor) but only around the steps; the counters see the steps themselves but not every
cause. A launch is taken to be as slow as the slowest of these says:

    reference   its time over the usual one
    steal       1 / (1 - share of the cores' time that the hypervisor took)
    quota       1 / (1 - share of the CPU time that a quota withheld)
    cores       1 / (1 - share of the ranks' own cores that other processes used)
    clock       the usual clock of the GPU over this one

What is usual is the median of the faster half of the launches nearby in time: it holds while half
of the launches are disturbed, and follows a machine that changes for good. A launch is disturbed if
it is beyond the usual variation too: on a machine that always does other work as well, that is part
of the noise between launches, and no launch would be left.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

DISTURBED = 0.05
"""Least slowdown from which a launch counts as disturbed."""
VARIATIONS = 6
"""The same in median absolute deviations of the faster half: normal noise is rarely more."""
FEWEST = 3
"""Fewest launches that show what is usual."""
NEARBY = 50
"""Launches before and after one that show what was usual at its time."""
UNKNOWN = math.nan


@dataclass(frozen=True)
class Control:
    """What was recorded beside a launch; NaN where it is unknown."""

    machine: Hashable = ""  # only launches of one machine and one fixed work compare
    case: Hashable = ""  # counters compare between launches of one case
    reference_ns: float = UNKNOWN
    steal_fraction: float = UNKNOWN
    cpu_throttled_fraction: float = UNKNOWN
    cores_short: float = UNKNOWN
    gpu_sm_mhz: float = UNKNOWN


class Cause(StrEnum):
    """What shows that a launch was slowed."""

    reference = "reference"
    steal = "steal"
    quota = "quota"
    cores = "cores"
    clock = "clock"


@dataclass(frozen=True)
class Slowdown:
    """By how much a launch was slowed, as a fraction of its usual time, and what shows it.

    One that was faster than usual has a negative slowdown.
    """

    fraction: float = UNKNOWN
    cause: Cause = Cause.reference
    limit: float = DISTURBED  # from which the launch counts as disturbed

    @property
    def beyond_usual(self) -> float:
        """The fraction of a disturbed launch, 0 for one within the usual variation."""
        return self.fraction if is_disturbed(self) or math.isnan(self.fraction) else 0.0


NOT_KNOWN = Slowdown()


def slowdowns(controls: Sequence[Control]) -> tuple[Slowdown, ...]:
    """The slowdown of each launch; the launches are in the order of time."""
    machines = [control.machine for control in controls]
    cases = [(control.machine, control.case) for control in controls]
    factors: dict[Cause, list[float]] = {
        Cause.reference: [control.reference_ns for control in controls],
        Cause.steal: [_stretch(control.steal_fraction) for control in controls],
        Cause.quota: [_stretch(control.cpu_throttled_fraction) for control in controls],
        Cause.cores: [_stretch(control.cores_short) for control in controls],
        Cause.clock: [
            1 / control.gpu_sm_mhz if control.gpu_sm_mhz > 0 else UNKNOWN for control in controls
        ],
    }
    found: list[list[Slowdown]] = [[] for _ in controls]  # of each launch, as far as is known
    for cause, values in factors.items():
        keys: Sequence[Hashable] = machines if cause is Cause.reference else cases
        places: dict[Hashable, list[int]] = {}
        for place, (key, factor) in enumerate(zip(keys, values, strict=True)):
            if not math.isnan(factor):
                places.setdefault(key, []).append(place)
        for of_key in places.values():
            known = [values[place] for place in of_key]
            for number, place in enumerate(of_key if len(known) >= FEWEST else ()):
                nearby = np.sort(known[max(0, number - NEARBY) : number + NEARBY + 1])
                faster = nearby[: (len(nearby) + 1) // 2]
                usual = float(np.median(faster))
                variation = float(np.median(np.abs(faster - usual))) / usual
                limit = max(DISTURBED, VARIATIONS * variation)
                found[place].append(Slowdown(values[place] / usual - 1, cause, limit))
    return tuple(
        max(own, key=lambda one: (is_disturbed(one), one.fraction), default=NOT_KNOWN)
        for own in found
    )


def is_disturbed(slowdown: Slowdown) -> bool:
    """Whether a launch is to be repeated, and counts for less; False if its slowdown is unknown."""
    return slowdown.fraction > slowdown.limit


def _stretch(share: float) -> float:
    """How much longer work takes when this share of the time is taken away."""
    return 1 / (1 - share) if share < 1 else UNKNOWN
