"""The command line: parse, call, print. No logic.

Everything heavy is imported by the command that needs it, so that `--help` costs nothing.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from ppbench import __version__, cli_importing, cli_tracking, process
from ppbench.cli_options import REPORTS, RESULTS, HowToPrint, Overrides, Results, Run
from ppbench.config.places import Launcher
from ppbench.error_text import encodable
from ppbench.errors import UsageError
from ppbench.files import is_stream
from ppbench.format import ExportFormat, Format, Theme

app = typer.Typer(
    help="Benchmark and profile pipeline-parallel training in PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models = typer.Typer(help="What models can be split, and whether that is exact.")
app.add_typer(models, name="models", no_args_is_help=True)
schedules = typer.Typer(help="Schedules: list, draw, check, export.")
app.add_typer(schedules, name="schedules", no_args_is_help=True)
app.add_typer(cli_tracking.commands)
app.add_typer(cli_importing.commands)

ScheduleName = Annotated[
    str, typer.Argument(metavar="NAME", help="A schedule, or csv:PATH for a program in a file.")
]
Ranks = Annotated[
    int | None, typer.Option("-p", "--ranks", metavar="P", help="Ranks; csv:PATH knows its own.")
]
Microbatches = Annotated[
    int | None, typer.Option("-m", "--microbatches", metavar="M", help="Microbatches per step.")
]
StagesPerRank = Annotated[
    int | None,
    typer.Option("-v", "--stages-per-rank", metavar="V", help="Default: the schedule's own."),
]
Cost = Annotated[
    str,
    typer.Option(
        "--cost",
        metavar="F=S,I=S,W=S",
        help="Seconds per microbatch and rank; a stage of V costs 1/V.",
    ),
]

UNIT_COST = "F=1,I=1,W=1"


def main() -> NoReturn:
    """Run the command line, and end the process with its exit code."""
    process.run(_invoke)


def _invoke() -> int:
    _check_paths(sys.argv)
    typer.main.get_command(app)(prog_name="ppbench")
    return 0


def _check_paths(arguments: Sequence[str]) -> None:
    """Raises UsageError for a path that is empty, or for a store where pyarrow opens no file.

    An empty path, as of a variable that is not set, would be the working directory.
    """
    for option in ("--results", "--reports", "--output", "-o"):
        values = [value for name, value in itertools.pairwise(arguments) if name == option]
        start = f"{option}="
        values += [word.removeprefix(start) for word in arguments if word.startswith(start)]
        for value in values:
            if not value:
                raise UsageError(f"{option}: is empty; expected a path")
            if option == "--results" and encodable(value) != value:
                raise UsageError(
                    f"{option}: {encodable(value)}: is not UTF-8; expected a path that is"
                )


def _print_path(text: str | Path, output: Path | None = None) -> None:
    """Print what was written and where, but never into the stream that was just written."""
    written = text if isinstance(text, Path) else output
    print(text, file=sys.stderr if written and is_stream(written) else sys.stdout)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ppbench {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    pass


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="The sweep file, TOML.")],
    results: Results = RESULTS,
    reports: Annotated[Path, typer.Option("--reports", help="Folder for HTML reports.")] = REPORTS,
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no HTML report.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cases; run none.")] = False,
    overrides: Overrides = None,
    rerun: Annotated[bool, typer.Option("--rerun", help="Run finished cases again.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run cases again that failed.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="KEY=VALUE", help="Run only the cases that match."),
    ] = None,
    launcher: Annotated[
        Launcher,
        typer.Option("--launcher", help="Run here, as a node of several, or as a Slurm job."),
    ] = Launcher.local,
    how: HowToPrint = Format.table,
) -> None:
    """Run every case of a sweep file and write a report."""
    from ppbench import commands
    from ppbench.config.selection import parse_only
    from ppbench.run.sweep import Choice

    choice = Choice(rerun, retry_failed, parse_only(only or []))
    if launcher is not Launcher.local:
        if reports != REPORTS or no_report or how is not Format.table:
            raise UsageError(
                f"--launcher {launcher.value}: writes no report and prints no table of runs; leave "
                "--reports, --no-report and --format out; use `ppbench report` and `ppbench ls` "
                "afterwards"
            )
        arguments = (launcher, file, overrides or [], results, choice)
        print(commands.sweep_elsewhere(*arguments, is_dry_run=dry_run))
        return
    if dry_run:
        print(commands.list_cases(file, overrides or [], choice.only, how))
        return
    folder = None if no_report else reports
    outcome = commands.sweep(file, overrides or [], results, folder, choice, how)
    print(outcome.table)
    if outcome.report is not None:
        print(f"report: {outcome.report}", file=sys.stdout if how is Format.table else sys.stderr)
    raise typer.Exit(outcome.exit_code)


@app.command()
def overhead(
    file: Annotated[Path, typer.Argument(help="The sweep file, TOML.")],
    overrides: Overrides = None,
    rounds: Annotated[
        int,
        typer.Option("--rounds", metavar="N", min=6, max=2000, help="Steps of each kind."),
    ] = 100,
    how: HowToPrint = Format.table,
) -> None:
    """What measuring costs: the flight record, spans, torch's profiler, each over steps without."""
    from ppbench import commands

    outcome = commands.overhead(file, overrides or [], rounds, how)
    print(outcome.table)
    raise typer.Exit(outcome.exit_code)


