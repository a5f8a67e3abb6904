"""The answer in words: which case is fastest, under which memory, by how much, how sure that is.

Plain sentences made from the stored figures, so that a reader who stops at the first screen has
not been misled: oversubscribed cases count only when there are no others, and cases whose loss or
gradients were not finite never.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import pandas as pd

from ppbench.analysis.front import pareto_front
from ppbench.analysis.ratios import FEWEST_LAUNCHES, Ratio, launch_ratio
from ppbench.config.case import EMULATED
from ppbench.report.cases import INTERVAL, Axes, by_case, ok_runs, settings_text, work_axes
from ppbench.report.units import (
    comparison,
    counted,
    is_missing,
    percent,
    rounded_size,
    size,
    tokens_per_s,
    written,
)

MOST_SMALLER = 4  # cases down the front; more would not be read
LEAST_SAVED = 0.05  # of the memory; less is not worth a clause
MOST_NAMED = 4  # cases by name
MOST_KINDS = 4  # of work, of which each has a fastest case
RIVALS = ("schedule", "runtime")  # axes whose values are held against each other
MAX_RIVALRIES = 3  # a sentence each; three schedules have as many


@dataclass(frozen=True)
class Rivalry:
    """Two of an axis over the cases that differ in nothing else. Ratios are `one` / `other`."""

    axis: str
    one: str
    other: str
    num_pairs: int
    throughput: float
    memory: float


def answer(runs: pd.DataFrame, axes: Axes) -> list[str]:
    """Sentences, the most important first. Plain text, to be escaped by whoever prints it."""
    cases = by_case(runs, axes)
    if cases.empty:
        return ["No run succeeded, so there is nothing to compare; the errors are below."]
    cases = cases.dropna(subset=["tokens_per_s"])
    if cases.empty:
        return ["No run tells its throughput, so there is nothing to compare."]
    broken = cases[cases["is_not_finite"]]
    cases = cases[~cases["is_not_finite"]]
    if cases.empty:
        return [_not_finite(broken), "There is nothing else to compare."]
    is_emulated = cases["device"] == EMULATED
    left_out = [] if broken.empty else [_not_finite(broken)]
    if is_emulated.any() and not is_emulated.all():
        left_out.append(
            "Emulated cases are left out of these comparisons: nothing was computed there."
        )
        cases = cases[~is_emulated]
    sound = _sound(cases)
    fastest = _fastest_of(sound)
    sentences = [
        _fastest(fastest, sound, axes),
        *_next(sound, fastest, runs, axes),
        *_under_memory(cases, fastest, axes),
        *_other_work(sound, fastest, axes),
        *left_out,
    ]
    for axis in RIVALS:
        found = rivalries(cases, axes, axis)
        if len(found) > MAX_RIVALRIES:
            sentences.append(_many_rivalries(found))
        else:
            sentences += [_rivalry(rivalry) for rivalry in found]
    if sound["is_oversubscribed"].any():
        sentences.append(
            "Every case was oversubscribed (ranks shared cores): none of this says anything about "
            "the schedules."
        )
    elif len(sound) < len(cases):
        sentences.append(f"Left out of these comparisons: {_oversubscribed(cases)}.")
    return [*sentences, _certainty(cases)]


def rivalries(cases: pd.DataFrame, axes: Axes, axis: str = "schedule") -> list[Rivalry]:
    """Every two schedules, or runtimes, the later against the earlier, over pairs of sound cases.

    Cases of a single rank count only when there are no others: they have no pipeline.
    """
    sound = _sound(cases)
    piped = sound[sound["world_size"] > 1]
    pool = sound if piped.empty else piped
    names = list(dict.fromkeys(pool[axis]))
    found = [_rival(pool, axis, one, other, axes) for other, one in combinations(names, 2)]
    return [rivalry for rivalry in found if rivalry.num_pairs]


def _rival(cases: pd.DataFrame, axis: str, one: str, other: str, axes: Axes) -> Rivalry:
    key = [other_axis for other_axis in axes if other_axis != axis] or ["device"]
    mine, theirs = (cases[cases[axis] == name] for name in (one, other))
    pairs = mine.merge(theirs, on=key, suffixes=("", "_other"))
    ratios = {
        name: (pairs[name] / pairs[f"{name}_other"]).median()
        for name in ("tokens_per_s", "peak_memory_bytes")
    }
    throughput, memory = ratios["tokens_per_s"], ratios["peak_memory_bytes"]
    return Rivalry(axis, one, other, len(pairs), throughput, memory)


def _sound(cases: pd.DataFrame) -> pd.DataFrame:
    """The cases that are not oversubscribed, or all if every one is."""
    cases = cases[~cases["is_not_finite"]]
    sound = cases[~cases["is_oversubscribed"]]
    return cases if sound.empty else sound


def _not_finite(cases: pd.DataFrame) -> str:
    """That some cases have no say, by name where they are few."""
    names = "; ".join(cases["text"]) if len(cases) <= MOST_NAMED else ""
    count = counted(len(cases), "case")
    return (
        f"Left out of these comparisons: {count} in which a loss or gradient was NaN or infinite"
        f"{f' ({names})' if names else ''}: nothing was learnt there, and speed says nothing."
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
        f"{name}. It reaches {tokens_per_s(case['tokens_per_s'])}, with a bubble of "
        f"{percent(case['bubble_fraction'])} (theory {percent(case['bubble_fraction_theory'])})"
        f"{memory}."
    )


def _next(cases: pd.DataFrame, fastest: pd.Series, runs: pd.DataFrame, axes: Axes) -> list[str]:
    """By how much the fastest case leads the best other schedule under the same settings.

    Or, where it has no such rival, the next case that does the same work.
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
    """Those of the axes along which tokens/s of these cases do not compare.

    Emulated ranks bring their own work, however many there are.
    """
    own = {*work_axes(axes)}
    if (cases["device"] == EMULATED).all():
        own.add("world_size")
    return [axis for axis in axes if axis in own]


