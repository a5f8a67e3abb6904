"""Where the idle time of a run went, in sentences: the parts of its bubble and the largest's cause.

Made from what is stored of a run, so that a report, a listing and `ppbench explain` say the same.
"""

from __future__ import annotations

import pandas as pd

from engine.plan.action import SEND_OPS
from ppbench.analysis.costs import (
    STAGE_STANDS_OUT,
    Costs,
    link_ns,
    slow_link,
    slow_stage,
    stage_ns,
    stored_costs,
)
from ppbench.analysis.whatif import (
    WhatIf,
    as_modelled,
    other_schedules,
    same_program,
    stored_program,
)
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


def what_if(run: pd.Series, edges: pd.DataFrame) -> list[str]:
    """What the step could take instead, in a sentence; nothing for one rank."""
    if run["world_size"] == 1:
        return []
    costs, (lowered, posting) = stored_costs(run, edges), stored_program(run)
    if edges.empty and any(action.op in SEND_OPS for row in lowered.actions for action in row):
        return ["What if: its messages are no longer in the store, so nothing can be modelled."]
    balanced, free, _ = same_program(lowered, costs)
    others = other_schedules(lowered, costs, posting)
    best = min(
        (one for one in others if isinstance(one, WhatIf)),
        key=lambda one: one.step_ns,
        default=None,
    )
    now_ns = as_modelled(lowered, costs).step_ns
    told = [
        f"{one.question} {milliseconds(one.step_ns)} ({one.step_ns / now_ns - 1:+z.1%})"
        for one in (balanced, free, best)
        if one is not None
    ]
    return [f"What if, as modelled from {milliseconds(now_ns)}: {'; '.join(told)}."]


def _sum_of(run: pd.Series, parts: dict[str, float]) -> str:
    first, *others = (
        f"{round(share * 100, 1) + 0:.1f} {PART_NAMES[name]}"  # no -0.0
        for name, share in parts.items()
    )
    return (
        f"Over all measured steps, of every 100 ms of the ranks' time "
        f"{float(run['bubble_mean']) * 100:.1f} were idle: "
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
            return _stages(stored_costs(run, edges))
        case "transfer":
            return _links(stored_costs(run, edges))
        case "jitter":
            return f"an action's time varies by {percent(run['op_variation'])} around its mean"
        case _:
            return "no cost explains it; the host between actions, or ranks in each other's way"


def _stages(costs: Costs) -> str:
    slow, taken = slow_stage(costs), stage_ns(costs)
    if slow is not None:
        return (
            f"stage {slow.index} takes {slow.ratio:.2f} times as long as the others "
            f"({milliseconds(slow.ns)} per microbatch against {milliseconds(slow.others_ns)})"
        )
    longest = max(taken)
    slowest = [str(stage) for stage, ns in enumerate(taken) if ns > longest / STAGE_STANDS_OUT]
    return (
        f"a microbatch takes {milliseconds(min(taken))} to {milliseconds(longest)} on a stage, "
        f"longest on {'stages' if len(slowest) > 1 else 'stage'} {', '.join(slowest)}"
    )


def _links(costs: Costs) -> str:
    slow, taken = slow_link(costs), link_ns(costs)
    if not taken:
        return "its messages are no longer in the store, so between which stages is unknown"
    if slow is not None:
        return (
            f"messages between stages {slow.index} and {slow.index + 1} take "
            f"{milliseconds(slow.ns)}, elsewhere {milliseconds(slow.others_ns)}"
        )
    shortest, longest = (milliseconds(choose(taken.values())) for choose in (min, max))
    return f"a message takes {shortest if shortest == longest else f'{shortest} to {longest}'}"


def _residual(run: pd.Series) -> str:
    residual = float(run["model_residual"])
    word = "longer" if residual >= 0 else "shorter"
    return (
        "Replayed with its own mean costs and transfers, the step takes "
        f"{milliseconds(run['modelled_step_ns'])}; the measured steps took "
        f"{percent(abs(residual))} {word} on average."
    )
