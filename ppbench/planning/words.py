"""A plan in a table and in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from engine.plan.program import loop_placement
from ppbench.display.fields import Field, field_of
from ppbench.display.units import MEBIBYTES, MS, PERCENT, counted, milliseconds, percent, size
from ppbench.planning.plan import AUTO, Configuration, Plan, Proposal

_ENDS = "the {} end of the 90 % interval of the step, by errors of the costs alone"
SHOWN: dict[str, Field] = {
    **{name: field_of(name) for name in ("schedule", "world_size", "stages_per_rank")},
    "microbatch_size": Field("microbatch size", ".0f"),
    "recomputed_stages": Field("stages recomputed", ".0f"),
    "step_ns": field_of("step_ns"),
    "step_low_ns": Field("low", ",.1f", MS, meaning=_ENDS.format("lower")),
    "step_high_ns": Field("high", ",.1f", MS, meaning=_ENDS.format("upper")),
    "tokens_per_s": field_of("tokens_per_s"),
    "bubble_fraction": field_of("bubble_fraction"),
    "peak_memory_bytes": Field("peak", ",.1f", MEBIBYTES),
}
"""The columns of the table that people see; the number of ranks if a plan has several."""
TRIED: dict[str, Field] = {
    **{name: field_of(name) for name in ("schedule", "world_size", "stages_per_rank")},
    "microbatch_size": Field("microbatch size", ".0f"),
    "measured_step_ns": Field("measured step", ",.1f", MS),
    "measured_low_ns": Field("low", ",.1f", MS),
    "measured_high_ns": Field("high", ",.1f", MS),
    "num_launches": Field("launches", ".0f"),
    "predicted_step_ns": Field("predicted step", ",.1f", MS),
    "step_error": Field("error", "+.1f", PERCENT),
    "measured_peak_bytes": Field("measured peak", ",.1f", MEBIBYTES),
    "predicted_peak_bytes": Field("predicted peak", ",.1f", MEBIBYTES),
}
"""The columns of the table of proposals that were measured."""
CAUSES = {
    "schedule": "the bubble of the schedule",
    "imbalance": "stages that take unequally long",
    "memory": "memory",
    "link": "the link between ranks",
}
WITHOUT = {
    "schedule": "without a bubble",
    "imbalance": "with equal stages",
    "memory": "with as much memory as one likes",
    "link": "with a link that takes no time",
}
LEAST_LOSS = 0.005
"""The part of a step below which nothing is said to limit it."""
LEAST_SAID = 0.0005
"""A smaller part of a step would be written as 0.0 %."""
ALL_RANKS = "Tokens/s are those of all ranks together: more ranks are more devices."
"""What is said where numbers of ranks are compared."""
MOST_RANKS = 8
"""Of more ranks it is not said one by one what they have."""


def row_of(proposal: Proposal) -> dict[str, object]:
    """A proposal's configuration and figures."""
    one = proposal.configuration
    return {
        "schedule": one.schedule,
        "world_size": one.ranks,
        "stages_per_rank": one.stages_per_rank,
        "microbatch_size": one.microbatch_size,
        "num_microbatches": one.num_microbatches,
        "placement": one.placement.ranks,
        "layers": one.layers,
        "recompute": one.recompute,
        "recomputed_stages": sum(one.recompute),
        "step_ns": proposal.step_ns,
        "step_low_ns": proposal.step_low_ns,
        "step_high_ns": proposal.step_high_ns,
        "bound_ns": proposal.bound_ns,
        "tokens_per_s": proposal.tokens_per_s,
        "bubble_fraction": proposal.bubble_fraction,
        "peak_memory_bytes": max(proposal.peak_bytes),
        "peak_bytes": proposal.peak_bytes,
    }


def sentences_of(plan: Plan, *, is_measured: bool = False) -> list[str]:
    """What to run, what that gains, what limits it, what more would bring, what was left out.

    If proposals are measured, what to run is not for the plan to say.
    """
    return [*_choice(plan, is_measured=is_measured), *_limits(plan), *plan.notes]


