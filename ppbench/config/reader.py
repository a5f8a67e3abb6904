"""Reads a sweep file: parse, flatten, check each key, expand into frozen cases.

    text --tomllib--> tree --> dotted keys with their places --(--set)--> settings, axes,
    conditions --> cases --feasibility--> cases that can run

A key is checked by itself, by its row in `SETTINGS`. Every refusal names file, line, key, what is
wrong and what is expected, before anything is written or started (except for the process that
inspects models other than presets).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engine.model.descriptions import Facts, Identity, Problem
from engine.plan.schedules.registry import CSV_PREFIX, SCHEDULES, ProgramFileError, read_csv
from ppbench.config import kinds
from ppbench.config.case import (
    CASE_KEYS,
    EMULATED,
    SETTINGS,
    TIMES,
    Case,
    Measure,
    Planned,
    PlanSettings,
    Slurm,
    Supervision,
    Torchrun,
    TrackSettings,
    setting_of,
    with_recompute_by_stage,
)
from ppbench.config.conditions import (
    EVERYTHING,
    Conditions,
    alternatives,
    condition_on,
    parse_assignment,
    read_conditions,
    stages_of,
)
from ppbench.config.feasibility import (
    is_known_by_name,
    look_at_files,
    problems_of_fit,
    problems_of_settings,
)
from ppbench.config.kinds import AUTO, first_twice, name_from
from ppbench.config.programs import (
    digest_of,
    facts_of,
    identity_of,
    most_stages_per_rank,
    read_costs,
)
from ppbench.config.shipped import find_sweep
from ppbench.config.sweep import Accepted, Given, Sweep, SweepText, Threshold, Track
from ppbench.config.toml import (
    Place,
    Source,
    brief,
    column_named,
    read_source,
    setting_named,
    shown,
    text_of,
    unknown_key,
)
from ppbench.errors import UsageError

T = TypeVar("T")
MAX_CASES = 100_000
_DECISIVE = ("schedule", "runtime", "model.preset", "stages_per_rank", "world_size")
"""Keys that restrict others, which may have been left at their defaults."""
_COSTS = "emulated.costs"
_TABLES = ("grid", "exclude", "override")
_SECTIONS = {key[:at] for key in SETTINGS for at in range(len(key)) if key[at] == "."}
"""The tables that hold settings, such as `launch` and `launch.slurm`."""
BLOCK_ON_DEVICE = 4
"""Steps of a turn where the host issues them ahead, so that it is ahead in most of them.

