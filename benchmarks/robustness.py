"""Verdicts, histories and sequences of looks under several models of noise: parts of `tracking`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binomtest, norm

from benchmarks.made_up_launches import (
    ALL_MODELS,
    BETWEEN,
    BIMODAL,
    LEVELS,
    SEARCHED,
    SHARES,
    Demand,
    Figures,
    Floats,
    Model,
    Settings,
    bimodal_name,
    change_in_words,
    disturbed,
    made_up_steps,
    noises,
    normal,
)
from ppbench.display.metrics import METRICS
from ppbench.statistics.change_points import ChangePoint, change_points
from ppbench.statistics.sequential import is_decided, judge, looks
from ppbench.statistics.verdicts import Change, Noise, Pair, Verdict, compare

CHANGES = (0.02, 0.05, 0.10)
NUM_COMMITS, CHANGED_AT = 80, 40
HISTORIES = ("10 % disturbed", "20 % disturbed", "t3", "exponential")
FEW_LOOKS, MANY_LOOKS = 12, 24
PAIRED_STEPS, LAUNCH_NOISE, STEP_NOISE = 20, 0.01, 0.002
SCATTER = 3
KNOWN = ("unknown", "known")
_CLAIMS = (Verdict.slower, Verdict.faster)
STEP = METRICS["step_ns"]


def _demands() -> Iterator[Demand]:
    for known in KNOWN:
        start = f"noise {known}"
        levels = [f"bimodal {level:.0%}" for level in LEVELS]
        for name in [*(name for name in ALL_MODELS if name not in BIMODAL), *levels]:
            yield Demand(f"{name}, {start}, A/A: slower", at_most=0.01)
        for name, least in (("10 % disturbed", (0.9, 0.99)), ("20 % disturbed", (0.75, 0.95))):
            yield Demand(f"{name}, {start}, 5 %: slower", at_least=least[0])
            yield Demand(f"{name}, {start}, 10 %: slower", at_least=least[1])
            yield Demand(f"{name}, {start}: the interval of 95 % holds", at_least=0.9)
        yield Demand(f"exponential, {start}, 2 %: slower", at_least=0.6)
    history = "history, 10 % disturbed"
    yield Demand(f"{history}, no change: alarm", at_most=0.04)
    yield Demand(f"{history}, 5 %: hit", at_least=0.9)
    yield Demand(f"{history}, 5 %: likeliest commit off by 1 at most", at_least=0.75)
    for known in KNOWN:
        start = f"looks up to {FEW_LOOKS}, normal, noise {known}"
        yield Demand(f"{start}, no change: false claims", at_most=0.01)
        yield Demand(f"{start}, no change: launches a side, number in the mean", at_most=8)
        yield Demand(f"{start}, 10 %: launches a side, number in the mean", at_most=4)
    yield Demand("20 of 20 paired steps of one launch a side, no effect: claims", at_most=0.0)


DEMANDS = tuple(_demands())


def compared(settings: Settings) -> Iterator[tuple[str, float]]:
    """Rates of verdicts with five launches a side, in turn: base, head, base, head, ..."""
    figures: Figures = {}
    for name, model in ALL_MODELS.items():
        draw, num = settings.draw(f"model {name}"), settings.launches
        drawn = made_up_steps(draw, (settings.comparisons, 2 * num), settings.steps, model)
        for known in KNOWN:
            measured = noises(settings, settings.comparisons, model) if known == "known" else None
            for figure, value in _rates(name, np.median(drawn, axis=-1), measured):
                figures[f"{name}, noise {known}{figure}"] = value
                yield f"{name}, noise {known}{figure}", value
    yield from _over_shares(figures)
    yield from _of_unequal_sides(settings)


def _over_shares(figures: Figures) -> Iterator[tuple[str, float]]:
    """False alarms of launches on two levels: over all shares of the slow one, and of the worst."""
    for level in LEVELS:
        for known in KNOWN:
            end = f"noise {known}, A/A: slower"
            rates = [figures[f"{bimodal_name(level, share)}, {end}"] for share in SHARES]
            yield f"bimodal {level:.0%}, {end}", float(np.mean(rates))
            yield f"bimodal {level:.0%}, {end}, in the worst share", max(rates)


def _of_unequal_sides(settings: Settings) -> Iterator[tuple[str, float]]:
    """Rates of false verdicts where head scatters more than base."""
    shape = settings.comparisons, 2 * settings.launches
    launches = np.median(made_up_steps(settings.draw("unequal"), shape, settings.steps), axis=-1)
    head = launches[:, 1::2] ** SCATTER
    verdicts = Counter(each.verdict for each in _changes(launches[:, ::2], head, None))
    for claim in _CLAIMS:
        start = f"head scatters {SCATTER} times as much, noise unknown, A/A"
        yield f"{start}: {claim}", verdicts[claim] / settings.comparisons


def _rates(
    name: str, launches: Floats, measured: list[Noise] | None
) -> Iterator[tuple[str, float]]:
    base, head = launches[:, ::2], launches[:, 1::2]
    for change in (0.0, *(CHANGES if name in SEARCHED else ())):
        changes = list(_changes(base, head * (1 + change), measured))
        verdicts = Counter(each.verdict for each in changes)
        start = f", {change_in_words(change)}"
        yield f"{start}: slower", verdicts[Verdict.slower] / len(changes)
        yield f"{start}: faster", verdicts[Verdict.faster] / len(changes)
        if not change:
            ratios = [each.ratio for each in changes if each.ratio is not None]
            yield (
                ": the interval of 95 % holds",
                float(np.mean([r.low <= 1 <= r.high for r in ratios])),
            )
            yield ": launches discounted", sum(len(c.discounts) for c in changes) / launches.size


def verdicts_of(launches: Floats, change: float) -> list[Verdict]:
    """The verdicts of launches of base and head in turn, for a true change of that size."""
    changes = _changes(launches[:, ::2], launches[:, 1::2] * (1 + change), None)
    return [each.verdict for each in changes]


def _changes(base: Floats, head: Floats, measured: list[Noise] | None) -> Iterator[Change]:
    for index, (before, after) in enumerate(zip(base, head, strict=True)):
        noise = None if measured is None else measured[index]
        yield compare(STEP, [Pair(tuple(before), tuple(after), noise)])[0]


def histories(settings: Settings) -> Iterator[tuple[str, float]]:
    """Histories of one launch per commit, without a change and with one."""
    for name in HISTORIES:
        draw, shape = settings.draw(f"history {name}"), (settings.series, NUM_COMMITS)
        launches = np.median(made_up_steps(draw, shape, settings.steps, ALL_MODELS[name]), axis=-1)
        alarms = [bool(_points(series)) for series in launches]
        yield f"history, {name}, no change: alarm", float(np.mean(alarms))
        for change in CHANGES[:2]:
            changed = launches.copy()
            changed[:, CHANGED_AT:] *= 1 + change
            start = f"history, {name}, {change_in_words(change)}"
            yield from _hits(start, [_points(series) for series in changed])


def _points(series: Floats) -> list[ChangePoint]:
    return change_points([[value] for value in series.tolist()], slow_sign=1)


def _hits(start: str, series: Sequence[list[ChangePoint]]) -> Iterator[tuple[str, float]]:
    nearest = [
        min(points, key=lambda point: abs(point.index - CHANGED_AT), default=None)
        for points in series
    ]
    hit = [bool(p and p.earliest <= CHANGED_AT <= p.latest) for p in nearest]
    close = [bool(p and abs(p.index - CHANGED_AT) <= 1) for p in nearest]
    yield f"{start}: hit", float(np.mean(hit))
    yield f"{start}: likeliest commit off by 1 at most", float(np.mean(close))
    yield f"{start}: other points beside it", float(np.mean([len(p) > 1 for p in series]))


@dataclass(frozen=True)
class _Sequence:
    """A comparison that was looked at until it was decided, or the launches ran out."""

    verdict: Verdict
    num_launches: int


def sequences(settings: Settings) -> Iterator[tuple[str, float]]:
    """Launches until the verdict: how many, and how often it is false."""
    yield from _sequence_rates(settings, "normal", normal, FEW_LOOKS, (0.0, 0.01, 0.02, 0.10))
    yield f"a change of 1 %, {FEW_LOOKS} launches a side: the most that any test finds", _most(0.01)
    yield from _sequence_rates(settings, "normal", normal, MANY_LOOKS, (0.0, 0.01))
    few = "10 % disturbed", disturbed(0.1), FEW_LOOKS
    yield from _sequence_rates(settings, *few, (0.0, 0.10))
    yield from _paired(settings)


def _most(change: float) -> float:
    """Power of the best test with 1 % of false claims: normal, of known deviation (Neyman-Pearson).

    The deviation is that between launches alone.
    """
    error = BETWEEN * np.sqrt(2 / FEW_LOOKS)
    return float(norm.sf(norm.isf(0.005) - np.log1p(change) / error))


def _sequence_rates(
    settings: Settings, name: str, model: Model, most: int, changes: Sequence[float]
) -> Iterator[tuple[str, float]]:
    for known in KNOWN:
        measured = noises(settings, 4 * settings.sequences, model) if known == "known" else None
        for change in changes:
            num = settings.sequences * (1 if change else 4)
            draw = settings.draw(f"looks {name} {most} {change}")
            launches = np.median(
                made_up_steps(draw, (num, 2, most), settings.steps, model), axis=-1
            )
            launches[:, 1] *= 1 + change
            start = f"looks up to {most}, {name}, noise {known}"
            yield from _of_sequences(start, change, _run(launches, measured))


def _run(launches: Floats, measured: list[Noise] | None) -> list[_Sequence]:
    at = looks(launches.shape[-1])
    return [
        _looked_at(base, head, None if measured is None else measured[index], at)
        for index, (base, head) in enumerate(launches)
    ]


def _looked_at(base: Floats, head: Floats, noise: Noise | None, at: Sequence[int]) -> _Sequence:
    for look, num in enumerate(at):
        (change,) = judge(STEP, [Pair(tuple(base[:num]), tuple(head[:num]), noise)], look, at)
        if is_decided([change]):
            break
    return _Sequence(change.verdict, num)


def _of_sequences(
    start: str, change: float, done: Sequence[_Sequence]
) -> Iterator[tuple[str, float]]:
    verdicts = Counter(each.verdict for each in done)
    start = f"{start}, {change_in_words(change) if change else 'no change'}"
    if change:
        yield f"{start}: slower", verdicts[Verdict.slower] / len(done)
    else:
        yield f"{start}: false claims", sum(verdicts[claim] for claim in _CLAIMS) / len(done)
    yield f"{start}: same", verdicts[Verdict.same] / len(done)
    nums = [each.num_launches for each in done]
    yield f"{start}: launches a side, number in the mean", float(np.mean(nums))


def _paired(settings: Settings) -> Iterator[tuple[str, float]]:
    """Two launches of one commit, whose steps are paired: the launches differ, not the commits."""
    draw, num = settings.draw("paired steps"), settings.sequences
    levels = draw.normal(0, LAUNCH_NOISE, (num, 2, 1))
    times = np.exp(levels + draw.normal(0, STEP_NOISE, (num, 2, PAIRED_STEPS)))
    wins = (times[:, 1] > times[:, 0]).sum(axis=1)
    is_clean = np.isin(wins, (0, PAIRED_STEPS))
    significant = [binomtest(int(each), PAIRED_STEPS).pvalue < 0.01 for each in wins]
    yield "paired steps of one launch a side, no effect: 20 of 20", float(is_clean.mean())
    yield (
        "paired steps of one launch a side, no effect: a sign test claims",
        float(np.mean(significant)),
    )
    medians = np.median(times[is_clean], axis=-1)
    pairs = [[Pair((float(base),), (float(head),))] for base, head in medians]
    said = [judge(STEP, pair, 0, looks(FEW_LOOKS))[0].verdict in _CLAIMS for pair in pairs]
    yield "20 of 20 paired steps of one launch a side, no effect: claims", float(np.mean(said))
