"""The conclusions of a report: which case is fastest, by how much, how certainly, in what memory.

They are sentences made from the stored figures. A reader who stops at the first screen must not be
misled, so oversubscribed cases count only if there are no others, and cases whose loss or gradients
were not finite never count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import pandas as pd

from ppbench.config.case import EMULATED
from ppbench.display.cases import INTERVAL, Axes, by_case, ok_runs, settings_text, work_axes
from ppbench.display.fields import figure
from ppbench.display.units import (
    comparison,
    counted,
    is_missing,
    percent,
    rounded_size,
    size,
    written,
)
from ppbench.report.charts.memory import pareto_front
from ppbench.statistics.significance import FEWEST_LAUNCHES, Ratio, launch_ratio

MOST_SMALLER = 4  # cases along the front
LEAST_SAVED = 0.05  # share of the memory that is worth a clause
MOST_NAMED = 4  # cases by name
MOST_KINDS = 4  # kinds of work, each with its fastest case
COMPARED_AXES = ("schedule", "runtime")
MAX_COMPARISONS = 3  # with a sentence each, as many as three schedules have


@dataclass(frozen=True)
class AxisComparison:
    """Two values of an axis, over pairs of cases that differ in nothing else.

    Ratios are medians over the pairs, of `name` relative to `base`.
    """

    axis: str
    name: str
    base: str
    num_pairs: int
    throughput: float
    memory: float


def answer(runs: pd.DataFrame, axes: Axes) -> list[str]:
    """Return sentences in plain text (to be escaped by the caller), the most important first."""
    cases = by_case(runs, axes)
    if cases.empty:
        return ["No run succeeded, so there is nothing to compare; the errors are listed below."]
    cases = cases.dropna(subset=["tokens_per_s"])
    if cases.empty:
        return ["No run has a stored throughput, so there is nothing to compare."]
    broken = cases[cases["is_not_finite"]]
    cases = cases[~cases["is_not_finite"]]
    if cases.empty:
        return [_not_finite(broken), "There is nothing else to compare."]
    is_emulated = cases["device"] == EMULATED
    excluded = [] if broken.empty else [_not_finite(broken)]
    if is_emulated.any() and not is_emulated.all():
        excluded.append(
            "Emulated cases are excluded from these comparisons, as they compute nothing."
        )
        cases = cases[~is_emulated]
    sound = _sound(cases)
    fastest = _fastest_of(sound)
    sentences = [
        _fastest(fastest, sound, axes),
        *_next(sound, fastest, runs, axes),
        *_under_memory(cases, fastest, axes),
        *_other_work(sound, fastest, axes),
        *excluded,
    ]
    for axis in COMPARED_AXES:
        comparisons = compared(cases, axes, axis)
        if len(comparisons) > MAX_COMPARISONS:
            sentences.append(_comparison_with_first(comparisons))
        else:
            sentences += map(_comparison_text, comparisons)
    if sound["is_oversubscribed"].any():
        sentences.append(
            "Every case was oversubscribed (ranks shared cores), so the schedules cannot be judged "
            "by these figures."
        )
    elif len(sound) < len(cases):
        sentences.append(f"Excluded from these comparisons: {_oversubscribed(cases)}.")
    return [*sentences, _certainty(cases)]


def compared(cases: pd.DataFrame, axes: Axes, axis: str) -> list[AxisComparison]:
    """Compare every two values of an axis, later with earlier, over pairs of sound cases.

    Cases of a single rank count only if there are no others, as they have no pipeline.
    """
    sound = _sound(cases)
    pipelined = sound[sound["world_size"] > 1]
    pool = sound if pipelined.empty else pipelined
    names = list(dict.fromkeys(pool[axis]))
    pairs = combinations(names, 2)
    comparisons = [_compared(pool, axis, name, base, axes) for base, name in pairs]
    return [comparison for comparison in comparisons if comparison.num_pairs]


def _compared(cases: pd.DataFrame, axis: str, name: str, base: str, axes: Axes) -> AxisComparison:
    key = [other_axis for other_axis in axes if other_axis != axis] or ["device"]
    heads, bases = (cases[cases[axis] == value] for value in (name, base))
    pairs = heads.merge(bases, on=key, suffixes=("", "_base"))
    throughput, memory = (
        (pairs[column] / pairs[f"{column}_base"]).median()
        for column in ("tokens_per_s", "peak_memory_bytes")
    )
    return AxisComparison(axis, name, base, len(pairs), throughput, memory)


def _sound(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the cases that are not oversubscribed, or all cases if every one is."""
    cases = cases[~cases["is_not_finite"]]
    sound = cases[~cases["is_oversubscribed"]]
    return cases if sound.empty else sound


