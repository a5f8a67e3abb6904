"""Rates of false alarms and of missed changes in histories and bisections, on made-up series.

    python -m benchmarks.tracking [--seed 8] [--series 2000] [--searches 1000]

The made-up launches resemble measured ones: lognormal, with a deviation of 0.8 % between launches
and 0.8 % within, where steps follow an AR(1) of 0.4 and 2 % of them take 1.5 to 3 times as long.
Each has 20 steps, and a launch counts with their median. The parts:

    history    60 commits with one launch each (and three): without a change, and with one at commit
               40; for early detection, the series ends one commit after the change. A change is
               hit if the range of commits that is named holds commit 40; the distance of the
               likeliest commit is printed as well. No noise is known in advance here.
               `3 sharing launches`: all launches of a commit share another 0.8 %, as in a session
    histories  80 commits with one launch each, of which some are disturbed
    bisect     64 commits, the first bad one anywhere, until the search says that it is done; each
               launch is one of two commits, whose noise does not cancel here

The same series go through the methods of other tools: scipy's Mann-Whitney test (p < 5 %) on the
steps of both sides, and a threshold of 5 % on their medians; in a history, each commit is compared
with the one before. For bisect, the alternative is a plain bisection that knows both levels and
asks for one launch of each commit.

The demands are printed at the end; if one is not held, the exit code is 1. What two sides are
judged by is in `benchmarks/judging.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.stats import mannwhitneyu

from benchmarks.made_up_launches import (
    ALL_MODELS,
    Demand,
    Figures,
    Floats,
    Part,
    Settings,
    change_in_words,
    in_words,
    made_up_steps,
)
from ppbench.judge.evidence import Metric, Rounds
from ppbench.statistics.bisection import Finding, Search, search_first_bad
from ppbench.statistics.change_points import Step, find_changes

STEP = Metric("step_ns", higher_is_better=False, in_points=False)
SHARED = 0.008  # deviation that all launches of a commit share
NUM_COMMITS, NUM_LONG, CHANGED_AT = 60, 80, 40
HISTORIES = ("10 % disturbed", "20 % disturbed", "t3", "exponential")
NUM_SEARCHED = 64
CHANGES = (0.0, 0.02, 0.05)
SEARCHED_CHANGES = (0.02, 0.05, 0.08)
MOST_SEARCH_LAUNCHES = 300
NUM_BY_OTHERS = 1000
"""Histories that go through other tools' tests, which take longer."""
THRESHOLD = 0.05
P = 0.05

DEMANDS = (
    Demand("history, 1 launch, no change: alarm", at_most=0.04),
    Demand("history, 1 launch, 2 %: hit", at_least=0.97),
    Demand("history, 1 launch, 5 %: hit", at_least=0.97),
    Demand("history, 1 launch, 5 %: caught one commit later", at_least=0.90),
    Demand("history, 3 sharing launches, no change: alarm", at_most=0.04),
    Demand("history, 3 sharing launches, 5 %: hit", at_least=0.97),
    Demand("bisect, 2 %: right where it says found", at_least=0.95),
    Demand("history, 10 % disturbed, no change: alarm", at_most=0.04),
    Demand("history, 10 % disturbed, 5 %: hit", at_least=0.9),
    Demand("history, 10 % disturbed, 5 %: likeliest commit off by 1 at most", at_least=0.75),
)


def main() -> int:
    settings = _arguments()
    began = time.perf_counter()
    print(
        f"seed {settings.seed}; {settings.series} histories, {settings.searches} searches of each "
        f"kind; {settings.steps} steps a launch"
    )
    figures: Figures = {}
    for part in settings.parts or PARTS:
        for name, value in PARTS[part](settings):
            figures[name] = value
            print(f"  {name:68} {in_words(name, value)}", flush=True)
    held = _print_demands(figures)
    print(f"{time.perf_counter() - began:.0f} s")
    if settings.json is not None:
        options = {name: value for name, value in vars(settings).items() if name != "json"}
        settings.json.write_text(json.dumps({**options, "figures": figures}, indent=1) + "\n")
    return 0 if held else 1


def _arguments() -> Settings:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=8)
    parser.add_argument("--series", type=int, default=2000, help="number of histories")
    parser.add_argument("--searches", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=20, help="steps of a launch")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="only these; default: all")
    parser.add_argument("--json", type=Path, help="file for the raw figures")
    return Settings(**vars(parser.parse_args()))