Elsewhere a turn has one step: what disturbs a machine lasts for some steps, and arms that take
turns more often have more of it in common. On two shared cores the variance of a difference, for
the same time, was 2.5 times as large with four steps as with one, disturbed or not.
"""


@dataclass(frozen=True)
class Rule:
    """A rule overrides settings of the cases that meet conditions, or leaves these out."""

    where: Conditions
    place: Place
    values: Mapping[str, object] | None  # None: excluded


def flat(source: Source, table: object, place: Place, *, is_axes: bool) -> dict[str, Given]:
    """The settings of a table by their dotted keys, which must all be known, each given once.

    A key of a section may be written in a table, dotted or quoted. With `is_axes`, settings that
    all cases share are refused.
    """
    found: dict[str, Given] = {}

    def add(prefix: str, inner: object, at: Place) -> None:
        if not isinstance(inner, dict):
            raise source.error(at, f"expected a table; got {shown(inner)}")
        for name, value in inner.items():
            key, where = setting_named(f"{prefix}{name}"), (*at, name)
            if key in _SECTIONS:
                add(f"{key}.", value, where)
            elif key not in SETTINGS:
                known = CASE_KEYS if is_axes else (*SETTINGS, *_TABLES)
                raise source.error(where, unknown_key(key, value, known))
            elif is_axes and (reason := SETTINGS[key].shared):
                raise source.error(where, f"cannot be an axis: {reason}")
            elif key in found:
                problem = f"is given twice: {text_of(found[key].place)} is the same key"
                raise source.error(where, problem)
            else:
                found[key] = Given(value, where)

    add("", table, place)
    return found


def read_sweep(
    file: Path,
    overrides: Sequence[str],
    default_device: str,
    *,
    is_of_this_tree: bool = True,
    is_question: bool = False,
) -> Sweep:
    """Read a sweep file, or the shipped sweep of that name, and expand it into cases.

    `overrides` are `KEY=VALUE` with a dotted key and a TOML value; `default_device` is the meaning
    of `device = "auto"` here. Without `is_of_this_tree` the cases run in a tree with other files,
    and no file that they name is checked. `is_question`: a plan, which chooses the schedule, is to
    answer, so that of the cases need not take slices. Raises UsageError for a file that cannot be
    read or an override that cannot be parsed, SweepFileError for everything in the file.
    """
    source = read_source(find_sweep(file) if is_of_this_tree else file)
    tables = {name: source.tree[name] for name in _TABLES if name in source.tree}
    settings = {name: value for name, value in source.tree.items() if name not in _TABLES}
    said = SweepText(
        source,
        default_device,
        flat(source, settings, (), is_axes=False),
        flat(source, tables.get("grid", {}), ("grid",), is_axes=True),
    )
    set_here: set[str] = set()
    for assignment in overrides:
        key, value, is_axis = parse_assignment("--set", assignment, [*SETTINGS])
        set_here.add(key)
        several = isinstance(value, list) and alternatives(key, value) == value
        if is_axis or key in said.grid or (several and not SETTINGS[key].shared):
            said.grid[key] = Given(value, ("grid", key), is_set_here=True)
        else:
            said.top[key] = Given(value, (key,), is_set_here=True)
    values = {key: declared.default for key, declared in SETTINGS.items()}
    values["name"] = name_from(Path(source.file).stem)
    values |= {key: said.checked(key, given) for key, given in said.top.items()}
    rules = [
        Rule(_conditions(said, table, place), place, None)
        for table, place in source.tables(tables.get("exclude", []), ("exclude",))
    ]
    for table, place in source.tables(tables.get("override", []), ("override",)):
        rules.append(_override(said, table, place, set_here))
    axes = _checked_axes(said)
    for changed in ({}, *(rule.values for rule in rules if rule.values)):
        whole = {**values, **changed}
        if any(axes.get(_COSTS, [whole[_COSTS]])):  # a file with costs sets all times
            for key in (f"emulated.{time.removeprefix('emulated_')}" for time in TIMES):
                if key in axes or whole[key]:
                    problem = f"{_COSTS} names a file with the times; set one or the other"
                    raise said.error_of(key, (), problem)
    idle = {rule.place: rule.where for rule in rules}  # conditions that no case has met so far
    cases = tuple(_expand(said, values, axes, rules, idle))
    if not cases:
        raise source.error(("exclude",), "excludes every combination of the grid; nothing to run")
    if (twice := first_twice(cases)) is not None:  # by two spellings, such as `auto` and `cpu`
        point = ", ".join(f"{key} = {brief(setting_of(*cases[twice], key))}" for key in axes)
        raise source.error(("grid",), f"two combinations give the same case, with {point}")
    possible = tuple(map(_in_slices, cases)) if is_question else cases
    facts = _check_possible(said, possible, is_of_this_tree=is_of_this_tree)
    track, of_track = _track(said, _built(TrackSettings, values))
    idle |= {place: only for place, only in of_track.items() if not any(map(only.matches, cases))}
    unmet = [
        place
        for place, where in idle.items()
        if where.each and set_here.isdisjoint(one.key for one in where.each)
    ]
    notes = []
    if not source.tree and not overrides:
        notes.append(
            f"{source.file}: is empty, so that every setting has its default; for a file to start "
            "from: ppbench init FILE"
        )
    if unmet:
        num = len(unmet) - 1
        others = f"; nor {'does' if num == 1 else 'do'} {num:,} more" if num else ""
        line = source.line_of(unmet[0])
        notes.append(f"{source.file}:{line}: {idle[unmet[0]]} matches no case{others}")
    for name in (known.name for known in SCHEDULES.values() if known.in_slices is not None):
        trained = [case for case, _ in cases if case.schedule == name and case.trains]
        if trained and all(case.slices_number == 1 for case in trained):
            notes.append(
                f"{source.file}: {name} takes microbatches in slices, and is 1f1b without any; set "
                "slices.number"
            )
    return Sweep(
        str(values["name"]),
        source.file,
        cases,
        _columns_that_vary(axes, rules, cases),
        _built(Torchrun, values),
        _built(Slurm, values),
        _built(Supervision, values),
        track,
        _built(PlanSettings, values),
        facts,
        said,
        tuple(notes),
    )


def _built(owner: type[T], values: Mapping[str, object]) -> T:
    """An object of a settings class, with the values of its keys."""
    declared = (one for one in SETTINGS.values() if one.owner is owner)
    return owner(**{one.field: values[one.key] for one in declared})


def _conditions(said: SweepText, table: object, place: Place) -> Conditions:
    """The conditions of a table, whose values may be lists of alternatives."""
    found = []
    for key, one in _settings_in(said, table, place).items():
        try:
            found.append(condition_on(key, one.value, said.device))
        except ValueError as error:
            raise said.error(one, str(error)) from None
    return Conditions(tuple(found))


def _settings_in(said: SweepText, table: object, place: Place) -> dict[str, Given]:
    """Return the settings of a table, which must have some."""
    given = flat(said.source, table, place, is_axes=True)
    if not given:
        raise said.source.error(place, "is empty; expected KEY = VALUE")
    return given


def _override(said: SweepText, table: object, place: Place, set_here: set[str]) -> Rule:
    """An override, without the keys that the command line sets."""
    if not isinstance(table, dict) or set(table) != {"where", "set"}:
        problem = "expected where = {KEY = VALUE, ...} and set = {KEY = VALUE, ...}"
        raise said.source.error(place, f"{problem}; got {shown(table)}")
    where = _conditions(said, table["where"], (*place, "where"))
    given = _settings_in(said, table["set"], (*place, "set"))
    for key, one in given.items():
        if key in said.grid:
            raise said.error(one, "is an axis of [grid], which sets it for every case")
    values = {key: said.checked(key, one) for key, one in given.items()}
    said.sets.append({key: one for key, one in given.items() if key not in set_here})
    return Rule(where, place, {key: values[key] for key in said.sets[-1]})


def _checked_axes(said: SweepText) -> dict[str, list[Any]]:
    """The values of each axis."""
    given = {key: one.value if isinstance(one.value, list) else [one.value]
             for key, one in said.grid.items()}  # fmt: skip
    num_cases = math.prod(len(values) for values in given.values() if values)
    if num_cases > MAX_CASES:
        problem = f"{num_cases:,} cases; at most {MAX_CASES:,} are allowed"
        raise said.error_of("grid", [*said.grid], problem)
    axes = {}
    for key, values in given.items():
        axis = said.grid[key]
        if not values:
            raise said.error(axis, "an axis needs at least one value, got []")
        each = [
            dataclasses.replace(axis, value=value, place=(*axis.place, index))
            for index, value in enumerate(values)
        ]
        axes[key] = [said.checked(key, one) for one in each]
        if (twice := first_twice(axes[key])) is not None:
            raise said.error(each[twice], f"{shown(values[twice])} is listed twice")
    return axes


def _expand(
    said: SweepText,
    settings: Mapping[str, Any],
    axes: Mapping[str, Sequence[Any]],
    rules: Sequence[Rule],
    idle: dict[Place, Conditions],
) -> Iterator[Planned]:
    """The cases of the grid; conditions that are met are removed from `idle`."""
    shape_of = functools.cache(_shape_of)  # a file may change between two sweeps
    times = {key for rule in rules for key in rule.values or () if key.startswith("emulated.")}
    of_case = [declared for declared in SETTINGS.values() if declared.owner is Case]

    def resolved(point: Mapping[str, Any]) -> dict[str, Any]:
        """The point without `auto`, so that conditions compare what a case has."""
        stages, digest = shape_of(point["schedule"])
        whole = {**point, "program_digest": digest}
        if point["device"] == AUTO:
            whole["device"] = said.device
        if point["stages_per_rank"] == AUTO:
            whole["stages_per_rank"] = stages
        return whole

    for values in itertools.product(*axes.values()):
        point = before = {**settings, **dict(zip(axes, values, strict=True))}
        for rule in rules:  # each on those before it
            if rule.values is not None and rule.where.holds(resolved(point).__getitem__):
                idle.pop(rule.place, None)
                point = {**point, **rule.values}
        point = resolved(point)
        if point["device"] != EMULATED:  # `--set device=cpu` measures what the file emulates
            point |= {key: before[key] for key in times}
        if costs := str(point[_COSTS]):
            with contextlib.suppress(ValueError):  # an unusable file is refused as infeasible later
                point |= {f"emulated.{name}": times for name, times in read_costs(costs).items()}
        excluding = (rule for rule in rules if rule.values is None)
        met = next((one.place for one in excluding if one.where.holds(point.__getitem__)), None)
        if met is not None:
            idle.pop(met, None)
            continue
        case = {one.field: point[one.key] for one in of_case}
        case["program_digest"] = point["program_digest"]
        measure = _built(Measure, point)
        if measure.block == 0:
            is_issued_ahead = point["device"] not in ("cpu", EMULATED)
            block = BLOCK_ON_DEVICE if is_issued_ahead else 1
            measure = dataclasses.replace(measure, block=block)
        yield Case(**with_recompute_by_stage(case)), measure  # type: ignore[arg-type]  # each value was checked


def _shape_of(schedule: str) -> tuple[int, str]:
    """The number for `stages_per_rank = "auto"`, and the hash of a program file.

    An unusable file is refused as infeasible later.
    """
    if (own := stages_of(schedule)) is not None:
        return own, ""
    path = Path(schedule.removeprefix(CSV_PREFIX))
    try:
        return most_stages_per_rank(read_csv(path)), digest_of(path)
    except (OSError, ProgramFileError):
        return 1, ""


def _columns_that_vary(
    axes: Mapping[str, object], rules: Sequence[Rule], cases: Sequence[Planned]
) -> tuple[str, ...]:
    """Columns of the axes, and of overridden keys that differ but for times of emulated stages.

    Recomputation by stage has a column of its own.
    """
    overridden = dict.fromkeys(key for rule in rules for key in rule.values or ())
    others = (key for key in overridden if not key.startswith("emulated."))
    keys = [*axes, *(key for key in others if len({setting_of(*case, key) for case in cases}) > 1)]
    columns = [column_named(key) for key in keys]
    if "train.recompute" in keys and any(case.train_recompute_stages for case, _ in cases):
        columns.append("train_recompute_stages")
    return tuple(columns)


def _track(said: SweepText, asked: TrackSettings) -> tuple[Track, dict[Place, Conditions]]:
    """`[track]` with its paths resolved and its conditions read, and the places of these."""
    source, found = said.source, dict[Place, Conditions]()
    folder = Path(source.file).resolve().parent
    if not (folder / asked.repo).is_dir():
        problem = f"no such folder: {brief(asked.repo)}"
        raise said.error_of("track.repo", (), problem)

    def conditions(text: str, place: Place) -> Conditions:
        try:
            found[place] = read_conditions([text], said.device)
        except ValueError as error:
            raise source.error(place, str(error)) from None
        return found[place]

    thresholds, accepted = [], []
    for key, value in asked.thresholds.items():
        place = (*said.top["track.thresholds"].place, key)
        only = EVERYTHING if key == "default" else conditions(key, place)
        thresholds.append(Threshold(only, source.checked(kinds.SHARE, value, place)))
    given = said.top.get("track.accept")
    for table, place in source.tables(asked.accept, given.place if given else ()):
        entry = source.read(Accepted, table, place)
        only = conditions(entry.cases, (*place, "cases")) if entry.cases else EVERYTHING
        accepted.append(dataclasses.replace(entry, only=only))
    return Track(folder / asked.repo, asked.setup, tuple(thresholds), tuple(accepted)), found


def _in_slices(planned: Planned) -> Planned:
    """The same with a schedule that takes the case's slices, if its own does not."""
    case, measure = planned
    schedule = SCHEDULES.get(case.schedule)
    if case.slices_number == 1 or schedule is None or schedule.takes_slices(case.mode):
        return planned
    able = next(one for one in SCHEDULES.values() if one.in_slices is not None)
    own = able.stages_per_rank.default
    return dataclasses.replace(case, schedule=able.name, stages_per_rank=own), measure


