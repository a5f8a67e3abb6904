"""Reads the accept file: intended changes for the worse, which `ppbench check` then passes.

    [[accept]]
    commit = "3f2a91c07"                  # the change came with it
    reason = "exact attention, see #41"
    cases  = "schedule=1f1b and world_size=4"   # of these cases; all when left out
    metric = "tokens_per_s"               # this figure; all when left out
    up_to  = "10%"                        # no worse than this; however much when left out

An entry is in force only while its commit lies between base and head. After that the base has the
change too, so the entry need not be deleted, and the next regression is not covered by it. If its
commit was squashed or rebased away it is never in force, and a note says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ppbench.config.case import Case, Measure
from ppbench.config.messages import brief, quoted, shown, unknown_key
from ppbench.config.overrides import AND, EVERYTHING, Only, parse_only
from ppbench.config.sweep import Sweep, read_fraction
from ppbench.config.toml import Place, Source, Tree, parse, read_text
from ppbench.errors import RepositoryError, UsageError, nearest
from ppbench.git import Repository
from ppbench.statistics.verdicts import METRICS

_KEYS = ("commit", "reason", "cases", "metric", "up_to")
_NEEDED = ("commit", "reason")
_MOST = 1000.0  # memory may grow to several times its size


@dataclass(frozen=True)
class Accepted:
    """One entry of the file."""

    commit: str  # in full, if it is known
    reason: str
    only: Only = EVERYTHING
    metric: str | None = None  # None: any
    up_to: float | None = None  # a fraction; None: however much
    problem: str = ""  # why the commit is not known

    def covers(self, metric: str, worse: float, planned: tuple[Case, Measure] | None) -> bool:
        """Whether it accepts that a metric of a case is worse by this fraction.

        `planned` is None for a case that the sweep file lacks; such a case meets no condition.
        """
        if self.metric not in (None, metric) or (self.up_to is not None and worse > self.up_to):
            return False
        return not self.only.allowed or (planned is not None and self.only.matches(*planned))


def accept_file(sweep: Sweep) -> Path | None:
    """Return the file that `[track] accept` names, else `<sweep>.accept.toml` if it exists.

    Raises UsageError for a named file that does not exist.
    """
    named = sweep.track.accept
    if named is not None:
        if not named.is_file():
            raise UsageError(f"{sweep.file}: track.accept: no such file: {named}")
        return named
    beside = Path(sweep.file).with_suffix(".accept.toml")
    return beside if beside.is_file() else None


def read_accepted(file: Path, repository: Repository) -> list[Accepted]:
    """Read the entries of a file. Raises SweepFileError, with the line, for an invalid one."""
    text = read_text(file)
    tree, source = parse(file, text), Source(str(file), text, frozenset())
    for key, value in tree.items():
        if key != "accept":
            raise source.error((key,), unknown_key(key, value, ["accept"]))
    tables = tree.get("accept", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise source.error(("accept",), "expected [[accept]], an array of tables")
    return [_entry(source, ("accept", index), t, repository) for index, t in enumerate(tables)]


def _entry(source: Source, place: Place, table: Tree, repository: Repository) -> Accepted:
    for key, value in table.items():
        if key not in _KEYS:
            raise source.error((*place, key), unknown_key(key, value, _KEYS))
        if not isinstance(value, str) and key != "up_to":
            raise source.error((*place, key), f"expected a string, got {shown(value)}")
    for key in _NEEDED:
        if not str(table.get(key, "")).strip():
            raise source.error((*place, key), f"is missing; every entry needs a {key}")
    metric, up_to = table.get("metric"), table.get("up_to")
    if metric is not None and metric not in METRICS:
        problem = f"unknown metric {brief(metric)}{nearest(str(metric), METRICS)}"
        raise source.error((*place, "metric"), problem)
    commit, problem = _commit(str(table["commit"]), repository)
    return Accepted(
        commit,
        str(table["reason"]),
        _only(source, (*place, "cases"), table.get("cases")),
        None if metric is None else str(metric),
        None if up_to is None else _fraction(source, (*place, "up_to"), up_to),
        problem,
    )


def _commit(name: str, repository: Repository) -> tuple[str, str]:
    """The full hash, or the name as written with the reason why it is unknown."""
    try:
        return repository.resolve(name), ""
    except RepositoryError as error:
        return name, str(error)


def _only(source: Source, place: Place, text: object) -> Only:
    try:
        return EVERYTHING if text is None else parse_only(AND.split(str(text).strip()))
    except UsageError as error:
        raise source.error(place, str(error).removeprefix("--only ")) from None


def _fraction(source: Source, place: Place, value: object) -> float:
    try:
        return read_fraction(value, _MOST)
    except ValueError as error:
        raise source.error(place, f"{error}; got {shown(value)}") from None


def in_force(
    entries: Iterable[Accepted], repository: Repository, base: str, head: str
) -> list[Accepted]:
    """Return the entries whose commit is in head and not in base."""
    return [
        entry
        for entry in entries
        if not entry.problem
        and repository.is_ancestor(entry.commit, head)
        and not repository.is_ancestor(entry.commit, base)
    ]


def entry_text(commit: str, cases: Mapping[str, object], metric: str, up_to: float) -> str:
    """Write an entry to paste; `cases` are dotted keys of the sweep file and their values."""
    conditions = " and ".join(f"{key}={_plain(value)}" for key, value in cases.items())
    lines = [
        "[[accept]]",
        f"commit = {quoted(commit)}",
        'reason = "why this is intended"',
        *([f"cases = {quoted(conditions)}"] if conditions else []),
        f"metric = {quoted(metric)}",
        f'up_to = "{up_to:.0%}"',
    ]
    return "\n".join(lines)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else brief(value)
