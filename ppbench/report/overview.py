"""A step as a grid of ranks and slices of time: what each slice was spent on.

Its size is chosen, not given by the number of spans, so a step of a million spans is drawn as fast
as one of a hundred. Exact: a span that lies in several slices gives to each what lies in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ppbench.report.marks import Floats, Ints, Marks

MOST_SHARE = 0.8
"""With less, chance decides which op took most, and the colours of neighbours would flicker."""
Cells = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Overview:
    """`shares[kind, rank, slice]` of the slice's time; `counts` are the marks that begin in it."""

    edges_ns: Floats
    shares: Cells
    counts: Cells

    @property
    def busy(self) -> Cells:
        """By rank and slice, the share of the time spent on anything."""
        return np.asarray(np.minimum(self.shares.sum(axis=0), 1.0))

    @property
    def mostly(self) -> Ints:
        """By rank and slice, the kind that took MOST_SHARE of what was spent; else how many."""
        is_most = self.shares.max(axis=0) >= MOST_SHARE * self.shares.sum(axis=0)
        return np.where(is_most, self.shares.argmax(axis=0), len(self.shares))


def overview(
    kinds: Sequence[Marks], num_ranks: int, start_ns: float, end_ns: float, num_slices: int
) -> Overview:
    """Marks of one rank and kind must not overlap; `end_ns` must lie after `start_ns`."""
    edges = np.linspace(start_ns, end_ns, num_slices + 1)
    shares = np.zeros((len(kinds), num_ranks, num_slices))
    counts = np.zeros((num_ranks, num_slices))
    for number, marks in enumerate(kinds):
        bounds = np.searchsorted(marks.rank, np.arange(num_ranks + 1))
        for rank in range(num_ranks):
            mine = slice(bounds[rank], bounds[rank + 1])
            begin, width = marks.begin_ns[mine], marks.width_ns[mine]
            shares[number, rank] = _spent(begin, width, edges)
            counts[rank] += np.histogram(begin, edges)[0]
    return Overview(edges, shares / np.diff(edges), counts)


def _spent(
    begin_ns: npt.NDArray[np.int64], width_ns: npt.NDArray[np.int64], edges: Floats
) -> Floats:
    """Time in each slice: the running total, a line that rises during a mark, read at the edges."""
    if not len(begin_ns):
        return np.zeros(len(edges) - 1)
    total = np.concatenate([[0], np.cumsum(width_ns)])
    times = np.stack([begin_ns, begin_ns + width_ns], axis=1).ravel()
    levels = np.stack([total[:-1], total[1:]], axis=1).ravel()
    return np.diff(np.interp(edges, times, levels))