def _print_demands(figures: Figures) -> bool:
    """Print which demands on these figures are held; whether all of them are."""
    measured = [demand for demand in DEMANDS if demand.figure in figures]
    for demand in measured:
        value = figures[demand.figure]
        said = "held    " if demand.is_held(value) else "NOT HELD"
        print(f"{said} {demand}: {in_words(demand.figure, value).strip()}")
    return all(demand.is_held(figures[demand.figure]) for demand in measured)


def _mann_whitney(base: Floats, head: Floats) -> npt.NDArray[np.bool_]:
    """Whether the steps of each series differ; all launches of a side are pooled."""
    sides = [side.reshape(len(side), -1) for side in (base, head)]
    return np.asarray(mannwhitneyu(*sides, axis=-1, method="asymptotic").pvalue < P)


def _beyond_threshold(base: Floats, head: Floats) -> npt.NDArray[np.bool_]:
    sides = [np.median(side.reshape(len(side), -1), axis=-1) for side in (base, head)]
    return np.asarray(np.abs(sides[1] / sides[0] - 1) > THRESHOLD)


# history


def _history(settings: Settings) -> Iterator[tuple[str, float]]:
    for num_launches, name in ((1, "1 launch"), (3, "3 launches"), (3, "3 sharing launches")):
        shape = (settings.series, NUM_COMMITS, num_launches)
        steps = made_up_steps(settings.draw(f"history {num_launches}"), shape, settings.steps)
        if "sharing" in name:
            shared = settings.draw("shared").normal(0, SHARED, (*shape[:2], 1, 1))
            steps *= np.exp(shared)
        yield from _alarms(f"history, {name}", steps)
        for change in CHANGES[1:]:
            changed = steps.copy()
            changed[:, CHANGED_AT:] *= 1 + change
            yield from _hits(f"history, {name}, {change_in_words(change)}", changed)


def _alarms(start: str, steps: Floats) -> Iterator[tuple[str, float]]:
    alarms = [bool(points) for points in _all_points(steps)]
    yield f"{start}, no change: alarm", _mean(alarms)
    for name, is_alarm in _by_others(steps[:NUM_BY_OTHERS]):
        yield f"{start}, no change, {name}: alarm", float(is_alarm.any(axis=1).mean())


def _hits(start: str, steps: Floats) -> Iterator[tuple[str, float]]:
    series = _all_points(steps)
    nearest = [_nearest(points) for points in series]
    hit = [point for point in nearest if point and point.good < CHANGED_AT <= point.last]
    yield f"{start}: hit", len(hit) / len(series)
    yield f"{start}: hit, number of commits named", _mean(p.num_commits for p in hit)
    for most in (0, 1, 3):
        within = [point and abs(point.first - CHANGED_AT) <= most for point in nearest]
        yield f"{start}: likeliest commit off by {most} at most", _mean(map(bool, within))
    yield f"{start}: other points beside it", _mean(len(points) > 1 for points in series)
    early = [_nearest(points) for points in _all_points(steps[:, : CHANGED_AT + 2])]
    caught = [bool(p and p.good < CHANGED_AT <= p.last) for p in early]
    yield f"{start}: caught one commit later", _mean(caught)
    for name, is_alarm in _by_others(steps[:NUM_BY_OTHERS]):
        yield f"{start}, {name}: alarm at the change", float(is_alarm[:, CHANGED_AT - 1].mean())
        others = np.delete(is_alarm, CHANGED_AT - 1, axis=1).any(axis=1)
        yield f"{start}, {name}: alarms elsewhere", float(others.mean())


def _mean(values: Iterator[float] | list[bool]) -> float:
    return float(np.mean(list(values)))


def _all_points(launches: Floats) -> list[list[Step]]:
    return [
        list(find_changes(series, slow_sign=1).steps)
        for series in np.median(launches, axis=-1).tolist()
    ]


def _nearest(points: list[Step]) -> Step | None:
    return min(points, key=lambda point: abs(point.first - CHANGED_AT), default=None)


def _by_others(steps: Floats) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
    """Alarms of other tools for each series, at each commit against the one before.

    Only with one launch per commit: with more, their alarms change little.
    """
    num_series, num_commits, num_launches, _ = steps.shape
    if num_launches > 1:
        return
    by_commit = steps.reshape(num_series, num_commits, -1)
    sides = [side.reshape(-1, side.shape[-1]) for side in (by_commit[:, :-1], by_commit[:, 1:])]
    tests: dict[str, Callable[[Floats, Floats], npt.NDArray[np.bool_]]] = {
        "Mann-Whitney on steps": _mann_whitney,
        "5 % threshold on medians": _beyond_threshold,
    }
    for name, test in tests.items():
        yield name, test(*sides).reshape(num_series, num_commits - 1)


