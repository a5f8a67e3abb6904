"""`ppbench simulate`: the predicted step of a schedule, or of every schedule."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from ppbench.cli import completion
from ppbench.cli.options import (
    UNIT_COST,
    CollectiveTimes,
    Columns,
    Cost,
    HowToPrint,
    Microbatches,
    NumReplicas,
    Ranks,
    ReplicaFactors,
    Sharding,
    Sort,
    StagesPerRank,
)
from ppbench.display.fields import field_of
from ppbench.display.formats import Format
from ppbench.display.tables import EVERYTHING, View, facts, render
from ppbench.display.units import counted
from ppbench.errors import UsageError

if TYPE_CHECKING:
    from engine.plan.schedules.formulae import Times
    from ppbench.prediction import ProgramRequest
    from ppbench.prediction.amounts import Transfers
    from ppbench.prediction.replicas import Replication

ALL = "all"
SHOWN_OF_PATH = 12
COMPARED = [
    *("schedule", "stages_per_rank", "makespan", "period"),
    *("bubble_fraction", "bubble_idle_over_ideal", "bubble_max_stage_span"),
    *("peak_activations", "num_actions"),
]
OF_REPLICAS = ["exposed_collective", "replica_skew"]

ChosenSchedule = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="A schedule, csv:PATH, or all to compare them.",
        autocompletion=completion.schedules,
    ),
]
Latency = Annotated[str, typer.Option(metavar="S", help="Latency of every message, in seconds.")]
HasHeld = Annotated[
    bool, typer.Option("--held", help="With --format json: include the activations over time.")
]


def simulate(
    schedule: ChosenSchedule,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    cost: Cost = UNIT_COST,
    latency: Latency = "0",
    bandwidth: Annotated[
        str | None,
        typer.Option(metavar="BYTES_PER_S", help="Bandwidth of a link. Default: infinite."),
    ] = None,
    message_bytes: Annotated[
        int, typer.Option(metavar="N", help="Size of a message, in bytes.")
    ] = 0,
    overlap: Annotated[
        bool,
        typer.Option(
            "--overlap/--no-overlap",
            help="Overlap transfers with compute (default), or block the sender.",
        ),
    ] = True,
    replicas: NumReplicas = 1,
    sharding: Sharding = None,
    collectives: CollectiveTimes = None,
    replica_factors: ReplicaFactors = None,
    held: HasHeld = False,
    how: HowToPrint = Format.table,
    columns: Columns = None,
    sort: Sort = None,
) -> None:
    """Predict makespan, bubble and peak activations of a schedule, or of all."""
    from ppbench.prediction import ProgramRequest, predict, program_of
    from ppbench.prediction.amounts import read_costs, read_transfers
    from ppbench.prediction.replicas import read_replication

    conditions = (
        read_costs(cost),
        read_transfers(latency, bandwidth, message_bytes, overlaps=overlap),
        read_replication(replicas, sharding, collectives, replica_factors),
    )
    is_replicated = conditions[-1] is not None
    view = View.of(columns, sort)
    request = ProgramRequest(schedule, ranks, microbatches, stages_per_rank)
    if held and how is not Format.json:
        raise UsageError("--held: is printed only with --format json; add it")
    if held and is_replicated:
        raise UsageError("--held: is for one pipeline; leave --replicas out")
    if schedule != ALL and view != EVERYTHING:
        raise UsageError("--columns, --sort: are for --schedule all; leave them out")
    if schedule == ALL:
        print(_compared(request, conditions, how, view, has_held=held))
        return
    prediction = predict(program_of(request, is_replicated=is_replicated), *conditions)
    if how not in (Format.table, Format.markdown):
        everything = prediction.as_dict(has_held=held)
        print(_as_json(everything) if how is Format.json else facts(everything, how))
        return
    from ppbench.display.predictions import amount, costs_text, peaks_text, replicas_facts

    moved, figures = prediction.transfers, prediction.figures()
    overlapping = "beside compute" if moved.overlaps else "compute waits"
    takes = f"{amount(moved.duration_s)} s, {overlapping}" if moved.duration_s else "free"
    bubbles = {name: f"{figures[name]:.4f}" for name in figures if name.startswith("bubble")}
    path_facts = {}
    if not is_replicated:
        path = prediction.critical_path()
        more = f" … {path[-1]}" if len(path) > SHOWN_OF_PATH else ""
        words = f"{' '.join(map(str, path[:SHOWN_OF_PATH]))}{more} ({counted(len(path), 'action')})"
        path_facts = {"critical path": words}
    for_people: dict[str, object] = {
        **{field_of(key).label: value for key, value in prediction.shape().items()},
        "cost, s": costs_text(prediction.costs),
        "transfer": takes,
        **dict(replicas_facts(prediction)[1:]),
        "makespan": f"{amount(prediction.makespan_s)} s",
        "period": f"{amount(prediction.period_s)} s",
        **bubbles,
        "peak activations by rank": peaks_text(prediction.peaks),
        "actions": f"{figures['num_actions']:,}",
        **path_facts,
    }
    print(facts(for_people, how))


def _compared(
    request: ProgramRequest,
    conditions: tuple[Times, Transfers, Replication | None],
    how: Format,
    view: View,
    *,
    has_held: bool,
) -> str:
    """A row per registered schedule: its figures, or why it cannot have this shape."""
    import pandas as pd

    from engine.plan.schedules.registry import SCHEDULES
    from ppbench.prediction import predict, program_of
    from ppbench.prediction.amounts import number

    rows: list[dict[str, object]] = []
    refusals: list[UsageError] = []
    is_json = how is Format.json and view == EVERYTHING
    for name in SCHEDULES:
        named = request._replace(schedule=name)
        try:
            prediction = predict(program_of(named), *conditions)
        except UsageError as error:
            refusals.append(error)
            rows.append({**named._asdict(), "reason": str(error)})
            continue
        if is_json:
            rows.append(prediction.as_dict(has_held=has_held))
            continue
        row = {**prediction.shape(), **prediction.figures(), "reason": None}
        if how is Format.csv:  # all the peaks for programs, and the highest for people
            row["peak_activations"] = json.dumps(row["peak_activations"])
        else:
            row["peak_activations"] = number(max(prediction.peaks))
        rows.append(row)
    if len(refusals) == len(rows):
        raise refusals[0]
    if is_json:
        return "[\n" + ",\n".join(map(_as_json, rows)) + "\n]"
    frame = pd.DataFrame(rows).convert_dtypes()  # whole numbers stay whole beside missing ones
    is_joined = conditions[-1] is not None
    shown = [*(name for name in COMPARED if name in frame), *(OF_REPLICAS if is_joined else [])]
    return render(frame, how, [*shown, *(["reason"] if refusals else [])], view)


def _as_json(values: Mapping[str, object]) -> str:
    """A line per key: lists may have thousands of entries."""
    lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
    return "{\n" + ",\n".join(lines) + "\n}"