def _not_finite(cases: pd.DataFrame) -> str:
    """Say that some cases are excluded, by name if they are few."""
    names = "; ".join(cases["text"]) if len(cases) <= MOST_NAMED else ""
    count = counted(len(cases), "case")
    return (
        f"Excluded from these comparisons: {count} in which a loss or gradient was NaN or infinite"
        f"{f' ({names})' if names else ''}, so that the speed means nothing."
    )


def _fastest(case: pd.Series, cases: pd.DataFrame, axes: Axes) -> str:
    name = case["text"]
    if _differing_work(cases, axes):
        name = f"Most tokens/s of {len(cases)} cases, which do different work: {name}"
    elif len(cases) > 1:
        name = f"Fastest of {len(cases)} cases: {name}"
    peak = case["peak_memory_bytes"]
    memory = "" if is_missing(peak) else f" and a peak of {size(peak)} on its fullest rank"
    return (
        f"{name}. It reaches {figure('tokens_per_s', case['tokens_per_s'])}, with a bubble of "
        f"{percent(case['bubble_fraction'])} (theory {percent(case['bubble_fraction_theory'])})"
        f"{memory}."
    )


def _next(cases: pd.DataFrame, fastest: pd.Series, runs: pd.DataFrame, axes: Axes) -> list[str]:
    """Compare the fastest case with the best other schedule under the same settings.

    Without such a rival, compare it with the next case that does the same work.
    """
    others = [axis for axis in axes if axis != "schedule"]
    rivals = _alike(cases[cases["schedule"] != fastest["schedule"]], fastest, others)
    if not rivals.empty:
        where, rival = settings_text(fastest, others) or "the same settings", _fastest_of(rivals)
        name = f"{rival['schedule']}, the next schedule"
        return [_lead(fastest, rival, runs, f"With {where}, that", name)]
    rivals = _alike(cases[cases["case_id"] != fastest["case_id"]], fastest, _work(cases, axes))
    if rivals.empty:
        return []
    rival = _fastest_of(rivals)
    return [_lead(fastest, rival, runs, "That", f"{rival['text']}, the next case")]


def _work(cases: pd.DataFrame, axes: Axes) -> list[str]:
    """Return the axes along which tokens/s of these cases do not compare.

    The work of emulated ranks grows with their number.
    """
    own = {*work_axes(axes)}
    if (cases["device"] == EMULATED).all():
        own.add("world_size")
    return [axis for axis in axes if axis in own]


def _differing_work(cases: pd.DataFrame, axes: Axes) -> list[str]:
    """Return the axes in which the work of these cases differs, the device aside."""
    work = [axis for axis in _work(cases, axes) if axis != "device"]
    return [axis for axis in work if len(cases[axis].astype(str).unique()) > 1]


def _other_work(cases: pd.DataFrame, fastest: pd.Series, axes: Axes) -> list[str]:
    """Name the fastest case of each other kind of work with several cases, if they are few."""
    work = _differing_work(cases, axes)
    others = [axis for axis in axes if axis not in work]
    kinds = [kind for _, kind in cases.groupby(work, sort=False)] if work else []
    clauses = [
        f"with {settings_text(best, work)}, {settings_text(best, others)} is fastest "
        f"({figure('tokens_per_s', best['tokens_per_s'])})"
        for kind in kinds
        if len(kind) > 1 and fastest["case_id"] not in kind["case_id"].tolist()
        for best in [_fastest_of(kind)]
    ]
    if not clauses or len(kinds) > MOST_KINDS:
        return []
    return [f"{'; '.join(clauses)}.".replace("with", "With", 1)]


def _alike(cases: pd.DataFrame, case: pd.Series, axes: Iterable[str]) -> pd.DataFrame:
    """Return the cases with the same settings along these axes."""
    for axis in axes:
        cases = cases[cases[axis] == case[axis]]
    return cases


