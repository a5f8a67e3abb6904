"""Cases that differ in one setting alone, pair by pair: throughput, bubble, memory, what moved.

    runs --- equal in all but the axis ---> Row of cases
    Row  --- base value, other value -----> Contrast, Pairing ---> Line, Breakdown

A case without a partner is named in the notes, with what the nearest one differs in.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import combinations
from pathlib import Path

import pandas as pd

from ppbench.comparison import notes
from ppbench.comparison.axes import find_axis, key_of, ordered, value_named, work_note
from ppbench.comparison.evidence import Background, comparable_pairs, looks_of
from ppbench.comparison.groups import alike, groups_of
from ppbench.comparison.launches import FRESH_S, key_text, keys_of, of_keys
from ppbench.comparison.lines import (
    Comparison,
    Contrast,
    Family,
    Pairing,
    lines_of,
    listed,
    read_metrics,
)
from ppbench.comparison.measurement import measure_until_decided
from ppbench.comparison.rows import Grid, Row, num_pairs, pairs_of
from ppbench.comparison.sides import Places, Side, choose_runs, the_sweep_file
from ppbench.config.reader import read_sweep
from ppbench.display.cases import NOT_FINITE, axis_text, by_case, varying_axes
from ppbench.errors import UsageError
from ppbench.judge.evidence import Metric
from ppbench.judge.looks import Looks
from ppbench.judge.verdicts import SPEED
from ppbench.run.machine.environment import default_device
from ppbench.run.sweep.control import run_sweep
from ppbench.run.sweep.plan import Choice
from ppbench.run.sweep.progress import Display
from ppbench.store import Store, check_writable

PROGRAM = "program_digest"
"""The setting whose values are contents of a program file."""


def compare_across(
    axis: str,
    runs: Sequence[str] = (),
    *,
    base: object = None,
    all_pairs: bool = False,
    metrics: Sequence[str] = (),
    results: Path | str = Path("results"),
    launches: int | None = None,
    max_launches: int | None = None,
    budget_s: float = 0.0,
    say: Callable[[str], None] = lambda _text: None,
    display: Display | None = None,
) -> Comparison:
    """Compare the cases of some runs that differ in one setting alone.

    `runs` are run ids, sweeps or sweep files; by default those of the last sweep. Each value of the
    setting is compared with `base`, or with `all_pairs` each with each. By default the base is the
    value that most others can be compared with: of several the smallest number, or the first in
    the sweep.

    With `launches` the cases of the one sweep file that `runs` names are launched first, so often
    each, and with `max_launches` in turns until the verdicts are decided or `budget_s` seconds
    spent (0: no bound). Launches of the last hour count, so that a measurement that was stopped
    goes on; older ones do not, since a machine drifts by more than launches differ. Raises
    UsageError, SweepFileError, StoreError, and what running a sweep raises.
    """
    setting, chosen_metrics, store = find_axis(axis), read_metrics(metrics), Store(Path(results))
    places = Places(store, Path.cwd())

    def compared(chosen: Side, looks: Looks | None = None) -> Comparison:
        """Compare these runs at the last of some looks, by default those of their budget."""
        return _compare_along(setting, chosen, base, chosen_metrics, looks, all_pairs=all_pairs)

    if launches is None and max_launches is None:
        return compared(choose_runs(runs, places, has_older_programs=setting == PROGRAM))
    if len(runs) != 1 or not runs[0].endswith(".toml"):
        raise UsageError(
            f"--run: measures the cases of a sweep file; give one, got {' '.join(runs) or 'none'}"
        )
    check_writable(Path(results), "--results")
    sweep = read_sweep(Path(runs[0]), [], default_device())
    an_hour_ago = (
        f"{datetime.now(UTC) - timedelta(seconds=FRESH_S):%Y%m%dT%H%M%S}"  # as run ids are
    )

    def bring_to(num_launches: int) -> float:
        """Launch every case until it has so many launches; return the rounds made."""
        planned = tuple((case, replace(own, launches=num_launches)) for case, own in sweep.cases)
        choice = Choice(since=an_hour_ago)
        done = run_sweep(replace(sweep, cases=planned), store, choice, display)
        return len(done.plan.missing) / len(planned)

    def first(num_launches: int) -> Side:
        """So many of the first launches of each case in this hour."""
        side = choose_runs(runs, places)
        rows, failed = (rows[rows["run_id"] > an_hour_ago] for rows in (side.runs, side.failed))
        kept = rows.sort_values("launch").groupby("case_id").head(num_launches)["run_id"]
        return replace(side, runs=rows[rows["run_id"].isin(kept)], failed=failed)

    if max_launches is None:
        bring_to(launches or 0)
        return compared(first(launches or 0))
    result, stopped = measure_until_decided(
        max_launches,
        bring_to,
        lambda looks: compared(first(looks.last), looks),
        lambda across: across,
        set(metrics or (SPEED,)),
        say,
        budget_s,
    )
    return replace(result, stopped=stopped)


def _compare_along(
    setting: str,
    chosen: Side,
    base: object,
    metrics: Sequence[Metric],
    looks: Looks | None,
    *,
    all_pairs: bool,
) -> Comparison:
    """Compare the chosen runs at the last of some looks; `None`: those of their budget.

    Raises UsageError.
    """
    if all_pairs and base is not None:
        raise UsageError("--all-pairs: compares each value with each; leave --base out")
    grid = Grid(setting, chosen.runs)
    values = ordered(value for row in grid.rows for value in row.keys)
    if len(values) < 2:
        raise UsageError(_too_few_values(setting, values, chosen))
    compared_with: Hashable | None = None  # each is compared with each
    if base is not None:
        compared_with = value_named(base, grid.axis, values)
    elif not all_pairs:
        compared_with = max(values, key=lambda value: num_pairs(grid.rows, value))
    pairs = [(row, pair) for row in grid.rows for pair in pairs_of(row, values, compared_with)]
    rows = list({id(row): row for row, _ in pairs}.values())
    common = dict(zip(map(id, rows), grid.common_texts(rows), strict=True))
    has_other_pairs = len({pair for _, pair in pairs}) > 1
    pairings = []
    for row, (first, other) in pairs:
        keys = row.keys[first], row.keys[other]
        contrast = Contrast(grid.axis, *keys, common[id(row)], first, other, has_other_pairs)
        own, partner = (of_keys(chosen.runs, key) for key in keys)
        pairings.append(Pairing(contrast, own, partner, (keys[1], keys[0])))
    background = Background(chosen.runs, [chosen.store])
    families = _families(chosen, rows) if pairings else []
    looks = looks_of(chosen.runs) if looks is None else looks
    lines = lines_of(metrics, pairings, families, background, looks)
    file, num = the_sweep_file(chosen), notes.launches_wanted(lines)
    remedy = f"measure more with: ppbench sweep {file or 'SWEEP'} --set measure.launches={num}"
    every = pd.concat([chosen.runs, chosen.failed])
    texts = {} if chosen.failed.empty else Grid("schedule", every).texts()
    found = [
        *filter(None, [work_note(grid.axis)]),
        *chosen.notes,
        *grid.without_partner(compared_with),
        *_apart(pairings),
        *notes.notes_on(pairings, lines, {"": chosen.failed}, texts, remedy),
    ]
    return Comparison(
        axis=setting,
        base=chosen,
        head=chosen,
        base_value=compared_with,
        axis_values=tuple(values),
        shared=grid.shared_text(rows),
        sweep_file=file,
        pairings={pairing.series: pairing for pairing in pairings},
        lines=tuple(lines),
        notes=tuple(dict.fromkeys(found)),
    )


def _families(chosen: Side, rows: Sequence[Row]) -> list[Family]:
    """The groups of cases that a report judges together, and each row that is in none of them.

    In such a row the axis changes the work, or a case was left out of its group.
    """
    axes = varying_axes(pd.concat([chosen.runs, chosen.failed]))
    broken = chosen.failed.loc[chosen.failed["status"] == NOT_FINITE, "case_id"]
    sound = chosen.runs[~chosen.runs["case_id"].isin(broken)]
    by_key = dict(tuple(chosen.runs.groupby(pd.Series(keys_of(chosen.runs), chosen.runs.index))))
    families = []
    for _, group in groups_of(by_case(sound, axes), axes):
        ids = set(alike(group)["case_id"])
        arms = {key: runs for key, runs in by_key.items() if key[0] in ids}
        families.append(Family(arms, comparable_pairs(arms), does_same_work=True))
    judged = {frozenset(pair) for family in families for pair in family.pairs}
    for row in rows:
        left = [
            pair for pair in combinations(row.keys.values(), 2) if frozenset(pair) not in judged
        ]
        if left:
            families.append(Family({key: by_key[key] for pair in left for key in pair}, left))
    return families


def _apart(pairings: Sequence[Pairing]) -> Iterable[str]:
    """Name the pairs whose sides differ in the code, or lie far apart in time."""
    others, gaps = [], []
    for pairing in pairings:
        sides = (pairing.base, pairing.head)
        for column, word in (("commit", "commit"), ("changes", "changes"), ("code", "ppbench")):
            states = [set(side[column].dropna().map(key_text)) for side in sides]
            if all(states) and states[0] != states[1]:
                others.append(f"{pairing.series.text} ({word})")
                break
        if gap := notes.gap_between(*sides):
            gaps.append(f"{pairing.series.text} ({gap})")
    if others:
        yield (
            f"these pairs differ in the code that was measured too: {listed(others)}; measure both "
            "sides at one commit: ppbench sweep SWEEP"
        )
    if gaps:
        yield (
            f"these pairs were measured far apart: {listed(gaps)}: part of it is drift of the "
            "machine; measure both sides in one sweep: ppbench sweep SWEEP --rerun"
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
    return (
        f"--across {key}: {chosen.title}, {only}; {hint}two values come from: ppbench sweep "
        f"{the_sweep_file(chosen) or 'SWEEP'} --set '{key}={two}'"
    )
