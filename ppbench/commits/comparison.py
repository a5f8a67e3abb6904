"""Compares two sides case by case, and finds the spans that explain a change.

Runs are paired by case, fingerprint and measurement settings. Runs from another machine, or over
other steps, are another series: it has its own line if both sides have it, else a note.

Sides are given by name, and can be measured first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

from ppbench.commits.advice import COMPARE, compare_command, near
from ppbench.commits.bench import SILENT, Progress, read_tracked, rounds_of
from ppbench.comparison import notes
from ppbench.comparison.across import compare_across
from ppbench.comparison.evidence import Background
from ppbench.comparison.launches import (
    MEASURED_ALIKE,
    SETTINGS,
    Key,
    keys_of,
    of_keys,
    without_times_of_files,
)
from ppbench.comparison.lines import (
    COMMIT,
    Comparison,
    Contrast,
    Family,
    Pairing,
    lines_of,
    listed,
    read_metrics,
)
from ppbench.comparison.measurement import measure_until_decided
from ppbench.comparison.sides import WORKTREE, Places, Side, both_fresh, find_side, the_sweep_file
from ppbench.config.sweep import Sweep
from ppbench.display.cases import case_text, varying_axes
from ppbench.errors import UsageError
from ppbench.judge.evidence import RESOLUTION, Metric
from ppbench.judge.looks import ONE_LOOK, Looks
from ppbench.judge.verdicts import SPEED
from ppbench.run.sweep.progress import Display
from ppbench.store import Store
from ppbench.store.columns import ATTACHED


def compare_sides(
    base: Side,
    head: Side,
    metrics: Sequence[Metric],
    resolution_of: Callable[[Contrast], float] = lambda _: RESOLUTION,
    *,
    again: str = COMPARE,
    looks: Looks | None = None,
    sweep_file: str | None = None,
) -> Comparison:
    """Compare every case that both sides have, in the order of the head's sweep.

    `again` is the command that measures both sides. With `looks` only the first launches
    count, and the verdicts are those of the last look. `sweep_file` is the one that was named.
    Raises StoreError.
    """
    if looks is not None:
        base, head = (side.first(looks.last) for side in (base, head))
    every = pd.concat([head.runs, head.failed, base.runs, base.failed])
    cases = without_times_of_files(every.drop_duplicates("case_id"))
    axes = varying_axes(cases) if len(cases) else ()
    texts = {str(row["case_id"]): case_text(row, axes) for _, row in cases.iterrows()}
    in_order = head.runs.sort_values("position", kind="stable")
    known = set(keys_of(base.runs))
    shared = [key for key in dict.fromkeys(keys_of(in_order)) if key in known]
    pairings, by_place = [], dict[tuple[object, ...], list[Pairing]]()
    for key in shared:  # measurement settings are named where one case has several
        alike = [other for other in shared if other[:2] == key[:2]]
        words = (texts[key[0]], *_differing_settings(key, alike))
        own, other = (of_keys(side.runs, key) for side in (base, head))
        contrast = Contrast(COMMIT, key, key, words)
        pairing = Pairing(contrast, own, other, (("head", key), ("base", key)))
        pairings.append(pairing)
        by_place.setdefault((key[1], other["sweep_file"].iloc[-1]), []).append(pairing)
    compared = pd.concat([base.runs, head.runs])
    background = Background(compared, (base.store, head.store))
    families = [  # the cases of a sweep on a machine
        Family(
            {one.arms[at]: (one.head, one.base)[at] for one in some for at in (0, 1)},
            [one.arms for one in some],
            {one.arms: resolution_of(one.series) for one in some},
        )
        for some in by_place.values()
    ]
    lines = lines_of(metrics, pairings, families, background, looks or ONE_LOOK)
    remedy = f"measure more with: {again} --launches {notes.launches_wanted(lines)}"
    if origins := base.origins | head.origins:
        remedy = "run the script more often, under the same name"
        if ATTACHED not in origins:
            remedy = "import more recordings under the same name"
    failed = {" at base": base.failed, " at head": head.failed}
    found = [
        *base.notes,
        *head.notes,
        *_not_compared(base, head, texts, again),
        *_apart(pairings, base, head),
        *notes.notes_on(pairings, lines, failed, texts, remedy),
    ]
    return Comparison(
        axis=COMMIT,
        base=base,
        head=head,
        axes=axes,
        texts=texts,
        sweep_file=sweep_file or the_sweep_file(base, head),
        pairings={pairing.series: pairing for pairing in pairings},
        lines=tuple(lines),
        notes=tuple(dict.fromkeys(found)),
    )


def _differing_settings(key: Key, others: Sequence[Key]) -> list[str]:
    """The settings of `measure` in which a key differs from any of the others."""
    return [
        f"{name.replace('_', '.', 1)}={value or 'unknown'}"
        for name, value, *values in zip(MEASURED_ALIKE, key, *others, strict=True)
        if name in SETTINGS and set(values) - {value}
    ]


def _not_compared(base: Side, head: Side, texts: Mapping[str, str], again: str) -> Iterable[str]:
    """Name the cases, machines and settings that only one side has."""
    what = ""
    revisions = {base.revision, head.revision}
    if len(revisions) == 2 and None not in revisions and not base.origins | head.origins:
        what = f"; measure both sides by one sweep file: {again}"
    ids = [set(side.runs["case_id"]) | set(side.failed["case_id"]) for side in (base, head)]
    for only, word in ((ids[0] - ids[1], "base"), (ids[1] - ids[0], "head")):
        if only:
            yield f"only {word} has {listed(sorted(texts[str(case_id)] for case_id in only))}{what}"
    machines = [{key[:2] for key in keys_of(side.runs)} for side in (base, head)]
    cases = {case for case, _ in machines[0]} & {case for case, _ in machines[1]}
    for only, word in ((machines[0] - machines[1], "base"), (machines[1] - machines[0], "head")):
        for machine in sorted({fingerprint for case, fingerprint in only if case in cases}):
            names = sorted(
                texts[case] for case, other in only if other == machine and case in cases
            )
            yield (
                f"only {word} was measured on the machine {machine} ({listed(names)}): these runs "
                "are not compared, since machines differ in more than the code"
            )
    first, last = (list(dict.fromkeys(keys_of(side.runs))) for side in (base, head))
    for mine, theirs, word in ((first, last, "base"), (last, first, "head")):
        for key in mine:
            others = [other for other in theirs if other[:2] == key[:2]]
            if others and key not in theirs:
                settings = ", ".join(_differing_settings(key, others))
                yield (
                    f"only {word} was measured with {settings} ({texts[key[0]]}): runs with "
                    f"different measurement settings are not compared{what}"
                )


def _apart(pairings: Sequence[Pairing], base: Side, head: Side) -> Iterable[str]:
    """Say whether both sides were measured by other code, or far apart in time."""
    codes = [sorted(set(side.runs["code"].dropna())) for side in (base, head)]
    if all(codes) and codes[0] != codes[1]:
        old, new = (", ".join(hashes) for hashes in codes)
        yield (
            f"base was measured by another ppbench (code {old}) than head ({new}): unless ppbench "
            "itself is tracked, measure both with one version: ppbench compare --run"
        )
    both = [[getattr(pairing, side) for pairing in pairings] for side in ("base", "head")]
    if pairings and (gap := notes.gap_between(*map(pd.concat, both))):
        yield (
            f"base and head were measured {gap} from each other: the difference includes drift of "
            "the machine; interleave the launches with: ppbench compare --run"
        )


def compare(
    base: object = None,
    head: str = WORKTREE,
    *,
    across: str | None = None,
    runs: Sequence[str] = (),
    all_pairs: bool = False,
    sweep: Path | str | None = None,
    metrics: Sequence[str] = (),
    launches: int | None = None,
    max_launches: int | None = None,
    budget_s: float = 0.0,
    results: Path | str = Path("results"),
    progress: Progress = SILENT,
    display: Display | None = None,
) -> Comparison:
    """Compare two sides case by case, or with `across` the cases that differ in that setting alone.

    A side is named by a revision, a run, a sweep or a results folder. With a `sweep` file only its
    cases are compared. With `launches` both sides are measured first, so often each, and with
    `max_launches` until the verdicts are decided or `budget_s` seconds spent (0: no bound); `base`
    may then be None for the repository's default. Raises UsageError, NotMeasuredError, StoreError,
    LaunchError and SweepInterruptedError.

    `compare(across="schedule")` takes the last sweep, or `runs`: ids, sweeps, sweep files. `base`
    is then a value of the setting; see `comparison.across.compare_across`. Measured first are the
    cases of the one sweep file that `runs` names; `display` shows how far they are.
    """
    if across is not None:
        return compare_across(
            *(across, runs),
            base=base,
            all_pairs=all_pairs,
            metrics=metrics,
            results=results,
            launches=launches,
            max_launches=max_launches,
            budget_s=budget_s,
            say=progress.say,
            display=display,
        )
    if base is None and launches is None and max_launches is None:
        raise UsageError("BASE: is missing; name it, or measure both sides with --run")
    begun, folder, chosen = datetime.now(UTC), Path(results), read_metrics(metrics)
    tracked = None if sweep is None else read_tracked(sweep)
    named = None if tracked is None else tracked.file

    def compared(
        base: str, head: str, *, is_fresh: bool = False, looks: Looks | None = None
    ) -> Comparison:
        """Compare two sides, with `is_fresh` by their launches of the last hour."""
        places = places_of(tracked, folder)
        places = dataclasses.replace(places, compare=compare_command(base, head, named, folder))
        first, last = (of_sweep(find_side(name, places), tracked) for name in (base, head))
        if is_fresh:
            first, last = both_fresh(first, last, begun)
        is_one = first.revision == last.revision  # two runs of a commit: no two sides to measure
        measurable = (None, None) if is_one else (first.revision, last.revision)
        again = compare_command(*measurable, named or the_sweep_file(first, last), folder)
        return compare_sides(first, last, chosen, again=again, looks=looks, sweep_file=named)

    if launches is None and max_launches is None:
        return compared(str(base), head)
    with rounds_of(tracked, None if base is None else str(base), head, folder, progress) as rounds:
        if max_launches is None:
            rounds.bring_to(launches or 0)
        else:
            result, stopped = measure_until_decided(
                max_launches,
                rounds.bring_to,
                lambda looks: compared(*rounds.names, is_fresh=True, looks=looks),
                lambda result: result,
                set(metrics or (SPEED,)),
                progress.say,
                budget_s,
            )
            return dataclasses.replace(result, stopped=stopped)
    return compared(*rounds.names, is_fresh=True)


def places_of(sweep: Sweep | None, results: Path) -> Places:
    """The store, and the repository that a sweep tracks or else the one around this folder."""
    if sweep is None:
        return Places(Store(results), Path.cwd())
    return Places(Store(results), sweep.track.repo, near(sweep.file))


def of_sweep(side: Side, sweep: Sweep | None) -> Side:
    """The side with the cases of a sweep only, if there is one."""
    return side if sweep is None else side.of_cases(case.case_id for case, _ in sweep.cases)
