"""Reads a sweep file: parse, override, check, expand into frozen cases.

    text --tomllib--> tree --(--set)--> tree --schema--> settings x grid - exclude --> cases
    cases, facts of their models --possible--> cases that can run

Every refusal names file, line, key, value and what is allowed, and happens before anything is
written or started (but for the one process that looks at models that are no presets).
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from engine.model.answers import Problem
from engine.plan.schedules.registry import CSV_PREFIX, ProgramFileError, find_schedule, read_csv
from ppbench.config.case import Case, Measure, Sweep
from ppbench.config.locate import holds, line_of
from ppbench.config.models import facts_of, identity_of
from ppbench.config.possible import (
    digest_of,
    most_stages_per_rank,
    problems_of_fit,
    problems_of_settings,
)
from ppbench.config.problems import describe, shown, unknown_key
from ppbench.config.schema import AUTO, SweepFile, known_keys
from ppbench.errors import SweepFileError, UsageError, nearest

MAX_CASES = 100_000
_NOT_AN_AXIS = ("name", "measure.launches", "measure.order_seed")
_TYPE_IN_LIST: dict[str, type | tuple[type, ...]] = {
    "model.partition": int,
    "model.split_points": str,
    "emulated.F_ms": (int, float),
    "emulated.I_ms": (int, float),
    "emulated.W_ms": (int, float),
    "emulated.link_ms": (int, float),
}
"""Settings that are lists themselves, and what their elements are."""
_MEASURE = "measure."
Tree = dict[str, object]


@dataclass(frozen=True)
class _Source:
    """The file as the user sees it, for messages."""

    file: str
    text: str
    overridden: frozenset[str]

    def error(self, path: tuple[str | int, ...], problem: str) -> SweepFileError:
        key = ".".join(str(step) for step in path if isinstance(step, str))
        if key in self.overridden or key.removeprefix("grid.") in self.overridden:
            return SweepFileError("--set", None, key, problem)
        line = next((n for end in _shortened(path) if (n := line_of(self.text, end))), None)
        return SweepFileError(self.file, line, key, problem)

    def path_in(self, table: tuple[str | int, ...], key: str) -> tuple[str | int, ...]:
        """The path of a dotted key, which may be written quoted or as nested tables."""
        quoted = (*table, key)
        return quoted if line_of(self.text, quoted) else (*table, *key.split("."))


def _shortened(path: tuple[str | int, ...]) -> Iterable[tuple[str | int, ...]]:
    """The path, then its parents: an absent key is reported where its table stands."""
    return (path[:length] for length in range(len(path), 0, -1))


def read_sweep(file: Path, overrides: Sequence[str], default_device: str) -> Sweep:
    """The cases of a sweep file.

    `overrides` are `KEY=VALUE` with a dotted key and a TOML value; `default_device` is what
    `device = "auto"` means here. Raises UsageError for a file that cannot be read or an override
    that cannot be parsed, SweepFileError for everything in the file.
    """
    text = _read_text(file)
    tree = _parse(file, text)
    pairs = [_parse_override(override) for override in overrides]
    for key, value in pairs:
        _override(tree, key, value)
    source = _Source(str(file), text, frozenset(key for key, _ in pairs))
    grid = _flat(source, tree.pop("grid", {}), ("grid",))
    exclude = _read_exclude(source, tree.pop("exclude", []))
    tree.setdefault("name", file.stem)
    _validated(source, tree, ())
    axes = _checked_axes(source, grid)
    cases = tuple(_expand(source, tree, axes, exclude, default_device))
    if not cases:
        raise source.error(("exclude",), "excludes every combination of the grid; nothing to run")
    _check_unique(source, cases)
    _check_possible(source, tree, axes, cases)
    return Sweep(str(tree["name"]), str(file), cases, tuple(key.replace(".", "_") for key in axes))


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")  # a byte order mark is no mistake
    except OSError as error:
        raise UsageError(f"{file}: cannot read the sweep file: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{file}: not a text file: {error.reason} at byte {error.start}"
        ) from error


def _parse(file: Path, text: str) -> Tree:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message, _, place = str(error).partition(" (at ")
        line = place.removeprefix("line ").partition(",")[0]
        number = int(line) if line.isdigit() else max(1, len(text.splitlines()))
        raise SweepFileError(str(file), number, None, f"not valid TOML: {message}") from None
    except (ValueError, RecursionError) as error:  # a number too long, tables too deep
        raise SweepFileError(str(file), None, None, f"not usable as TOML: {error}") from None


def _parse_override(override: str) -> tuple[str, object]:
    """`train.microbatch_size=2`; a value that is not TOML is taken as a string."""
    key, separator, value = override.partition("=")
    key = key.strip()
    if not separator or not key:
        raise UsageError(f"--set {override}: expected KEY=VALUE, such as train.microbatch_size=2")
    bare = key.removeprefix("grid.")
    if bare not in known_keys():
        raise UsageError(f'--set {override}: unknown key "{bare}"{nearest(bare, known_keys())}')
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        return key, value.strip()


def _override(tree: Tree, key: str, value: object) -> None:
    """Replace an axis if the key is one (or the value is an array), else the setting."""
    bare = key.removeprefix("grid.")
    grid = tree.setdefault("grid", {})
    if not isinstance(grid, dict):
        return  # left for the check of [grid] to refuse
    is_axis = bare in grid or _take(grid, bare)
    wants_axis = key != bare or _is_list_of_values(bare, value)
    if is_axis or wants_axis:
        grid[bare] = value if isinstance(value, list) else [value]
    else:
        _put(tree, bare, value)


def _is_list_of_values(key: str, value: object) -> bool:
    """Several lists are a list that holds more than a single list's elements."""
    if not isinstance(value, list):
        return False
    element = _TYPE_IN_LIST.get(key)
    return element is None or not all(isinstance(one, element) for one in value)


