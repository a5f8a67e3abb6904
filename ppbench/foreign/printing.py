"""What `ppbench import` says of what it did."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ppbench.foreign.importing import Imported, Wanted
from ppbench.foreign.importing import import_traces as run_import
from ppbench.format import Format
from ppbench.stored import list_runs, tell


def import_traces(paths: Sequence[Path], wanted: Wanted, results: Path, how: Format) -> str:
    """Import, and list the run as `ppbench ls` does. Raises UsageError, StoreError."""
    done = run_import(paths, wanted, results)
    tell(
        f"imported {done.num_steps} steps of {done.world_size} ranks, schedule {done.schedule}, "
        f"as run {done.run_id}"
    )
    if done.job_size is not None and done.job_size > done.world_size:
        tell(
            f"the job had {done.job_size} ranks: its other pipelines are not looked at, and if "
            f"this one has more than {done.world_size} ranks, files are missing"
        )
    if corrected := _corrections(done):
        tell(corrected)
    return list_runs(results, [f"run_id={done.run_id}"], None, how)


def _corrections(done: Imported) -> str | None:
    """How ranks' clocks were moved, and how far off that may be."""
    apart = {rank: clock for rank, clock in enumerate(done.clocks) if not clock.is_shared}
    told = [
        f"rank {rank} by {clock.offset_ns / 1e3:,.1f} us, off by at most "
        f"{clock.error_ns / 1e3:,.1f} us"
        for rank, clock in apart.items()
    ]
    return (
        f"clocks of other hosts were moved by their messages: {'; '.join(told)}" if told else None
    )
