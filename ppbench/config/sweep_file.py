"""Reads a sweep file: parse, override, check, expand into frozen cases.

    text --tomllib--> tree --(--set)--> tree --schema--> settings x grid - exclude --> cases
    cases, facts of their models --possible--> cases that can run

Every refusal names file, line, key, value and what is allowed, and happens before anything is
written or started (but for the one process that looks at models that are no presets).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from engine.model.answers import Facts, Identity, Problem
from engine.plan.schedules.registry import CSV_PREFIX, ProgramFileError, find_schedule, read_csv
from ppbench.config.assignment import LISTS, checked_value, is_list_of_values, parse_assignment
from ppbench.config.case import Case, Measure, setting_of
from ppbench.config.combination import axes_at_fault, in_words
from ppbench.config.costs import read_costs
from ppbench.config.locate import Path as Place
from ppbench.config.locate import holds
from ppbench.config.models import facts_of, identity_of
from ppbench.config.places import Slurm, Torchrun
from ppbench.config.possible import (
    digest_of,
    is_known_by_name,
    most_stages_per_rank,
    problems_of_fit,
    problems_of_settings,
)
from ppbench.config.problems import brief, describe, shown, unknown_key
from ppbench.config.schema import (
    AUTO,
    CostsFile,
    SweepFile,
    TrackSection,
    first_twice,
    known_keys,
    shared_keys,
)
from ppbench.config.source import Source, Tree, parse, read_text
from ppbench.config.sweep import Sweep
from ppbench.config.track import Track, read_threshold
from ppbench.errors import UsageError

MAX_CASES = 100_000
_NOT_AN_AXIS = {
    "name": "it names the sweep, whose cases are all of one name",
    "measure.launches": "it says how often every case is repeated",
    "measure.order_seed": "it decides in which order the cases of a launch are run",
}
_SHARED = {
    "launch.torchrun": "it says where the launches run",
    "launch.slurm": "it says where the launches run",
    "track": "it says what is tracked over commits",
}
_DECISIVE = ("schedule", "runtime", "model.preset", "stages_per_rank", "world_size")
"""Keys that ask something of others, which may have been left at their defaults."""
_COSTS = "emulated.costs"
_MEASURE_FIELDS = {
    key: key.removeprefix("measure.") for key in known_keys() if key.startswith("measure.")
}
_CASE_FIELDS = {
    key: key.replace(".", "_")
    for key in (*known_keys(), "program_digest")
    if key not in _MEASURE_FIELDS and key != "name"
}
Planned = tuple[Case, Measure]


def read_sweep(
    file: Path, overrides: Sequence[str], default_device: str, *, is_of_this_tree: bool = True
) -> Sweep:
    """The cases of a sweep file.

    `overrides` are `KEY=VALUE` with a dotted key and a TOML value; `default_device` is what
    `device = "auto"` means here. Cases that are not of this tree are to be run where other files
    lie: then what depends on files is left for there to refuse. Raises UsageError for a file that
    cannot be read or an override that cannot be parsed, SweepFileError for everything in the file.
    """
    text = read_text(file)
    tree = parse(file, text)
    pairs = [parse_assignment("--set", override, shared_keys()) for override in overrides]
    for key, value in pairs:
        _override(tree, key, value)
    source = Source(str(file), text, frozenset(key for key, _ in pairs))
    grid = _flat(source, tree.pop("grid", {}), ("grid",))
    exclude = _read_exclude(source, tree.pop("exclude", []))
    if "name" not in tree:
        tree["name"] = _name_from(source, file)
    checked = _validated(source, tree)
    settings = _flattened(checked)
    axes = _checked_axes(source, grid)
    _check_costs(source, settings, axes)
    cases = tuple(_expand(settings, axes, exclude, default_device))
    if not cases:
        raise source.error(("exclude",), "excludes every combination of the grid; nothing to run")
    _check_unique(source, cases, axes)
    facts = _check_possible(source, tree, axes, cases, is_of_this_tree=is_of_this_tree)
    return Sweep(
        str(tree["name"]),
        str(file),
        cases,
        tuple(key.replace(".", "_") for key in axes),
        Torchrun(**checked.launch.torchrun.model_dump()),
        Slurm(**checked.launch.slurm.model_dump()),
        _track_of(source, checked.track),
        facts,
    )


def _track_of(source: Source, section: TrackSection) -> Track:
    folder = Path(source.file).resolve().parent
    thresholds = []
    for key, value in section.thresholds.items():
        try:
            thresholds.append(read_threshold(key, value))
        except ValueError as error:
            raise source.error(("track", "thresholds", key), str(error)) from None
    repo = folder / section.repo
    if not repo.is_dir():
        raise source.error(("track", "repo"), f"no such folder: {brief(section.repo)}")
    accept = folder / section.accept if section.accept else None
    return Track(repo, accept, section.setup, tuple(thresholds))


def _name_from(source: Source, file: Path) -> str:
    """A sweep without a name is called as its file."""
    try:
        return str(checked_value("name", file.stem))
    except ValueError as error:
        problem = f'{error}; this is the file\'s own name: set one, such as name = "mine"'
        raise source.error(("name",), problem) from None


def _override(tree: Tree, key: str, value: object) -> None:
    """Replace an axis if the key is one (or the value is an array), else the setting."""
    bare = key.removeprefix("grid.")
    if bare in shared_keys():
        _put(tree, bare, value)
        return
    grid = tree.setdefault("grid", {})
    if not isinstance(grid, dict):
        return  # left for the check of [grid] to refuse
    is_axis = bare in grid or _take(grid, bare)
    wants_axis = key != bare or is_list_of_values(bare, value)
    if is_axis or wants_axis:
        grid[bare] = value if isinstance(value, list) else [value]
    else:
        _put(tree, bare, value)


def _check_costs(
    source: Source, settings: Mapping[str, object], axes: Mapping[str, Sequence[object]]
) -> None:
    """A file of costs tells all times: others beside it would be passed over."""
    if not any(map(bool, axes.get(_COSTS, [settings[_COSTS]]))):
        return
    for key in (f"emulated.{name}" for name in CostsFile.model_fields):
        if key in axes or settings[key]:
            problem = f"{_COSTS} names a file that tells the times; set one or the other"
            raise source.error(source.path_of(key, axes), problem)


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
        tree[head] = changed = dict(inner)
        _put(changed, rest, value)


def _flat(source: Source, table: object, path: tuple[str | int, ...]) -> dict[str, object]:
    """Nested tables as dotted keys; every key must be known."""
    if not isinstance(table, dict):
        raise source.error(path, f"expected a table, got {shown(table)}")
    flat: dict[str, object] = {}
    for key, value in _dotted(table):
        where = (*path, *_steps_of(key, table))
        if key in _NOT_AN_AXIS:
            raise source.error(where, f"is no axis: {_NOT_AN_AXIS[key]}")
        if reason := next((why for name, why in _SHARED.items() if _is_in(key, name)), ""):
            raise source.error(where, f"is no axis: {reason}, for all cases")
        if key not in known_keys():
            known = [k for k in known_keys() if k not in _NOT_AN_AXIS]
            raise source.error(where, unknown_key(key, value, known))
        if key in flat:
            raise source.error(where, "is given twice: by its quoted name and in a table")
        flat[key] = value
    return flat


def _is_in(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def _steps_of(key: str, table: Mapping[str, object]) -> Sequence[str]:
    return (key,) if key in table else key.split(".")


def _dotted(table: Mapping[str, object]) -> Iterable[tuple[str, object]]:
    """Keys and values; a section's keys, quoted or as a table, under their dotted names."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", v) for inner, v in value.items())
        else:
            yield key, value