def _take(table: Tree, key: str) -> bool:
    """Remove a dotted key that is written as nested tables; whether it was there."""
    head, _, rest = key.partition(".")
    inner = table.get(head)
    return isinstance(inner, dict) and inner.pop(rest, None) is not None


def _put(tree: Tree, key: str, value: object) -> None:
    """Set a dotted key. A section that is not a table is left for the schema to refuse."""
    head, _, rest = key.partition(".")
    if not rest:
        tree[head] = value
    elif isinstance(inner := tree.setdefault(head, {}), dict):
        tree[head] = {**inner, rest: value}


def _flat(source: _Source, table: object, path: tuple[str | int, ...]) -> dict[str, object]:
    """Nested tables as dotted keys; every key must be known."""
    if not isinstance(table, dict):
        raise source.error(path, f"expected a table, got {shown(table)}")
    flat: dict[str, object] = {}
    for key, value in _dotted(table):
        if key == "measure.launches":
            raise source.error((*path, key), "is no axis: it says how often every case is repeated")
        if key not in known_keys() or key in _NOT_AN_AXIS:
            known = [k for k in known_keys() if k not in _NOT_AN_AXIS]
            where = (key,) if key in table else tuple(key.split("."))
            raise source.error((*path, *where), unknown_key(key, value, known))
        flat[key] = value
    return flat


