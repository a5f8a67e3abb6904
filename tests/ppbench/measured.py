"""Launches of a repository's commits as this machine would have measured them, made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from repositories import git
from stored_runs import run_row, store_together
from tracked import note_written, num_written

from ppbench.config.reader import read_sweep
from ppbench.run.machine.environment import read_environment
from ppbench.run.machine.measuring_code import code_hash
from ppbench.store import Store

SWEEP = """\
name = "tracked"
device = "cpu"

[model]
preset = "llama-tiny"

[grid]
schedule = ["1f1b"]
"""
TWO_CASES = SWEEP.replace('["1f1b"]', '["1f1b", "afab"]')
FAILS = SWEEP + '\n[track]\nsetup = "echo one; echo two >&2; exit 3"\n'
"""No commit can be measured for it, and no rank is started to find out."""


def sweep_in(folder: Path, text: str = SWEEP) -> Path:
    """Beside the repository's files, and not one of them."""
    path = folder / "sweep.toml"
    path.write_text(text)
    (folder / ".git" / "info" / "exclude").write_text("sweep.toml\nresults/\n")
    return path


def now() -> dict[str, str]:
    """Columns of launches that count: made just now, by the present measuring code."""
    return {"created_at": datetime.now(UTC).isoformat(), "code": code_hash()}


def add_measured(
    file: Path, sha: str, speeds: Sequence[float | None], place: int = 0, **changes: object
) -> list[str]:
    """A run of a case of the sweep, by its place, for each of the tokens/s; their ids.

    None is a launch that failed.
    """
    return add_line(file, {sha: speeds}, place, **changes)


def add_line(
    file: Path,
    speeds: Mapping[str, Sequence[float | None]],
    place: int = 0,
    **changes: object,
) -> list[str]:
    """The same for each of some commits, by their hashes."""
    store = Store(file.parent / "results")
    case, measure = read_sweep(file, [], "cpu").cases[place]
    machine = read_environment().fingerprint(case.device, case.world_size, 1)
    first, runs = num_written(store), []
    for sha, figures in speeds.items():
        subject = git(file.parent, "show", "--no-patch", "--format=%s", sha)
        for launch, speed in enumerate(figures):
            failed = {"status": "error", "error": "RuntimeError: made by hand\nits trace"}
            row = {
                **run_row(0, case),
                **measure.settings(),
                "run_id": f"20260101T{first + len(runs):06d}000-abcdef",
                "launch": launch,
                "process_start": f"turns {launch}",  # all commits took turns
                "resume_key": f"{case.case_id} {launch} {sha}",
                "commit": sha,
                "changes": "",
                "subject": subject,
                "fingerprint": machine,
                "tokens_per_s": speed,
                **({} if speed is not None else failed),
                **changes,
            }
            runs.append((row, {}))
    note_written(store, len(runs))
    store_together(store, runs)
    return [str(row["run_id"]) for row, _ in runs]


def around(middle: float, count: int = 3) -> list[float]:
    """Launches that differ by 0.3 %."""
    return [middle * (1 + step / 1000) for step in (0, 2, -1, 1, -2)[:count]]
