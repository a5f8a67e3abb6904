"""`ppbench schedules`: which there are, what one looks like, whether a file is one, one as a file.

From parsed arguments to printed text, as in `commands`; apart from it, since nothing here needs a
sweep, a store or a run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich.console import Console

from engine.plan.action import COMPUTE_OPS
from engine.plan.lower import DEFAULT_LOOK_AHEAD, Policy, lower
from engine.plan.program import Program, to_csv, v_placement
from engine.plan.rules import ProgramError
from engine.plan.schedules.registry import ALIASES, CSV_PREFIX, SCHEDULES, Schedule
from ppbench.errors import UsageError, nearest
from ppbench.files import whole_file
from ppbench.format import Format
from ppbench.listing import render
from ppbench.planning import drawing
from ppbench.planning.prediction import UNIT_COSTS, Prediction, number, predict, read_costs
from ppbench.planning.programs import Wanted, placement_word, program_of, program_of_file
from ppbench.report.units import counted

STANDARD_OUTPUT = "-"
MOST_DRAWN = 50_000
EXAMPLE_RANKS, EXAMPLE_MICROBATCHES = 4, 8
SCHEDULE_COLUMNS = [
    "name",
    "aliases",
    "stages per rank",
    "placement",
    "bubble_fraction",
    "peak_activations",
    "source",
    "constraint",
]
_ABOUT_EXAMPLE = (
    f"bubble and peak: simulated with {EXAMPLE_RANKS} ranks, {EXAMPLE_MICROBATCHES} microbatches, "
    "F = I = W and free transfers"
)


def list_schedules(how: Format) -> str:
    """Every schedule, what it asks for, and what it gives in one small example."""
    rows = [_listed(schedule) for schedule in SCHEDULES.values()]
    rows.append(
        {
            "name": f"{CSV_PREFIX}PATH",
            "stages_per_rank": "any",
            "placement": "any",
            "constraint": "none but the rules; see: ppbench schedules check PATH",
            "source": "a file in torch's CSV form",
        }
    )
    if how is Format.json:
        return json.dumps(rows, indent=2)
    frame = pd.DataFrame(rows).convert_dtypes()
    frame["aliases"] = frame["aliases"].map(", ".join, na_action="ignore")
    if how is not Format.csv:  # where it is no number, as elsewhere, but may be `any`
        frame = frame.rename(columns={"stages_per_rank": "stages per rank"})
    table = render(frame, how, SCHEDULE_COLUMNS)
    return f"{table}\n{_ABOUT_EXAMPLE}" if how is Format.table else table


def _listed(schedule: Schedule) -> dict[str, object]:
    allowed = schedule.stages_per_rank
    program = program_of(Wanted(schedule.name, EXAMPLE_RANKS, EXAMPLE_MICROBATCHES, None))
    prediction = predict(program, UNIT_COSTS)
    return {
        "name": schedule.name,
        "aliases": [alias for alias, name in ALIASES.items() if name == schedule.name],
        "stages_per_rank": str(allowed.most or "any"),
        "default_stages_per_rank": allowed.default,
        "placement": "v" if schedule.place is v_placement else "loop",
        "constraint": schedule.constraint.text if schedule.constraint else "",
        "bubble_fraction": prediction.simulation.bubble_fraction,
        "peak_activations": number(max(prediction.peaks)),
        "source": schedule.source,
    }


def draw(wanted: Wanted, cost: str, html: Path | None) -> str:
    """The schedule over time, as wide and as colourful as the terminal; `html` gets a page too."""
    costs = read_costs(cost)
    program = program_of(wanted)
    num_actions = num_computations(program)
    if num_actions > MOST_DRAWN:
        raise UsageError(
            f"{num_actions:,} actions are too many to draw; at most {MOST_DRAWN:,}; use fewer "
            "ranks, stages or microbatches, or ask for figures alone: ppbench simulate"
        )
    prediction = predict(program, costs)
    text = drawing.draw(prediction, Console(highlight=False))
    if html is None:
        return text
    _write_page(html, prediction)
    return f"{text}\n{html}"


def _write_page(path: Path, prediction: Prediction) -> None:
    from ppbench.report.timeline_page import write_plan

    program, costs = prediction.program, prediction.costs
    source = SCHEDULES[program.schedule].source if program.schedule in SCHEDULES else "the file"
    peaks = drawing.peaks_text(prediction)
    figures = prediction.figures()
    bubbles = [(name, f"{figures[name]:.4f}") for name in figures if name.startswith("bubble")]
    write_plan(
        path,
        prediction.spans(),
        title=f"{program.schedule}, planned",
        subtitle=f"planned by simulation, not measured · {drawing.shape_text(prediction)}",
        facts=[
            ("makespan", f"{drawing.amount(prediction.makespan_s)} s"),
            *bubbles,
            ("peak activations by rank", f"{peaks} (microbatches of a rank's share)"),
            ("costs, in s", drawing.costs_text(costs)),
            ("transfers", "free"),
            ("placement of stages", placement_word(program)),
            ("source", source),
        ],
    )


def check_file(path: Path, max_held: int | None) -> str:
    """That a file's program obeys all rules and cannot hang; raises UsageError where it does."""
    if max_held is not None and max_held < 1:
        raise UsageError(f"--max-held: must be at least 1, got {max_held}")
    program = program_of_file(path, max_held)
    lowered = _proved(program, Policy.EARLY, DEFAULT_LOOK_AHEAD)
    num_actions = num_computations(program)
    num_transfers = sum(map(len, lowered.actions)) - num_actions
    counts = [
        counted(program.world_size, "rank"),
        f"{counted(program.num_stages, 'stage')} ({placement_word(program)} placement)",
        counted(program.num_microbatches, "microbatch"),
        counted(num_actions, "action"),
        *([counted(num_transfers, "transfer")] if program.has_transfers else []),
    ]
    peaks = drawing.peaks_text(predict(program, UNIT_COSTS))
    return (
        f"ok: {', '.join(counts)}; deadlock-free; peak activations by rank: {peaks} "
        "(microbatches of a rank's share)"
    )


