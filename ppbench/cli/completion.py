"""Completes words in the shell: runs, sweeps, schedules, settings, columns, metrics, figures.

Each function returns words, of which typer offers those that begin with what is typed. It imports
what it lists when it is called, and offers nothing where a store cannot be read: a shell has no
place for errors.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import typer

MOST_RUNS = 50
"""The newest runs that are offered."""


def schedules() -> list[str]:
    """The registered schedules."""
    from engine.plan.schedules.registry import SCHEDULES

    return [*SCHEDULES]


def sweeps(incomplete: str) -> list[str]:
    """The sweeps that ship with ppbench, and files in TOML."""
    from ppbench.config.shipped import shipped_sweeps

    names = [*shipped_sweeps()]
    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            if path.suffix == ".toml":
                names.append(str(path))
            elif path.is_dir() and not path.name.startswith("."):
                names.append(f"{path}/")
    return names


def settings(incomplete: str) -> list[str]:
    """`KEY=` for every setting, and the values of a schedule, runtime or model."""
    from engine.model.presets import PRESETS
    from ppbench.config.case import CASE_KEYS
    from ppbench.config.toml import SYNONYMS
    from ppbench.runtimes import known_runtimes

    key, separator, _ = incomplete.partition("=")
    if not separator:
        return [f"{name}=" for name in (*CASE_KEYS, *SYNONYMS)]
    values = {"schedule": schedules(), "runtime": known_runtimes(), "model.preset": PRESETS}
    return [f"{key}={value}" for value in values.get(key, ())]


def runs(ctx: typer.Context, incomplete: str) -> list[str]:
    """`last`, and the newest runs of the store: their ids, or the ends that tables show."""
    from ppbench.store import Store

    short: dict[str, str] = {}
    with contextlib.suppress(Exception):  # no store, or a damaged one
        store = Store(Path(ctx.params.get("results") or "results"))
        newest = store.listed(["run_id"], (), MOST_RUNS)
        short = store.short_ids(str(run_id) for (run_id,) in reversed(newest))
    ends = [end for end in short.values() if incomplete and end.startswith(incomplete)]
    return ends or ["last", *short]


def columns(incomplete: str) -> list[str]:
    """Columns of runs, after those that are already listed."""
    from ppbench.config.toml import SYNONYMS
    from ppbench.store import TABLES

    before, comma, _ = incomplete.rpartition(",")
    names = (*(column.name for column in TABLES["runs"]), *SYNONYMS)
    return [f"{before}{comma}{name}" for name in names]


def metrics() -> list[str]:
    """The metrics that have verdicts."""
    from ppbench.display.metrics import METRICS

    return [*METRICS]


def figures() -> list[str]:
    """The names of figures."""
    from ppbench.figures import FIGURES

    return [*FIGURES]


def tables() -> list[str]:
    """The tables of the store."""
    from ppbench.store import TABLES

    return [*TABLES]
