"""`ppbench plan`: which pipeline to run, and how sure that is."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from ppbench.cli.browser import Open
from ppbench.cli.commands import PLAN
from ppbench.cli.declare import option
from ppbench.cli.emit import answers
from ppbench.cli.options import (
    REPORTS,
    RESULTS,
    Overrides,
    Results,
    SweepFile,
    typed_command,
)
from ppbench.cli.sweep import Rerun
from ppbench.display.commands import command
from ppbench.display.document import Result
from ppbench.errors import ExitCode, UsageError

Effort = Annotated[
    float, option("--effort X", "How much is searched; 2 is twice as much.", min=0.01, max=100)
]

NumTrials = Annotated[
    int, option("--run N", "Also measure the N best and 1F1B, in turns.", min=0, max=100)
]
NumLaunches = Annotated[
    int,
    option(
        "--max-launches --launches K",
        "Most launches of each, with --run, if it is not decided earlier.",
        min=1,
        max=16,
    ),
]
Budget = Annotated[str | None, option("--budget TIME", "Most time for --run, as in 90s or 10m.")]
IsMeasuredAnew = Annotated[
    bool, option("--remeasure", "Measure the layers again though they are stored.")
]
HandOver = Annotated[
    Path | None,
    option(
        "--hand-over DIR",
        "Write the first choice, or what --run says to take, for a sweep, for torchtitan and "
        "for Megatron-LM.",
    ),
]


def _known() -> list[str]:
    from ppbench.planning.words import SHOWN, TRIED

    of_a_row = ("num_microbatches", "placement", "layers", "recompute", "bound_ns", "peak_bytes")
    of_trials = ("predicted_low_ns", "predicted_high_ns")
    return list(dict.fromkeys([*SHOWN, *of_a_row, *TRIED, *of_trials]))


@answers("plan", PLAN, 1, _known)
def plan(
    file: SweepFile,
    overrides: Overrides = None,
    effort: Effort = 1.0,
    remeasure: IsMeasuredAnew = False,
    run: NumTrials = 0,
    launches: NumLaunches = 6,
    budget: Budget = None,
    rerun: Rerun = False,
    open_it: Open = False,
    hand_over: HandOver = None,
    results: Results = RESULTS,
) -> Result:
    """Find the best pipeline for a model, devices and memory, and say how sure that is."""
    from ppbench.cli.progress import LiveProgress
    from ppbench.planning.words import as_dict, sentences_of
    from ppbench.recommendation.question import hand_over as write_forms
    from ppbench.recommendation.question import plan as make_plan
    from ppbench.recommendation.question import read_question
    from ppbench.report.pages.plan import document_of, name_of

    if not run and (budget is not None or rerun):
        option = "--budget: is for" if budget is not None else "--rerun: repeats"
        raise UsageError(f"{option} what --run measures; add --run 2")
    asked = [*(overrides or []), *([] if budget is None else [f"measure.budget={budget}"])]
    plain = "plan", str(file)
    usual = {"set": overrides, "effort": None if effort == 1 else effort, "results": results}
    with LiveProgress("reading the sweep file") as progress:

        def on_progress(what: str, done: int, num: int) -> None:
            share = f" ({done + 1} of {num})" if num > 1 else ""
            progress.show(f"{what}{share}", "" if num else f"measuring {what.partition(':')[0]}")

        sweep = read_question(file, asked)
        found = make_plan(
            sweep,
            asked,
            results=results,
            effort=effort,
            remeasure=remeasure,
            on_progress=on_progress,
        )
    trials = None
    if run:
        from rich.console import Console

        from ppbench.recommendation.trials import measure
        from ppbench.run.sweep.progress import display_for
        from ppbench.store import check_writable

        check_writable(results, "--results")
        trials = measure(
            found,
            sweep,
            run,
            launches,
            results,
            reruns=rerun,
            display=display_for(Console(stderr=True)),
            command=command(*plain, **usual, run=run, max_launches=launches, budget=budget),
        )
    rows, blocks = document_of(found, trials)
    data = {**as_dict(found), "sentences": sentences_of(found, is_measured=trials is not None)}
    if trials is not None:
        data = {**trials.as_dict(), **data}
    asides = []
    if hand_over is not None:
        to_take = None if trials is None else trials.to_take
        written = write_forms(found, sweep, hand_over, to_take)
        why = "as the plan predicts"
        if trials is not None:
            why = "as measured" if to_take else "the plan's first, as the runs leave it open"
        asides.append(f"handed over: {name_of((to_take or found.first).configuration)}, {why}")
        asides += [
            f"{one.name}: {one.path or f'not written: {one.refusal}'}" for one in written.forms
        ]
        if (path := written.form("sweep").path) is not None:
            asides.append(f"to train it: ppbench sweep {shlex.quote(str(path))}")

    def own_page() -> str:
        from ppbench.planning.planner import simulated
        from ppbench.report.pages.plan import PlanPage, render_plan

        drawn = [found.first]
        if found.baseline is not None and found.baseline != found.first:
            drawn.append(found.baseline)
        commands = [
            ("Measure the best two, and 1F1B", command(*plain, **usual, run=2)),
            (
                "Write it for a sweep, torchtitan, Megatron-LM",
                command(*plain, **usual, hand_over="chosen"),
            ),
        ][trials is not None :]
        steps = [(proposal, simulated(found, proposal)) for proposal in drawn]
        origin, title = found.costs.origin, f"Plan of {file.stem}"
        page = PlanPage(title, found, steps, origin, commands, typed_command(), trials)
        return render_plan(page)

    return Result(
        blocks,
        rows,
        data,
        ExitCode.ok if trials is None or trials.is_ok else ExitCode.failed_runs,
        key="proposals" if trials is None else "trials",
        asides=asides,
        own_page=own_page,
        page=REPORTS / f"plan-{file.stem}.html" if open_it else None,
        is_opened=open_it,
    )
