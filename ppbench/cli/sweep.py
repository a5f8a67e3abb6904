"""`ppbench sweep`: every case of a sweep file, run here or elsewhere, and a report of them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppbench.cli.options import (
    REPORTS,
    RESULTS,
    HowToPrint,
    Launcher,
    Overrides,
    Results,
    SweepFile,
    command,
    going_on,
    option_words,
)
from ppbench.console import note
from ppbench.display.fields import WORKLOAD
from ppbench.display.formats import Format
from ppbench.display.tables import render
from ppbench.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from ppbench.config.sweep import Sweep
    from ppbench.run.sweep.control import SweepResult
    from ppbench.run.sweep.plan import Choice

FIGURES = [
    *("tokens_per_s", "step_ns", "planned_step_ns", "bubble_fraction", "bubble_fraction_theory"),
    *("peak_memory_bytes", "cautions"),
]


def sweep(
    file: SweepFile,
    results: Results = RESULTS,
    reports: Annotated[Path, typer.Option("--reports", help="Folder for HTML reports.")] = REPORTS,
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no HTML report.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the cases without running them.")
    ] = False,
    overrides: Overrides = None,
    rerun: Annotated[bool, typer.Option("--rerun", help="Run finished cases again.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run failed cases again.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="KEY=VALUE", help="Run only the cases that match."),
    ] = None,
    launcher: Annotated[
        Launcher,
        typer.Option("--launcher", help="Run here, as one of several nodes, or as a Slurm job."),
    ] = Launcher.local,
    how: HowToPrint = Format.table,
) -> None:
    """Run every case of a sweep file and write a report."""
    from ppbench.config.reader import read_sweep
    from ppbench.config.sweep import parse_only
    from ppbench.run.machine.environment import default_device
    from ppbench.run.sweep.plan import Choice

    choice = Choice(rerun, retry_failed, parse_only(only or []))
    if launcher is not Launcher.local and (
        reports != REPORTS or no_report or how is not Format.table
    ):
        raise UsageError(
            f"--launcher {launcher.value}: writes no report and prints no table of runs; leave "
            "--reports, --no-report and --format out; use `ppbench report` and `ppbench ls` "
            "afterwards"
        )
    read = read_sweep(file, overrides or [], default_device())
    if launcher is not Launcher.local:
        options = option_words(set=overrides)
        _sweep_elsewhere(launcher, read, options, results, choice, is_dry_run=dry_run)
    elif dry_run:
        _list_cases(read, choice, how)
    else:
        folder = None if no_report else reports
        raise typer.Exit(_sweep_here(read, overrides, results, folder, choice, how))


def _list_cases(read: Sweep, choice: Choice, how: Format) -> None:
    """Print the chosen cases, none of them run."""
    import dataclasses

    from ppbench.run.sweep.control import note_stages
    from ppbench.run.sweep.plan import planned_cases

    chosen = dataclasses.replace(read, cases=choice.only.select(read.cases))
    note_stages(chosen)
    print(render(planned_cases(chosen), how, ["case_id", *(chosen.axes or WORKLOAD)]))


def _sweep_here(
    read: Sweep,
    overrides: list[str] | None,
    results: Path,
    reports: Path | None,
    choice: Choice,
    how: Format,
) -> ExitCode:
    """Run what is missing, print a table of all runs, and write a report if `reports` is given."""
    import dataclasses

    from rich.console import Console

    from ppbench.report.pages.report import write_report
    from ppbench.report.pages.templates import update_index
    from ppbench.run.sweep.control import note_stages, run_sweep
    from ppbench.run.sweep.progress import display_for
    from ppbench.store import Store, check_writable

    store = Store(results)
    check_writable(results, "--results")
    if reports is not None:
        check_writable(reports, "--reports")
    note_stages(dataclasses.replace(read, cases=choice.only.select(read.cases)))
    again = command(
        *("sweep", read.file),
        set=overrides,
        results=results,
        reports=reports,
        no_report=reports is None,
    )
    done = run_sweep(read, store, choice, display_for(Console(stderr=True)), again)
    path = None
    if reports is not None:
        path = reports / f"{read.name}-{done.plan.sweep_id}.html"
        text = Path(read.file).read_text(encoding="utf-8")
        write_report(path, store, done.frame, title=read.name, command=again, sweep_text=text)
        update_index(reports, note)
    print(render(done.frame, how, _shown_columns(done)))
    if path is not None:
        print(f"report: {path}", file=sys.stdout if how is Format.table else sys.stderr)
    return ExitCode.ok if done.is_ok else ExitCode.failed_runs


def _shown_columns(done: SweepResult) -> list[str]:
    sweep = done.plan.sweep
    is_repeated = any(measure.launches > 1 for _, measure in sweep.cases)
    figures = [
        name
        for name in FIGURES
        if (done.frame[name].notna() & done.frame[name].ne("")).any()
        and (done.is_emulated or name != "planned_step_ns")
    ]
    axes = [*(sweep.axes or WORKLOAD), *(["launch"] if is_repeated else [])]
    return ["run_id", *axes, "status", *figures]


def _sweep_elsewhere(
    launcher: Launcher,
    read: Sweep,
    options: list[str],
    results: Path,
    choice: Choice,
    *,
    is_dry_run: bool,
) -> None:
    """Run this node's part of a sweep under torchrun, or submit it to Slurm.

    A dry run prints what would be run, and runs nothing. Raises SweepInterruptedError.
    """
    from ppbench.run.launch.cluster import SlurmJob, node_launches, rendezvous_of
    from ppbench.run.launch.local import WORKER
    from ppbench.run.sweep.control import choice_options
    from ppbench.store import check_writable

    choice.only.select(read.cases)  # what matches nothing is refused here, not by every node
    program = [WORKER, read.file, "--results", str(results), *options, *choice_options(choice)]
    if launcher is Launcher.torchrun:
        launches = node_launches(read, read.torchrun.nodes, program)
        rendezvous = rendezvous_of(read)
        if is_dry_run:
            print("\n".join(map(shlex.join, launches.commands(rendezvous))))
            return
        with going_on():
            launches.run(rendezvous)
        return
    job = SlurmJob(read, results, node_launches(read, read.slurm.nodes, program))
    if is_dry_run:
        print(job.preview())
        return
    check_writable(results, "--results")
    print(f"job {job.submit()}; its logs: {results / 'slurm'}")
