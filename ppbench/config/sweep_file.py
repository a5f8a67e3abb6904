"""Reads a sweep file: parse, override, check, expand into frozen cases.

    text --tomllib--> tree --(--set)--> tree --schema--> settings x grid - exclude --> cases
    cases, facts of their models --possible--> cases that can run

Every refusal names file, line, key, value and what is allowed, and happens before anything is
written or started (but for the one process that looks at models that are no presets).
"""

from __future__ import annotations

import itertools
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from engine.model.answers import Problem
from engine.plan.schedules.registry import CSV_PREFIX, ProgramFileError, find_schedule, read_csv
from ppbench.config.assignment import checked_value, is_list_of_values, parse_assignment
from ppbench.config.case import Case, Measure, Sweep, setting_of
from ppbench.config.combination import combination_of
from ppbench.config.locate import Path as Place
from ppbench.config.locate import holds, line_of, line_that_fails
from ppbench.config.models import facts_of, identity_of
from ppbench.config.possible import (
    digest_of,
    most_stages_per_rank,
    problems_of_fit,
    problems_of_settings,
)
from ppbench.config.problems import (
    brief,
    cut,
    describe,
    key_text,
    printable,
    shown,
    unknown_key,
)
from ppbench.config.schema import AUTO, SweepFile, first_twice, known_keys
from ppbench.errors import SweepFileError, UsageError

MAX_CASES = 100_000
MAX_BYTES = 1_048_576
"""Of a sweep file. 100,000 values take less; what is larger is something else."""
_NOT_AN_AXIS = {
    "name": "it names the sweep, whose cases are all of one name",
    "measure.launches": "it says how often every case is repeated",
    "measure.order_seed": "it decides in which order the cases of a launch are run",
}
_MEASURE = "measure."
Planned = tuple[Case, Measure]
Tree = dict[str, object]


@dataclass(frozen=True)
class _Source:
    """The file as the user sees it, for messages."""

    file: str
    text: str
    tree: Tree  # before overrides
    overridden: frozenset[str]

    def error(self, path: Place, problem: str) -> SweepFileError:
        steps = [step for step in path if isinstance(step, str)]
        key = cut(".".join(map(key_text, steps)))
        if self.is_overridden(path):
            return SweepFileError("--set", None, key, problem)
        standing = next((end for end in _shortened(path) if holds(self.tree, end)), None)
        line = None if standing is None else line_of(self.text, standing)
        return SweepFileError(self.file, line, key, problem)

    def is_overridden(self, path: Place) -> bool:
        key = ".".join(step for step in path if isinstance(step, str))
        return key in self.overridden or key.removeprefix("grid.") in self.overridden

    def path_in(self, table: Place, key: str) -> Place:
        """The path of a dotted key, which may be written quoted or as nested tables."""
        quoted = (*table, key)
        return quoted if holds(self.tree, quoted) else (*table, *key.split("."))


def _shortened(path: Place) -> Iterable[Place]:
    """The path, then its parents: an absent key is reported where its table stands."""
    return (path[:length] for length in range(len(path), 0, -1))


def read_sweep(file: Path, overrides: Sequence[str], default_device: str) -> Sweep:
    """The cases of a sweep file.

    `overrides` are `KEY=VALUE` with a dotted key and a TOML value; `default_device` is what
    `device = "auto"` means here. Raises UsageError for a file that cannot be read or an override
    that cannot be parsed, SweepFileError for everything in the file.
    """
    text = _read_text(file)
    tree, written = _parse(file, text), _parse(file, text)
    pairs = [parse_assignment("--set", override) for override in overrides]
    for key, value in pairs:
        _override(tree, key, value)
    source = _Source(str(file), text, written, frozenset(key for key, _ in pairs))
    grid = _flat(source, tree.pop("grid", {}), ("grid",))
    exclude = _read_exclude(source, tree.pop("exclude", []))
    if "name" not in tree:
        tree["name"] = _name_from(source, file)
    settings = _flattened(_validated(source, tree))
    axes = _checked_axes(source, grid)
    cases = tuple(_expand(settings, axes, exclude, default_device))
    if not cases:
        raise source.error(("exclude",), "excludes every combination of the grid; nothing to run")
    _check_unique(source, cases, axes)
    _check_possible(source, tree, axes, cases)
    return Sweep(str(tree["name"]), str(file), cases, tuple(key.replace(".", "_") for key in axes))


def _read_text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{file}: cannot read the sweep file: {error.strerror}") from error
    except ValueError:  # a null byte in the name
        raise UsageError(f"{printable(str(file))}: no file can have this name") from None
    if len(content) > MAX_BYTES:
        raise UsageError(f"{file}: larger than {MAX_BYTES:,} bytes; no sweep file is")
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")  # a byte order mark is no mistake
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem = f"not a text file in UTF-8: {error.reason} at byte {error.start}"
        raise SweepFileError(str(file), line, None, problem) from None


def _parse(file: Path, text: str) -> Tree:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(file, text, str(error)) from None
    except RecursionError:
        problem = "nested too deeply"
    except ValueError:  # the one other thing that the parser raises
        problem = "a number has too many digits"
    raise SweepFileError(str(file), line_that_fails(text), None, problem)


def _syntax_error(file: Path, text: str, told: str) -> SweepFileError:
    """With the line that the parser stumbles on, and the one where its statement begins."""
    message, _, place = told.rpartition(" (at ")
    lines = text.split("\n")
    numbers = [int(number) for number in re.findall(r"\d+", place)]
    number, column = numbers if len(numbers) == 2 else (len(text.rstrip().split("\n")), None)
    content = printable(lines[number - 1].strip())
    at = f" at column {column}" if column else " at the end of the file"
    start = line_that_fails(text)
    begun = f" (in what begins on line {start})" if start and start < number else ""
    names = re.sub(r"\('(.*?)',?\)", lambda found: found[1].replace("', '", "."), message)
    problem = f"not valid TOML: {names[:1].lower()}{names[1:]}{at}{begun}"
    return SweepFileError(str(file), number, None, f"{problem}: {cut(content)}" if content else problem)


