"""Commands that errors and notes recommend, with the names that are known."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ppbench.config.shipped import from_here

SWEEP = "SWEEP"
"""Stands for a sweep file that is not known."""
COMPARE = f"ppbench compare BASE HEAD {SWEEP} --run"
"""Measures two sides whose names are not known."""
_RESULTS = Path("results")


def compare_command(base: str | None, head: str | None, sweep: str | None, results: Path) -> str:
    """The comparison of these names that measures both sides first."""
    names = [base or "BASE", head or "HEAD", near(sweep)]
    return shlex.join(["ppbench", "compare", *names, "--run", *_place(results)])


def check_command(sweep: str | None, base: str | None, head: str | None, results: Path) -> str:
    """The gate for these names that measures both sides first; the usual sides have no name."""
    options = [("--base", base), ("--head", head)]
    named = [word for option, name in options if name for word in (option, name)]
    return shlex.join(["ppbench", "check", near(sweep), *named, "--run", *_place(results)])


def noise_command(sweep: str, settings: Sequence[str], results: Path) -> str:
    """The noise of a file with these settings."""
    words = [word for setting in settings for word in ("--set", setting)]
    return shlex.join(["ppbench", "noise", near(sweep), *words, *_place(results)])


def near(sweep: str | None) -> str:
    """A sweep file as it would be typed here."""
    if sweep is None:
        return SWEEP
    path = Path(sweep)
    return sweep if from_here(path) == path else str(from_here(path))


def _place(results: Path) -> list[str]:
    return [] if results == _RESULTS else ["--results", str(results)]
