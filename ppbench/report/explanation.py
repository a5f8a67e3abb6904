"""Where the idle time of a run went, in sentences: the parts of its bubble and the largest's cause.

Made from what is stored of a run, so that a report, a listing and `ppbench explain` say the same.
"""

from __future__ import annotations

import statistics

import pandas as pd

from ppbench.analysis.costs import Costs, slowest_link, slowest_stage, stored_costs
from ppbench.analysis.whatif import STANDS_OUT
from ppbench.report.units import is_missing, milliseconds, percent

PART_NAMES = {
    "structure": "the schedule itself",
    "imbalance": "stage imbalance",
    "transfer": "exposed transfer",
    "jitter": "jitter",
    "launch_gap": "launch gaps",
}
"""Part of the bubble, as columns of `runs` name it -> in words."""
PART_MEANINGS = {
    "structure": "what the schedule leaves idle with equal stages and free transfers",
    "imbalance": "what the stages' mean costs add to that",
    "transfer": "what the channels' mean transfers add to that",
    "jitter": "what each action's and each message's own time adds to that",
    "launch_gap": "the rest: the host between actions, and whatever else the model leaves out",
}
_LEAST_TOLD = 0.005  # of rank-time; less is not worth a sentence


def has_parts(run: pd.Series) -> bool:
    """Whether the run tells where its idle time went; those of older versions do not."""
    return not is_missing(run.get("bubble_structure"))


def parts_of(run: pd.Series) -> dict[str, float]:
    """The parts of the bubble as shares of rank-time; they add up to `bubble_mean`."""
    return {name: float(run[f"bubble_{name}"]) for name in PART_NAMES}


def explain(run: pd.Series, edges: pd.DataFrame) -> list[str]:
    """Sentences, the most important first; `run` must have parts. `edges` are the run's own."""
    parts = parts_of(run)
    sentences = [_sum_of(run, parts), *_largest(run, parts, edges)]
    return [*sentences, _residual(run)]


def headline(run: pd.Series, edges: pd.DataFrame) -> str:
    """The parts, and the cause of the largest that is not the schedule's, in a line or two."""
    parts = parts_of(run)
    return " ".join([_sum_of(run, parts), *_largest(run, parts, edges)])


def _sum_of(run: pd.Series, parts: dict[str, float]) -> str:
    first, *others = (
        f"{round(share * 100, 1) + 0:.1f} {PART_NAMES[name]}"  # no -0.0
        for name, share in parts.items()
    )
    return (
        f"Of every 100 ms of the ranks' time {float(run['bubble_mean']) * 100:.1f} were idle: "
        f"{', '.join([first, *others[:-1]])} and {others[-1]}."
    )


def _largest(run: pd.Series, parts: dict[str, float], edges: pd.DataFrame) -> list[str]:
    avoidable = {name: share for name, share in parts.items() if name != "structure"}
    name = max(avoidable, key=lambda part: avoidable[part])
    if avoidable[name] < _LEAST_TOLD:
        return ["Nothing but the schedule leaves much idle."]
    cause = _cause(name, run, edges)
    return [f"Beyond the schedule the most is lost to {PART_NAMES[name]}: {cause}."]


def _cause(part: str, run: pd.Series, edges: pd.DataFrame) -> str:
    match part:
        case "imbalance":
            return _slow_stage(stored_costs(run, edges))
        case "transfer":
            return _slow_link(stored_costs(run, edges))
        case "jitter":
            return f"an action's time varies by {percent(run['op_variation'])} around its mean"
        case _:
            return "the host needs that time between actions"


def _slow_stage(costs: Costs) -> str:
    slow = slowest_stage(costs)
    if slow is None or slow.ratio < STANDS_OUT:
        return "the stages' costs differ a little"
    return (
        f"stage {slow.index} takes {slow.ratio:.2f} times as long as the others "
        f"({milliseconds(slow.ns)} per microbatch against {milliseconds(slow.others_ns)})"
    )


def _slow_link(costs: Costs) -> str:
    slow = slowest_link(costs)
    if slow is None or slow.ratio < STANDS_OUT:
        usual_ns = statistics.mean(costs.by_channel.values())
        return f"a message takes {milliseconds(usual_ns)} on average"
    return (
        f"messages between stages {slow.index} and {slow.index + 1} take {milliseconds(slow.ns)}, "
        f"elsewhere {milliseconds(slow.others_ns)}"
    )


def _residual(run: pd.Series) -> str:
    residual = float(run["model_residual"])
    word = "longer" if residual >= 0 else "shorter"
    return (
        "Replayed with its own mean costs and transfers, the step takes "
        f"{milliseconds(run['modelled_step_ns'])}; the measured steps took "
        f"{percent(abs(residual))} {word} on average."
    )
