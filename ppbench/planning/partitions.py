"""Finds the layers of each stage: begins with equal times, then moves layers while that helps.

A move takes one layer from a stage and gives it to another, the stages between them passing one on.
All moves of a round are simulated at once, and the best is made. Where nothing fits yet, the
best is the one after which ranks are short of the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from engine.plan.model_costs import LayerCosts, ModelCosts
from engine.plan.program import Placement
from ppbench.planning.fitting import Candidate, Fit, Layout, Partition, Shortage, simulated

MOST_PAIRS = 250
"""Pairs of stages between which a layer may be moved at once; of more, those of neighbours."""
MOST_WIDENED, NUM_WIDE = 16, 300
"""Stages of which two layers may be moved at once, and how many such moves are tried."""


def partition_of(counts: Sequence[int]) -> Partition:
    """The layers of each stage from their numbers."""
    ends = list(accumulate(counts))
    return tuple(range(end - num, end) for num, end in zip(counts, ends, strict=True))


def evened(model: ModelCosts, least: Sequence[int]) -> Partition:
    """Contiguous layers, each stage's time as near to the mean as cuts allow.

    `least` is how many layers each stage has at least.
    """
    upto = list(accumulate(map(_time, model.layers), initial=_time(model.before)))
    total, num_stages = upto[-1] + _time(model.after), len(least)
    cuts = [0]
    for stage in range(1, num_stages):
        aim = total * stage / num_stages
        low = cuts[-1] + least[stage - 1]
        high = len(model.layers) - sum(least[stage:])
        cuts.append(min(range(low, high + 1), key=lambda cut: abs(upto[cut] - aim)))
    cuts.append(len(model.layers))
    return tuple(range(a, b) for a, b in pairwise(cuts))


def levelled(model: ModelCosts, placement: Placement, least: Sequence[int]) -> Partition:
    """Contiguous layers, the heaviest rank as light as moves from an even spread make it."""
    loads = Loads(model, placement)
    best = evened(model, least)
    lightest = loads(best)
    while around := list(moves(best, least)):
        found = min(around, key=loads)
        if loads(found) >= lightest:
            break
        best, lightest = found, loads(found)
    return best


class Loads:
    """How heavy the ranks of a partition are, so that lighter ones are tried first."""

    def __init__(self, model: ModelCosts, placement: Placement) -> None:
        """Take the costs of a microbatch and the ranks of the stages."""
        self._upto = list(accumulate(map(_time, model.layers), initial=0.0))
        self._besides = _time(model.before), _time(model.after)
        self._placement = placement

    def __call__(self, partition: Partition) -> tuple[float, float]:
        """The heaviest rank, and the sum of squares, so that the others are levelled as well."""
        by_rank, ranks = [0.0] * self._placement.world_size, self._placement.ranks
        for layers, rank in zip(partition, ranks, strict=True):
            by_rank[rank] += self._upto[layers.stop] - self._upto[layers.start]
        by_rank[ranks[0]] += self._besides[0]
        by_rank[ranks[-1]] += self._besides[1]
        return max(by_rank), sum(load * load for load in by_rank)


def _counts(partition: Partition) -> tuple[int, ...]:
    return tuple(map(len, partition))


def _time(layer: LayerCosts) -> float:
    """A forward and a backward, whole or in halves, whichever is quicker."""
    return layer.forward_ns + min(layer.backward_ns, layer.input_ns + layer.weight_ns)


def moves(
    partition: Partition, least: Sequence[int], sources: Sequence[int] = ()
) -> Iterator[Partition]:
    """The partitions that moving one layer makes; of many stages, between neighbours.

    With `sources`, those that take a layer from these stages to any other.
    """
    counts, num = [len(layers) for layers in partition], len(partition)
    is_small = num * (num - 1) <= MOST_PAIRS or bool(sources)
    for source in sources or range(num):
        if counts[source] <= least[source]:
            continue
        near = [stage for stage in (source - 1, source + 1) if 0 <= stage < num]
        for target in range(num) if is_small else near:
            if target != source:
                changed = list(counts)
                changed[source] -= 1
                changed[target] += 1
                yield partition_of(changed)


class Climb:
    """Moves layers of a shape while its step becomes shorter, within the memory of a rank."""

    def __init__(
        self, fit: Fit, least: Sequence[int], memory_bytes: int | None, start: Partition
    ) -> None:
        """Take a shape, the fewest layers of each stage, and the partition to begin with."""
        self.fit, self.memory = fit, memory_bytes
        self.best: Candidate | None = None
        self.short = Shortage(2**62, 2**62)  # while nothing fits
        self.is_over = False
        self.lightest = start  # what is short of the fewest bytes, while nothing fits
        self._least, self._next = least, [start]
        self._seen: set[Partition] = set()

    def wanted(self) -> list[Layout]:
        """The layouts of the next round, which are to be simulated; none when it is over."""
        while self._next:
            self._seen.update(self._next)
            laid = [self.fit.layout(partition, self.memory) for partition in self._next]
            fitting = [layout for layout, short in laid if short.most == 0]
            if fitting:
                return fitting
            layout, short = min(laid, key=lambda one: one[1][:2])
            if self.best is not None or short[:2] >= self.short[:2]:
                break
            self.short, self.lightest = short, layout.partition
            full = self.fit.owned[short.worst]
            self._next = self._around(layout.partition, full)
        self.is_over = True
        return []

    def take(self, found: Sequence[Candidate]) -> None:
        """Take the simulated layouts of a round, and go on from the best if it is better."""
        best = min(found, key=lambda one: one.step_ns)
        self.is_over = self.best is not None and best.step_ns >= self.best.step_ns
        if not self.is_over:
            self.best, self.short = best, Shortage(0, 0)
            self._next = self._around(best.layout.partition)

    def widen(self, loads: Loads) -> None:
        """Go on, where nothing near is better, with the lightest of what two moves lead to."""
        if self.best is None or len(self._least) > MOST_WIDENED:
            return
        near = set(moves(self.best.layout.partition, self._least))
        far = {each for one in near for each in moves(one, self._least)} - self._seen
        self._next = sorted(far, key=lambda each: (loads(each), _counts(each)))[:NUM_WIDE]
        self.is_over = not self._next

    def _around(self, partition: Partition, sources: Sequence[int] = ()) -> list[Partition]:
        around = moves(partition, self._least, sources)
        return [each for each in around if each not in self._seen]


def climb_all(climbs: Sequence[Climb], most_actions: int) -> int:
    """Take all to their ends, a round of all at a time; returns the actions that were simulated.

    Once these are `most_actions`, no further round begins: each has done at least its first.
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
    return num_actions