def _choice(plan: Plan, *, is_measured: bool) -> Iterator[str]:
    """The first choice: what it is, what it gains on 1F1B, how near a registered schedule comes."""
    first, one = plan.first, plan.first.configuration
    verb = "Predicted to be the best:" if is_measured else "Run"
    yield (
        f"{verb} {pipeline_text(one)}: a predicted step of {milliseconds(first.step_ns)}, "
        f"{first.tokens_per_s:,.0f} tokens/s, at most {size(max(first.peak_bytes))} on a rank."
    )
    if first.step_low_ns < first.step_high_ns:
        yield (
            "If nothing but the costs of layers and link is off, it takes "
            f"{milliseconds(first.step_low_ns)} to {milliseconds(first.step_high_ns)}, with 90 % "
            "probability; what else the machine does is left out."
        )

    if len(plan.request.ranks) > 1:
        yield ALL_RANKS
    if one.ranks > MOST_RANKS:
        is_v = one.placement != loop_placement(one.ranks, one.stages_per_rank)
        way = "down the ranks and back up" if is_v else "round the ranks"
        if one.placement.directions > 1:
            way = "down the ranks, and a copy of each up them"
        yield f"Stages go {way}."
    elif one.ranks > 1:
        texts = []
        for stage, layers in enumerate(one.partition):
            parts = ["embedding"] * (stage == 0)
            if len(layers) == 1:
                parts.append(f"layer {layers.start}")
            elif layers:
                parts.append(f"layers {layers.start} to {layers.stop - 1}")
            parts += ["head"] * (stage + 1 == len(one.layers))
            texts.append(f"stage {stage} ({', '.join(parts)})")
        depth = one.placement.depth
        texts += [
            f"stage {stage} (as stage {stage % depth})"
            for stage in range(depth, one.placement.num_stages)
        ]
        owned = [", ".join(texts[s] for s in one.placement.stages_of(r)) for r in range(one.ranks)]
        yield " ".join(f"Rank {rank}: {text}." for rank, text in enumerate(owned))

    gain = plan.gain
    if gain is None or plan.baseline is None:
        yield "No 1F1B fits into this memory."
    elif plan.baseline == first or gain < LEAST_LOSS:
        yield "That is as good as any other: nothing found gains on the best 1F1B."
    else:
        yield (
            f"It is predicted to be {gain:.1%} faster than the best 1F1B within the same memory, "
            f"whose step is {milliseconds(plan.baseline.step_ns)}."
        ).replace("%", " %")

    loss = plan.registered_loss
    if one.schedule == AUTO and plan.registered and loss is not None:
        longer = f"{percent(loss)} longer" if loss >= LEAST_SAID else "as long"
        name, need = plan.registered.configuration.schedule, max(plan.registered.peak_bytes)
        yield f"{name}, which needs no program of its own, takes {longer}, in {size(need)}."
        if plan.registered.step_low_ns <= first.step_high_ns:
            yield "The errors of the costs are larger than what is between these two."


def _limits(plan: Plan) -> Iterator[str]:
    """How far the first choice is from the best possible, why, and what more would bring."""
    first, step_ns = plan.first, plan.first.step_ns

    def changed(to_ns: int) -> str:
        return f"{milliseconds(to_ns)} ({100 * (1 - to_ns / step_ns):.1f} % less)"

    if plan.most_left < LEAST_SAID:
        yield "No program of these layers on these stages can be quicker."
    else:
        yield (
            "No program of these layers on these stages can be quicker than "
            f"{milliseconds(first.bound_ns)}: at most {percent(plan.most_left)} are left."
        )

    largest = plan.losses[0]
    if 1 - largest.step_ns / step_ns < LEAST_LOSS:
        yield "Nothing limits it but the computation itself."
    else:
        others = [each for each in plan.losses[1:] if 1 - each.step_ns / step_ns >= LEAST_LOSS]
        words = [f"{WITHOUT[each.cause]} {changed(each.step_ns)}" for each in (largest, *others)]
        cause = CAUSES[largest.cause]
        if largest.cause == "schedule" and plan.most_left < LEAST_SAID:
            cause += ", which any other program of these stages has too"
        yield f"What limits it most is {cause}: the step would be {'; '.join(words)}."

    if plan.more_memory is not None:
        more = plan.more_memory
        yield (
            f"With {size(more.memory_bytes)} per rank it would be {changed(more.step_ns)}, as "
            f"{more.configuration.schedule}."
        )
    elif plan.request.memory_bytes is not None:
        yield "Up to twice the memory would bring nothing that was found."
    if 1 - plan.faster_link_ns / step_ns >= LEAST_LOSS:
        yield f"A link twice as fast would make it {changed(plan.faster_link_ns)}."
    else:
        yield "A faster link would bring nothing."


def pipeline_text(one: Configuration) -> str:
    """A configuration in words."""
    name = "a program of the solver (auto)" if one.schedule == AUTO else one.schedule
    stages = counted(one.stages_per_rank, "stage")
    sequences = counted(one.microbatch_size, "sequence")
    if one.num_slices > 1:
        sequences += f" in {one.num_slices} slices"
    text = (
        f"{name} with {stages} per rank on {counted(one.ranks, 'rank')}, "
        f"{counted(one.num_microbatches, 'microbatch')} of {sequences}, layers by stage "
        f"{', '.join(map(str, one.layers))}"
    )
    if all(one.recompute):
        return f"{text}, all of which recompute"
    recomputed = [str(stage) for stage, is_on in enumerate(one.recompute) if is_on]
    if len(recomputed) == 1:
        return f"{text}, of which stage {recomputed[0]} recomputes"
    return f"{text}, of which stages {', '.join(recomputed)} recompute" if recomputed else text


def as_dict(plan: Plan) -> dict[str, object]:
    """Everything about a plan, as JSON has it; times in ns, memory in bytes."""
    return {
        "memory_bytes": plan.request.memory_bytes,
        "replicas": plan.request.replicas,
        "sharding_policy": plan.request.sharding,
        "global_batch": plan.request.replicas * plan.request.global_batch,
        "seq_len": plan.request.seq_len,
        "proposals": [row_of(proposal) for proposal in plan.proposals],
        "registered": plan.registered and row_of(plan.registered),
        "registered_loss": plan.registered_loss,
        "most_left": plan.most_left,
        "baseline": plan.baseline and row_of(plan.baseline),
        "gain": plan.gain,
        "frontier": [
            {
                "memory_bytes": point.memory_bytes,
                "step_ns": point.step_ns,
                "schedule": point.configuration.schedule,
            }
            for point in plan.frontier
        ],
        "losses": {loss.cause: loss.step_ns for loss in plan.losses},
        "more_memory": None
        if plan.more_memory is None
        else {"memory_bytes": plan.more_memory.memory_bytes, "step_ns": plan.more_memory.step_ns},
        "faster_link_ns": plan.faster_link_ns,
        "sentences": sentences_of(plan),
    }