def _differing_work(cases: pd.DataFrame, axes: Axes) -> list[str]:
    """In what the work of these cases differs. The same work may be done on several devices."""
    work = [axis for axis in _work(cases, axes) if axis != "device"]
    return [axis for axis in work if len(cases[axis].astype(str).unique()) > 1]


def _other_work(cases: pd.DataFrame, fastest: pd.Series, axes: Axes) -> list[str]:
    """The fastest case of each other kind of work that several cases do, if these are few."""
    work = _differing_work(cases, axes)
    others = [axis for axis in axes if axis not in work]
    kinds = [kind for _, kind in cases.groupby(work, sort=False)] if work else []
    clauses = [
        f"with {settings_text(best, work)}, {settings_text(best, others)} is fastest "
        f"({tokens_per_s(best['tokens_per_s'])})"
        for kind in kinds
        if len(kind) > 1 and fastest["case_id"] not in kind["case_id"].tolist()
        for best in [_fastest_of(kind)]
    ]
    if not clauses or len(kinds) > MOST_KINDS:
        return []
    return [f"{'; '.join(clauses)}.".replace("with", "With", 1)]


def _alike(cases: pd.DataFrame, case: pd.Series, axes: Iterable[str]) -> pd.DataFrame:
    """The cases that have the same settings along these axes."""
    for axis in axes:
        cases = cases[cases[axis] == case[axis]]
    return cases


def _fastest_of(cases: pd.DataFrame) -> pd.Series:
    """Of several as fast, the smallest."""
    figures = ["tokens_per_s", "peak_memory_bytes"]
    return cases.sort_values(figures, ascending=[False, True], kind="stable").iloc[0]