def _name_from(source: _Source, file: Path) -> str:
    """A sweep without a name is called as its file."""
    try:
        return str(checked_value("name", file.stem))
    except ValueError as error:
        problem = f'{error}; this is the file\'s own name: set one, such as name = "mine"'
        raise source.error(("name",), problem) from None


def _override(tree: Tree, key: str, value: object) -> None:
    """Replace an axis if the key is one (or the value is an array), else the setting."""
    bare = key.removeprefix("grid.")
    grid = tree.setdefault("grid", {})
    if not isinstance(grid, dict):
        return  # left for the check of [grid] to refuse
    is_axis = bare in grid or _take(grid, bare)
    wants_axis = key != bare or is_list_of_values(bare, value)
    if is_axis or wants_axis:
        grid[bare] = value if isinstance(value, list) else [value]
    else:
        _put(tree, bare, value)


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
        where = (*path, *((key,) if key in table else key.split(".")))
        if key in _NOT_AN_AXIS:
            raise source.error(where, f"is no axis: {_NOT_AN_AXIS[key]}")
        if key not in known_keys():
            known = [k for k in known_keys() if k not in _NOT_AN_AXIS]
            raise source.error(where, unknown_key(key, value, known))
        if key in flat:
            raise source.error(where, "is given twice, as a quoted key and in a table")
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
    listed = {key: v if isinstance(v, list) else [v] for key, v in grid.items()}
    num_cases = math.prod(len(values) for values in listed.values() if values)
    if num_cases > MAX_CASES:
        raise source.error(("grid",), f"{num_cases:,} cases; at most {MAX_CASES:,} are possible")
    return {key: _checked_axis(source, key, values) for key, values in listed.items()}


def _checked_axis(source: _Source, key: str, values: list[object]) -> list[object]:
    where = source.path_in(("grid",), key)
    if not values:
        raise source.error(where, "an axis needs at least one value, got []")
    checked = [
        _checked_value(source, key, value, ("grid",), index) for index, value in enumerate(values)
    ]
    if (twice := first_twice(checked)) is not None:
        raise source.error((*where, twice), f"{shown(values[twice])} is listed twice")
    return checked


def _checked_value(
    source: _Source, key: str, value: object, table: Place, index: int | None = None
) -> object:
    """One axis or exclude value, checked as if it were set by itself; aliases resolved."""
    try:
        return checked_value(key, value)
    except ValueError as error:
        written = source.path_in(table, key)
        where = written if index is None else (*written, index)
        raise source.error(where, str(error)) from None


def _validated(source: _Source, tree: Tree) -> SweepFile:
    try:
        return SweepFile.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        path = tuple(first["loc"])
        if first["type"] == "extra_forbidden" and path[-1] in known_keys():
            key = path[-1]
            raise source.error(path, f"write it without quotes: {key} = {brief(first['input'])}")
        raise source.error(path, describe(first, SweepFile)) from None


def _expand(
    settings: dict[str, object],
    axes: dict[str, list[object]],
    exclude: list[dict[str, object]],
    default_device: str,
) -> Iterator[Planned]:
    """No key's check looks at another, so what is checked by itself is valid in every place."""
    for values in itertools.product(*axes.values()):
        point = {**settings, **dict(zip(axes, values, strict=True))}
        if point["device"] == AUTO:
            point["device"] = default_device
        _settle_schedule(point)
        if any(all(point[k] == v for k, v in one.items()) for one in exclude):
            continue
        yield _frozen(point)


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


def _frozen(settings: dict[str, object]) -> Planned:
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
    axes: Mapping[str, object],
    planned: Sequence[Planned],
) -> None:
    """Refuse the first case that nothing can run. Models are looked at only if the rest is fine."""
    _refuse(
        source, axes, planned, [next(problems_of_settings(*one), None) for one in planned]
    )
    is_set = "data.max_seq_len" in axes or holds(tree, ("data", "max_seq_len"))
    try:
        facts = facts_of(identity_of(case) for case, _ in planned)
    except UsageError as error:
        table = ("grid",) if "model.preset" in axes else ()
        raise source.error(source.path_in(table, "model.preset"), str(error)) from None
    fits = (
        problems_of_fit(case, facts[identity_of(case)], is_max_seq_len_set=is_set)
        for case, _ in planned
    )
    _refuse(source, axes, planned, [next(problems, None) for problems in fits])


def _refuse(
    source: _Source,
    axes: Mapping[str, object],
    planned: Sequence[Planned],
    problems: Sequence[Problem | None],
) -> None:
    """Raise the first problem, if there is one, with the combination that has it."""
    first = next((index for index, problem in enumerate(problems) if problem), None)
    if first is None:
        return
    problem = problems[first]
    assert problem is not None
    table = ("grid",) if problem.key in axes else ()
    message = problem.message + combination_of(first, planned, problems, list(axes))
    raise source.error(source.path_in(table, problem.key), message)


def _check_unique(
    source: _Source, planned: Sequence[Planned], axes: Mapping[str, object]
) -> None:
    """Two spellings of one setting (such as `auto` and `cpu`) would measure a case twice."""
    twice = first_twice(planned)
    if twice is None:
        return
    case, measure = planned[twice]
    point = ", ".join(f"{key} = {brief(setting_of(case, measure, key))}" for key in axes)
    raise source.error(("grid",), f"two combinations are one case, with {point}")