def _read_exclude(source: Source, tables: object) -> list[dict[str, object]]:
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


def _checked_axes(source: Source, grid: dict[str, object]) -> dict[str, list[object]]:
    listed = {key: v if isinstance(v, list) else [v] for key, v in grid.items()}
    num_cases = math.prod(len(values) for values in listed.values() if values)
    if num_cases > MAX_CASES:
        raise source.error(("grid",), f"{num_cases:,} cases; at most {MAX_CASES:,} are possible")
    return {key: _checked_axis(source, key, values) for key, values in listed.items()}


def _checked_axis(source: Source, key: str, values: list[object]) -> list[object]:
    if not values:
        where = source.path_in(("grid",), key)
        raise source.error(where, "an axis needs at least one value, got []")
    checked = [
        _checked_value(source, key, value, ("grid",), index) for index, value in enumerate(values)
    ]
    if (twice := first_twice(checked)) is not None:
        where = (*source.path_in(("grid",), key), twice)
        raise source.error(where, f"{shown(values[twice])} is listed twice")
    return checked


def _checked_value(
    source: Source, key: str, value: object, table: Place, index: int | None = None
) -> object:
    """One axis or exclude value, checked as if it were set by itself; aliases resolved."""
    try:
        return checked_value(key, value)
    except ValueError as error:
        written = source.path_in(table, key)
        where = written if index is None else (*written, index)
        raise source.error(where, str(error)) from None


