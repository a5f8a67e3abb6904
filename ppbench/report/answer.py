"""The answer in words: which case is fastest, what the schedule changes, how sure that is.

Plain sentences made from the stored figures, so that a reader who stops at the first screen has
not been misled: oversubscribed cases count only when there are no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import pandas as pd

from ppbench.config.case import EMULATED
from ppbench.report.cases import Axes, by_case, settings_text
from ppbench.report.units import comparison, is_missing, percent, size, tokens_per_s, written

MAX_RIVALRIES = 3  # a sentence each; three schedules have as many


@dataclass(frozen=True)
class Rivalry:
    """Two schedules over the cases that differ in nothing else. Ratios are `one` / `other`."""

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
    is_emulated = cases["device"] == EMULATED
    left_out = []
    if is_emulated.any() and not is_emulated.all():
        left_out = ["Emulated cases are left out of these comparisons: nothing was computed there."]
        cases = cases[~is_emulated]
    sound = _sound(cases)
    fastest = sound.iloc[int(sound["tokens_per_s"].argmax())]
    sentences = [_fastest(fastest, len(sound)), *_next_schedule(sound, fastest, axes), *left_out]
    found = rivalries(cases, axes)
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


def rivalries(cases: pd.DataFrame, axes: Axes) -> list[Rivalry]:
    """Every two schedules, the later against the earlier, over the pairs of sound cases.

    Cases of a single rank count only when there are no others: they have no pipeline.
    """
    sound = _sound(cases)
    piped = sound[sound["world_size"] > 1]
    pool = sound if piped.empty else piped
    schedules = list(dict.fromkeys(pool["schedule"]))
    found = [_rival(pool, one, other, axes) for other, one in combinations(schedules, 2)]
    return [rivalry for rivalry in found if rivalry.num_pairs]


def _rival(cases: pd.DataFrame, one: str, other: str, axes: Axes) -> Rivalry:
    key = [axis for axis in axes if axis != "schedule"] or ["device"]
    mine, theirs = (cases[cases["schedule"] == name] for name in (one, other))
    pairs = mine.merge(theirs, on=key, suffixes=("", "_other"))
    ratios = {
        name: (pairs[name] / pairs[f"{name}_other"]).median()
        for name in ("tokens_per_s", "peak_memory_bytes")
    }
    return Rivalry(one, other, len(pairs), ratios["tokens_per_s"], ratios["peak_memory_bytes"])


def _sound(cases: pd.DataFrame) -> pd.DataFrame:
    """The cases that are not oversubscribed, or all if every one is."""
    sound = cases[~cases["is_oversubscribed"]]
    return cases if sound.empty else sound


def _fastest(case: pd.Series, num_cases: int) -> str:
    name = f"Fastest of {num_cases} cases: {case['text']}" if num_cases > 1 else case["text"]
    peak = case["peak_memory_bytes"]
    memory = "" if is_missing(peak) else f" and a peak of {size(peak)} on its fullest rank"
    return (
        f"{name}. It reaches {tokens_per_s(case['tokens_per_s'])}, with a bubble of "
        f"{percent(case['bubble_fraction'])} (theory {percent(case['bubble_fraction_theory'])})"
        f"{memory}."
    )


def _next_schedule(cases: pd.DataFrame, fastest: pd.Series, axes: Axes) -> list[str]:
    """By how much the fastest case leads the best other schedule under the same settings."""
    others = [axis for axis in axes if axis != "schedule"]
    rivals = cases[cases["schedule"] != fastest["schedule"]]
    for axis in others:
        rivals = rivals[rivals[axis] == fastest[axis]]
    if rivals.empty:
        return []
    rival = rivals.iloc[int(rivals["tokens_per_s"].argmax())]
    where = settings_text(fastest, others) or "the same settings"
    faster = comparison(fastest["tokens_per_s"] / rival["tokens_per_s"], "throughput")
    lead = f"With {where}, that is {faster} {rival['schedule']}, the next schedule"
    ratio = fastest["peak_memory_bytes"] / rival["peak_memory_bytes"]
    memory = "" if is_missing(ratio) else f"; it needs {comparison(ratio, 'peak memory')} that one"
    return [f"{lead}{memory}."]


def _rivalry(rivalry: Rivalry) -> str:
    where = f"Over {rivalry.num_pairs} pairs of cases that differ only in schedule, the median"
    if rivalry.num_pairs == 1:
        where = "In the one pair of cases that differ only in schedule, the"
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
        f"only in schedule: {listed}."
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
