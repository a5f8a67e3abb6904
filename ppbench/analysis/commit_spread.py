"""Whether commits of one level differ more than their launches do.

    launches of one commit    o o o        of the next   o o o        of the next o o o
    its mean                   |                            |                       |

Launches of one commit often share a session, a build, a layout of memory: their luck is not each
one's own, and a test that takes them for independent finds a change at every other commit. An
analysis of variance tells: the mean squares between the commits of each level against those within
commits, by the F test (one-way random effects). Not the correlation of launches that it also gives:
as a correction it is too unsure, with ten commits, to lean on.

The commit that is furthest from its level is left out. It may be a change, which one commit cannot
tell from luck; whether luck is shared, the others show.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from ppbench.analysis.differences import Group, is_larger
from ppbench.analysis.levels import LEAST_DEVIATION

SHARED = 0.05
"""The level of the F test. Lower, histories of ten commits alarm; higher, more changes of the
newest commit that could show at once wait for the next."""
_HARMLESS = 0.25
"""Of the size that matters: if commits' means deviate by less, none goes beyond it by luck."""


def share_luck(commits: Sequence[Group], cuts: Sequence[int], size: float) -> bool:
    """Whether the launches of a commit do, given before which commits the level changes.

    `size` is the change that matters: luck that is far smaller is as good as none.
    """
    bounds = [0, *cuts, len(commits)]
    levels = [commits[start:end] for start, end in itertools.pairwise(bounds)]
    freedom = len(commits) - len(levels) - 1
    within = sum(commit.freedom for commit in commits)
    if freedom < 1 or within < 1:
        return False
    squares, furthest = zip(*(_between(level) for level in levels), strict=True)
    variance = max(sum(squares) - max(furthest), 0.0) / freedom
    launches = sum(commit.num for commit in commits) / len(commits)
    if math.sqrt(variance / launches) < _HARMLESS * size:
        return False
    own = max(sum(commit.squares for commit in commits) / within, LEAST_DEVIATION**2)
    return is_larger(variance, freedom, own, within, SHARED)


def _between(level: Sequence[Group]) -> tuple[float, float]:
    """Squares between its commits, and how much less they were without the furthest of them."""
    if len(level) < 2:
        return 0.0, 0.0
    nums = np.array([commit.num for commit in level])
    means = np.array([commit.mean for commit in level])
    total = nums.sum()
    squares = nums * np.square(means - nums @ means / total)
    return float(squares.sum()), float((squares * total / (total - nums)).max())