def _validated(source: Source, tree: Tree) -> SweepFile:
    try:
        return SweepFile.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        path = tuple(first["loc"])
        raise source.error(
            path,
            _misplaced(path, first["input"]) or describe(first, SweepFile, ("grid", "exclude")),
        ) from None


def _misplaced(path: Place, value: object) -> str:
    """What to say of a key or a value that is fine, but not where it stands; empty if it is not."""
    key, *others = (".".join(map(str, path[start:])) for start in range(len(path)))
    if isinstance(value, list) and key in known_keys() and key not in (*LISTS, *_NOT_AN_AXIS):
        return f"expected one value, got {shown(value)}; several values of a key stand in [grid]"
    if len(path) == 1 and "." in key and key in known_keys():
        return f"write this key without quotes: {key} = {brief(value)}"
    name = others[-1] if others else key
    known = [*known_keys(), *shared_keys()]
    homes = [one for one in known if one.split(".")[-1] == name]
    if any(key == one or key.startswith(f"{one}.") for one in known) or not homes:
        return ""
    sections = ", ".join(f"[{home.rpartition('.')[0]}]" for home in homes if "." in home)
    where = f"in {sections}" if sections else "at the top, before the first [section]"
    return f"unknown key here, set to {shown(value)}; {name} stands {where}"


def _expand(
    settings: dict[str, object],
    axes: dict[str, list[object]],
    exclude: list[dict[str, object]],
    default_device: str,
) -> Iterator[Planned]:
    """No key's check looks at another, so what is checked by itself is valid in every place."""
    shapes: dict[str, _Shape] = {}
    excluded = _by_keys(exclude)
    for values in itertools.product(*axes.values()):
        point = {**settings, **dict(zip(axes, values, strict=True))}
        if point["device"] == AUTO:
            point["device"] = default_device
        name = str(point["schedule"])
        shape = shapes.get(name) or shapes.setdefault(name, _shape_of(name))
        point["program_digest"] = shape.program_digest
        if point["stages_per_rank"] == AUTO:
            point["stages_per_rank"] = shape.stages_per_rank
        if costs := str(point[_COSTS]):
            point |= _costs_in(costs)
        if not any(tuple(point[k] for k in keys) in found for keys, found in excluded.items()):
            yield _frozen(point)


def _costs_in(file: str) -> dict[str, object]:
    """Times of a file of costs, by dotted key; one that cannot be used is refused as impossible."""
    try:
        return {f"emulated.{name}": times for name, times in read_costs(file).items()}
    except ValueError:
        return {}