def _histories(settings: Settings) -> Iterator[tuple[str, float]]:
    """Histories of one launch per commit, without a change and with one."""
    for name in HISTORIES:
        draw, shape = settings.draw(f"history {name}"), (settings.series, NUM_LONG)
        launches = np.median(made_up_steps(draw, shape, settings.steps, ALL_MODELS[name]), axis=-1)
        alarms = [bool(_points(series)) for series in launches]
        yield f"history, {name}, no change: alarm", float(np.mean(alarms))
        for change in CHANGES[1:]:
            changed = launches.copy()
            changed[:, CHANGED_AT:] *= 1 + change
            start = f"history, {name}, {change_in_words(change)}"
            yield from _hits_among(start, [_points(series) for series in changed])


def _points(series: Floats) -> list[Step]:
    return list(find_changes([[value] for value in series.tolist()], slow_sign=1).steps)


def _hits_among(start: str, series: Sequence[list[Step]]) -> Iterator[tuple[str, float]]:
    nearest = [
        min(points, key=lambda point: abs(point.first - CHANGED_AT), default=None)
        for points in series
    ]
    hit = [bool(p and p.good < CHANGED_AT <= p.last) for p in nearest]
    close = [bool(p and abs(p.first - CHANGED_AT) <= 1) for p in nearest]
    yield f"{start}: hit", float(np.mean(hit))
    yield f"{start}: likeliest commit off by 1 at most", float(np.mean(close))
    yield f"{start}: other points beside it", float(np.mean([len(p) > 1 for p in series]))


# bisect


def _bisected(settings: Settings) -> Iterator[tuple[str, float]]:
    for change in (0.0, *SEARCHED_CHANGES):
        draw = settings.draw(f"bisect {change}")
        searches = [_searched(settings, draw, change) for _ in range(settings.searches)]
        yield from _searches(f"bisect, {change_in_words(change)}", searches, change)
        if change:
            plain = [_plainly(settings, draw, change) for _ in range(settings.searches)]
            yield f"bisect, plain, {change_in_words(change)}: right", _mean(plain)


@dataclass(frozen=True)
class Searched:
    """A search that has ended, or was given up."""

    search: Search
    first_bad: int
    num_launches: int

    @property
    def is_right(self) -> bool:
        return self.search.latest == self.first_bad


def _searches(start: str, searches: list[Searched], change: float) -> Iterator[tuple[str, float]]:
    found = [each for each in searches if each.search.finding is Finding.found]
    for finding in Finding:
        share = _mean(each.search.finding is finding for each in searches)
        if share:
            yield f"{start}: says {finding.replace('_', ' ')}", share
    if change:
        yield f"{start}: right where it says found", _mean(each.is_right for each in found)
        said = _mean(each.search.confidence for each in found)
        yield f"{start}: how sure it says it is, in the mean", said
    nums = [each.num_launches for each in searches]
    yield f"{start}: launches, number in the median", float(np.median(nums))
    yield f"{start}: launches, number in 90 % at most", float(np.quantile(nums, 0.9))


def _searched(settings: Settings, draw: np.random.Generator, change: float) -> Searched:
    """A search whose launches have one round each, so that they differ as launches alone do."""
    first_bad = int(draw.integers(1, NUM_SEARCHED))
    steps = made_up_steps(draw, (MOST_SEARCH_LAUNCHES, 2), settings.steps)
    launches: list[list[Rounds]] = [[] for _ in range(NUM_SEARCHED)]
    search = search_first_bad(STEP, launches)
    for num_launches, (good, other) in enumerate(np.median(steps, axis=-1).tolist()):
        commit = search.next_commit
        if commit is None:
            return Searched(search, first_bad, num_launches)
        factor = 1 + change * (commit >= first_bad)
        launches[commit].append(Rounds((good,), (other * factor,)))
        search = search_first_bad(STEP, launches)
    return Searched(search, first_bad, MOST_SEARCH_LAUNCHES)


def _plainly(settings: Settings, draw: np.random.Generator, change: float) -> bool:
    """Whether a bisection with one launch per commit, which knows both levels, is right."""
    first_bad = int(draw.integers(1, NUM_SEARCHED))
    good, bad = 0, NUM_SEARCHED - 1
    while bad - good > 1:
        middle = (good + bad) // 2
        figure = float(np.median(made_up_steps(draw, (1,), settings.steps)))
        is_bad = figure * (1 + change * (middle >= first_bad)) > 1 + change / 2
        good, bad = (good, middle) if is_bad else (middle, bad)
    return bad == first_bad


PARTS: dict[str, Part] = {
    "history": _history,
    "histories": _histories,
    "bisect": _bisected,
}


if __name__ == "__main__":
    sys.exit(main())