@app.command("ls")
def list_runs(
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where",
            metavar="CONDITION",
            help="KEY=VALUE, or !=, <, <=, >, >=; several with `and`, or repeated.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", metavar="N", min=0, help="The newest N; 0: all."),
    ] = None,
    results: Results = RESULTS,
    how: HowToPrint = Format.table,
) -> None:
    """List the runs in the store, oldest first; as a table the newest 200."""
    from ppbench import stored

    print(stored.list_runs(results, where or [], limit, how))


@app.command()
def query(
    text: Annotated[str, typer.Argument(metavar="SQL", help="One SELECT over the store's tables.")],
    results: Results = RESULTS,
    how: HowToPrint = Format.table,
) -> None:
    """Ask the store in SQL: `SELECT schedule, max(tokens_per_s) FROM runs GROUP BY schedule`."""
    from ppbench import stored

    print(stored.query(text, results, how))


@app.command()
def compact(results: Results = RESULTS, how: HowToPrint = Format.table) -> None:
    """Merge the store's many small files into few large ones, which are read much faster."""
    from ppbench import stored

    print(stored.compact(results, how))


@app.command()
def show(run: Run, results: Results = RESULTS, how: HowToPrint = Format.table) -> None:
    """Everything that is known of a run: figures, ranks, steps."""
    from ppbench import commands

    print(commands.show(run, results, how))


@app.command()
def explain(run: Run, results: Results = RESULTS, how: HowToPrint = Format.table) -> None:
    """Where a run's idle time went, and what its step could take instead."""
    from ppbench import commands

    print(commands.explain(run, results, how))


@app.command()
def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Runs; by default those of the last sweep."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where to write it.")
    ] = None,
    results: Results = RESULTS,
) -> None:
    """Write an HTML report of runs."""
    from ppbench import commands

    _print_path(commands.report(runs or [], output, results, REPORTS))


@app.command()
def timeline(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Runs, stacked on one time axis.")
    ],
    step: Annotated[
        str, typer.Option("--step", metavar="K|median|slowest", help="Which step of each run.")
    ] = "median",
    planned: Annotated[
        bool, typer.Option("--planned", help="The planned step under each measured one.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where to write it.")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    terminal: Annotated[bool, typer.Option("--terminal", help="Draw it here instead.")] = False,
    results: Results = RESULTS,
) -> None:
    """Write the Gantt timelines of runs as an HTML page, or draw them in the terminal."""
    from ppbench import commands

    shown = commands.Shown(runs, step, planned)
    if terminal and (output or open_it):
        raise UsageError("--terminal: draws here and writes no page; leave -o and --open out")
    if terminal:
        print(commands.timeline_text(shown, results))
        return
    path = commands.timeline(shown, output, results, REPORTS)
    _print_path(path)
    if open_it:
        typer.launch(str(path))


@app.command()
def trace(
    run: Run,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE.json.gz", help="Where to write it."),
    ] = None,
    step: Annotated[
        str, typer.Option("--step", metavar="K|median|slowest|all", help="Which steps.")
    ] = "all",
    perfetto: Annotated[
        bool, typer.Option("--perfetto", help="Perfetto's protobuf, into FILE.pftrace.")
    ] = False,
    results: Results = RESULTS,
) -> None:
    """Write a run as a Chrome trace, for Perfetto and other viewers."""
    from ppbench import exporting

    _print_path(exporting.trace(run, output, step, results, REPORTS, is_perfetto=perfetto))


@app.command()
def export(
    how: Annotated[ExportFormat, typer.Option("--format", help="How to write it.")],
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Runs; by default all.")
    ] = None,
    table: Annotated[
        str | None,
        typer.Option("--table", metavar="NAME", help="runs (the default), steps, ranks, ..."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Where to; printed by default."),
    ] = None,
    results: Results = RESULTS,
) -> None:
    """Write a table of the store, of all runs or of some; or figures for a benchmark tracker."""
    from ppbench import exporting

    _print_path(exporting.export(runs or [], table, how, output, results), output)


@app.command("figure")
def draw_figure(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="timeline, throughput, bubble, memory, ...")
    ],
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="FILE.png|.svg|.pdf|.html|.json", help="Where to."),
    ],
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Runs; by default those of the last sweep."),
    ] = None,
    width: Annotated[int | None, typer.Option(metavar="PX", min=100, max=10_000)] = None,
    height: Annotated[int | None, typer.Option(metavar="PX", min=100, max=10_000)] = None,
    scale: Annotated[float, typer.Option(help="Of a PNG's pixels.", min=0.1, max=10)] = 2,
    theme: Annotated[Theme, typer.Option(help="What it is drawn on.")] = Theme.light,
    step: Annotated[
        str | None,
        typer.Option("--step", metavar="K|median|slowest", help="Of timelines: which step."),
    ] = None,
    planned: Annotated[
        bool, typer.Option("--planned", help="Of timelines: the plan under each step.")
    ] = False,
    path: Annotated[bool, typer.Option("--path", help="Of timelines: the critical path.")] = False,
    results: Results = RESULTS,
) -> None:
    """Draw one figure into a file."""
    from ppbench.picturing import picture
    from ppbench.report.images import Size

    size = Size(width, height, scale)
    options = {"step": step, "planned": planned, "path": path}
    chosen = {name: value for name, value in options.items() if value}
    _print_path(picture(name, runs or [], output, size, theme, results, chosen))


