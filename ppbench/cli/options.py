"""Options and arguments that several commands share, and command lines written back."""

from __future__ import annotations

import contextlib
import functools
import inspect
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ppbench.cli import completion
from ppbench.cli.declare import argument, option
from ppbench.display.formats import Assets
from ppbench.errors import SweepInterruptedError, UsageError, no_runs_in


class Launcher(StrEnum):
    """The launcher that starts the workers."""

    local = "local"
    torchrun = "torchrun"
    slurm = "slurm"


Results = Annotated[Path, option("--results", "Results folder: the store.")]
"""The store of a command that measures, and makes it where there is none."""


def check_exists(store: Path) -> None:
    """Raise the one error for a store that a command reads and that is not there."""
    if not store.exists():
        raise no_runs_in(store)


def check_store_of(store: Path, names: Iterable[str], *, measures: bool) -> None:
    """Like `check_exists`, unless the sides bring a store of their own or are measured now."""
    if not measures and not any(name and Path(name).is_dir() for name in names):
        check_exists(store)


def _existing(ctx: typer.Context, store: Path) -> Path:
    if not ctx.resilient_parsing:
        check_exists(store)
    return store


StoredResults = Annotated[
    Path, option("--results", "Results folder: the store.", callback=_existing)
]
"""The store of a command that reads it."""
Run = Annotated[
    str, argument("RUN", "Run id, a unique beginning or end of it, or `last`.", completion.runs)
]
Runs = Annotated[
    list[str],
    argument(
        "RUN...",
        "Run ids, unique beginnings or ends of them, `last`, or names of sweeps.",
        completion.runs,
    ),
]
LastSweepRuns = Annotated[
    list[str] | None,
    argument("[RUN]...", "Runs; by default those of the last sweep.", completion.runs),
]
SweepFile = Annotated[
    Path,
    argument("SWEEP", "The sweep file, TOML, or the name of one that ships.", completion.sweeps),
]
Output = Annotated[Path | None, option("-o --output FILE", "Output file.")]
PageAssets = Annotated[
    Assets,
    option(
        "--assets",
        "The plotting library: in each page, or one file beside the pages that share it.",
    ),
]
RetryFailed = Annotated[bool, option("--retry-failed", "Measure failed commits again.")]
Overrides = Annotated[
    list[str] | None,
    option("--set KEY=VALUE", "Override a setting or an axis.", completion.settings),
]
Metrics = Annotated[
    list[str] | None,
    option("--metric NAME", "tokens_per_s, bubble_fraction, ...; repeatable.", completion.metrics),
]
IsRun = Annotated[bool, option("--run", "Measure both sides first, in interleaved launches.")]
NumLaunches = Annotated[
    int | None,
    option(
        "--launches K",
        "With --run: exactly so many launches of each side. By default it stops when every "
        "case is decided.",
        min=1,
        max=1000,
    ),
]
MostLaunches = Annotated[
    int | None,
    option(
        "--max-launches K",
        "With --run: most launches of each side, if it is not decided earlier; default: 12.",
        min=3,
        max=1000,
    ),
]
Budget = Annotated[
    str | None,
    option(
        "--budget TIME",
        "With --run: begin no launch after this time, as in 90s or 10m; three are made.",
    ),
]
MostTime = Annotated[
    str | None,
    option("--budget TIME", "Most time, as in 90s or 10m: nothing is begun that would end later."),
]
ScheduleName = Annotated[
    str, argument("NAME", "A schedule, or csv:PATH for a program in a file.", completion.schedules)
]
Ranks = Annotated[int | None, option("-p --ranks P", "Ranks; a csv:PATH has its own.")]
Microbatches = Annotated[int | None, option("-m --microbatches M", "Microbatches per step.")]
StagesPerRank = Annotated[
    int | None, option("-v --stages-per-rank V", "Default: the schedule's own.")
]
Mode = Annotated[str, option("--mode train|evaluate", "To evaluate, there are forwards alone.")]
Slices = Annotated[
    str | None,
    option(
        "--slices K,attention=A",
        "Slices of each microbatch; attention's share of its time grows with what is before one.",
    ),
]
NumReplicas = Annotated[int, option("--replicas D", "Pipelines that train together.")]
Sharding = Annotated[
    str | None,
    option(
        "--sharding POLICY",
        "What replicas share, as sharding.policy in a sweep file, with its settings: "
        "zero3,residency=2,look_ahead=1. Default: ddp.",
    ),
]
CollectiveTimes = Annotated[
    str | None,
    option(
        "--collectives gather=S,reduce=S",
        "Seconds of a stage's UNSHARD and REDUCE_GRAD, or bytes=N,bandwidth=B,latency=S of a "
        "stage and of the link. Default: 0.",
    ),
]
ReplicaFactors = Annotated[
    str | None,
    option(
        "--replica-factors X,X",
        "How many times as long the computations of each replica take. Default: 1.",
    ),
]
Cost = Annotated[
    str,
    option(
        "--cost F=S,I=S,W=S",
        "Seconds per microbatch and rank; each of V stages takes 1/V; with two ways (chimera, "
        "dualpipe), each takes all.",
    ),
]
RESULTS = Path("results")
REPORTS = Path("reports")
UNIT_COST = "F=1,I=1,W=1"


