"""Reads a sweep file: parse, override, check, expand into frozen cases.

    text --tomllib--> tree --(--set)--> tree --schema--> settings x grid - exclude --> cases
                                          the settings of [[override]] in place of the file's own
    cases, facts of their models --feasibility--> cases that can run

Every refusal names file, line, key, value and what is allowed, before anything is written or
started (except for the process that inspects models other than presets).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from engine.model.descriptions import Facts, Identity, Problem
from engine.plan.schedules.registry import CSV_PREFIX, ProgramFileError, find_schedule, read_csv
from ppbench.config.case import (
    EMULATED,
    Case,
    Measure,
    Planned,
    PlanSettings,
    Slurm,
    Torchrun,
    setting_of,
    with_recompute_by_stage,
)
from ppbench.config.feasibility import (
    is_known_by_name,
    look_at_files,
    problems_of_fit,
    problems_of_settings,
)
from ppbench.config.kinds import AUTO, first_twice
from ppbench.config.programs import (
    digest_of,
    facts_of,
    identity_of,
    most_stages_per_rank,
    read_costs,
)
from ppbench.config.schema import CostsFile, SweepFile, TrackSection, known_keys, shared_keys
from ppbench.config.shipped import find_sweep
from ppbench.config.sweep import (
    EVERYTHING,
    LISTS,
    MOST_ACCEPTED,
    Accepted,
    Sweep,
    Track,
    checked_value,
    is_list_of_values,
    parse_assignment,
    read_conditions,
    read_fraction,
    read_threshold,
)
from ppbench.config.synonyms import SYNONYMS, setting_named
from ppbench.config.toml import (
    Place,
    Source,
    Tree,
    brief,
    describe,
    holds,
    parse,
    read_text,
    shown,
    unknown_key,
)
from ppbench.errors import UsageError

MAX_CASES = 100_000
_NOT_AN_AXIS = {
    "name": "it names the whole sweep",
    "measure.launches": "all cases have the same number of launches",
    "measure.budget": "it is the time of the whole sweep",
    "measure.resolution": "it belongs to the question of the whole sweep",
    "measure.order_seed": "it sets the order of the cases of a launch",
}
_SHARED = {
    "launch.torchrun": "it sets where launches run",
    "launch.slurm": "it sets where launches run",
    "track": "it sets what is tracked over commits",
    "plan": "it sets what a plan is asked for",
}
_MAY_BE_LISTS = (*LISTS, "train.recompute")
"""Settings whose value may be a list: one that is wrong is said to be so."""
_DECISIVE = ("schedule", "runtime", "model.preset", "stages_per_rank", "world_size")
"""Keys that restrict others, which may have been left at their defaults."""
_COSTS = "emulated.costs"
BLOCK_ON_DEVICE = 4
"""Steps of a turn where the host issues them ahead, so that it is ahead in most of them.