def _fastest_of(cases: pd.DataFrame) -> pd.Series:
    """Return the fastest case; ties go to the one with least memory."""
    figures = ["tokens_per_s", "peak_memory_bytes"]
    return cases.sort_values(figures, ascending=[False, True], kind="stable").iloc[0]


def _lead(fastest: pd.Series, rival: pd.Series, runs: pd.DataFrame, that: str, name: str) -> str:
    by_launches = _by_launches(fastest, rival, runs)
    if by_launches is None:
        faster = comparison(fastest["tokens_per_s"] / rival["tokens_per_s"], "throughput")
    else:  # the centre of the interval; the medians may even be ordered the other way round
        faster = comparison(by_launches.estimate, "throughput", digits=1)
        name += ", although its median is not lower" if by_launches.estimate < 1 else ""
    ratio = fastest["peak_memory_bytes"] / rival["peak_memory_bytes"]
    memory = "" if is_missing(ratio) else f"; it needs {comparison(ratio, 'peak memory')} that one"
    return f"{that} is {faster} {name}{memory}. {how_sure(fastest, rival, runs)}"


def how_sure(fastest: pd.Series, rival: pd.Series, runs: pd.DataFrame) -> str:
    """Say how certain the ratio of two cases' tokens/s is; the cases are rows of `by_case`.

    With enough launches of both, this is the interval of the ratio over launches. Else it is based
    on steps, which is weaker evidence, since the steps of one launch are correlated.
    """
    by_launches = _by_launches(fastest, rival, runs)
    if by_launches is not None:
        return _interval_text(by_launches)
    few = _too_few(fastest, rival, runs)
    (low, _), (_, high) = (_steps_interval(runs, case) for case in (fastest, rival))
    if is_missing(low) or is_missing(high):
        return f"The certainty is unknown: too few steps for an interval, and {few}."
    if low > high:
        return f"They differ by their steps (the 95 % intervals do not overlap); {few}."
    return f"It is unclear which is faster: the 95 % intervals over steps overlap; {few}."


def _by_launches(fastest: pd.Series, rival: pd.Series, runs: pd.DataFrame) -> Ratio | None:
    """Return the ratio of the two cases' tokens/s; None if either has too few launches."""
    speeds = [_speeds(runs, case) for case in (fastest, rival)]
    if min(len(side) for side in speeds) < FEWEST_LAUNCHES:
        return None
    return launch_ratio(*speeds)


def _interval_text(ratio: Ratio) -> str:
    low, high = (written(end - 1, "+.1f", "%", 100) for end in (ratio.low, ratio.high))
    lead = f"by the geometric means of their launches, the lead is between {low} and {high} (95 %)"
    if ratio.low > 1:
        return f"{lead.capitalize()}."
    if ratio.high < 1:
        return f"The order of the medians is misleading: {lead}, so the other case is faster."
    return f"It is unclear which is faster: {lead}."


def _too_few(fastest: pd.Series, rival: pd.Series, runs: pd.DataFrame) -> str:
    """Say that there are too few launches, and of which case."""
    counts = [len(_speeds(runs, case)) for case in (fastest, rival)]
    if max(counts) < FEWEST_LAUNCHES:
        return f"a firmer verdict needs at least {FEWEST_LAUNCHES} launches of each"
    fewer = (fastest, rival)[counts.index(min(counts))]
    succeeded = f"{counted(min(counts), 'launch')} of {fewer['text']} succeeded"
    return f"only {succeeded}; a firmer verdict needs at least {FEWEST_LAUNCHES}"


def _speeds(runs: pd.DataFrame, case: pd.Series) -> list[float]:
    measured = ok_runs(runs)
    speeds = measured.loc[measured["case_id"] == case["case_id"], "tokens_per_s"]
    return [float(speed) for speed in speeds]


def _steps_interval(runs: pd.DataFrame, case: pd.Series) -> tuple[float, float]:
    """Return the union of its launches' intervals over steps; NaN if a launch has none."""
    measured = ok_runs(runs).reindex(columns=["case_id", *INTERVAL])
    own = measured[measured["case_id"] == case["case_id"]]
    low, high = (own[name].astype(float) for name in INTERVAL)
    return float(low.min(skipna=False)), float(high.max(skipna=False))


