"""What the commands of tracking print, and how they say what to type next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ppbench.cli_options import RESULTS
from ppbench.listing import FIELDS, Field
from ppbench.repository import Commit

FINE, REGRESSION, NOT_ENOUGH, FAILED = 0, 1, 3, 4
"""Exit codes."""
_LONGEST_SUBJECT = 50


@dataclass(frozen=True)
class Outcome:
    """What a command prints and returns."""

    text: str
    exit_code: int


def _cut(text: object) -> str:
    line = str(text)
    return line if len(line) <= _LONGEST_SUBJECT else f"{line[: _LONGEST_SUBJECT - 1]}…"


COMMIT_FIELDS: Mapping[str, Field] = {
    **FIELDS,
    "author_date": Field("date", lambda date: str(date)[:10], is_number=False),
    "subject": Field("subject", _cut, is_number=False),
    "num_launches": Field("launches"),
    "chance": Field("chance", lambda chance: f"{float(str(chance)):.1%}".replace("%", " %")),
}
COMMIT_COLUMNS = ["author_date", "commit", "subject"]


def row_of(commit: Commit) -> dict[str, object]:
    """`COMMIT_COLUMNS` of a commit."""
    return {name: getattr(commit, name) for name in COMMIT_COLUMNS}


def words_of(
    options: Mapping[str, object],
    overrides: Sequence[str],
    results: Path,
    flags: Iterable[str] = (),
) -> list[str]:
    """The options of a command line; those that are None, and folders by default, left out."""
    words = [
        word
        for name, value in options.items()
        if value is not None
        for word in (f"--{name}", str(value))
    ]
    words += [word for override in overrides for word in ("--set", override)]
    words += [] if results == RESULTS else ["--results", str(results)]
    return [*words, *flags]