def _lead(fastest: pd.Series, rival: pd.Series, runs: pd.DataFrame, that: str, name: str) -> str:
    by_launches = _by_launches(fastest, rival, runs)
    if by_launches is None:
        faster = comparison(fastest["tokens_per_s"] / rival["tokens_per_s"], "throughput")
    else:  # what the interval is of: medians may lie outside it, or even the other way round
        faster = comparison(by_launches.estimate, "throughput", digits=1)
        name += ", though its median is no lower" if by_launches.estimate < 1 else ""
    ratio = fastest["peak_memory_bytes"] / rival["peak_memory_bytes"]
    memory = "" if is_missing(ratio) else f"; it needs {comparison(ratio, 'peak memory')} that one"
    return f"{that} is {faster} {name}{memory}. {how_sure(fastest, rival, runs)}"


def how_sure(fastest: pd.Series, rival: pd.Series, runs: pd.DataFrame) -> str:
    """What is known of the ratio of two cases' tokens/s, in a sentence; rows of `by_case`.

    With enough launches of both, the interval of the ratio by them; else what the steps tell, which
    is less: all steps of a launch share its luck.
    """
    by_launches = _by_launches(fastest, rival, runs)
    if by_launches is not None:
        return _interval_text(by_launches)
    few = _too_few(fastest, rival, runs)
    (low, _), (_, high) = (_steps_interval(runs, case) for case in (fastest, rival))
    if is_missing(low) or is_missing(high):
        return f"How sure that is, is unknown: too few steps for an interval, and {few}."
    if low > high:
        return f"By their steps they differ (their 95 % intervals lie apart); {few}."
    return f"Which of them is faster is unclear: by their steps, 95 % intervals overlap; {few}."


def _by_launches(fastest: pd.Series, rival: pd.Series, runs: pd.DataFrame) -> Ratio | None:
    """The ratio of the two cases' tokens/s; None if either has too few launches to tell."""
    speeds = [_speeds(runs, case) for case in (fastest, rival)]
    if min(len(side) for side in speeds) < FEWEST_LAUNCHES:
        return None
    return launch_ratio(*speeds)


def _interval_text(ratio: Ratio) -> str:
    low, high = (written(end - 1, "{:+.1f} %", 100) for end in (ratio.low, ratio.high))
    told = f"by the geometric means of their launches, the lead is between {low} and {high} (95 %)"
    if ratio.low > 1:
        return f"{told.capitalize()}."
    if ratio.high < 1:
        return f"The order of their medians misleads: {told}, so that the other one is faster."
    return f"Which of them is faster is unclear: {told}."


def _too_few(fastest: pd.Series, rival: pd.Series, runs: pd.DataFrame) -> str:
    """That launches do not tell, and whose are missing."""
    counts = [len(_speeds(runs, case)) for case in (fastest, rival)]
    if max(counts) < FEWEST_LAUNCHES:
        return f"fewer than {FEWEST_LAUNCHES} launches of each cannot tell more"
    fewer = (fastest, rival)[counts.index(min(counts))]
    have = f"{counted(min(counts), 'launch')} of {fewer['text']} succeeded"
    return f"only {have}, and fewer than {FEWEST_LAUNCHES} cannot tell more"


def _speeds(runs: pd.DataFrame, case: pd.Series) -> list[float]:
    measured = ok_runs(runs)
    speeds = measured.loc[measured["case_id"] == case["case_id"], "tokens_per_s"]
    return [float(speed) for speed in speeds]


def _steps_interval(runs: pd.DataFrame, case: pd.Series) -> tuple[float, float]:
    """From the lowest to the highest end that its launches' steps tell; NaN if one tells none."""
    measured = ok_runs(runs).reindex(columns=["case_id", *INTERVAL])
    own = measured[measured["case_id"] == case["case_id"]]
    low, high = (own[name].astype(float) for name in INTERVAL)
    return float(low.min(skipna=False)), float(high.max(skipna=False))


