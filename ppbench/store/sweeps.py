"""The sweeps of a store: which runs belong to one, and the command that repeats it.

A run names the sweep that made it. A sweep that finds runs done already has them too, so each call
leaves a note of all its runs:

    results/sweeps/<time it began>-<sweep_id>.json    {"command": ..., "folder": ..., ...}
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ppbench.files import whole_file

if TYPE_CHECKING:
    import pandas as pd

SWEEPS = "sweeps"
NOTED = ("run_id", "sweep_id", "resume_key", "status")
"""The columns of `runs` by which the runs of a sweep are found."""


@dataclass(frozen=True)
class SweepNote:
    """What one sweep was when it was last called."""

    sweep_id: str
    begun: str  # sorts among the ids of runs
    resume_keys: frozenset[str]
    command: str | None  # as it works from the working directory
    text: str  # of the sweep file, as it was read


def write_sweep_note(
    store: Path,
    sweep_id: str,
    begun: str,
    resume_keys: Iterable[str],
    command: str | None,
    text: str = "",
) -> None:
    """Note the runs of a sweep that begins, in place of its older note. Raises StoreError."""
    path = store / SWEEPS / f"{begun.partition('-')[0]}-{sweep_id}.json"
    with whole_file(path) as file:
        given = {"command": command, "folder": str(Path.cwd()), "text": text}
        held = {**given, "resume_keys": sorted(resume_keys)}
        file.write(json.dumps(held).encode())
    for older in path.parent.glob(f"*-{sweep_id}.json"):
        if older.name < path.name:
            with contextlib.suppress(OSError):
                older.unlink()


def newest_sweep_note(store: Path, sweep_id: str = "*") -> SweepNote | None:
    """The newest note of a sweep, or of any; None if there is none that can be read."""
    for path in sorted((store / SWEEPS).glob(f"*-{sweep_id}.json"), reverse=True):
        begun, _, sweep_id = path.stem.partition("-")
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            held = json.loads(path.read_bytes())
            keys, command = frozenset(held["resume_keys"]), held["command"]
            if command is not None and Path(held["folder"]) != Path.cwd():
                command = f"cd {shlex.quote(held['folder'])} && {command}"
            return SweepNote(sweep_id, begun, keys, command, held["text"])
    return None


def last_sweep_in(store: Path, runs: pd.DataFrame) -> tuple[pd.DataFrame, SweepNote | None]:
    """The runs of the last sweep among these, which have the columns `NOTED`, and its note.

    That is the sweep that began after all of them, if it had some of them done already, and else
    the sweep of the last run. A run that another sweep began and did not end does not count.
    """
    last = runs.iloc[-1]
    note = newest_sweep_note(store)
    if note is not None and note.begun > str(last["run_id"]):
        found = _runs_of(runs, note.sweep_id, note)
        if len(found):
            return found, note
    sweep_id = str(last["sweep_id"]) if isinstance(last["sweep_id"], str) else None
    note = None if sweep_id is None else newest_sweep_note(store, sweep_id)
    return _runs_of(runs, sweep_id, note), note


def _runs_of(runs: pd.DataFrame, sweep_id: str | None, note: SweepNote | None) -> pd.DataFrame:
    is_own = runs["sweep_id"].isna() if sweep_id is None else runs["sweep_id"].eq(sweep_id)
    if note is None:
        return runs[is_own]
    left = note.resume_keys.difference(runs.loc[is_own, "resume_key"])
    return runs[is_own | (runs["resume_key"].isin(left) & runs["status"].ne("interrupted"))]
