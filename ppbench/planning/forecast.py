"""`ppbench simulate`: what a schedule would take, idle and hold, or each of all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from engine.plan.schedules.formulae import Times
from engine.plan.schedules.registry import SCHEDULES
from ppbench.errors import UsageError
from ppbench.format import Format
from ppbench.listing import facts, render
from ppbench.planning.drawing import amount, costs_text, peaks_text
from ppbench.planning.prediction import Prediction, Transfers, number, predict, share_of_stage
from ppbench.planning.programs import Wanted, placement_word, program_of
from ppbench.report.units import counted

ALL = "all"
SHOWN_OF_PATH = 12
COMPARED = [
    "schedule",
    "stages_per_rank",
    "makespan",
    "bubble_fraction",
    "bubble_idle_over_ideal",
    "bubble_max_stage_span",
    "peak_activations",
    "num_actions",
]


@dataclass(frozen=True)
class Assumptions:
    """What a simulation takes for granted."""

    costs: Times
    transfers: Transfers


def simulate(wanted: Wanted, assumed: Assumptions, how: Format, *, has_held: bool = False) -> str:
    """The figures of a schedule, or of each of `all` that fit the shape. Raises UsageError."""
    if has_held and how is not Format.json:
        raise UsageError("--held: is printed only with --format json; add it")
    if wanted.schedule == ALL:
        return _compared(wanted, assumed, how, has_held)
    prediction = _predicted(wanted, assumed)
    if how in (Format.table, Format.markdown):
        return facts(_for_people(prediction, assumed), how)
    everything = _everything(prediction, assumed, has_held)
    return _as_json(everything) if how is Format.json else facts(everything, how)


def _predicted(wanted: Wanted, assumed: Assumptions) -> Prediction:
    return predict(program_of(wanted), assumed.costs, assumed.transfers)


def _everything(prediction: Prediction, assumed: Assumptions, has_held: bool) -> dict[str, object]:
    """All that programs may want to know; times in seconds."""
    costs, transfers = assumed.costs, assumed.transfers
    held = {"held_activations": prediction.held_over_time()} if has_held else {}
    return {
        **_shape_facts(prediction),
        "cost": {key: number(cost) for key, cost in zip("FIW", costs, strict=True)},
        "transfer": number(transfers.duration_s),
        "message_bytes": transfers.message_bytes,
        "overlap": transfers.overlaps,
        **prediction.figures(),
        "critical_path": prediction.critical_path(),
        **held,
    }


def _shape_facts(prediction: Prediction) -> dict[str, object]:
    program = prediction.program
    return {
        "schedule": program.schedule,
        "ranks": program.world_size,
        "microbatches": program.num_microbatches,
        "stages_per_rank": number(1 / share_of_stage(program)),
        "num_stages": program.num_stages,
        "placement": placement_word(program),
    }


def _for_people(prediction: Prediction, assumed: Assumptions) -> dict[str, object]:
    transfers = assumed.transfers
    overlap = "beside compute" if transfers.overlaps else "compute waits"
    figures = prediction.figures()
    path = prediction.critical_path()
    more = f" … {path[-1]}" if len(path) > SHOWN_OF_PATH else ""
    bubbles = {name: f"{figures[name]:.4f}" for name in figures if name.startswith("bubble")}
    takes = f"{amount(transfers.duration_s)} s, {overlap}" if transfers.duration_s else "free"
    return {
        **{key.replace("_", " "): value for key, value in _shape_facts(prediction).items()},
        "cost, s": costs_text(assumed.costs),
        "transfer": takes,
        "makespan": f"{amount(prediction.makespan_s)} s",
        **bubbles,
        "peak activations by rank": peaks_text(prediction),
        "actions": f"{figures['num_actions']:,}",
        "critical path": f"{' '.join(path[:SHOWN_OF_PATH])}{more} ({counted(len(path), 'action')})",
    }


def _compared(wanted: Wanted, assumed: Assumptions, how: Format, has_held: bool) -> str:
    """A row per registered schedule: its figures, or why it does not fit."""
    rows: list[dict[str, object]] = []
    refusals: list[UsageError] = []
    is_json = how is Format.json
    for name in SCHEDULES:
        one = wanted._replace(schedule=name)
        try:
            prediction = _predicted(one, assumed)
        except UsageError as error:
            refusals.append(error)
            rows.append(_refused(one, error))
            continue
        row = _everything(prediction, assumed, has_held) if is_json else _row(prediction, how)
        rows.append(row)
    if len(refusals) == len(rows):
        raise refusals[0]
    if is_json:
        return "[\n" + ",\n".join(map(_as_json, rows)) + "\n]"
    frame = pd.DataFrame(rows).convert_dtypes()  # whole numbers stay whole beside missing ones
    return render(frame, how, [*COMPARED, *(["reason"] if refusals else [])])


def _row(prediction: Prediction, how: Format) -> dict[str, object]:
    """The figures; of the peaks, programs get all and people the highest."""
    figures = {**_shape_facts(prediction), **prediction.figures()}
    peaks = figures["peak_activations"]
    shown = json.dumps(peaks) if how is Format.csv else number(max(prediction.peaks))
    return {**figures, "peak_activations": shown, "reason": None}


def _refused(wanted: Wanted, error: UsageError) -> dict[str, object]:
    return {
        "schedule": wanted.schedule,
        "ranks": wanted.ranks,
        "microbatches": wanted.microbatches,
        "stages_per_rank": wanted.stages_per_rank,
        "reason": str(error),
    }


def _as_json(values: Mapping[str, object]) -> str:
    """A line per key: lists may have thousands of entries."""
    lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
    return "{\n" + ",\n".join(lines) + "\n}"
