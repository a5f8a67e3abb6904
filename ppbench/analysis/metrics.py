"""Figures of steps, ranks and runs, from spans.

A step of a running training lasts from the end of the one before it to its own, on each rank:

    rank 0   ..OPT 1)[F0 F1 .. B1 OPT 2)        its window of step 2
    rank 1   .OPT 1)[   F0 .. B1 OPT 2)

The windows of a rank follow each other without a gap, so that nothing of a training is left out or
counted twice. The period of a step is the mean of its windows over ranks. The makespan is from the
first action's start to the last one's end; where steps overlap it is longer than the period. A step
whose predecessor is not known stands alone: it lasts from its first action to its last on every
rank. In an evaluation nothing comes back that would hold the first ranks to the pace of the last:
there a step's window is on each rank that of the rank with the last stage, where it is over.

"Bubble" has three definitions in the literature; all are computed, each under its own name. With C
the time of computations and optimizer summed over ranks, p ranks, T the period:

    bubble_fraction         1 - C / (p T)
    bubble_idle_over_ideal  (p T - C) / C
    bubble_max_stage_span   1 - (F, B, I and W / p) / (longest span of one rank, its first to last)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt
import pandas as pd

from engine.plan.action import COMPUTE_OPS, JOINING_OPS, Op
from ppbench.errors import UsageError

Ns = npt.NDArray[np.int64]
NEVER = np.iinfo(np.int64).max // 2
"""A time after all others; its negative is before them."""
TIMES = ("start_ns", "end_ns")

MEDIAN, SLOWEST = "median", "slowest"
"""Steps that can be chosen by name."""

STEP_FIGURES = (
    "step_ns",
    "makespan_ns",
    "optimizer_ns",
    "tokens_per_s",
    "bubble_fraction",
    "bubble_idle_over_ideal",
    "bubble_max_stage_span",
)


def windows(
    spans: pd.DataFrame, world_size: int, after_pause: Collection[int] = ()
) -> pd.DataFrame:
    """Return `begin_ns`, `end_ns`, `busy_ns`, `follows` of each step on each rank of each replica.

    The index is (`step`, `replica`, `rank`). `busy_ns` is the time of computations and optimizer;
    at `free_ns` the rank itself was done with the step before, if it follows it.
    `follows` says whether the step begins with the end of the one before it.
    Steps that began `after_pause` stand alone, and so does one that overlaps the step before it on
    its own rank: their numbers say that one follows the other, their times do not.
    """
    steps = np.unique(spans["step"].to_numpy())
    shape = len(steps), num_replicas(spans), world_size
    worked = spans[spans["op"].isin([op.value for op in (*COMPUTE_OPS, Op.OPT)])]
    cell, start_ns, end_ns = times_by_cell(worked, steps)
    own_begin, own_end, busy = np.full(shape, NEVER), np.full(shape, -NEVER), np.zeros(shape, int)
    np.minimum.at(own_begin, cell, start_ns)
    np.maximum.at(own_end, cell, end_ns)
    np.add.at(busy, cell, end_ns - start_ns)
    joined = spans[spans["op"].isin([op.value for op in JOINING_OPS])]
    cell_of_joined, _, joined_ns = times_by_cell(joined, steps)
    np.maximum.at(own_end, cell_of_joined, joined_ns)  # a rank without an optimizer waits for it
    last = spans.groupby("step")["end_ns"].max()
    whole_begin, whole_end = (
        np.broadcast_to(of_steps.reindex(steps).to_numpy(np.int64)[:, None, None], shape)
        for of_steps in (step_starts(spans), last)
    )
    own_begin = np.where(own_begin == NEVER, whole_begin, own_begin)
    own_end = np.where(own_end == -NEVER, whole_end, own_end)
    is_next = (np.diff(steps, prepend=NEVER) == 1) & ~np.isin(steps, list(after_pause))
    before = np.roll(own_end, 1, axis=0)
    follows = is_next[:, None, None] & (before <= own_begin)
    free = np.where(follows, before, whole_begin)
    if not spans["op"].isin([Op.B.value, Op.I.value, Op.W.value]).any():
        last_rank = int(worked["rank"].to_numpy()[worked["stage"].to_numpy().argmax()])
        follows = np.broadcast_to(follows.all(axis=2, keepdims=True), shape)
        before, own_end = (
            np.broadcast_to(of_all[..., [last_rank]], shape) for of_all in (before, own_end)
        )
    found = {
        "begin_ns": np.where(follows, before, whole_begin),
        "end_ns": np.where(follows, own_end, whole_end),
        "busy_ns": busy,
        "follows": follows,
        "free_ns": free,
    }
    names = ["step", "replica", "rank"]
    index = pd.MultiIndex.from_product([steps, *map(range, shape[1:])], names=names)
    return pd.DataFrame({name: of_all.reshape(-1) for name, of_all in found.items()}, index=index)


def times_by_cell(spans: pd.DataFrame, steps: Ns) -> tuple[tuple[Ns, Ns, Ns], Ns, Ns]:
    """Where each span belongs in an array of these steps, replicas and ranks; its start and end."""
    step, replica, rank, start_ns, end_ns = (
        spans[name].to_numpy(np.int64) for name in ("step", "replica", "rank", *TIMES)
    )
    return (np.searchsorted(steps, step), replica, rank), start_ns, end_ns


def step_figures(
    spans: pd.DataFrame, of_ranks: pd.DataFrame, tokens_of_step: Mapping[int, int | None]
) -> pd.DataFrame:
    """One row per step, in order of `step`: the columns `step`, `num_tokens` and `STEP_FIGURES`.

    `spans` has the columns of `engine.plan.spans.Span`, and `of_ranks` their `windows`;
    `tokens_of_step` is the number of tokens of each step, None for all where unknown, and may hold
    steps without spans. Times are nanoseconds.
    """
    program = spans[spans["op"] != Op.OPT.value]
    makespan = program.groupby("step")["end_ns"].max() - step_starts(spans)
    optimizer = spans[spans["op"] == Op.OPT.value]
    optimizer_ns = (optimizer["end_ns"] - optimizer["start_ns"]).groupby(optimizer["step"]).max()
    capacity = (of_ranks["end_ns"] - of_ranks["begin_ns"]).groupby("step").sum()
    busy, num_ranks = of_ranks["busy_ns"].groupby("step").sum(), len(of_ranks) // len(makespan)
    figures = pd.DataFrame(
        {
            "step_ns": capacity // num_ranks,
            "makespan_ns": makespan,
            "optimizer_ns": optimizer_ns.reindex(makespan.index).fillna(0).astype("int64"),
        }
    )
    tokens = [tokens_of_step[int(step)] for step in figures.index]
    figures["num_tokens"] = tokens if None not in tokens else np.nan
    figures["tokens_per_s"] = figures["num_tokens"] / (figures["step_ns"] / 1e9)
    compute = compute_spans(spans)
    total = (compute["end_ns"] - compute["start_ns"]).groupby(compute["step"]).sum()
    by_rank = compute.groupby(["step", "replica", "rank"])
    longest = (by_rank["end_ns"].max() - by_rank["start_ns"].min()).groupby("step").max()
    figures["bubble_fraction"] = 1 - busy / capacity
    figures["bubble_idle_over_ideal"] = (capacity - busy) / busy
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


def rank_figures(spans: pd.DataFrame, of_ranks: pd.DataFrame) -> pd.DataFrame:
    """One row per rank of each replica: `compute_ns`, `idle_fraction`, both medians over steps.

    `replica` and `rank` come first. `of_ranks` are the `windows` of the steps that count. A rank
    without compute is idle throughout.
    """
    compute = compute_spans(spans)
    duration = compute["end_ns"] - compute["start_ns"]
    per_step = duration.groupby([compute[name] for name in of_ranks.index.names]).sum()
    computed = per_step.reindex(of_ranks.index).fillna(0)
    idle = 1 - of_ranks["busy_ns"] / (of_ranks["end_ns"] - of_ranks["begin_ns"])
    figures = pd.DataFrame({"compute_ns": computed, "idle_fraction": idle})
    return figures.groupby(["replica", "rank"]).median().reset_index()


def run_figures(steps: pd.DataFrame) -> dict[str, float]:
    """The median over steps of every step figure, and the steps' relative deviation.

    `step_relative_deviation` is the median absolute deviation of the period over its median: a few
    slow steps do not move it.
    """
    medians = {name: float(steps[name].median()) for name in STEP_FIGURES}
    periods = steps["step_ns"]
    deviation = (periods - periods.median()).abs().median() / periods.median()
    return {**medians, "step_relative_deviation": float(deviation)}


def chosen_step(steps: pd.DataFrame, choice: str, *others: str) -> int:
    """The step that `--step` selects: `median`, `slowest` or the number of a measured one.

    Of several medians it is the lower one, of several slowest steps the first. Raises UsageError
    for any other; `others` are further words that the caller accepts.
    """
    if choice == MEDIAN:
        ordered = steps.sort_values(["step_ns", "step"])
        return int(ordered.iloc[(len(ordered) - 1) // 2]["step"])
    if choice == SLOWEST:
        return int(steps.sort_values(["step_ns", "step"], ascending=[False, True]).iloc[0]["step"])
    numbers = {str(number): int(number) for number in steps["step"]}
    if choice in numbers:
        return numbers[choice]
    words = ", ".join((MEDIAN, SLOWEST, *others))
    raise UsageError(
        f"--step {choice}: no such step was measured; expected {words} or one of "
        f"{min(numbers.values())} to {max(numbers.values())}"
    )