def _check_possible(
    said: SweepText, planned: Sequence[Planned], *, is_of_this_tree: bool
) -> Mapping[Identity, Facts]:
    """Refuse the first case that cannot run; returns the facts of the models.

    Models are inspected only if everything else is valid.
    """
    look_at_files.cache_clear()

    def refuse(problems_of: Callable[[Planned], Iterator[Problem]]) -> None:
        problems = [next(problems_of(one), None) for one in planned]
        first = next((index for index, problem in enumerate(problems) if problem), None)
        if first is not None:
            raise _refusal(said, planned, problems, first)

    refuse(lambda one: problems_of_settings(*one, is_of_this_tree=is_of_this_tree))
    if not is_of_this_tree:
        planned = [(case, measure) for case, measure in planned if is_known_by_name(case)]
    try:
        facts = facts_of(identity_of(case) for case, _ in planned)
    except UsageError as error:
        raise said.error_of("model.preset", ("data.tokenizer",), str(error)) from None

    def of_fit(one: Planned) -> Iterator[Problem]:
        def is_set(key: str) -> bool:  # for this case, where an override sets it for some
            is_overridden = any(key in given for given in said.sets)
            is_own = is_overridden and setting_of(*one, key) != SETTINGS[key].default
            return key in said.top or key in said.grid or is_own

        return problems_of_fit(one[0], facts[identity_of(one[0])], is_set)

    refuse(of_fit)
    return facts


def _refusal(
    said: SweepText,
    planned: Sequence[Planned],
    problems: Sequence[Problem | None],
    first: int,
) -> UsageError:
    """The error about the first problem, with the combination of axes that has it."""
    problem, at_fault = problems[first], planned[first]
    assert problem is not None
    others = [
        case
        for case, other in zip(planned, problems, strict=True)
        if other is None or other.key != problem.key
    ]
    keys = list(said.grid)
    for key in said.grid:  # the fewest, found greedily, whose values no case without it has
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
    return said.error_of(problem.key, [*keys, *_DECISIVE], message)