def _under_memory(cases: pd.DataFrame, fastest: pd.Series, axes: Axes) -> list[str]:
    """The fastest case that fits where the fastest of all does not, down the Pareto front."""
    alike = _alike(cases, fastest, _work(cases, axes)).dropna(subset=["peak_memory_bytes"])
    peaks = alike["peak_memory_bytes"].map(rounded_size)  # so that no step is between two that
    alike = alike.assign(peak_memory_bytes=peaks)  # read the same
    rivals = _sound(alike)
    if len(rivals) == 1 or is_missing(fastest["peak_memory_bytes"]):
        return []
    memory, speed = (rivals[name].tolist() for name in ("peak_memory_bytes", "tokens_per_s"))
    front = rivals.iloc[pareto_front(memory, speed)[::-1]]
    clauses = [
        f"where less than {size(larger['peak_memory_bytes'])} fit on a rank, "
        f"{case['text']} is fastest ({_beside(case, fastest)})"
        for larger, case in _steps_down(front)
    ]
    if clauses:
        return [f"{'; '.join(clauses[:MOST_SMALLER])}.".replace("where", "Where", 1)]
    enough = (1 - LEAST_SAVED) * rounded_size(fastest["peak_memory_bytes"])
    is_denied = (peaks <= enough).any()  # of those that were oversubscribed
    sound = " and was not oversubscribed" if is_denied else ""
    return [f"No case that does the same work{sound} needs much less memory."]


def _steps_down(front: pd.DataFrame) -> Iterator[tuple[pd.Series, pd.Series]]:
    """Each case of the front after the one that it replaces, if it saves much beside the last."""
    cases = [case for _, case in front.iterrows()]
    last = cases[0]
    for larger, case in pairwise(cases):
        if case["peak_memory_bytes"] <= (1 - LEAST_SAVED) * last["peak_memory_bytes"]:
            yield larger, case
            last = case


def _beside(case: pd.Series, fastest: pd.Series) -> str:
    """`312.0 MiB, 4.2 % fewer tokens/s`."""
    slower = percent(1 - case["tokens_per_s"] / fastest["tokens_per_s"])
    return f"{size(case['peak_memory_bytes'])}, {slower} fewer tokens/s"


def _rivalry(rivalry: Rivalry) -> str:
    axis = rivalry.axis
    where = f"Over {rivalry.num_pairs} pairs of cases that differ only in {axis}, the median"
    if rivalry.num_pairs == 1:
        where = f"In the one pair of cases that differ only in {axis}, the"
    memory = ""
    if not is_missing(rivalry.memory):
        memory = f", and its peak memory {_times(rivalry.memory)},"
    return (
        f"{where} throughput of {rivalry.one} is {_times(rivalry.throughput)}{memory} "
        f"that of {rivalry.other}."
    )


def _many_rivalries(found: Sequence[Rivalry]) -> str:
    """All schedules against the first, in one sentence: each pair by itself would be too many."""
    first = found[0].other
    ranked = sorted((r for r in found if r.other == first), key=lambda r: -r.throughput)
    listed = ", ".join(f"{r.one} {written(r.throughput, '{:.2f}')}" for r in ranked)
    pairs = {r.num_pairs for r in ranked}
    counts = " to ".join(str(n) for n in sorted({min(pairs), max(pairs)}))
    where = f"{counts} pairs" if max(pairs) > 1 else "one pair"
    return (
        f"Median throughput as a multiple of {first}'s, over {where} of cases that differ "
        f"only in {found[0].axis}: {listed}."
    )


def _times(ratio: float) -> str:
    return written(ratio, "{:.2f} times")


def _oversubscribed(cases: pd.DataFrame) -> str:
    count = int(cases["is_oversubscribed"].sum())
    return (
        f"{count} oversubscribed {'case' if count == 1 else 'cases'}, in which ranks shared cores"
    )


def _certainty(cases: pd.DataFrame) -> str:
    fewest = int(cases["num_launches"].min())
    if fewest > 1:
        return f"Each case was launched {fewest} times or more; figures are medians over launches."
    each = "Each case was" if int(cases["num_launches"].max()) == 1 else "Some cases were"
    return (
        f"{each} launched only once: differences of a few per cent may be chance. "
        "Set measure.launches to 3 or more to tell."
    )
