"""Fits a model to a program: which stages recompute for it to fit, how long its step is then.

A rank's peak, by `engine.plan.memory`, depends on its own stages alone, so that what recomputes is
chosen rank by rank: of all choices that fit, the one that takes the least time more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.plan.collectives import add_collectives
from engine.plan.lower import lower
from engine.plan.memory import MemoryRow
from engine.plan.model_costs import StageCosts
from engine.plan.program import Program
from engine.plan.sharded_bytes import NOTHING_SHARED, BucketBytes, SharedBytes, buckets_of
from engine.plan.walk import TransferModel
from ppbench.planning.cost_set import CostSet
from ppbench.planning.layout import Partition
from ppbench.planning.plan import AUTO, Configuration, FrontierPoint
from ppbench.planning.space import Shape
from ppbench.planning.stages import StageTable, steps_ns, transfers_of

MOST_CHOSEN_FREELY = 4
"""Stages of a rank of which any may recompute; of more, the last ones do."""


class Layout(NamedTuple):
    """The layers of each part, and which stages recompute; two directions have copies of a part."""

    partition: Partition
    recompute: tuple[bool, ...]


@dataclass(frozen=True)
class Candidate:
    """A shape with its layout and program, and what they come to; times in ns, memory by rank.

    The step is the period of steps in a row, after which ranks meet or do not.
    """

    shape: Shape
    layout: Layout
    program: Program
    stages: tuple[StageCosts, ...]
    meets: bool
    step_ns: int
    peak_bytes: tuple[int, ...]

    @property
    def most_bytes(self) -> int:
        """The memory that every rank needs for this to fit."""
        return max(self.peak_bytes)

    @property
    def configuration(self) -> Configuration:
        shape = self.shape
        return Configuration(
            shape.schedule,
            shape.ranks,
            shape.stages_per_rank,
            shape.placement,
            tuple(map(len, self.layout.partition)),
            shape.microbatch_size,
            shape.num_microbatches,
            self.layout.recompute,
            shape.num_slices,
        )

    @property
    def point(self) -> FrontierPoint:
        """It as a point of the frontier."""
        return FrontierPoint(self.most_bytes, self.step_ns, self.configuration)


class Fit:
    """A shape's program with the costs of a model, for layers to be put on its stages."""

    def __init__(
        self,
        shape: Shape,
        program: Program,
        table: StageTable,
        costs: CostSet,
        recompute: str,
        *,
        meets: bool,
    ) -> None:
        """Take the program and costs; `recompute` and `meets` are those of a request."""
        self.shape, self.program, self.table = shape, program, table
        self.costs, self.mode, self.meets = costs, recompute, meets
        self.owned = [shape.placement.stages_of(rank) for rank in range(shape.ranks)]
        lowered = lower(program)
        if costs.replicas > 1:
            lowered = add_collectives(lowered, costs.policy)
        how = {"is_posted": costs.device != "cpu", "is_queued": False}  # there, memory is mapped
        self._rows = [MemoryRow(lowered, rank, **how) for rank in range(shape.ranks)]
        self._peaks: dict[tuple[object, ...], int] = {}
        self._known: dict[tuple[object, ...], tuple[tuple[bool, ...], int]] = {}

    def layout(self, partition: Partition, memory_bytes: int | None) -> tuple[Layout, list[int]]:
        """The layout with the least recomputation that fits; else with the least memory.

        With it come the bytes that each rank is short of.
        """
        recompute, short = [self.mode == "all"] * self.shape.placement.num_stages, []
        for rank, owned in enumerate(self.owned):
            key = memory_bytes, rank, *(partition[stage % len(partition)] for stage in owned)
            if (known := self._known.get(key)) is None:
                known = self._known[key] = self._chosen(rank, partition, memory_bytes)
            chosen, missing = known
            for stage, is_recomputed in zip(owned, chosen, strict=True):
                recompute[stage] = is_recomputed
            short.append(missing)
        return Layout(partition, tuple(recompute)), short

    def candidate(self, layout: Layout, step_ns: int) -> Candidate:
        """A layout with its peaks."""
        stages, peaks = self.table.of_all(*layout), self.peaks(layout)
        return Candidate(self.shape, layout, self.program, stages, self.meets, step_ns, peaks)

    def peaks(self, layout: Layout) -> tuple[int, ...]:
        """By rank, the most bytes that it has in a step."""
        return tuple(self._peak(rank, *layout) for rank in range(self.shape.ranks))

    def _chosen(
        self, rank: int, partition: Partition, room: int | None
    ) -> tuple[tuple[bool, ...], int]:
        """Which of a rank's stages recompute, and the bytes that are missing then."""
        least: tuple[int, tuple[bool, ...]] | None = None
        for choice in self._choices(rank, partition):
            if room is None:
                return choice, 0
            recompute = dict(zip(self.owned[rank], choice, strict=True))
            need = self._peak(rank, partition, recompute)
            if need <= room:
                return choice, 0
            if least is None or need < least[0]:
                least = need, choice
        assert least is not None
        return least[1], least[0] - (room or 0)

    def _choices(self, rank: int, partition: Partition) -> Iterator[tuple[bool, ...]]:
        """What a rank may recompute, by the time that it takes more."""
        num, has_both = len(self.owned[rank]), len(self.table.models) > 1
        if self.mode != AUTO or not has_both:
            yield (self.mode == "all",) * num
            return
        yield (False,) * num
        if num > MOST_CHOSEN_FREELY:
            yield from (tuple(at >= num - n for at in range(num)) for n in range(1, num + 1))
            return
        more = []  # the time that a stage's backward takes more where it recomputes
        for stage in self.owned[rank]:
            with_it, without = (self.table.of(partition, stage, is_on) for is_on in (True, False))
            later = with_it.backward_ns - without.backward_ns, with_it.input_ns - without.input_ns
            more.append(max(later))
        choices = list(itertools.product((False, True), repeat=num))[1:]
        yield from sorted(choices, key=lambda choice: sum(itertools.compress(more, choice)))

    def _peak(
        self, rank: int, partition: Partition, recompute: Mapping[int, bool] | Sequence[bool]
    ) -> int:
        owned, replicas = self.owned[rank], self.costs.replicas
        key = rank, *((partition[s % len(partition)], recompute[s]) for s in owned)
        if (known := self._peaks.get(key)) is None:
            own = {stage: self.table.of(partition, stage, recompute[stage]) for stage in owned}
            stages, shared = [one.memory for one in own.values()], NOTHING_SHARED
            if replicas > 1:
                stages = [one.without_gradients() for one in stages]
                buckets = list[BucketBytes]()
                for stage, one in own.items():
                    gradients = [layer.gradient_bytes for layer in one.layers]
                    buckets += buckets_of(stage, gradients, self.costs.policy, replicas)
                shared = SharedBytes(buckets)
            static_bytes = sum(one.static_bytes for one in own.values())
            known = self._rows[rank].peak(static_bytes, stages, shared=shared)
            self._peaks[key] = known
        return known


def simulated(wanted: Sequence[tuple[Fit, Sequence[Layout]]]) -> list[list[Candidate]]:
    """The candidates of layouts, as given; what has the same transfers is simulated at once."""
    found: list[list[Candidate | None]] = [[None] * len(layouts) for _, layouts in wanted]
    groups: dict[tuple[TransferModel, bool], list[tuple[int, int]]] = {}
    for index, (fit, layouts) in enumerate(wanted):
        for place, layout in enumerate(layouts):
            key = transfers_of(fit.costs.link, fit.table.of_all(*layout)), fit.meets
            groups.setdefault(key, []).append((index, place))
    for (transfers, meets), members in groups.items():
        pairs = [(wanted[index][0], wanted[index][1][place]) for index, place in members]
        cases = [(fit.program, fit.table.of_all(*layout)) for fit, layout in pairs]
        steps = steps_ns(cases, transfers, meets=meets)
        for (index, place), (fit, layout), step_ns in zip(members, pairs, steps, strict=True):
            found[index][place] = fit.candidate(layout, step_ns)
    return [[one for one in of_fit if one is not None] for of_fit in found]
