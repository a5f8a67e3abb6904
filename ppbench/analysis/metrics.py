"""Figures of steps, ranks and runs, from spans.

"Bubble" has three definitions in the literature; all are computed, each under its own name. With C
the compute time summed over ranks, p ranks, T the step's duration:

    bubble_fraction         1 - C / (p T)
    bubble_idle_over_ideal  (p T - C) / C
    bubble_max_stage_span   1 - (C / p) / (longest span of one rank, its first start to last end)
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from engine.plan.action import COMPUTE_OPS, Op
from ppbench.errors import UsageError

MEDIAN, SLOWEST = "median", "slowest"
"""Steps that can be chosen by name."""

STEP_FIGURES = (
    "step_ns",
    "optimizer_ns",
    "step_with_optimizer_ns",
    "tokens_per_s",
    "bubble_fraction",
    "bubble_idle_over_ideal",
    "bubble_max_stage_span",
)


def step_figures(
    spans: pd.DataFrame, world_size: int, tokens_of_step: Mapping[int, int | None]
) -> pd.DataFrame:
    """One row per step, in order of `step`: the columns `step`, `num_tokens` and `STEP_FIGURES`.

    `spans` has the columns of `engine.plan.spans.Span`; `tokens_of_step` is the number of tokens of
    each step, None for all where unknown, and may hold steps without spans. Times are nanoseconds.
    A step begins as `step_starts` says. Without
    optimizer spans (a simulation) it ends with its last action. Of replicas, each of `world_size`
    ranks, it is all of them: the first start and the last end.
    """
    program = spans[spans["op"] != Op.OPT.value]
    start = step_starts(spans)
    end = program.groupby("step")["end_ns"].max()
    optimizer = spans[spans["op"] == Op.OPT.value]
    optimizer_end = optimizer.groupby("step")["end_ns"].max().reindex(end.index)
    full_end = optimizer_end.fillna(end).astype("int64").clip(lower=end)
    optimizer_ns = (optimizer["end_ns"] - optimizer["start_ns"]).groupby(optimizer["step"]).max()
    figures = pd.DataFrame(
        {
            "step_ns": end - start,
            "optimizer_ns": optimizer_ns.reindex(end.index).fillna(0).astype("int64"),
            "step_with_optimizer_ns": full_end - start,
        }
    )
    tokens = [tokens_of_step[int(step)] for step in figures.index]
    figures["num_tokens"] = tokens if None not in tokens else np.nan
    figures["tokens_per_s"] = figures["num_tokens"] / (figures["step_with_optimizer_ns"] / 1e9)
    compute, num_ranks = compute_spans(spans), num_replicas(spans) * world_size
    total = (compute["end_ns"] - compute["start_ns"]).groupby(compute["step"]).sum()
    by_rank = compute.groupby(["step", "replica", "rank"])
    rank_span = by_rank["end_ns"].max() - by_rank["start_ns"].min()
    longest = rank_span.groupby("step").max()
    capacity = num_ranks * figures["step_ns"]
    figures["bubble_fraction"] = 1 - total / capacity
    figures["bubble_idle_over_ideal"] = (capacity - total) / total
    figures["bubble_max_stage_span"] = 1 - total / num_ranks / longest
    return figures.rename_axis("step").reset_index()


def step_starts(spans: pd.DataFrame) -> pd.Series:
    """Return when each step began, by `step`: with its first computation, or the first UNSHARD.

    A receive posted before that only waits, and so does an UNSHARD until all replicas have begun
    it. `spans` are of all replicas.
    """
    computed = compute_spans(spans).groupby("step")["start_ns"].min()
    unshards = spans[spans["op"] == Op.UNSHARD.value]
    if unshards.empty:
        return computed
    begun = unshards.groupby(["step", "rank", "replica"])["start_ns"].min()
    ready = begun.groupby(["step", "rank"]).max().groupby("step").min()
    return computed.clip(upper=ready.reindex(computed.index).fillna(computed)).astype("int64")


def num_replicas(spans: pd.DataFrame) -> int:
    """The replicas of a run, from all its spans."""
    return int(spans["replica"].max()) + 1


def compute_spans(spans: pd.DataFrame) -> pd.DataFrame:
    """Spans of computations: F, B, I and W."""
    return spans[spans["op"].isin([op.value for op in COMPUTE_OPS])]


def rank_figures(spans: pd.DataFrame, step_ns: pd.Series, world_size: int) -> pd.DataFrame:
    """One row per rank of each replica: `compute_ns`, `idle_fraction`, both medians over steps.

    `replica` and `rank` come first. `step_ns` is indexed by step. A rank without compute is idle
    throughout.
    """
    compute = compute_spans(spans)
    duration = compute["end_ns"] - compute["start_ns"]
    ranks = [range(num_replicas(spans)), range(world_size)]
    columns = pd.MultiIndex.from_product(ranks, names=["replica", "rank"])
    by_rank = duration.groupby([compute[name] for name in ("step", *columns.names)]).sum()
    per_step = by_rank.unstack(columns.names, fill_value=0)
    per_step = per_step.reindex(index=step_ns.index, columns=columns, fill_value=0)
    idle = 1 - per_step.div(step_ns, axis=0)
    figures = pd.DataFrame({"compute_ns": per_step.median(), "idle_fraction": idle.median()})
    return figures.reset_index()


def run_figures(steps: pd.DataFrame) -> dict[str, float]:
    """The median over steps of every step figure, and the steps' relative deviation.

    `step_relative_deviation` is the median absolute deviation of the full step time over its
    median: a few slow steps do not move it.
    """
    medians = {name: float(steps[name].median()) for name in STEP_FIGURES}
    full = steps["step_with_optimizer_ns"]
    deviation = (full - full.median()).abs().median() / full.median()
    return {**medians, "step_relative_deviation": float(deviation)}


def chosen_step(steps: pd.DataFrame, choice: str, *others: str) -> int:
    """The step that `--step` selects: `median`, `slowest` or the number of a measured one.

    Of several medians it is the lower one, of several slowest steps the first. Raises UsageError
    for any other; `others` are further words that the caller accepts.
    """
    full = "step_with_optimizer_ns"
    if choice == MEDIAN:
        ordered = steps.sort_values([full, "step"])
        return int(ordered.iloc[(len(ordered) - 1) // 2]["step"])
    if choice == SLOWEST:
        return int(steps.sort_values([full, "step"], ascending=[False, True]).iloc[0]["step"])
    numbers = {str(number): int(number) for number in steps["step"]}
    if choice in numbers:
        return numbers[choice]
    words = ", ".join((MEDIAN, SLOWEST, *others))
    raise UsageError(
        f"--step {choice}: no such step was measured; expected {words} or one of "
        f"{min(numbers.values())} to {max(numbers.values())}"
    )