@app.command()
def env(how: HowToPrint = Format.table) -> None:
    """What this machine is, as far as timings depend on it."""
    from ppbench import commands

    print(commands.environment(how))


@models.command("check")
def check_models(
    architectures: Annotated[
        list[str] | None,
        typer.Option("--arch", metavar="NAME", help="Architecture; repeatable. Default: all."),
    ] = None,
    how: HowToPrint = Format.table,
) -> None:
    """Train every architecture in two stages and unsplit, and compare loss and gradients."""
    from ppbench import commands

    outcome = commands.check_models(architectures or [], how)
    print(outcome.table)
    print(outcome.verdict, file=sys.stdout if how is Format.table else sys.stderr)
    raise typer.Exit(outcome.exit_code)


@schedules.command("list")
def list_schedules(how: HowToPrint = Format.table) -> None:
    """List every schedule: what it asks for, what it idles and holds."""
    from ppbench.planning import schedules as planned

    print(planned.list_schedules(how))


@schedules.command("draw")
def draw_schedule(
    name: ScheduleName,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    cost: Cost = UNIT_COST,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a Gantt page too.")
    ] = None,
) -> None:
    """Draw a schedule over time in the terminal, or as a page."""
    from ppbench.planning import schedules as planned
    from ppbench.planning.programs import Wanted

    wanted = Wanted(name, ranks, microbatches, stages_per_rank)
    print(planned.draw(wanted, cost, html))


@schedules.command("check")
def check_schedule(
    file: Annotated[Path, typer.Argument(metavar="FILE.csv", help="A program in torch's form.")],
    max_held: Annotated[
        int | None,
        typer.Option(
            "--max-held",
            metavar="N",
            help="Most activations, each of one microbatch of a stage, that a rank may hold.",
        ),
    ] = None,
) -> None:
    """Check a program in torch's CSV form, and prove that it cannot hang."""
    from ppbench.planning import schedules as planned

    print(planned.check_file(file, max_held))


@schedules.command("export")
def export_schedule(
    name: ScheduleName,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE.csv", help="Where to; - prints it.")
    ],
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    with_communication: Annotated[
        bool, typer.Option("--with-communication", help="With SEND and RECV actions.")
    ] = False,
    policy: Annotated[
        str | None,
        typer.Option(metavar="early|just_in_time", help="Where RECVs stand. Default: early."),
    ] = None,
    look_ahead: Annotated[
        int | None,
        typer.Option(metavar="N", help="Computations that an early RECV goes ahead. Default: 1."),
    ] = None,
) -> None:
    """Write a schedule in torch's CSV form."""
    from ppbench.planning import schedules as planned
    from ppbench.planning.programs import Wanted

    wanted = Wanted(name, ranks, microbatches, stages_per_rank)
    communication = planned.Communication(with_communication, policy, look_ahead)
    _print_path(planned.export(wanted, communication, output), output)


@app.command()
def simulate(
    schedule: Annotated[
        str, typer.Option(metavar="NAME", help="A schedule, csv:PATH, or all to compare them.")
    ],
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    cost: Cost = UNIT_COST,
    latency: Annotated[str, typer.Option(metavar="S", help="Seconds of every message.")] = "0",
    bandwidth: Annotated[
        str | None, typer.Option(metavar="BYTES_PER_S", help="Default: infinite.")
    ] = None,
    message_bytes: Annotated[int, typer.Option(metavar="N", help="Size of a message.")] = 0,
    overlap: Annotated[
        bool, typer.Option("--overlap/--no-overlap", help="Whether senders compute meanwhile.")
    ] = True,
    held: Annotated[
        bool, typer.Option("--held", help="With json: what each rank holds over time.")
    ] = False,
    how: HowToPrint = Format.table,
) -> None:
    """Predict makespan, bubbles and peaks of a schedule, or of all."""
    from ppbench.planning import forecast
    from ppbench.planning.prediction import read_costs, read_transfers
    from ppbench.planning.programs import Wanted

    transfers = read_transfers(latency, bandwidth, message_bytes, overlaps=overlap)
    assumed = forecast.Assumptions(read_costs(cost), transfers)
    wanted = Wanted(schedule, ranks, microbatches, stages_per_rank)
    print(forecast.simulate(wanted, assumed, how, has_held=held))


if __name__ == "__main__":  # python -m ppbench.cli; imported again, so that every command is there
    from ppbench import __main__ as entry

    entry.main()
