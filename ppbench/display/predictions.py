"""A predicted step in words: its shape, costs, peaks and replicas."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from engine.plan.program import Program
from ppbench.display.units import counted
from ppbench.prediction import Prediction
from ppbench.prediction.amounts import UnitCosts
from ppbench.prediction.replicas import sharding_text

MOST_LISTED = 16
OF_PEAKS = "microbatches of a rank's share"


def shape_text(prediction: Prediction) -> str:
    """Format the shape and the costs: `4 ranks, 8 microbatches, F=1 I=1 W=1`."""
    program, replication = prediction.program, prediction.replication
    counts = [counted(program.world_size, "rank")]
    if replication is not None and replication.replicas > 1:
        sharding = sharding_text(replication.policy)
        counts.append(f"{counted(replication.replicas, 'replica')} sharing by {sharding}")
    if program.num_stages > program.world_size:
        counts.append(counted(program.num_stages, "stage"))
    return ", ".join([*counts, microbatches_text(program), costs_text(prediction.costs)])


def microbatches_text(program: Program) -> str:
    """Count the microbatches, and the slices of each: `8 microbatches of 4 slices`."""
    text = counted(program.num_microbatches // program.num_slices, "microbatch")
    return f"{text} of {counted(program.num_slices, 'slice')}" if program.slices else text


def costs_text(costs: UnitCosts) -> str:
    pair = "" if costs.pair is None else f" FB={amount(costs.pair)}"
    return f"F={amount(costs.f)} I={amount(costs.i)} W={amount(costs.w)}{pair}"


def amount(value: Fraction) -> str:
    """Format a number with up to six significant digits."""
    return f"{float(value):.6g}"


def peaks_text(of_ranks: Iterable[Fraction]) -> str:
    """Format the peaks by rank, `4, 3, 2, 1`, in words if many are equal."""
    peaks = list(map(amount, of_ranks))
    if len(peaks) > MOST_LISTED and len(set(peaks)) == 1:
        return f"{peaks[0]} on each of {len(peaks)}"
    return ", ".join(peaks)


def figures_of(prediction: Prediction) -> dict[str, str]:
    """Return what is predicted, by its name; replicas add what they share and what that costs."""
    figures, facts = prediction.figures(), dict[str, str]()
    if (replication := prediction.replication) is not None:
        gather, reduce = amount(replication.gather_s), amount(replication.reduce_s)
        facts = {
            "collectives": f"gather {gather} s, reduce {reduce} s",
            "exposed collective": f"{amount(prediction.collective_s)} s",
        }
        if replication.replicas > 1:
            factors = ", ".join(map(amount, replication.factors))
            skew = f"{amount(prediction.skew_s)} s"
            facts = {"replica factors": factors, **facts, "replica skew": skew}
    return {
        **facts,
        "makespan": f"{amount(prediction.makespan_s)} s",
        "period": f"{amount(prediction.period_s)} s",
        **{name: f"{figures[name]:.4f}" for name in figures if name.startswith("bubble")},
        "peak activations by rank": f"{peaks_text(prediction.peaks)} ({OF_PEAKS})",
    }
