"""`ppbench import`: a training run taken from the traces of its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ppbench.cli.commands import EXCHANGE
from ppbench.cli.declare import argument, option
from ppbench.cli.emit import answers, catalogue
from ppbench.cli.options import RESULTS, Results
from ppbench.cli.runs import listing
from ppbench.console import note
from ppbench.display.document import Result

Traces = Annotated[
    list[Path], argument("TRACE...", "A torch.profiler file of each rank, or a folder.")
]
Pattern = Annotated[
    str | None, option("--pattern REGEX", "Names of actions, with groups op, stage and microbatch.")
]

Replicas = Annotated[
    int | None,
    option("--replicas D", "Number of pipelines. Default: as many as have the same stages.", min=1),
]
TokensPerStep = Annotated[
    int | None, option("--tokens-per-step N", "Tokens of a step, for throughput.", min=1)
]
Settings = Annotated[
    list[str] | None,
    option("--set KEY=VALUE", "A setting of the run, such as model.preset or seq_len."),
]


@answers("import", EXCHANGE, 1, catalogue)
def import_traces(
    traces: Traces,
    name: Annotated[str, option("--name", "Name of the run.")] = "imported",
    schedule: Annotated[
        str | None, option("--schedule NAME", "Default: found by the order of the actions.")
    ] = None,
    step: Annotated[
        list[int] | None, option("--step K", "Only this step; repeatable. Default: all.")
    ] = None,
    tokens_per_step: TokensPerStep = None,
    pattern: Pattern = None,
    replicas: Replicas = None,
    settings: Settings = None,
    results: Results = RESULTS,
) -> Result:
    """Store a training run from its ranks' torch.profiler traces."""
    from ppbench.external import traces as external

    done = external.import_traces(
        traces,
        name,
        results,
        schedule=schedule,
        pattern=pattern,
        replicas=replicas,
        steps=step or (),
        tokens_per_step=tokens_per_step,
        settings=settings or (),
    )
    replicated = f"{done.num_replicas} replicas of " if done.num_replicas > 1 else ""
    note(
        f"imported {done.num_steps} steps of {replicated}{done.world_size} ranks, schedule "
        f"{done.schedule}, as run {done.run_id}"
    )
    if done.job_size is not None and done.job_size > done.num_replicas * done.world_size:
        note(
            f"the job had {done.job_size} ranks: its other pipelines are not looked at, and if "
            f"this one has more than {done.world_size} ranks, files are missing"
        )
    for sentence in done.notes:
        note(sentence)
    moved = [
        f"{done.name_of(rank)} by {clock.offset_ns / 1e3:,.1f} us, error at most "
        f"{clock.error_ns / 1e3:,.1f} us"
        for rank, clock in enumerate(done.clocks)
        if not clock.is_shared
    ]
    if moved:
        note(f"clocks of other hosts were aligned by their messages: {'; '.join(moved)}")
    return listing(results, [f"run_id={done.run_id}"])
