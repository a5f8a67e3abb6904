"""Moves layers between stages while that makes the simulated step shorter.

It begins from partitions of `layout`, whose heaviest rank has least to do. That says nothing of how
long ranks wait for each other, nor of what must be recomputed: simulation does.

A move takes one layer from a stage and gives it to another, the stages between them passing one on.
All moves of a round are simulated at once, and the best is made. Where nothing fits yet, the
best is the one after which ranks are short of the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ppbench.planning.fitting import Candidate, Fit, Layout, simulated
from ppbench.planning.layout import Partition, moves, partition_of

MOST_PAIRS = 250
"""Pairs of stages between which a layer may be moved at once; of more, those of neighbours."""


def around(
    partition: Partition, least: Sequence[int], sources: Sequence[int] = ()
) -> Iterator[Partition]:
    """The partitions that moving one layer makes; of many stages, between neighbours.

    With `sources`, those that take a layer from these stages to any other.
    """
    counts, num = tuple(map(len, partition)), len(partition)
    is_far = num * (num - 1) <= MOST_PAIRS or bool(sources)
    for source in sources or range(num):
        yield from map(partition_of, moves(counts, source, least, is_far=is_far))


class Climb:
    """Moves layers of a shape while its step becomes shorter, within the memory of a rank."""

    def __init__(
        self, fit: Fit, least: Sequence[int], memory_bytes: int | None, start: Partition
    ) -> None:
        """Take a shape, the fewest layers of each stage, and the partition to begin with."""
        self.fit, self.memory = fit, memory_bytes
        self.best: Candidate | None = None
        self.is_over = False
        self.lightest = start  # what is short of the fewest bytes, while nothing fits
        self._short: tuple[int, int] | None = None  # the most and all bytes, while nothing fits
        self._least, self._next = least, [start]
        self._seen: set[Partition] = set()

    def wanted(self) -> list[Layout]:
        """The layouts of the next round, which are to be simulated; none when it is over."""
        while self._next:
            self._seen.update(self._next)
            laid = [self.fit.layout(partition, self.memory) for partition in self._next]
            fitting = [layout for layout, short in laid if not any(short)]
            if fitting:
                return fitting
            layout, short = min(laid, key=lambda one: (max(one[1]), sum(one[1])))
            worth = max(short), sum(short)
            if self.best is not None or (self._short is not None and worth >= self._short):
                break
            self._short, self.lightest = worth, layout.partition
            full = self.fit.owned[short.index(max(short))]
            parts = [stage % len(layout.partition) for stage in full]
            self._next = self._around(layout.partition, parts)
        self.is_over = True
        return []

    def take(self, found: Sequence[Candidate]) -> None:
        """Take the simulated layouts of a round, and go on from the best if it is better."""
        best = min(found, key=lambda one: one.step_ns)
        self.is_over = self.best is not None and best.step_ns >= self.best.step_ns
        if not self.is_over:
            self.best = best
            self._next = self._around(best.layout.partition)

    def _around(self, partition: Partition, sources: Sequence[int] = ()) -> list[Partition]:
        every = around(partition, self._least, sources)
        return [each for each in every if each not in self._seen]


def climb_all(climbs: Sequence[Climb], most_actions: int) -> None:
    """Take all to their ends, a round of all at a time.

    Once `most_actions` are simulated, no further round begins: each has done at least its first.
    """
    num_actions, is_first = 0, True
    left = list(climbs)
    while left and (is_first or num_actions < most_actions):
        rounds = [(climb, climb.wanted()) for climb in left]
        rounds = [(climb, layouts) for climb, layouts in rounds if layouts]
        found = simulated([(climb.fit, layouts) for climb, layouts in rounds])
        for (climb, layouts), candidates in zip(rounds, found, strict=True):
            climb.take(candidates)
            num_actions += len(layouts) * climb.fit.program.table.num_actions
        left, is_first = [climb for climb, _ in rounds if not climb.is_over], False
