"""Options and arguments that several commands share, and command lines written back."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ppbench.display.formats import Format
from ppbench.errors import SweepInterruptedError
from ppbench.files import is_stream


class Launcher(StrEnum):
    """The launcher that starts the workers."""

    local = "local"
    torchrun = "torchrun"
    slurm = "slurm"


Results = Annotated[Path, typer.Option("--results", help="Results folder: the store.")]
HowToPrint = Annotated[Format, typer.Option("--format", help="Output format.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Run id, a unique prefix, or `last`.")]
LastSweepRuns = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUN]...", help="Runs; by default those of the last sweep."),
]
SweepFile = Annotated[Path, typer.Argument(metavar="SWEEP", help="The sweep file, TOML.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Output file.")]
RetryFailed = Annotated[bool, typer.Option("--retry-failed", help="Measure failed commits again.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting or an axis."),
]
Metrics = Annotated[
    list[str] | None,
    typer.Option(
        "--metric", metavar="NAME", help="tokens_per_s, bubble_fraction, ...; repeatable."
    ),
]
IsRun = Annotated[
    bool, typer.Option("--run", help="Measure both sides first, in interleaved launches.")
]
NumLaunches = Annotated[
    int,
    typer.Option(
        "--launches", metavar="K", min=1, max=1000, help="Launches of each side, with --run."
    ),
]
ScheduleName = Annotated[
    str, typer.Argument(metavar="NAME", help="A schedule, or csv:PATH for a program in a file.")
]
Ranks = Annotated[
    int | None, typer.Option("-p", "--ranks", metavar="P", help="Ranks; a csv:PATH has its own.")
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
        help="Seconds per microbatch and rank; each of V stages takes 1/V.",
    ),
]
RESULTS = Path("results")
REPORTS = Path("reports")
_DEFAULTS = {"results": RESULTS, "reports": REPORTS}
UNIT_COST = "F=1,I=1,W=1"


def typed_command() -> str:
    """The command line of this process, quoted for a shell."""
    return shlex.join(["ppbench", *sys.argv[1:]])


def command(*words: str, **options: object) -> str:
    """A command line of ppbench, quoted for a shell.

    An option is left out if it is None, False or empty, or the default folder for results or
    reports; a list repeats it.
    """
    return shlex.join(["ppbench", *words, *option_words(**options)])


def option_words(**options: object) -> list[str]:
    """The words of options on a command line; see `command`."""
    words: list[str] = []
    for name, value in options.items():
        if value is None or value is False or value in ((), [], _DEFAULTS.get(name)):
            continue
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        else:
            values = value if isinstance(value, list | tuple) else [value]
            words += [word for one in values for word in (option, str(one))]
    return words


@contextlib.contextmanager
def going_on() -> Iterator[None]:
    """Add the command that goes on to the error of a measurement that was stopped."""
    try:
        yield
    except SweepInterruptedError as error:
        raise SweepInterruptedError(f"{error}. Go on with: {typed_command()}") from None


def print_path(text: str | Path, output: Path | None = None) -> None:
    """Print what was written and where, but never into the stream that was just written."""
    written = text if isinstance(text, Path) else output
    print(text, file=sys.stderr if written and is_stream(written) else sys.stdout)
