"""The command line: every command by its name, in the order of `ppbench --help`.

Each command's module imports little at its top; what it needs to run is imported by its functions,
so that `--help` costs nothing.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from ppbench import __version__
from ppbench.cli import (
    backfill,
    bisect,
    check,
    compare,
    env,
    explain,
    export,
    figure,
    history,
    models,
    noise,
    overhead,
    process,
    report,
    runs,
    schedules,
    simulate,
    sweep,
    traces,
)
from ppbench.console import print_notes
from ppbench.errors import UsageError, encodable

app = typer.Typer(
    help="Benchmark and profile pipeline-parallel training in PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("sweep")(sweep.sweep)
app.command("overhead")(overhead.overhead)
app.command("ls")(runs.list_runs)
app.command("query")(runs.query)
app.command("compact")(runs.compact)
app.command("show")(runs.show)
app.command("explain")(explain.explain)
app.command("report")(report.report)
app.command("timeline")(report.timeline)
app.command("trace")(export.trace)
app.command("export")(export.export)
app.command("figure")(figure.figure)
app.command("env")(env.env)
app.command("simulate")(simulate.simulate)
app.add_typer(models.commands, name="models", no_args_is_help=True)
app.add_typer(schedules.commands, name="schedules", no_args_is_help=True)
others = typer.Typer()
app.add_typer(others)
others.command("noise")(noise.noise)
others.command("compare")(compare.compare)
others.command("check")(check.check)
others.command("backfill")(backfill.backfill)
others.command("bisect")(bisect.bisect)
others.command("history")(history.history)
others.command("import")(traces.import_traces)


def main() -> NoReturn:
    """Run the command line, and end the process with its exit code."""
    process.run(_invoke)


def _invoke() -> int:
    _check_paths(sys.argv)
    typer.main.get_command(app)(prog_name="ppbench")
    return 0


def _check_paths(arguments: Sequence[str]) -> None:
    """Raises UsageError for an empty path, or for a store whose path pyarrow cannot open.

    An empty path, as from an unset variable, would mean the working directory.
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
                    f"{option}: {encodable(value)}: is not UTF-8; expected a UTF-8 path"
                )


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"ppbench {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[  # noqa: ARG001  # shown by its callback
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    print_notes()