Elsewhere a turn has one step: what disturbs a machine lasts for some steps, and arms that take
turns more often have more of it in common. On two shared cores the variance of a difference, for
the same time, was 2.5 times as large with four steps as with one, disturbed or not.
"""
_MEASURE_FIELDS = {
    key: key.removeprefix("measure.") for key in known_keys() if key.startswith("measure.")
}
_CASE_FIELDS = {
    key: key.replace(".", "_")
    for key in (*known_keys(), "program_digest")
    if key not in _MEASURE_FIELDS and key != "name"
}


def read_sweep(
    file: Path, overrides: Sequence[str], default_device: str, *, is_of_this_tree: bool = True
) -> Sweep:
    """Read a sweep file, or the shipped sweep of that name, and expand it into cases.

    `overrides` are `KEY=VALUE` with a dotted key and a TOML value; `default_device` is the meaning
    of `device = "auto"` here. Without `is_of_this_tree` the cases run in a tree with other files,
    and no file that they name is checked. Raises UsageError for a file that cannot be read or an
    override that cannot be parsed, SweepFileError for everything in the file.
    """
    file = find_sweep(file) if is_of_this_tree else file
    text = read_text(file)
    tree = parse(file, text)
    _resolve_synonyms(Source(str(file), text, frozenset()), tree)
    pairs = [parse_assignment("--set", override, shared_keys()) for override in overrides]
    for key, value in pairs:
        _override(tree, key, value)
    source = Source(str(file), text, frozenset(key for key, _ in pairs))
    grid = _flat(source, tree.pop("grid", {}), ("grid",))
    excluding = tree.pop("exclude", [])
    if not isinstance(excluding, list):
        raise source.error(("exclude",), "expected [[exclude]], an array of tables")
    exclude = []
    for index, table in enumerate(excluding):
        where = ("exclude", index)
        flat = _flat(source, table, where)
        if not flat:
            raise source.error(where, "is empty and would exclude every case")
        exclude.append({key: _checked_value(source, key, v, where) for key, v in flat.items()})
    overridden = [key.removeprefix("grid.") for key, _ in pairs]
    overriding = _read_overrides(source, tree.pop("override", []), grid, overridden)
    if "name" not in tree:
        try:
            tree["name"] = str(checked_value("name", file.stem))
        except ValueError as error:
            problem = f'{error}; this is the name of the file; set one, such as name = "mine"'
            raise source.error(("name",), problem) from None
    try:
        checked = SweepFile.model_validate(tree).model_dump()
    except ValidationError as error:
        first = error.errors()[0]
        problem = _misplaced(first["loc"], first["input"])
        others = ("grid", "exclude", "override")
        raise source.error(first["loc"], problem or describe(first, SweepFile, others)) from None
    settings: dict[str, object] = {}  # by dotted key
    for key, value in checked.items():
        if isinstance(value, dict):
            settings |= {f"{key}.{k}": v for k, v in value.items() if not isinstance(v, dict)}
        else:
            settings[key] = value
    launch = checked["launch"]
    axes = _checked_axes(source, grid)
    for values in ({}, *(override.values for override in overriding)):
        whole = {**settings, **values}
        if any(axes.get(_COSTS, [whole[_COSTS]])):  # a file with costs sets all times
            for key in (f"emulated.{name}" for name in CostsFile.model_fields):
                if key in axes or whole[key]:
                    problem = f"{_COSTS} names a file with the times; set one or the other"
                    raise source.error(source.path_of(key, axes), problem)
    cases = tuple(_expand(settings, axes, exclude, overriding, default_device))
    if not cases:
        raise source.error(("exclude",), "excludes every combination of the grid; nothing to run")
    if (twice := first_twice(cases)) is not None:  # by two spellings, such as `auto` and `cpu`
        point = ", ".join(f"{key} = {brief(setting_of(*cases[twice], key))}" for key in axes)
        raise source.error(("grid",), f"two combinations give the same case, with {point}")
    facts = _check_possible(source, tree, axes, cases, is_of_this_tree=is_of_this_tree)
    section = TrackSection(**checked["track"])
    thresholds = []
    for key, value in section.thresholds.items():
        try:
            thresholds.append(read_threshold(key, value))
        except ValueError as error:
            raise source.error(("track", "thresholds", key), str(error)) from None
    folder = Path(source.file).resolve().parent
    repo = folder / section.repo
    if not repo.is_dir():
        raise source.error(("track", "repo"), f"no such folder: {brief(section.repo)}")
    accepted = []
    for index, entry in enumerate(section.accept):
        key = "cases"
        try:
            only = EVERYTHING if entry.cases is None else read_conditions(entry.cases)
            key = "up_to"
            most = None if entry.up_to is None else read_fraction(entry.up_to, MOST_ACCEPTED)
        except ValueError as error:
            raise source.error(("track", "accept", index, key), str(error)) from None
        accepted.append(Accepted(entry.commit, entry.reason, only, entry.metric, most))
    return Sweep(
        str(tree["name"]),
        str(file),
        cases,
        _columns_that_vary(axes, overriding, cases),
        Torchrun(**launch["torchrun"]),
        Slurm(**launch["slurm"]),
        Track(repo, section.setup, tuple(thresholds), tuple(accepted)),
        PlanSettings(**checked["plan"]),
        facts,
    )


def _resolve_synonyms(source: Source, tree: Tree) -> None:
    """Rename `ranks` and `microbatches` to the settings that they mean, wherever settings are."""
    places: list[tuple[Place, object]] = [((), tree), (("grid",), tree.get("grid"))]
    for name, inner in (("exclude", None), ("override", "set"), ("override", "where")):
        tables = tree.get(name)
        for index, table in enumerate(tables if isinstance(tables, list) else ()):
            path: Place = (name, index) if inner is None else (name, index, inner)
            holder = table if inner is None or not isinstance(table, dict) else table.get(inner)
            places.append((path, holder))
    for path, table in places:
        if not isinstance(table, dict):
            continue
        for word, key in SYNONYMS.items():
            if word in table and key in table:
                problem = f"is given twice: {word} is another word for {key}"
                raise source.error((*path, word), problem)
        renamed = {setting_named(name): value for name, value in table.items()}
        table.clear()
        table.update(renamed)


def _override(tree: Tree, key: str, value: object) -> None:
    """Replace an axis if the key is an axis or the value an array, else the setting."""
    bare = key.removeprefix("grid.")
    if bare in shared_keys():
        _put(tree, bare, value)
        return
    grid = tree.setdefault("grid", {})
    if not isinstance(grid, dict):
        return  # the check of [grid] refuses it
    head, _, rest = bare.partition(".")
    inner = grid.get(head)  # keys may be written as nested tables
    is_axis = bare in grid or (isinstance(inner, dict) and inner.pop(rest, None) is not None)
    if is_axis or key != bare or is_list_of_values(bare, value):
        grid[bare] = value if isinstance(value, list) else [value]
    else:
        _put(tree, bare, value)


def _put(tree: Tree, key: str, value: object) -> None:
    """Set a dotted key. The schema refuses a section that is not a table."""
    head, _, rest = key.partition(".")
    if not rest:
        tree[head] = value
    elif isinstance(inner := tree.setdefault(head, {}), dict):
        tree[head] = changed = dict(inner)
        _put(changed, rest, value)


def _flat(source: Source, table: object, path: tuple[str | int, ...]) -> dict[str, object]:
    """Flatten nested tables to dotted keys, which must all be known."""
    if not isinstance(table, dict):
        raise source.error(path, f"expected a table, got {shown(table)}")
    flat: dict[str, object] = {}
    dotted: list[tuple[str, object]] = []
    for key, value in table.items():  # keys of a section may be quoted or in a table
        if isinstance(value, dict):
            dotted += ((f"{key}.{inner}", v) for inner, v in value.items())
        else:
            dotted.append((key, value))
    for key, value in dotted:
        where = (*path, *((key,) if key in table else key.split(".")))
        if key in _NOT_AN_AXIS:
            raise source.error(where, f"cannot be an axis: {_NOT_AN_AXIS[key]}")
        if reason := next((why for name, why in _SHARED.items() if _is_in(key, name)), ""):
            raise source.error(where, f"cannot be an axis: {reason} for all cases")
        if key not in known_keys():
            known = [k for k in known_keys() if k not in _NOT_AN_AXIS]
            raise source.error(where, unknown_key(key, value, known))
        if key in flat:
            raise source.error(where, "is given twice: by its quoted name and in a table")
        flat[key] = value
    return flat


def _is_in(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


@dataclass(frozen=True)
class _Override:
    """Settings of the cases that have one of the allowed values of every key of `where`."""

    where: Mapping[str, Sequence[object]]
    values: Mapping[str, object]


def _read_overrides(
    source: Source, tables: object, grid: Mapping[str, object], set_here: Sequence[str]
) -> list[_Override]:
    """The overrides of the file, without the keys that the command line sets."""
    if not isinstance(tables, list):
        raise source.error(("override",), "expected [[override]], an array of tables")
    overrides = []
    for index, table in enumerate(tables):
        path = ("override", index)
        if not isinstance(table, dict) or set(table) != {"where", "set"}:
            problem = "expected where = {KEY = VALUE, ...} and set = {KEY = VALUE, ...}"
            raise source.error(path, f"{problem}, got {shown(table)}")
        flat = {name: _flat(source, table[name], (*path, name)) for name in ("where", "set")}
        for name, settings in flat.items():
            if not settings:
                raise source.error((*path, name), "is empty; expected KEY = VALUE")
        if axis := next((key for key in flat["set"] if key in grid), ""):
            place = source.path_in((*path, "set"), axis)
            raise source.error(place, "is an axis of [grid], which sets it for every case")
        where = {}
        for key, value in flat["where"].items():
            listed = value if isinstance(value, list) and is_list_of_values(key, value) else [value]
            where[key] = [_checked_value(source, key, v, (*path, "where")) for v in listed]
        values = {k: _checked_value(source, k, v, (*path, "set")) for k, v in flat["set"].items()}
        kept = {key: value for key, value in values.items() if key not in set_here}
        overrides.append(_Override(where, kept))
    return overrides


def _columns_that_vary(
    axes: Iterable[str], overriding: Sequence[_Override], cases: Sequence[Planned]
) -> tuple[str, ...]:
    """Columns of the axes, and of overridden keys that differ but for times of emulated stages.

    Recomputation by stage has a column of its own.
    """
    overridden = dict.fromkeys(key for override in overriding for key in override.values)
    varied = (
        key
        for key in overridden
        if not _is_in(key, "emulated") and len({setting_of(*case, key) for case in cases}) > 1
    )
    keys = (*axes, *varied)
    has_lists = any(case.train_recompute_stages for case, _ in cases)
    by_stage = ("train_recompute_stages",) if has_lists and "train.recompute" in keys else ()
    return (*(key.replace(".", "_") for key in keys), *by_stage)


def _checked_axes(source: Source, grid: dict[str, object]) -> dict[str, list[object]]:
    listed = {key: v if isinstance(v, list) else [v] for key, v in grid.items()}
    num_cases = math.prod(len(values) for values in listed.values() if values)
    if num_cases > MAX_CASES:
        raise source.error(("grid",), f"{num_cases:,} cases; at most {MAX_CASES:,} are allowed")
    axes = {}
    for key, values in listed.items():
        if not values:
            where = source.path_in(("grid",), key)
            raise source.error(where, "an axis needs at least one value, got []")
        axes[key] = checked = [
            _checked_value(source, key, value, ("grid",), index)
            for index, value in enumerate(values)
        ]
        if (twice := first_twice(checked)) is not None:
            where = (*source.path_in(("grid",), key), twice)
            raise source.error(where, f"{shown(values[twice])} is listed twice")
    return axes


def _checked_value(
    source: Source, key: str, value: object, table: Place, index: int | None = None
) -> object:
    """Check one value of an axis or an exclude; aliases are resolved."""
    try:
        return checked_value(key, value)
    except ValueError as error:
        written = source.path_in(table, key)
        where = written if index is None else (*written, index)
        raise source.error(where, str(error)) from None


def _misplaced(path: Place, value: object) -> str:
    """The message for a key or value that is valid elsewhere; empty if it is not."""
    key, *others = (".".join(map(str, path[start:])) for start in range(len(path)))
    if (
        isinstance(value, list)
        and key in known_keys()
        and key not in (*_MAY_BE_LISTS, *_NOT_AN_AXIS)
    ):
        return f"expected one value, got {shown(value)}; list several values of a key in [grid]"
    if len(path) == 1 and "." in key and key in known_keys():
        return f"write this key without quotes: {key} = {brief(value)}"
    name = others[-1] if others else key
    known = [*known_keys(), *shared_keys()]
    homes = [path for path in known if path.split(".")[-1] == name]
    if any(_is_in(key, path) for path in known) or not homes:
        return ""
    sections = ", ".join(f"[{home.rpartition('.')[0]}]" for home in homes if "." in home)
    where = f"in {sections}" if sections else "at the top, before the first [section]"
    return f"unknown key here, set to {shown(value)}; {name} belongs {where}"


def _expand(
    settings: dict[str, object],
    axes: dict[str, list[object]],
    exclude: list[dict[str, object]],
    overriding: Sequence[_Override],
    default_device: str,
) -> Iterator[Planned]:
    """The cases of the grid; values were checked one by one, since no check spans two keys."""
    # The values to exclude by their keys, so that thousands are looked up as fast as one.
    excluded: dict[tuple[str, ...], set[tuple[object, ...]]] = {}
    for excluding in exclude:
        keys = tuple(sorted(excluding))
        excluded.setdefault(keys, set()).add(tuple(excluding[key] for key in keys))
    shape_of = functools.cache(_shape_of)  # a file may change between two sweeps
    for values in itertools.product(*axes.values()):
        point = {**settings, **dict(zip(axes, values, strict=True))}
        if point["device"] == AUTO:
            point["device"] = default_device
        before = point
        for override in overriding:  # each on those before it
            if all(point[key] in allowed for key, allowed in override.where.items()):
                point = {**point, **override.values}
        if point["device"] != EMULATED:  # `--set device=cpu` measures what the file emulates
            point |= {key: v for key, v in before.items() if _is_in(key, "emulated")}
        if point["device"] == AUTO:
            point["device"] = default_device
        stages_per_rank, point["program_digest"] = shape_of(str(point["schedule"]))
        if point["stages_per_rank"] == AUTO:
            point["stages_per_rank"] = stages_per_rank
        if costs := str(point[_COSTS]):
            with contextlib.suppress(ValueError):  # an unusable file is refused as infeasible later
                point |= {f"emulated.{name}": times for name, times in read_costs(costs).items()}
        if any(tuple(point[k] for k in keys) in points for keys, points in excluded.items()):
            continue
        case = {name: point[key] for key, name in _CASE_FIELDS.items()}
        measure = {name: point[key] for key, name in _MEASURE_FIELDS.items()}
        if measure["block"] == 0:
            is_issued_ahead = point["device"] not in ("cpu", EMULATED)
            measure["block"] = BLOCK_ON_DEVICE if is_issued_ahead else 1
        yield Case(**with_recompute_by_stage(case)), Measure(**measure)  # type: ignore[arg-type]  # the schema checked them


def _shape_of(schedule: str) -> tuple[int, str]:
    """The number for `stages_per_rank = "auto"`, and the hash of a program file.

    An unusable file is refused as infeasible later.
    """
    if schedule == AUTO:
        return 1, ""
    if not schedule.startswith(CSV_PREFIX):
        return find_schedule(schedule).stages_per_rank.default, ""
    path = Path(schedule.removeprefix(CSV_PREFIX))
    try:
        return most_stages_per_rank(read_csv(path)), digest_of(path)
    except (OSError, ProgramFileError):
        return 1, ""


def _check_possible(
    source: Source,
    tree: Tree,
    axes: Mapping[str, object],
    planned: Sequence[Planned],
    *,
    is_of_this_tree: bool,
) -> Mapping[Identity, Facts]:
    """Refuse the first case that cannot run; returns the facts of the models.

    Models are inspected only if everything else is valid.
    """
    look_at_files.cache_clear()
    problems = [problems_of_settings(*case, is_of_this_tree=is_of_this_tree) for case in planned]
    _refuse(source, axes, planned, [next(of_case, None) for of_case in problems])
    if not is_of_this_tree:
        planned = [(case, measure) for case, measure in planned if is_known_by_name(case)]
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
    """Raise the first problem, if any, with the combination that has it."""
    first = next((index for index, problem in enumerate(problems) if problem), None)
    if first is None:
        return
    problem, at_fault = problems[first], planned[first]
    assert problem is not None
    others = [
        case
        for case, other in zip(planned, problems, strict=True)
        if other is None or other.key != problem.key
    ]
    keys = list(axes)
    for key in axes:  # the fewest, found greedily, whose values no case without the problem has
        fewer = [kept for kept in keys if kept != key]
        wanted = [setting_of(*at_fault, kept) for kept in fewer]
        if not any([setting_of(*other, kept) for kept in fewer] == wanted for other in others):
            keys = fewer
    schedule = at_fault[0].schedule
    if problem.key == "schedule" and schedule.startswith(CSV_PREFIX):
        path = shlex.quote(schedule.removeprefix(CSV_PREFIX))
        remedy = f"; mend the file until this accepts it: ppbench schedules check {path}"
    else:
        has_valid_cases = None in problems
        remedy = "; leave it out with [[exclude]], or change the grid" if has_valid_cases else ""
    values = []
    for key in keys:
        value = setting_of(*at_fault, key)
        if isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], float):
            value = value[0]  # as `[[exclude]]` takes a single time for all stages
        values.append(f"{key} = {brief(value)}")
    reason, line_end, drawing = problem.message.partition("\n")
    combination = f" (in the combination {', '.join(values)}{remedy})" if keys else ""
    message = f"{reason}{combination}{line_end}{drawing}"
    raise source.error_of(problem.key, axes, [*keys, *_DECISIVE], message)