def _under_memory(cases: pd.DataFrame, fastest: pd.Series, axes: Axes) -> list[str]:
    """Name the fastest case for each smaller memory, along the Pareto front."""
    alike = _alike(cases, fastest, _work(cases, axes)).dropna(subset=["peak_memory_bytes"])
    peaks = alike["peak_memory_bytes"].map(rounded_size)  # as printed, so that steps are visible
    alike = alike.assign(peak_memory_bytes=peaks)
    rivals = _sound(alike)
    if len(rivals) == 1 or is_missing(fastest["peak_memory_bytes"]):
        return []
    memory, speed = (rivals[name].tolist() for name in ("peak_memory_bytes", "tokens_per_s"))
    front = rivals.iloc[pareto_front(memory, speed)[::-1]]
    clauses = [
        f"with less than {size(larger['peak_memory_bytes'])} per rank, "
        f"{case['text']} is fastest ({_beside(case, fastest)})"
        for larger, case in _steps_down(front)
    ]
    if clauses:
        return [f"{'; '.join(clauses[:MOST_SMALLER])}.".replace("with", "With", 1)]
    enough = (1 - LEAST_SAVED) * rounded_size(fastest["peak_memory_bytes"])
    has_oversubscribed = (peaks <= enough).any()
    sound = " and was not oversubscribed" if has_oversubscribed else ""
    return [f"No case that does the same work{sound} needs much less memory."]


def _steps_down(front: pd.DataFrame) -> Iterator[tuple[pd.Series, pd.Series]]:
    """Yield each case of the front after the next larger one, if it saves enough memory."""
    cases = [case for _, case in front.iterrows()]
    last = cases[0]
    for larger, case in pairwise(cases):
        if case["peak_memory_bytes"] <= (1 - LEAST_SAVED) * last["peak_memory_bytes"]:
            yield larger, case
            last = case


def _beside(case: pd.Series, fastest: pd.Series) -> str:
    """Format a case's memory and loss of speed: `312.0 MiB, 4.2 % fewer tokens/s`."""
    slower = percent(1 - case["tokens_per_s"] / fastest["tokens_per_s"])
    return f"{size(case['peak_memory_bytes'])}, {slower} fewer tokens/s"


def _comparison_text(pair: AxisComparison) -> str:
    where = f"Over {pair.num_pairs} pairs of cases that differ only in {pair.axis}, the median"
    if pair.num_pairs == 1:
        where = f"In the only pair of cases that differ only in {pair.axis}, the"
    memory = ""
    if not is_missing(pair.memory):
        memory = f", and its peak memory {_times(pair.memory)},"
    return (
        f"{where} throughput of {pair.name} is {_times(pair.throughput)}{memory} "
        f"that of {pair.base}."
    )


def _comparison_with_first(comparisons: Sequence[AxisComparison]) -> str:
    """Compare all values with the first in one sentence: all pairs would be too many."""
    first = comparisons[0].base
    ranked = sorted((r for r in comparisons if r.base == first), key=lambda r: -r.throughput)
    listed = ", ".join(f"{r.name} {written(r.throughput, '.2f')}" for r in ranked)
    pairs = {r.num_pairs for r in ranked}
    counts = " to ".join(str(n) for n in sorted({min(pairs), max(pairs)}))
    where = f"{counts} pairs" if max(pairs) > 1 else "one pair"
    return (
        f"Median throughput as a multiple of {first}'s, over {where} of cases that differ "
        f"only in {comparisons[0].axis}: {listed}."
    )


def _times(ratio: float) -> str:
    return written(ratio, ".2f", "times")


def _oversubscribed(cases: pd.DataFrame) -> str:
    count = int(cases["is_oversubscribed"].sum())
    return f"{counted(count, 'oversubscribed case')}, in which ranks shared cores"


def _certainty(cases: pd.DataFrame) -> str:
    fewest = int(cases["num_launches"].min())
    if fewest > 1:
        return f"Each case was launched {fewest} times or more; figures are medians over launches."
    each = "Each case was" if int(cases["num_launches"].max()) == 1 else "Some cases were"
    return (
        f"{each} launched only once: differences of a few per cent may be chance. "
        "Set measure.launches to 3 or more to find out."
    )
