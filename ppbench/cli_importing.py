"""The command that takes in what others have measured: parse, call, print. No logic."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ppbench.cli_options import RESULTS, HowToPrint, Results
from ppbench.format import Format

commands = typer.Typer()


@commands.command("import")
def import_traces(
    traces: Annotated[
        list[Path],
        typer.Argument(metavar="TRACE...", help="A file of each rank, as torch.profiler writes."),
    ],
    name: Annotated[str, typer.Option("--name", help="What the run is called.")] = "imported",
    schedule: Annotated[
        str | None,
        typer.Option("--schedule", metavar="NAME", help="Default: found by its actions' order."),
    ] = None,
    step: Annotated[
        list[int] | None,
        typer.Option("--step", metavar="K", help="Only this step; repeatable. Default: all."),
    ] = None,
    tokens_per_step: Annotated[
        int | None,
        typer.Option("--tokens-per-step", metavar="N", min=1, help="For throughput."),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--pattern",
            metavar="REGEX",
            help="Which ranges are actions: groups op, stage and microbatch.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="What is known of the run: model.preset, seq_len."
        ),
    ] = None,
    results: Results = RESULTS,
    how: HowToPrint = Format.table,
) -> None:
    """Store a training run from its ranks' traces, which name their pipeline's actions."""
    from ppbench.foreign import printing
    from ppbench.foreign.importing import Wanted

    wanted = Wanted(
        name, schedule, pattern, tuple(step or []), tokens_per_step, tuple(settings or [])
    )
    print(printing.import_traces(traces, wanted, results, how))