def _dotted(table: Mapping[str, object]) -> Iterable[tuple[str, object]]:
    """Keys and values; a section's keys, quoted or as a table, under their dotted names."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", v) for inner, v in value.items())
        else:
            yield key, value


def _read_exclude(source: _Source, tables: object) -> list[dict[str, object]]:
    if not isinstance(tables, list):
        raise source.error(("exclude",), "expected [[exclude]], an array of tables")
    excluded = []
    for index, table in enumerate(tables):
        flat = _flat(source, table, ("exclude", index))
        if not flat:
            raise source.error(("exclude", index), "is empty and would exclude every case")
        excluded.append(
            {key: _checked_value(source, key, v, ("exclude", index)) for key, v in flat.items()}
        )
    return excluded


def _checked_axes(source: _Source, grid: dict[str, object]) -> dict[str, list[object]]:
    axes: dict[str, list[object]] = {}
    for key, values in grid.items():
        listed = values if isinstance(values, list) else [values]
        if not listed:
            raise source.error(("grid", key), "an axis needs at least one value, got []")
        checked = [
            _checked_value(source, key, value, ("grid",), index)
            for index, value in enumerate(listed)
        ]
        for index, value in enumerate(checked):
            if value in checked[:index]:
                raise source.error(("grid", key), f"{shown(value)} is listed twice")
        axes[key] = checked
    num_cases = math.prod(len(values) for values in axes.values())
    if num_cases > MAX_CASES:
        raise source.error(("grid",), f"{num_cases:,} cases; at most {MAX_CASES:,} are possible")
    return axes


def _checked_value(
    source: _Source,
    key: str,
    value: object,
    table: tuple[str | int, ...],
    index: int | None = None,
) -> object:
    """One axis or exclude value, checked as if it were set by itself; aliases resolved."""
    trial: Tree = {"name": "x"}
    _put(trial, key, value)
    try:
        settings = SweepFile.model_validate(trial).model_dump()
    except ValidationError as error:
        written = source.path_in(table, key)
        where = written if index is None else (*written, index)
        raise source.error(where, describe(error.errors()[0], SweepFile)) from None
    head, _, rest = key.partition(".")
    return settings[head][rest] if rest else settings[head]


def _validated(source: _Source, tree: Tree, where: tuple[str | int, ...]) -> SweepFile:
    try:
        return SweepFile.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        path = where or tuple(first["loc"])
        raise source.error(path, describe(first, SweepFile)) from None


def _expand(
    source: _Source,
    tree: Tree,
    axes: dict[str, list[object]],
    exclude: list[dict[str, object]],
    default_device: str,
) -> Iterable[tuple[Case, Measure]]:
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        combined: Tree = dict(tree)
        for key, value in point.items():
            _put(combined, key, value)
        settings = _flattened(_validated(source, combined, ("grid",)))
        if settings["device"] == AUTO:
            settings["device"] = default_device
        _settle_schedule(settings)
        if any(all(settings[k] == v for k, v in one.items()) for one in exclude):
            continue
        yield _frozen(settings)


def _settle_schedule(settings: dict[str, object]) -> None:
    """`stages_per_rank = "auto"` as a number, and what a program file holds.

    A file that cannot be used is left for the check of what is possible to refuse.
    """
    name, is_auto = str(settings["schedule"]), settings["stages_per_rank"] == AUTO
    settings["program_digest"] = ""
    if not name.startswith(CSV_PREFIX):
        if is_auto:
            settings["stages_per_rank"] = find_schedule(name).stages_per_rank.default
        return
    path = Path(name.removeprefix(CSV_PREFIX))
    try:
        most = most_stages_per_rank(read_csv(path))
        settings["program_digest"] = digest_of(path)
    except (OSError, ProgramFileError):
        most = 1
    if is_auto:
        settings["stages_per_rank"] = most


def _flattened(checked: SweepFile) -> dict[str, object]:
    """Dotted key -> value of every setting."""
    flat: dict[str, object] = {}
    for key, value in checked.model_dump().items():
        if isinstance(value, dict):
            flat.update({f"{key}.{inner}": v for inner, v in value.items()})
        else:
            flat[key] = value
    return flat


def _frozen(settings: dict[str, object]) -> tuple[Case, Measure]:
    measure = {k.removeprefix(_MEASURE): v for k, v in settings.items() if k.startswith(_MEASURE)}
    case = {
        k.replace(".", "_"): v
        for k, v in settings.items()
        if not k.startswith(_MEASURE) and k != "name"
    }
    return Case(**case), Measure(**measure)  # type: ignore[arg-type]  # the schema checked them


def _check_possible(
    source: _Source,
    tree: Tree,
    axes: dict[str, list[object]],
    planned: Sequence[tuple[Case, Measure]],
) -> None:
    """Refuse the first case that nothing can run. Models are looked at only if the rest is fine."""
    for case, measure in planned:
        for problem in problems_of_settings(case, measure):
            raise _located(source, axes, problem)
    is_set = "data.max_seq_len" in axes or holds(tree, ("data", "max_seq_len"))
    facts = facts_of(identity_of(case) for case, _ in planned)
    for case, _ in planned:
        for problem in problems_of_fit(case, facts[identity_of(case)], is_max_seq_len_set=is_set):
            raise _located(source, axes, problem)


def _located(source: _Source, axes: dict[str, list[object]], problem: Problem) -> SweepFileError:
    table = ("grid",) if problem.key in axes else ()
    return source.error(source.path_in(table, problem.key), problem.message)


def _check_unique(source: _Source, cases: tuple[tuple[Case, Measure], ...]) -> None:
    """Two spellings of one setting (such as `auto` and `cpu`) would measure a case twice."""
    seen = set()
    for planned in cases:
        if planned in seen:
            raise source.error(("grid",), f"describes case {planned[0].case_id} twice")
        seen.add(planned)
