"""`ppbench sweep`: every case of a sweep file, run here or elsewhere, and a report of them."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ppbench.cli import completion
from ppbench.cli.browser import Open, open_page
from ppbench.cli.commands import MEASURE
from ppbench.cli.declare import option
from ppbench.cli.emit import answers, catalogue
from ppbench.cli.options import (
    REPORTS,
    RESULTS,
    Launcher,
    Overrides,
    PageAssets,
    Results,
    SweepFile,
    going_on,
    with_settings,
)
from ppbench.console import note
from ppbench.display.commands import command, option_words
from ppbench.display.document import Block, Code, Result, Text
from ppbench.display.fields import OF_REPLICAS, WORKLOAD
from ppbench.display.formats import Assets
from ppbench.display.rows import Rows
from ppbench.display.tables import Table
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

ReportsFolder = Annotated[Path, option("--reports", "Folder for HTML reports.")]
NoReport = Annotated[bool, option("--no-report", "Write no HTML report.")]
DryRun = Annotated[bool, option("--dry-run", "List the cases without running them.")]
Rerun = Annotated[bool, option("--rerun", "Run finished cases again.")]
RetryFailedCases = Annotated[bool, option("--retry-failed", "Run failed cases again.")]
OnlyCases = Annotated[
    list[str] | None,
    option("--only KEY=VALUE", "Run only the cases that match.", completion.settings),
]
IsLive = Annotated[
    bool, option("--live", "Rewrite the report as cases end; open, it refreshes itself.")
]
ChosenLauncher = Annotated[
    Launcher, option("--launcher", "Run here, as one of several nodes, or as a Slurm job.")
]


@with_settings
@answers("sweep", MEASURE, 2, catalogue)
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
) -> Result:
    """Run every case of a sweep file and write a report."""
    from rich.console import Console

    from ppbench.config.conditions import parse_only
    from ppbench.config.reader import read_sweep
    from ppbench.run.machine.environment import default_device
    from ppbench.run.sweep.plan import Choice
    from ppbench.run.sweep.progress import doing

    choice = Choice(rerun, retry_failed, parse_only(only or [], default_device()))
    writes_page = reports != REPORTS or no_report or open_it or is_live
    if launcher is not Launcher.local and writes_page:
        raise UsageError(
            f"--launcher {launcher.value}: writes no report; leave --reports, --no-report, --open "
            "and --live out; use `ppbench report` and `ppbench ls` afterwards"
        )
    if no_report and (open_it or is_live):
        option = "--open: opens" if open_it else "--live: rewrites"
        raise UsageError(f"{option} the report, which --no-report leaves out; drop one")
    with doing(f"reading {file}", Console(stderr=True)):
        read = read_sweep(file, overrides or [], default_device())
    if launcher is not Launcher.local:
        options = option_words(set=overrides)
        return _sweep_elsewhere(launcher, read, options, results, choice, is_dry_run=dry_run)
    if dry_run:
        return cases_of(read, choice)
    from ppbench.config.kinds import seconds_of
    from ppbench.run.sweep.control import note_sweep_file, run_sweep
    from ppbench.run.sweep.progress import display_for
    from ppbench.store import Store, check_writable

    store, display = Store(results), display_for(Console(stderr=True))
    check_writable(results, "--results")
    if not no_report:
        check_writable(reports, "--reports")
    selected = dataclasses.replace(read, cases=choice.only.select(read.cases))
    chosen = {case.case_id for case, _ in selected.cases}
    note_sweep_file(selected)
    again, whole = (
        command(
            *("sweep", str(file)),
            set=overrides,
            only=conditions,
            results=results,
            reports=None if no_report else reports,
            no_report=no_report,
            assets=None if assets is Assets.inline else assets,
        )
        for conditions in (only, None)
    )
    policy: UntilAnswered | None = None
    if seconds := seconds_of(read.cases[0][1].budget):
        from ppbench.comparison.evidence import MOST_LAUNCHES
        from ppbench.report.until_answered import UntilAnswered

        policy = UntilAnswered(selected, store, seconds, note, retries_failed=retry_failed)
        launches = tuple(
            (case, dataclasses.replace(measure, launches=MOST_LAUNCHES))
            for case, measure in read.cases
        )
        read = dataclasses.replace(read, cases=launches)
    with contextlib.ExitStack() as held:
        live: Display = display
        if is_live:
            from ppbench.cli.live import LiveReport

            opens = open_page if open_it else lambda _: None
            live = held.enter_context(LiveReport(display, read, reports, again, assets, opens))
        once = option_words(rerun=rerun, retry_failed=retry_failed)
        done = run_sweep(read, store, choice, live, " ".join([again, *once]), policy=policy)
    if not chosen.issuperset(done.frame["case_id"]):  # the report is of others too
        again = whole
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
    essential = ["status"] if has_failed else []
    rows = Rows.of(done.frame)
    blocks: list[Block] = [Table(rows, shown_columns, essential, short_ids=store.short_ids)]

    # Which case is best and how sure that is, in the report's words.
    from ppbench.display.cases import varying_axes
    from ppbench.report.pages.conclusions import NOTHING_COMPARABLE, conclude
    from ppbench.report.pages.judgement import judge

    said, judged = list[str](), judge(done.frame, varying_axes(done.frame), [store])
    conclusions = dataclasses.replace(conclude(judged, done.frame, again), others=())
    if conclusions.sentence.grade != NOTHING_COMPARABLE:
        said = conclusions.answers
        blocks.append(conclusions)
    if path is not None and open_it and not is_live:
        open_page(path)
    return Result(
        blocks,
        rows,
        {"answer": said},
        ExitCode.ok if done.is_ok else ExitCode.failed_runs,
        key="runs",
        asides=[] if path is None else [f"report: {path}"],
    )


def cases_of(read: Sweep, choice: Choice) -> Result:
    """The chosen cases, none of them run."""
    from ppbench.config.feasibility import notes_on_sources
    from ppbench.run.sweep.control import note_sweep_file
    from ppbench.run.sweep.plan import planned_cases, problem_of_devices

    chosen = dataclasses.replace(read, cases=choice.only.select(read.cases))
    note_sweep_file(chosen)
    if (problem := problem_of_devices(chosen)) is not None:
        note(f"note: not to be run on this machine: {problem}")
    for text in notes_on_sources((case for case, _ in chosen.cases), chosen.facts):
        note(f"note: {text}")
    rows = Rows.of(planned_cases(chosen))
    return Result([Table(rows, ["case_id", *_axes_of(chosen)])], rows)


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
) -> Result:
    """Run this node's part of a sweep, or submit it to Slurm.

    A dry run says what would be run, and runs nothing. Raises SweepInterruptedError.
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
            return Result([Code("\n".join(map(shlex.join, launches.commands(*rendezvous))))])
        with going_on():
            launches.run(*rendezvous)
        return Result()
    job = SlurmJob(read, results, node_launches(read, read.slurm.nodes, program))
    if is_dry_run:
        return Result([Code(job.preview())])
    check_writable(results, "--results")
    return Result([Text(f"job {job.submit()}; its logs: {results / 'slurm'}")])
