"""How much a predicted step may be off, because the costs that it is made of are.

The errors of layers of one type (equal costs, as of a layer measured once for all) are the same
error; those of forwards, whole backwards and both halves are drawn apart, as they were measured.
All draws of a program are simulated together, with the errors of the link in a few steps.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.plan.model_costs import LinkCosts, ModelCosts, StageCosts
from ppbench.planning.fitting import Candidate
from ppbench.planning.stages import TIMES, StageTable, steps_ns, transfers_of

SEED = 23
MOST_DRAWS, FEWEST_DRAWS = 199, 59
"""Draws of small and of large programs: of 199, the 10th and the 190th bound 90 %."""
DRAWN_ACTIONS = 8_000_000
LINK_STEPS = 7
"""Quantiles of the link's error that are simulated."""


def drawn_tables(models: Mapping[bool, ModelCosts]) -> list[StageTable]:
    """The costs of a microbatch size, by whether layers recompute, drawn from their errors."""
    normal = random.Random(SEED)  # noqa: S311  # reproducible draws, no secret
    tables = []
    for _ in range(MOST_DRAWS):
        kinds: dict[StageCosts, StageCosts] = {}  # each type of layers is drawn once

        def drawn(layer: StageCosts, kinds: dict[StageCosts, StageCosts] = kinds) -> StageCosts:
            if layer not in kinds:
                factors = [max(0.0, 1 + layer.error * normal.gauss(0, 1)) for _ in TIMES]
                pairs = zip(TIMES, factors, strict=True)
                kinds[layer] = replace(layer, **{at: getattr(layer, at) * by for at, by in pairs})
            return kinds[layer]

        tables.append(
            StageTable({is_on: model.with_each(drawn) for is_on, model in models.items()})
        )
    return tables


def interval_of(
    candidate: Candidate, tables: Sequence[StageTable], link: LinkCosts
) -> tuple[int, int]:
    """The bounds of a candidate's step in ns, between which it is with a probability of 90 %."""
    size = candidate.program.table.num_actions
    num = max(FEWEST_DRAWS, min(MOST_DRAWS, DRAWN_ACTIONS // size))
    factors = [1.0]  # by which a message takes longer, in steps of equal probability
    if link.error and (link.latency_ns or link.bytes_per_s != float("inf")):
        normal = statistics.NormalDist()
        chances = ((2 * step + 1) / (2 * LINK_STEPS) for step in range(LINK_STEPS))
        factors = [max(0.01, 1 + link.error * normal.inv_cdf(chance)) for chance in chances]
    steps: list[int] = []
    for at, factor in enumerate(factors):
        slower = replace(
            link, latency_ns=link.latency_ns * factor, bytes_per_s=link.bytes_per_s / factor
        )
        drawn = tables[at : num : len(factors)]
        cases = [(candidate.program, table.of_all(*candidate.layout)) for table in drawn]
        transfers = transfers_of(slower, candidate.stages)
        steps += steps_ns(cases, transfers, meets=candidate.meets)
    steps.sort()
    tail = (num + 1) // 20  # this many of num + 1 gaps are below the first bound
    return min(steps[tail - 1], candidate.step_ns), max(steps[-tail], candidate.step_ns)