def num_computations(program: Program) -> int:
    """How many actions are no transfers."""
    return sum(action.op in COMPUTE_OPS for row in program.actions for action in row)


def _proved(program: Program, policy: Policy, look_ahead: int) -> Program:
    """With transfers, its own or by policy, that cannot hang. Raises UsageError."""
    try:
        return lower(program, policy, look_ahead)
    except ProgramError as error:
        raise UsageError(str(error)) from None


@dataclass(frozen=True)
class Communication:
    """How `schedules export` adds transfers: as typed."""

    is_wanted: bool
    policy: str | None
    look_ahead: int | None

    def check(self) -> tuple[Policy, int]:
        """Raises UsageError where an option is unknown or says nothing."""
        given = {"--policy": self.policy, "--look-ahead": self.look_ahead}
        for option, value in given.items():
            if value is not None and not self.is_wanted:
                raise UsageError(f"{option}: has a meaning only with --with-communication; add it")
        policies = [policy.value for policy in Policy]
        if self.policy is not None and self.policy not in policies:
            hint = nearest(self.policy, policies)
            raise UsageError(f'--policy: unknown policy "{self.policy}"{hint}')
        policy = Policy(self.policy or Policy.EARLY)
        if self.look_ahead is None:
            return policy, DEFAULT_LOOK_AHEAD
        if self.look_ahead < 0:
            raise UsageError(f"--look-ahead: must be at least 0, got {self.look_ahead}")
        if policy is not Policy.EARLY:
            raise UsageError("--look-ahead: has a meaning only with --policy early; leave it out")
        return policy, self.look_ahead


def export(wanted: Wanted, communication: Communication, output: Path) -> str:
    """Write the program in torch's CSV form; the file's path, or the CSV itself for `-`."""
    policy, look_ahead = communication.check()
    program = program_of(wanted)
    if communication.is_wanted:
        program = _proved(program, policy, look_ahead)
    text = to_csv(program)
    if str(output) == STANDARD_OUTPUT:
        return text.rstrip("\n")
    with whole_file(output, "-o") as file:
        file.write(text.encode())
    return str(output)
