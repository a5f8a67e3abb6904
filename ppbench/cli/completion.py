"""Completes words in the shell: runs, sweeps, schedules, settings, columns, metrics, figures.

Each function returns the words that begin with what is typed. It imports what it lists when it is
called, and offers nothing where a store cannot be read: a shell has no place for errors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import typer

MOST_RUNS = 50
"""The newest runs that are offered."""


def schedules(incomplete: str) -> list[str]:
    """The registered schedules."""
    from engine.plan.schedules.registry import SCHEDULES

    return _beginning(incomplete, SCHEDULES)


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
    return _beginning(incomplete, names)


def settings(incomplete: str) -> list[str]:
    """`KEY=` for every setting, and the values of a schedule, runtime or model."""
    from engine.model.presets import PRESETS
    from engine.plan.schedules.registry import SCHEDULES
    from ppbench.config.case import CASE_KEYS
    from ppbench.config.toml import SYNONYMS
    from ppbench.runtimes import known_runtimes

    key, separator, _ = incomplete.partition("=")
    if not separator:
        return _beginning(incomplete, [f"{name}=" for name in (*CASE_KEYS, *SYNONYMS)])
    values = {"schedule": SCHEDULES, "runtime": known_runtimes(), "model.preset": PRESETS}
    return _beginning(incomplete, [f"{key}={value}" for value in values.get(key, ())])


def runs(ctx: typer.Context, incomplete: str) -> list[str]:
    """`last`, and the newest runs of the store: their ids, or the ends that tables show."""
    from ppbench.store import Store

    short: dict[str, str] = {}
    with contextlib.suppress(Exception):  # no store, or a damaged one
        store = Store(Path(ctx.params.get("results") or "results"))
        newest = store.listed(["run_id"], (), MOST_RUNS)
        short = store.short_ids(str(run_id) for (run_id,) in reversed(newest))
    ends = [end for end in short.values() if incomplete and end.startswith(incomplete)]
    return ends or _beginning(incomplete, ["last", *short])


def columns(incomplete: str) -> list[str]:
    """Columns of runs, after those that are already listed."""
    from ppbench.config.toml import SYNONYMS
    from ppbench.store import TABLES

    before, comma, last = incomplete.rpartition(",")
    names = [*(column.name for column in TABLES["runs"]), *SYNONYMS]
    return [f"{before}{comma}{name}" for name in _beginning(last, names)]


def metrics(incomplete: str) -> list[str]:
    """The metrics that have verdicts."""
    from ppbench.display.metrics import METRICS

    return _beginning(incomplete, METRICS)


def figures(incomplete: str) -> list[str]:
    """The names of figures."""
    from ppbench.figures import FIGURES

    return _beginning(incomplete, FIGURES)


def tables(incomplete: str) -> list[str]:
    """The tables of the store."""
    from ppbench.store import TABLES

    return _beginning(incomplete, TABLES)


def _beginning(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
