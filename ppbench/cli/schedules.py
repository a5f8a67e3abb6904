"""List, draw, check and export schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ppbench.cli import completion
from ppbench.cli.commands import PLAN
from ppbench.cli.declare import argument, option
from ppbench.cli.emit import answers, file_written
from ppbench.cli.options import (
    UNIT_COST,
    CollectiveTimes,
    Cost,
    Microbatches,
    Mode,
    NumReplicas,
    Ranks,
    ReplicaFactors,
    ScheduleName,
    Sharding,
    Slices,
    StagesPerRank,
)
from ppbench.display.document import Block, Facts, Result, Text
from ppbench.display.rows import Record, Rows, Written
from ppbench.display.tables import Table
from ppbench.display.units import counted
from ppbench.errors import UsageError, nearest
from ppbench.files import whole_file

STANDARD_OUTPUT = "-"
MOST_DRAWN = 50_000
EXAMPLE_RANKS, EXAMPLE_MICROBATCHES, EXAMPLE_SLICES = 4, 8, 4
PolicyName = Annotated[
    str | None, option("--policy early|just_in_time", "When RECVs are posted. Default: early.")
]
LookAhead = Annotated[
    int | None,
    option("--look-ahead N", "Computations by which an early RECV comes first. Default: 1."),
]
ScheduleOrFile = Annotated[
    str,
    argument(
        "FILE.csv|NAME", "A program in torch's CSV form, or a schedule.", completion.schedules
    ),
]
MaxHeld = Annotated[
    int | None,
    option(
        "--max-held N",
        "Largest number of activations (of a microbatch or slice on a stage) that a rank may hold.",
    ),
]
COLUMNS = [
    *("name", "aliases", "stages_per_rank", "placement"),
    *("bubble_fraction", "peak_activations", "source"),
]
_ABOUT_EXAMPLE = (
    f"bubble and peak: simulated with {EXAMPLE_RANKS} ranks, {EXAMPLE_MICROBATCHES} microbatches "
    f"(of {EXAMPLE_SLICES} slices, if any), F = I = W and free transfers"
)


@answers("schedules list", PLAN, 3)
def list_schedules() -> Result:
    """List the schedules with their constraints, bubble and peak activations."""
    from engine.plan.schedules.registry import ALIASES, CSV_PREFIX, SCHEDULES
    from ppbench.prediction import placement_word, simulate
    from ppbench.prediction.amounts import number

    records: list[dict[str, object]] = []
    for schedule in SCHEDULES.values():
        allowed = schedule.stages_per_rank
        slices = None if schedule.in_slices is None else str(EXAMPLE_SLICES)
        shape = EXAMPLE_RANKS, EXAMPLE_MICROBATCHES
        prediction = simulate(schedule.name, *shape, slices=slices)
        aliases = [alias for alias, name in ALIASES.items() if name == schedule.name]
        records.append(
            {
                "name": schedule.name,
                "aliases": Written(aliases, ", ".join(aliases)),
                "stages_per_rank": str(allowed.most or "any"),
                "default_stages_per_rank": allowed.default,
                "placement": placement_word(prediction.program),
                "constraint": "; ".join(one.text for one in schedule.constraints),
                "bubble_fraction": prediction.simulation.bubble_fraction,
                "peak_activations": number(max(prediction.peaks)),
                "source": schedule.source,
            }
        )
    records.append(
        {
            "name": f"{CSV_PREFIX}PATH",
            "stages_per_rank": "any",
            "placement": "any",
            "constraint": "none but the rules; see: ppbench schedules check PATH",
            "source": "a file in torch's CSV form",
        }
    )
    rows = Rows.of_records(records)
    constraints = {str(row["name"]): row["constraint"] for row in records if row["constraint"]}
    table, heading = Table(rows, COLUMNS), Text("constraints:")
    return Result([table, heading, Facts(constraints), Text(_ABOUT_EXAMPLE)], rows)


@answers("schedules draw", PLAN, 3)
def draw(
    name: ScheduleName,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    cost: Cost = UNIT_COST,
    replicas: NumReplicas = 1,
    sharding: Sharding = None,
    collectives: CollectiveTimes = None,
    replica_factors: ReplicaFactors = None,
    mode: Mode = "train",
    slices: Slices = None,
) -> Result:
    """Draw a schedule over time in the terminal, or as a page."""
    from engine.plan.action import JOINING_OPS, Op
    from engine.plan.schedules.registry import CSV_PREFIX, SCHEDULES, read_csv
    from ppbench.display.predictions import figures_of, shape_text
    from ppbench.prediction import ProgramRequest, predict, program_of
    from ppbench.prediction.amounts import read_costs, read_slices
    from ppbench.prediction.replicas import may_be_two_way, read_replication
    from ppbench.report.timeline.terminal import text_of_program

    costs = read_costs(cost)
    two_way = may_be_two_way(name)
    given = replicas, sharding, collectives, replica_factors
    replication = read_replication(*given, is_two_way=two_way)
    request = ProgramRequest(name, ranks, microbatches, stages_per_rank, read_slices(slices))
    program = program_of(request, MOST_DRAWN, is_replicated=replicas > 1, mode=mode)
    prediction = predict(program, costs, replication=replication)
    figures = figures_of(prediction)

    def own_page() -> str:
        from ppbench.report.pages.timeline import planned_page

        schedule = SCHEDULES.get(program.schedule)
        return planned_page(
            prediction.frame_in_a_row,
            title=f"{program.schedule}, planned",
            subtitle=f"planned by simulation, not measured · {shape_text(prediction)}",
            facts={
                **figures,
                "placement of stages": str(prediction.shape()["placement"]),
                "source": schedule.source if schedule else "the file",
            },
        )

    title = f"{program.schedule}: {shape_text(prediction)}"
    blocks: list[Block] = [Text(title), text_of_program(prediction), Facts(figures)]
    with_collectives, shown = prediction.program, set(JOINING_OPS)
    if replication is None and (name.startswith(CSV_PREFIX) or name.endswith(".csv")):
        with_collectives, shown = read_csv(Path(name.removeprefix(CSV_PREFIX))), set(Op)
    if with_collectives.has_collectives:
        lanes = {
            f"rank {rank}": " ".join(str(action) for action in row if action.op in shown)
            for rank, row in enumerate(with_collectives.actions)
        }
        blocks += [Text("with the collectives of replicas, in order:"), Facts(lanes)]
    return Result(blocks, Record(prediction.as_dict()), key="", own_page=own_page)


@answers("schedules check", PLAN, 3)
def check(
    name: ScheduleOrFile,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    max_held: MaxHeld = None,
    slices: Slices = None,
    sharding: Annotated[
        str | None,
        option(
            "--sharding POLICY",
            "Check a file's collectives by sharding.policy, with its settings: "
            "zero3,residency=2,look_ahead=1.",
        ),
    ] = None,
) -> Result:
    """Check a program, and prove that it cannot hang."""
    from engine.plan.check import check as check_rules
    from engine.plan.collectives import POLICIES
    from engine.plan.rules import ProgramError
    from engine.plan.schedules.registry import CSV_PREFIX, known_names
    from ppbench.display.predictions import OF_PEAKS, microbatches_text, peaks_text
    from ppbench.prediction import (
        ProgramRequest,
        placement_word,
        predict,
        program_of,
        program_of_file,
        with_transfers,
    )
    from ppbench.prediction.amounts import UNIT_COSTS, read_slices
    from ppbench.prediction.replicas import collectives_of_file

    if max_held is not None and max_held < 1:
        raise UsageError(f"--max-held: must be at least 1, got {max_held}")
    num_collectives, shares = 0, read_slices(slices)
    if name not in known_names():
        shape = {"ranks": ranks, "microbatches": microbatches, "stages-per-rank": stages_per_rank}
        for given, value in shape.items():
            if value is not None:
                raise UsageError(f"--{given}: a file has its own; leave it out")
        path = Path(name.removeprefix(CSV_PREFIX))
        program = program_of_file(path, max_held, shares)
        num_collectives = collectives_of_file(path, sharding)
    else:
        program = program_of(ProgramRequest(name, ranks, microbatches, stages_per_rank, shares))
        try:
            check_rules(program, max_held)
        except ProgramError as error:
            raise UsageError(str(error)) from None
        if sharding is not None:
            raise UsageError(
                f"--sharding: checks the collectives of a file, and {name} is a schedule; to add "
                f"collectives to it: ppbench schedules export {name} --sharding {sharding} "
                "-o FILE.csv"
            )
    num_actions = program.num_computations
    num_transfers = with_transfers(program).table.num_actions - num_actions
    prediction = predict(program, UNIT_COSTS)
    counts = [
        counted(program.world_size, "rank"),
        f"{counted(program.num_stages, 'stage')} ({placement_word(program)} placement)",
        microbatches_text(program),
        counted(num_actions, "action"),
        *([counted(num_transfers, "transfer")] if program.has_transfers else []),
        *([counted(num_collectives, "collective")] if num_collectives else []),
    ]
    blocks = [
        Text(
            f"ok: {', '.join(counts)}; deadlock-free; peak activations by rank: "
            f"{peaks_text(prediction.peaks)} ({OF_PEAKS})"
        )
    ]
    if num_collectives and sharding is None:
        policies = ", ".join(POLICIES)
        text = f"Its collectives are not checked: add --sharding POLICY, one of {policies}."
        blocks.append(Text(text))
    facts = {
        **prediction.shape(),
        "num_actions": num_actions,
        "num_transfers": num_transfers if program.has_transfers else 0,
        "num_collectives": num_collectives,
        "peak_activations": prediction.figures()["peak_activations"],
    }
    return Result(blocks, Record(facts), key="")


@answers("schedules export", PLAN, 3)
def export(
    name: ScheduleName,
    output: Annotated[
        Path,
        option("-o --output FILE.csv", "Output file; - for standard output."),
    ],
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    with_communication: Annotated[
        bool, option("--with-communication", "Include SEND and RECV actions.")
    ] = False,
    policy: PolicyName = None,
    look_ahead: LookAhead = None,
    sharding: Annotated[
        str | None,
        option(
            "--sharding POLICY",
            "Include what replicas do together by sharding.policy, with its settings: "
            "zero3,residency=2,look_ahead=1. Default: what a file has.",
        ),
    ] = None,
    slices: Slices = None,
) -> Result:
    """Write a schedule in torch's CSV form."""
    from engine.plan.lower import DEFAULT_LOOK_AHEAD, Policy
    from engine.plan.program import to_csv
    from ppbench.prediction import ProgramRequest, program_of, with_transfers
    from ppbench.prediction.amounts import read_slices
    from ppbench.prediction.replicas import with_sharding

    for given, value in {"--policy": policy, "--look-ahead": look_ahead}.items():
        if value is not None and not with_communication:
            raise UsageError(f"{given}: applies only with --with-communication; add it")
    policies = [known.value for known in Policy]
    if policy is not None and policy not in policies:
        raise UsageError(f'--policy: unknown policy "{policy}"{nearest(policy, policies)}')
    posting = Policy(policy or Policy.EARLY)
    if look_ahead is not None and look_ahead < 0:
        raise UsageError(f"--look-ahead: must be at least 0, got {look_ahead}")
    if look_ahead is not None and posting is not Policy.EARLY:
        raise UsageError("--look-ahead: applies only with --policy early; leave it out")
    request = ProgramRequest(name, ranks, microbatches, stages_per_rank, read_slices(slices))
    written = program_of(request, is_replicated=True)
    num_ahead = DEFAULT_LOOK_AHEAD if look_ahead is None else look_ahead
    program = with_transfers(written, posting, num_ahead) if with_communication else written
    text = to_csv(with_sharding(program, written, sharding))
    if str(output) == STANDARD_OUTPUT:
        print(text.rstrip("\n"))
        return Result(is_printed=True)
    with whole_file(output, "-o") as file:
        file.write(text.encode())
    return file_written(output)