def _by_keys(
    exclude: Sequence[Mapping[str, object]],
) -> dict[tuple[str, ...], set[tuple[object, ...]]]:
    """The values to exclude, of each set of keys: thousands are as quick to look up as one."""
    grouped: dict[tuple[str, ...], set[tuple[object, ...]]] = {}
    for one in exclude:
        keys = tuple(sorted(one))
        grouped.setdefault(keys, set()).add(tuple(one[key] for key in keys))
    return grouped


@dataclass(frozen=True)
class _Shape:
    """What `stages_per_rank = "auto"` is as a number, and what a program file holds."""

    stages_per_rank: int
    program_digest: str


def _shape_of(schedule: str) -> _Shape:
    """A file that cannot be used is left for the check of what is possible to refuse."""
    if not schedule.startswith(CSV_PREFIX):
        return _Shape(find_schedule(schedule).stages_per_rank.default, "")
    path = Path(schedule.removeprefix(CSV_PREFIX))
    try:
        return _Shape(most_stages_per_rank(read_csv(path)), digest_of(path))
    except (OSError, ProgramFileError):
        return _Shape(1, "")


def _flattened(checked: SweepFile) -> dict[str, object]:
    """Dotted key -> value of every setting."""
    flat: dict[str, object] = {}
    for key, value in checked.model_dump().items():
        if isinstance(value, dict):
            flat.update({f"{key}.{k}": v for k, v in value.items() if not isinstance(v, dict)})
        else:
            flat[key] = value
    return flat


def _frozen(settings: dict[str, object]) -> Planned:
    case = {name: settings[key] for key, name in _CASE_FIELDS.items()}
    measure = {name: settings[key] for key, name in _MEASURE_FIELDS.items()}
    return Case(**case), Measure(**measure)  # type: ignore[arg-type]  # the schema checked them


def _check_possible(
    source: Source,
    tree: Tree,
    axes: Mapping[str, object],
    planned: Sequence[Planned],
    *,
    is_of_this_tree: bool,
) -> Mapping[Identity, Facts]:
    """Refuse the first case that nothing can run; returns the facts of the models.

    Models are looked at only if the rest is fine.
    """
    problems = [problems_of_settings(*one, is_of_this_tree=is_of_this_tree) for one in planned]
    _refuse(source, axes, planned, [next(some, None) for some in problems])
    if not is_of_this_tree:
        planned = [one for one in planned if is_known_by_name(one[0])]
    is_set = "data.max_seq_len" in axes or holds(tree, ("data", "max_seq_len"))
    try:
        facts = facts_of(identity_of(case) for case, _ in planned)
    except UsageError as error:
        raise source.error_of("model.preset", axes, ("data.tokenizer",), str(error)) from None
    fits = (
        problems_of_fit(case, facts[identity_of(case)], is_max_seq_len_set=is_set)
        for case, _ in planned
    )
    _refuse(source, axes, planned, [next(problems, None) for problems in fits])
    return facts


def _refuse(
    source: Source,
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
    keys = axes_at_fault(first, planned, problems, list(axes))
    told, line_end, drawing = problem.message.partition("\n")
    combination = in_words(planned[first], keys, is_rest_fine=None in problems)
    message = f"{told}{combination}{line_end}{drawing}"
    raise source.error_of(problem.key, axes, [*keys, *_DECISIVE], message)


def _check_unique(source: Source, planned: Sequence[Planned], axes: Mapping[str, object]) -> None:
    """Two spellings of one setting (such as `auto` and `cpu`) would measure a case twice."""
    twice = first_twice(planned)
    if twice is None:
        return
    case, measure = planned[twice]
    point = ", ".join(f"{key} = {brief(setting_of(case, measure, key))}" for key in axes)
    raise source.error(("grid",), f"two combinations are one case, with {point}")
