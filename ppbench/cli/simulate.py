"""`ppbench simulate`: the predicted step of a schedule, or of every schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from ppbench.cli import completion
from ppbench.cli.commands import PLAN
from ppbench.cli.declare import option
from ppbench.cli.emit import answers
from ppbench.cli.options import (
    UNIT_COST,
    CollectiveTimes,
    Cost,
    Microbatches,
    Mode,
    NumReplicas,
    Ranks,
    ReplicaFactors,
    Sharding,
    Slices,
    StagesPerRank,
)
from ppbench.display.document import Facts, Result
from ppbench.display.fields import field_of
from ppbench.display.rows import Record, Rows, Written
from ppbench.display.tables import Table
from ppbench.display.units import counted
from ppbench.errors import UsageError

if TYPE_CHECKING:
    from ppbench.prediction import ProgramRequest
    from ppbench.prediction.amounts import Transfers, UnitCosts
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
    option(
        "--schedule NAME", "A schedule, csv:PATH, or all to compare them.", completion.schedules
    ),
]
Latency = Annotated[str, option("--latency S", "Latency of every message, in seconds.")]
HasHeld = Annotated[bool, option("--held", "Include the activations over time in JSON.")]


@answers("simulate", PLAN, 2)
def simulate(
    schedule: ChosenSchedule,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    cost: Cost = UNIT_COST,
    latency: Latency = "0",
    bandwidth: Annotated[
        str | None, option("--bandwidth BYTES_PER_S", "Bandwidth of a link. Default: infinite.")
    ] = None,
    message_bytes: Annotated[int, option("--message-bytes N", "Size of a message, in bytes.")] = 0,
    overlap: Annotated[
        bool,
        option(
            "--overlap/--no-overlap",
            "Overlap transfers with compute (default), or block the sender.",
        ),
    ] = True,
    replicas: NumReplicas = 1,
    sharding: Sharding = None,
    collectives: CollectiveTimes = None,
    replica_factors: ReplicaFactors = None,
    held: HasHeld = False,
    mode: Mode = "train",
    slices: Slices = None,
) -> Result:
    """Predict makespan, bubble and peak activations of a schedule, or of all."""
    from ppbench.prediction import ProgramRequest, predict, program_of
    from ppbench.prediction.amounts import read_costs, read_slices, read_transfers
    from ppbench.prediction.replicas import may_be_two_way, read_replication

    conditions = (
        read_costs(cost),
        read_transfers(latency, bandwidth, message_bytes, overlaps=overlap),
        read_replication(
            replicas,
            sharding,
            collectives,
            replica_factors,
            is_two_way=schedule == ALL or may_be_two_way(schedule),
        ),
    )
    has_collectives = conditions[-1] is not None
    request = ProgramRequest(schedule, ranks, microbatches, stages_per_rank, read_slices(slices))
    if held and has_collectives:
        raise UsageError("--held: leaves collectives out; leave --replicas and --collectives out")
    if schedule == ALL:
        return _compared(request, conditions, has_held=held, mode=mode)
    program = program_of(request, is_replicated=replicas > 1, mode=mode)
    prediction = predict(program, *conditions)
    from ppbench.display.predictions import amount, costs_text, figures_of

    moved, figures = prediction.transfers, prediction.figures()
    overlapping = "beside compute" if moved.overlaps else "compute waits"
    takes = f"{amount(moved.duration_s)} s, {overlapping}" if moved.duration_s else "free"
    path_facts = {}
    if not has_collectives:
        path = prediction.critical_path()
        more = f" … {path[-1]}" if len(path) > SHOWN_OF_PATH else ""
        words = f"{' '.join(map(str, path[:SHOWN_OF_PATH]))}{more} ({counted(len(path), 'action')})"
        path_facts = {"critical path": words}
    for_people: dict[str, object] = {
        **{field_of(key).label: value for key, value in prediction.shape().items()},
        "cost, s": costs_text(prediction.costs),
        "transfer": takes,
        **figures_of(prediction),
        "actions": f"{figures['num_actions']:,}",
        **path_facts,
    }
    return Result([Facts(for_people)], Record(prediction.as_dict(has_held=held)), key="")


def _compared(
    request: ProgramRequest,
    conditions: tuple[UnitCosts, Transfers, Replication | None],
    *,
    has_held: bool,
    mode: str,
) -> Result:
    """A row per registered schedule: its figures, or why it cannot have this shape."""
    from engine.plan.schedules.registry import SCHEDULES
    from ppbench.prediction import predict, program_of
    from ppbench.prediction.amounts import number

    records: list[dict[str, object]] = []
    refusals: list[UsageError] = []
    for name, schedule in SCHEDULES.items():
        if schedule.in_slices is not None and not request.slices:  # without any it is another one
            continue
        slices = request.slices if schedule.takes_slices(mode) else ()
        named = request._replace(schedule=name, slices=slices)
        try:
            prediction = predict(program_of(named, mode=mode), *conditions)
        except UsageError as error:
            refusals.append(error)
            records.append({**named._asdict(), "reason": str(error)})
            continue
        record = prediction.as_dict(has_held=has_held)
        highest = number(max(prediction.peaks))
        peaks = Written(record["peak_activations"], f"{highest}")
        records.append({**record, "peak_activations": peaks})
    if len(refusals) == len(records):
        raise refusals[0]
    rows = Rows.of_records(records)
    is_joined = conditions[-1] is not None
    shown = [*COMPARED, *(OF_REPLICAS if is_joined else []), *(["reason"] if refusals else [])]
    return Result([Table(rows, [name for name in shown if name in rows.columns])], rows)
