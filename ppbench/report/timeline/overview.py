"""Steps with too many marks to see one by one: what took most of each slice of time, by rank.

The size of an overview does not depend on the number of spans, so a step of a million spans is
drawn as fast as one of a hundred. A span that covers several slices adds to each exactly the time
that it spends there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ppbench.report.timeline.marks import Ints, Kind, Marks

MOST_SHARE = 0.8
"""Below this share the main op is close to chance, and neighbouring colours would flicker."""
Cells = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Overview:
    """`shares[kind, rank, slice]` of the time; `counts[rank, slice]` of marks that begin."""

    kinds: Sequence[Kind]
    shares: Cells
    counts: Cells

    @property
    def busy(self) -> Cells:
        """The busy share of the time, by rank and slice."""
        return np.asarray(np.minimum(self.shares.sum(axis=0), 1.0))

    @property
    def mostly(self) -> Ints:
        """The kind with MOST_SHARE of the busy time, by rank and slice.

        Where none has it, it is the number of kinds or, of a step beside the shown one, one more.
        """
        main = self.shares.argmax(axis=0)
        is_most = self.shares.max(axis=0) >= MOST_SHARE * self.shares.sum(axis=0)
        is_beside = np.array([kind.beside != 0 for kind in self.kinds], bool)
        return np.asarray(np.where(is_most, main, len(self.kinds) + is_beside[main]), np.int64)


def overview(
    marks_by_kind: Sequence[Marks], num_ranks: int, start_ns: float, end_ns: float, num_slices: int
) -> Overview:
    """Return the overview of a period; marks of the same rank and kind must not overlap."""
    edges = np.linspace(start_ns, end_ns, num_slices + 1)
    shares = np.zeros((len(marks_by_kind), num_ranks, num_slices))
    counts = np.zeros((num_ranks, num_slices))
    for number, marks in enumerate(marks_by_kind):
        bounds = np.searchsorted(marks.row, np.arange(num_ranks + 1))
        for rank in range(num_ranks):
            own = slice(bounds[rank], bounds[rank + 1])
            begin, width = marks.begin_ns[own], marks.width_ns[own]
            counts[rank] += np.histogram(begin, edges)[0]
            if len(begin):  # the running total, interpolated at the edges
                total = np.concatenate([[0], np.cumsum(width)])
                times = np.stack([begin, begin + width], axis=1).ravel()
                levels = np.stack([total[:-1], total[1:]], axis=1).ravel()
                shares[number, rank] = np.diff(np.interp(edges, times, levels))
    kinds = [marks.kind for marks in marks_by_kind]
    return Overview(kinds, shares / np.diff(edges), counts)