def until_of(
    launches: int | None, most: int | None, budget: str | None, *, is_run: bool
) -> tuple[int | None, int | None, float]:
    """How long `--run` launches: a fixed number, or the most of them and the seconds for them.

    Both numbers are None without it. Raises UsageError for options that do not go together.
    """
    from ppbench.comparison.measurement import MOST_LAUNCHES

    if most is not None and launches is not None:
        raise UsageError(
            "--max-launches: ends when it is decided, and --launches after a fixed number; give one"
        )
    if most is not None and not is_run:
        raise UsageError("--max-launches: is a number of launches to make; add --run")
    if is_run and launches is None:
        most = most or MOST_LAUNCHES
    if budget is not None and most is None:
        raise UsageError("--budget: bounds the launches until it is decided; add --run")
    return launches if is_run else None, most, seconds_in(budget)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes overrides the options of settings: each is short for a `--set`."""
    from ppbench.config.case import SETTINGS

    declared = {one.field: one for one in SETTINGS.values() if one.metavar}

    @functools.wraps(command)
    def run(**given: Any) -> None:
        chosen = {name: given.pop(name) for name in declared}
        short = [f"{declared[name].key}={v}" for name, v in chosen.items() if v is not None]
        command(**{**given, "overrides": [*(given["overrides"] or []), *short]})

    options = {
        name: Annotated[
            str | None,
            option(
                f"--{name.replace('_', '-')} {one.metavar}",
                f"{one.meaning[:1].upper()}{one.meaning[1:]}.",
            ),
        ]
        for name, one in declared.items()
    }
    return with_options(run, command, {name: (kind, None) for name, kind in options.items()})


def with_options(
    run: Callable[..., None], command: Callable[..., Any], added: Mapping[str, tuple[Any, object]]
) -> Callable[..., None]:
    """Give a function the parameters of a command, and options with their types and defaults."""
    keyword, signature = inspect.Parameter.KEYWORD_ONLY, inspect.signature(command, eval_str=True)
    parameters = [
        *signature.parameters.values(),
        *(
            inspect.Parameter(name, keyword, default=default, annotation=annotation)
            for name, (annotation, default) in added.items()
        ),
    ]
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=parameters, return_annotation=None
    )
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def seconds_in(text: str | None) -> float:
    """The seconds of a time such as 90s; 0 without it. Raises UsageError for another form."""
    from ppbench.config.kinds import seconds_of

    if text is None:
        return 0.0
    if not (seconds := seconds_of(text)):
        raise UsageError(f"--budget: expected a time such as 90s or 10m, got {text}")
    return seconds


def typed_command() -> str:
    """The command line of this process, quoted for a shell."""
    return shlex.join(["ppbench", *sys.argv[1:]])


@contextlib.contextmanager
def going_on() -> Iterator[None]:
    """Add the command that goes on to the error of a measurement that was stopped."""
    try:
        yield
    except SweepInterruptedError as error:
        raise SweepInterruptedError(f"{error}. Go on with: {typed_command()}") from None
