"""From sides to an answer: cases that differ along one axis alone, with their lines and notes.

    runs of sides --- equal in all but the axis ---> Row of cases
    Row           --- base value, other value -----> Contrast ---> Line, Breakdown

The axis is a setting, or the commit: then a row has the values `base` and `head`. A case without a
partner is named in the notes, with what the nearest one differs in.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from datetime import datetime
from itertools import combinations

import pandas as pd

from ppbench.comparison import notes
from ppbench.comparison.axes import key_of, ordered, value_named, work_note
from ppbench.comparison.evidence import Background, comparable_pairs, looks_of
from ppbench.comparison.groups import alike, groups_of
from ppbench.comparison.launches import key_text
from ppbench.comparison.lines import COMMIT, Comparison, Contrast, Family, lines_of, listed
from ppbench.comparison.rows import SIDE, Grid, Row, num_pairs, pairs_of
from ppbench.comparison.sides import Side, both_fresh, side_of, the_sweep_file
from ppbench.config.sweep import Sweep
from ppbench.display.cases import NOT_FINITE, axis_text, by_case, varying_axes
from ppbench.display.commands import command, near
from ppbench.display.metrics import METRICS
from ppbench.errors import UsageError
from ppbench.judge.evidence import RESOLUTION, Metric
from ppbench.judge.looks import ONE_LOOK, Looks
from ppbench.judge.verdicts import SPEED
from ppbench.store import Store
from ppbench.store.columns import ATTACHED

_CODE = {"commit": "commit", "changes": "changes", "code": "ppbench"}
"""Columns of the code that was measured, in words."""


def compare_sides(
    base: Side,
    head: Side,
    metrics: Sequence[Metric],
    resolution_of: Callable[[Contrast], float] = lambda _: RESOLUTION,
    *,
    again: str = "ppbench compare BASE HEAD SWEEP --run",
    sweep: Sweep | None = None,
    since: datetime | None = None,
    looks: Looks | None = None,
) -> Comparison:
    """Compare every case that both sides have, in the order of the head's sweep.

    `again` is the command that measures both sides. With a `sweep` that was named only its cases
    count, with `since` only launches made after it or in the hour before, and with `looks` only the
    first launches: the verdicts are those of the last look. Raises StoreError, and UsageError where
    both sides are the same runs.
    """
    if set(base.runs["run_id"]) & set(head.runs["run_id"]):
        raise UsageError(
            f"base ({base.title}) and head ({head.title}): are the same runs; name two"
        )
    if since is not None:
        base, head = both_fresh(base, head, since)
    if sweep is not None:
        case_ids = [case.case_id for case, _ in sweep.cases]
        base, head = base.of_cases(case_ids), head.of_cases(case_ids)
    if looks is not None:
        base, head = (side.first(looks.last) for side in (base, head))
    named = (("head", head), ("base", base))
    runs, failed = (
        pd.concat([getattr(side, kind).assign(**{SIDE: word}) for word, side in named])
        for kind in ("runs", "failed")
    )
    runs = runs.sort_values([SIDE, "position"], ascending=[False, True], kind="stable")
    grid = Grid(COMMIT, runs, failed)
    what, origins = "", base.origins | head.origins
    revisions = {base.revision, head.revision}
    if len(revisions) == 2 and None not in revisions and not origins:
        what = f"; measure both sides by one sweep file: {again}"

    remedy = f"measure more with: {again}"
    if looks is not None:
        remedy = ""  # why measuring stopped says how to go on
    if origins:
        remedy = "import more recordings under the same name"
    if ATTACHED in origins:
        remedy = "run the script more often, under the same name"

    def families_of(contrasts: Sequence[Contrast], _rows: Sequence[Row]) -> Iterable[Family]:
        """The cases of a sweep on a machine."""
        by_place: dict[Hashable, list[Contrast]] = {}
        for one in contrasts:
            place = one.base_key[1], one.head["sweep_file"].iloc[-1]
            by_place.setdefault(place, []).append(one)
        for some in by_place.values():
            yield Family(
                {one.arms[at]: (one.head, one.base)[at] for one in some for at in (0, 1)},
                [one.arms for one in some],
                {one.arms: resolution_of(one) for one in some},
            )

    pairs = [(row, ("base", "head")) for row in grid.rows if len(row.keys) == 2]
    along = None if pairs or origins else grid.setting_between()
    instead = list[str]()
    if along is not None and base.store.folder == head.store.folder:
        key, folder = key_of(along), base.store.folder
        other = command("compare", base.name, head.name, across=key, results=folder)
        instead = [f"base and head differ in {key}; they are compared along it by: {other}"]

    return _compared(
        grid,
        pairs,
        (base, head),
        metrics,
        families_of,
        looks or ONE_LOOK,
        [
            *instead,
            *base.notes,
            *head.notes,
            *(f"{text}{what}" for text in grid.without_partner(None)),
        ],
        {" at base": base.failed, " at head": head.failed},
        remedy if origins else again,
        remedy,
        sweep.file if sweep else the_sweep_file(base, head),
    )


def compare_values(
    setting: str,
    chosen: Side,
    base: object,
    metrics: Sequence[Metric],
    looks: Looks | None = None,
    *,
    all_pairs: bool = False,
) -> Comparison:
    """Compare the cases of some runs that differ in one setting alone.

    `looks` are by default those of the budget of these runs. Raises UsageError.
    """
    if all_pairs and base is not None:
        raise UsageError("--all-pairs: compares each value with each; leave --base out")
    grid = Grid(setting, chosen.runs, chosen.failed)
    values = ordered(value for row in grid.rows for value in row.keys)
    if len(values) < 2:
        raise UsageError(_too_few_values(setting, values, chosen))
    compared_with: Hashable | None = None  # each is compared with each
    if base is not None:
        compared_with = value_named(base, grid.axis, values)
    elif not all_pairs:
        compared_with = max(values, key=lambda value: num_pairs(grid.rows, value))
    file = the_sweep_file(chosen)
    folder = chosen.store.folder

    more = command("sweep", near(file), budget="10m", results=folder)
    return _compared(
        grid,
        [(row, pair) for row in grid.rows for pair in pairs_of(row, values, compared_with)],
        (chosen, chosen),
        metrics,
        lambda contrasts, rows: _families(grid, chosen, rows) if contrasts else [],
        looks_of(chosen.runs) if looks is None else looks,
        [*filter(None, [work_note(setting)]), *chosen.notes, *grid.without_partner(compared_with)],
        {"": chosen.failed},
        command("sweep", near(file), rerun=True, results=folder),
        f"measure more with: {more}",
        file,
        base_value=compared_with,
        axis_values=tuple(values),
    )


def compare_along(axes: Iterable[str], runs: pd.DataFrame, store: Store) -> list[Comparison]:
    """Compare throughput along each of these settings that varies among runs that are ok.

    Raises StoreError.
    """
    side = side_of("", "the sweep", store, runs)
    varying = (axis for axis in axes if len(set(side.runs[axis].astype(str))) > 1)
    return [compare_values(axis, side, None, [METRICS[SPEED]]) for axis in varying]


def _compared(
    grid: Grid,
    pairs: Sequence[tuple[Row, tuple[Hashable, Hashable]]],
    sides: tuple[Side, Side],
    metrics: Sequence[Metric],
    families_of: Callable[[Sequence[Contrast], Sequence[Row]], Iterable[Family]],
    looks: Looks,
    first_notes: Sequence[str],
    failed: dict[str, pd.DataFrame],
    again: str,
    remedy: str,
    sweep_file: str | None,
    *,
    base_value: Hashable | None = None,
    axis_values: tuple[Hashable, ...] = (),
) -> Comparison:
    """Compare these pairs of a grid.

    `again` is the command that measures both sides, and `remedy` says what makes more launches.
    """
    rows = list({id(row): row for row, _ in pairs}.values())
    common = dict(zip(map(id, rows), grid.common_texts(rows), strict=True))
    has_other_pairs = len({pair for _, pair in pairs}) > 1
    contrasts = []
    for row, pair in pairs:
        own, other = ((value, row.keys[value]) for value in pair)
        keys, words = (own[1], other[1]), common[id(row)]
        launches = grid.arms[own], grid.arms[other]
        contrasts.append(Contrast(grid.axis, *keys, words, *pair, has_other_pairs, *launches))
    compared = pd.concat([side.runs for side in sides]).drop_duplicates("run_id")
    background = Background(compared, [side.store for side in sides])
    lines = lines_of(metrics, contrasts, list(families_of(contrasts, rows)), background, looks)
    found = [
        *first_notes,
        *_of_other_code(contrasts, again),
        *notes.notes_on(contrasts, lines, failed, grid.texts(), remedy, again),
    ]
    return Comparison(
        axis=grid.axis,
        base=sides[0],
        head=sides[1],
        axes=grid.axes,
        texts=grid.texts(),
        base_value=base_value,
        axis_values=axis_values,
        shared=grid.shared_text(rows),
        sweep_file=sweep_file,
        contrasts=tuple(contrasts),
        lines=tuple(lines),
        notes=tuple(dict.fromkeys(found)),
    )


def _families(grid: Grid, chosen: Side, rows: Sequence[Row]) -> list[Family]:
    """The groups of cases that a report judges together, and each row that is in none of them.

    In such a row the axis changes the work, or a case was left out of its group.
    """
    axes = varying_axes(pd.concat([chosen.runs, chosen.failed]))
    broken = chosen.failed.loc[chosen.failed["status"] == NOT_FINITE, "case_id"]
    sound = chosen.runs[~chosen.runs["case_id"].isin(broken)]
    families = []
    for _, group in groups_of(by_case(sound, axes), axes):
        ids = set(alike(group)["case_id"])
        arms: dict[Hashable, pd.DataFrame] = {
            arm: runs for arm, runs in grid.arms.items() if arm[1][0] in ids
        }
        families.append(Family(arms, comparable_pairs(arms), does_same_work=True))
    judged = {frozenset(pair) for family in families for pair in family.pairs}
    for row in rows:
        left = [pair for pair in combinations(row.keys.items(), 2) if frozenset(pair) not in judged]
        if left:
            families.append(Family({arm: grid.arms[arm] for pair in left for arm in pair}, left))
    return families


def _of_other_code(contrasts: Sequence[Contrast], again: str) -> Iterable[str]:
    """Name the pairs whose sides differ in the code that was measured too."""
    others = []
    for contrast in contrasts:
        sides = (contrast.base, contrast.head)
        for column in ("code",) if contrast.axis == COMMIT else _CODE:
            states = [set(side[column].dropna().map(key_text)) for side in sides]
            if all(states) and states[0] != states[1]:
                others.append(f"{contrast.text} ({_CODE[column]})")
                break
    if others:
        yield (
            f"these pairs differ in the code that was measured too: {listed(others)}; measure both "
            f"sides with one: {again}"
        )


def _too_few_values(axis: str, values: Sequence[Hashable], chosen: Side) -> str:
    """Say that there is one value, where others are, and what would give two."""

    def others(runs: pd.DataFrame) -> str:
        found = (value for value in ordered(runs[axis]) if value not in values)
        return ", ".join([axis_text(axis, value) for value in found][:4])

    key, first = key_of(axis), values[0] if values else None
    only = f"all have {axis_text(axis, first)}" if values else "none of them is ok"
    hint = ""
    if failed := others(chosen.failed):
        hint = f"runs with {failed} failed: ppbench ls --where status!=ok; "
    elif elsewhere := others(chosen.store.runs([axis])):
        hint = f"{chosen.store.folder} has runs with {elsewhere}: name their sweeps; "
    two = f'["{first or "1f1b"}", "{"afab" if axis == "schedule" else "..."}"]'
    if isinstance(first, int):
        two = "[false, true]" if isinstance(first, bool) else f"[{first}, {2 * first}]"
    file, folder = near(the_sweep_file(chosen)), chosen.store.folder
    again = command("sweep", file, set=f"{key}={two}", results=folder)
    return f"--across {key}: {chosen.title}, {only}; {hint}two values come from: {again}"
