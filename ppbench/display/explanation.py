"""The idle time of a run in sentences: the parts of its bubble, and the cause of the largest.

They are made from stored figures, so a report, a listing and `ppbench explain` agree.
"""

from __future__ import annotations

import statistics

import pandas as pd

from engine.plan.action import SEND_OPS
from ppbench.analysis.costs import (
    STAGE_OUTLIER_RATIO,
    Costs,
    link_ns,
    slow_link,
    slow_stage,
    stage_ns,
    stored_costs,
)
from ppbench.analysis.policy_whatif import other_sharing
from ppbench.analysis.replicas import replica_ns, slowest_link
from ppbench.analysis.whatif import WhatIf, as_modelled, other_schedules, same_program
from ppbench.display.units import is_missing, milliseconds, percent
from ppbench.store.programs import modelled_run

PART_NAMES = {
    "structure": "schedule",
    "imbalance": "stage imbalance",
    "transfer": "exposed transfer",
    "collective": "exposed collective",
    "skew": "replica skew",
    "jitter": "jitter",
    "launch_gap": "launch gaps",
    "between": "between steps",
}
"""The parts of the bubble, by the suffix of their columns in `runs`."""
OF_REPLICAS = ("collective", "skew")
"""The parts that only runs with replicas have."""
_LEAST_SHARE = 0.005  # of rank-time that is worth a sentence


def has_parts(run: pd.Series) -> bool:
    """Whether the causes of the run's idle time are stored: a run that failed has none."""
    return not is_missing(run.get("bubble_structure"))


def with_parts(runs: pd.DataFrame) -> pd.Series:
    """Return for each of the runs whether it `has_parts`."""
    return runs["bubble_structure"].notna()


def parts_of(run: pd.Series) -> dict[str, float]:
    """Return the parts of the bubble as shares of rank-time; their sum is `bubble_mean`."""
    shares = {name: run.get(f"bubble_{name}") for name in PART_NAMES}
    return {
        name: float(str(share))
        for name, share in shares.items()
        if name not in OF_REPLICAS or not is_missing(share)
    }


def explain(run: pd.Series, edges: pd.DataFrame) -> list[str]:
    """Return sentences, the most important first; the run must have parts and these `edges`."""
    residual = float(run["model_residual"])
    word = "longer" if residual >= 0 else "shorter"
    replayed = (
        "Replayed with its own mean costs and transfers, a step takes "
        f"{milliseconds(run['modelled_step_ns'])}; the measured ones were "
        f"{percent(abs(residual))} {word} on average."
    )
    return [*_idle_time(run, edges), replayed]


def headline(run: pd.Series, edges: pd.DataFrame) -> str:
    """Return the parts, and the cause of the largest avoidable one, in a line or two."""
    return " ".join(_idle_time(run, edges))


def what_if(run: pd.Series, edges: pd.DataFrame, collectives: pd.DataFrame) -> list[str]:
    """Return what the step could take instead, in a sentence; nothing for one process."""
    if run["world_size"] * run["replicas"] == 1:
        return []
    model = modelled_run(run, edges, collectives)
    has_sends = any(action.op in SEND_OPS for row in model.lowered.actions for action in row)
    if (edges.empty and has_sends) or (collectives.empty and run["replicas"] > 1):
        return ["What if: the messages are no longer in the store, so nothing can be modelled."]
    balanced, free, _ = same_program(model)
    shared = [other for other in other_sharing(model) if isinstance(other, WhatIf)]
    others = [other for other in other_schedules(model) if isinstance(other, WhatIf)]
    best = min(others, key=lambda other: other.step_ns, default=None)
    now_ns = as_modelled(model).step_ns
    answers = [
        f"{option.question} {milliseconds(option.step_ns)} ({option.step_ns / now_ns - 1:+z.1%})"
        for option in (balanced, free, *shared, best)
        if option is not None
    ]
    return [f"What if, with a modelled step of {milliseconds(now_ns)} now: {'; '.join(answers)}."]


def _idle_time(run: pd.Series, edges: pd.DataFrame) -> tuple[str, str]:
    """Return the parts in a sentence, and the cause of the largest avoidable one in another."""
    parts = parts_of(run)
    shares = (
        f"{PART_NAMES[name]} {round(share * 100, 1) + 0:.1f}"  # no -0.0
        for name, share in parts.items()
    )
    whole = (
        f"Over all measured steps, ranks were idle {float(run['bubble_mean']) * 100:.1f} % of the "
        f"time: {', '.join(shares)}."
    )
    avoidable = {name: share for name, share in parts.items() if name != "structure"}
    name = max(avoidable, key=lambda part: avoidable[part])
    if avoidable[name] < _LEAST_SHARE:
        return whole, "Nearly all idle time is due to the schedule."
    match name:
        case "imbalance":
            cause = _slow_stage_text(stored_costs(run, edges))
        case "transfer":
            costs = stored_costs(run, edges)
            slow, taken = slow_link(costs), link_ns(costs)
            if not taken:
                cause = "the messages are no longer in the store, so the stages are unknown"
            elif slow is not None:
                cause = (
                    f"messages between stages {slow.index} and {slow.index + 1} take "
                    f"{milliseconds(slow.ns)}, elsewhere {milliseconds(slow.others_ns)}"
                )
            else:
                ends = dict.fromkeys(milliseconds(end(taken.values())) for end in (min, max))
                cause = f"a message takes {' to '.join(ends)}"
        case "jitter":
            varies = percent(run["op_variation"])
            cause = f"the time of an action varies by {varies} around its mean"
        case "collective":
            cause = "ranks wait for parameters or gradients of all owners, with nothing to compute"
        case "skew":
            cause = _slow_replica_text(run)
        case "between":
            cause = "time of the host from one step to the next, as for its batch"
        case _:
            cause = "time of the host between actions, or of contention between ranks"
    return whole, f"The largest avoidable loss is {PART_NAMES[name]}: {cause}."


def _slow_stage_text(costs: Costs) -> str:
    slow, taken = slow_stage(costs), stage_ns(costs)
    if slow is not None:
        return (
            f"stage {slow.index} takes {slow.ratio:.2f} times as long as the others "
            f"({milliseconds(slow.ns)} per microbatch against {milliseconds(slow.others_ns)})"
        )
    longest = max(taken)
    slowest = [str(stage) for stage, ns in enumerate(taken) if ns > longest / STAGE_OUTLIER_RATIO]
    return (
        f"a microbatch takes {milliseconds(min(taken))} to {milliseconds(longest)} on a stage, "
        f"longest on {'stages' if len(slowest) > 1 else 'stage'} {', '.join(slowest)}"
    )


def _slow_replica_text(run: pd.Series) -> str:
    taken = replica_ns(run)
    slowest = max(range(len(taken)), key=taken.__getitem__)
    others = statistics.median(ns for replica, ns in enumerate(taken) if replica != slowest)
    more, link = f"(ppbench stragglers {run['run_id']} says more)", slowest_link(run)
    if link is not None and 2 * (link.ns - link.others_ns) > taken[slowest] - others:  # both ways
        return (
            f"messages between stages {link.link} and {link.link + 1} of replica {link.replica} "
            f"take {milliseconds(link.ns)}, those of the others {milliseconds(link.others_ns)} "
            f"{more}"
        )
    return (
        f"replica {slowest} takes {milliseconds(taken[slowest])} for a microbatch over all its "
        f"stages, the others {milliseconds(others)} {more}"
    )
