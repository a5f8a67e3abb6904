"""`ppbench sweep`: every case of a sweep file, run here or elsewhere, and a report of them."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppbench.cli import completion
from ppbench.cli.browser import Open, open_page
from ppbench.cli.options import (
    REPORTS,
    RESULTS,
    Columns,
    HowToPrint,
    Launcher,
    Overrides,
    PageAssets,
    Results,
    Sort,
    SweepFile,
    going_on,
    print_text,
    with_settings,
)
from ppbench.console import note
from ppbench.display.commands import command, option_words
from ppbench.display.fields import OF_REPLICAS, WORKLOAD
from ppbench.display.formats import Assets, Format
from ppbench.display.tables import EVERYTHING, View, render
from ppbench.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from ppbench.config.sweep import Sweep
    from ppbench.report.until_answered import UntilAnswered
    from ppbench.run.sweep.plan import Choice
    from ppbench.run.sweep.progress import Display

FIGURES = [
    *("tokens_per_s", "step_ns", "planned_step_ns", "bubble_fraction", "bubble_fraction_theory"),
    *("peak_memory_bytes", "cautions"),
]

ReportsFolder = Annotated[Path, typer.Option("--reports", help="Folder for HTML reports.")]
NoReport = Annotated[bool, typer.Option("--no-report", help="Write no HTML report.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List the cases without running them.")]
Rerun = Annotated[bool, typer.Option("--rerun", help="Run finished cases again.")]
RetryFailedCases = Annotated[bool, typer.Option("--retry-failed", help="Run failed cases again.")]
OnlyCases = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="KEY=VALUE",
        help="Run only the cases that match.",
        autocompletion=completion.settings,
    ),
]
IsLive = Annotated[
    bool,
    typer.Option("--live", help="Rewrite the report as cases end; open, it refreshes itself."),
]
ChosenLauncher = Annotated[
    Launcher,
    typer.Option("--launcher", help="Run here, as one of several nodes, or as a Slurm job."),
]


@with_settings
def sweep(
    file: SweepFile,
    results: Results = RESULTS,
    reports: ReportsFolder = REPORTS,
    no_report: NoReport = False,
    assets: PageAssets = Assets.inline,
    open_it: Open = False,
    is_live: IsLive = False,
    dry_run: DryRun = False,
    overrides: Overrides = None,
    rerun: Rerun = False,
    retry_failed: RetryFailedCases = False,
    only: OnlyCases = None,
    launcher: ChosenLauncher = Launcher.local,
    how: HowToPrint = Format.table,
    columns: Columns = None,
    sort: Sort = None,
) -> None:
    """Run every case of a sweep file and write a report."""
    from rich.console import Console

    from ppbench.config.conditions import parse_only
    from ppbench.config.reader import read_sweep
    from ppbench.run.machine.environment import default_device
    from ppbench.run.sweep.plan import Choice
    from ppbench.run.sweep.progress import doing
    from ppbench.store import TABLES

    view = View.of(columns, sort)
    if not dry_run:  # refused before anything is measured
        view.check([column.name for column in TABLES["runs"]])
    choice = Choice(rerun, retry_failed, parse_only(only or [], default_device()))
    writes_page = reports != REPORTS or no_report or open_it or is_live
    if launcher is not Launcher.local and (writes_page or how is not Format.table):
        raise UsageError(
            f"--launcher {launcher.value}: writes no report and prints no table of runs; leave "
            "--reports, --no-report, --open, --live and --format out; use `ppbench report` and "
            "`ppbench ls` afterwards"
        )
    if no_report and (open_it or is_live):
        option = "--open: opens" if open_it else "--live: rewrites"
        raise UsageError(f"{option} the report, which --no-report leaves out; drop one")
    with doing(f"reading {file}", Console(stderr=True)):
        read = read_sweep(file, overrides or [], default_device())
    if launcher is not Launcher.local:
        options = option_words(set=overrides)
        _sweep_elsewhere(launcher, read, options, results, choice, is_dry_run=dry_run)
        return
    if dry_run:
        list_cases(read, choice, how, view)
        return
    import dataclasses

    from ppbench.config.kinds import seconds_of
    from ppbench.run.sweep.control import note_sweep_file, run_sweep
    from ppbench.run.sweep.progress import display_for
    from ppbench.store import Store, check_writable

    store, display = Store(results), display_for(Console(stderr=True))
    check_writable(results, "--results")
    if not no_report:
        check_writable(reports, "--reports")
    note_sweep_file(dataclasses.replace(read, cases=choice.only.select(read.cases)))
    again = command(
        *("sweep", str(file)),
        set=overrides,
        only=only,
        results=results,
        reports=None if no_report else reports,
        no_report=no_report,
        assets=None if assets is Assets.inline else assets,
    )
    policy: UntilAnswered | None = None
    if seconds := seconds_of(read.cases[0][1].budget):
        from ppbench.comparison.evidence import MOST_LAUNCHES
        from ppbench.report.until_answered import UntilAnswered

        policy = UntilAnswered(read, store, seconds, note)
        launches = tuple(
            (case, dataclasses.replace(measure, launches=MOST_LAUNCHES))
            for case, measure in read.cases
        )
        read = dataclasses.replace(read, cases=launches)
    with contextlib.ExitStack() as held:
        live: Display = display
        if is_live:
            from ppbench.cli.live import reporting

            opens = open_page if open_it else lambda _: None
            live = held.enter_context(reporting(display, read, reports, again, assets, opens))
        once = option_words(rerun=rerun, retry_failed=retry_failed)
        done = run_sweep(read, store, choice, live, " ".join([again, *once]), policy=policy)
    path = None
    if not no_report:
        with display.doing("writing the report"):
            from ppbench.cli.live import report_path
            from ppbench.report.pages.report import write_report
            from ppbench.report.pages.templates import update_index

            path = report_path(reports, read, done.plan.sweep_id)
            write_report(
                path,
                store,
                done.frame,
                title=read.name,
                command=again,
                sweep_text=read.said.source.text,
                assets=assets,
            )
            update_index(reports)
    if how is Format.table:
        view = dataclasses.replace(view, short_ids=store.short_ids(done.frame["run_id"]))
    has_failed = bool((done.frame["status"] != "ok").any())
    is_repeated = any(measure.launches > 1 for _, measure in read.cases)
    figures = [
        name
        for name in FIGURES
        if (done.frame[name].notna() & done.frame[name].ne("")).any()
        and (done.is_emulated or name != "planned_step_ns")
    ]
    axes = [*_axes_of(read), *(["launch"] if is_repeated else [])]
    shown_columns = ["run_id", *axes, "status", *figures]
    print(render(done.frame, how, shown_columns, view, ["status"] if has_failed else []))
    if how is Format.table:  # which case is best and how sure that is, in the report's words
        from ppbench.display.cases import varying_axes
        from ppbench.report.pages.conclusions import conclude
        from ppbench.report.pages.judgement import judge

        judged = judge(done.frame, varying_axes(done.frame), [store])
        if judged.first is not None and judged.first.rival is not None:
            said = conclude(judged, done.frame, again).sentence
            answer = "\n".join(filter(None, [said.text, said.advice, said.command]))
            print_text(f"\n{answer}\n")
    if path is not None:
        print(f"report: {path}", file=sys.stdout if how is Format.table else sys.stderr)
        if open_it and not is_live:
            open_page(path)
    raise typer.Exit(ExitCode.ok if done.is_ok else ExitCode.failed_runs)


def list_cases(read: Sweep, choice: Choice, how: Format, view: View = EVERYTHING) -> None:
    """Print the chosen cases, none of them run."""
    import dataclasses

    from ppbench.config.feasibility import notes_on_sources
    from ppbench.run.sweep.control import note_sweep_file
    from ppbench.run.sweep.plan import planned_cases

    chosen = dataclasses.replace(read, cases=choice.only.select(read.cases))
    note_sweep_file(chosen)
    for text in notes_on_sources((case for case, _ in chosen.cases), chosen.facts):
        note(f"note: {text}")
    print(render(planned_cases(chosen), how, ["case_id", *_axes_of(chosen)], view))


def _axes_of(sweep: Sweep) -> tuple[str, ...]:
    """The columns that tell the cases of a sweep apart."""
    has_replicas = any(case.replicas > 1 for case, _ in sweep.cases)
    return sweep.axes or (OF_REPLICAS if has_replicas else WORKLOAD)


def _sweep_elsewhere(
    launcher: Launcher,
    read: Sweep,
    options: list[str],
    results: Path,
    choice: Choice,
    *,
    is_dry_run: bool,
) -> None:
    """Run this node's part of a sweep, or submit it to Slurm.

    A dry run prints what would be run, and runs nothing. Raises SweepInterruptedError.
    """
    from ppbench.run.launch.cluster import SlurmJob, node_launches, rendezvous_of
    from ppbench.run.launch.local import WORKER
    from ppbench.run.sweep.control import choice_options, note_sweep_file
    from ppbench.store import check_writable

    # What matches nothing is refused here, not by every node.
    note_sweep_file(dataclasses.replace(read, cases=choice.only.select(read.cases)))
    program = [WORKER, read.file, "--results", str(results), *options, *choice_options(choice)]
    if launcher is Launcher.torchrun:
        launches = node_launches(read, read.torchrun.nodes, program)
        rendezvous = rendezvous_of(read)
        if is_dry_run:
            print("\n".join(map(shlex.join, launches.commands(*rendezvous))))
            return
        with going_on():
            launches.run(*rendezvous)
        return
    job = SlurmJob(read, results, node_launches(read, read.slurm.nodes, program))
    if is_dry_run:
        print(job.preview())
        return
    check_writable(results, "--results")
    print(f"job {job.submit()}; its logs: {results / 'slurm'}")
