"""The outcome of a benchmark, stored and shown: ratios with their goals, and the figures behind.

A JSON file per benchmark holds every observation, so that every statistic can be recomputed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

from benchmarks.surroundings import ROOT, Surroundings
from ppbench.judge.differences import CONFIDENCE, group, t_quantile
from ppbench.statistics.step_times import median_interval

RESULTS = ROOT / "benchmarks" / "results"
MAX_ROUNDS = "most rounds, to which it is measured on while a goal is not decided; 0: none"
_SHORT_LIST = re.compile(r"\[\n([^\[\]{}]*?)\n\s*\]")


@dataclass(frozen=True)
class Figure:
    """Something measured several times."""

    name: str
    values: tuple[float, ...]
    unit: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the median; None for fewer than 6 observations."""
        return median_interval(self.values)


class Standing(StrEnum):
    """Whether a goal is reached, as far as its interval says."""

    held = "held"
    missed = "missed"
    undecided = "not decided"


@dataclass(frozen=True)
class Goal:
    """Bounds of the true ratio."""

    at_least: float | None = None
    at_most: float | None = None
    is_exact: bool = False  # the ratio is counted or computed: measured again, it is the same

    def standing(self, low: float, high: float) -> Standing:
        """Whether an interval lies on the right side of the bounds, or beyond one of them."""
        least = low if self.at_least is None else self.at_least
        most = high if self.at_most is None else self.at_most
        if high < least or low > most:
            return Standing.missed
        return Standing.held if low >= least and high <= most else Standing.undecided

    def missed_by(self, ratio: Ratio) -> float:
        """The distance of the ratio's median from the goal, as a share of the goal."""
        short = [] if self.at_least is None else [1 - ratio.median / self.at_least]
        over = [] if self.at_most is None else [ratio.median / self.at_most - 1]
        return max(0.0, *short, *over)

    def __str__(self) -> str:
        bounds = (("≥", self.at_least), ("≤", self.at_most))
        return ", ".join(f"{words} {bound:g}" for words, bound in bounds if bound is not None)


@dataclass(frozen=True)
class Ratio(Figure):
    """One measured figure over another, with an observation for each round that measured both."""

    goal: Goal | None = None
    num_looks: int = 1  # after how many rounds one may have stopped; they share 5 %

    @classmethod
    def of(
        cls,
        name: str,
        numerators: Sequence[float],
        denominators: Sequence[float],
        goal: Goal | None = None,
    ) -> Ratio:
        pairs = zip(numerators, denominators, strict=True)
        return cls(name, tuple(top / bottom for top, bottom in pairs), goal=goal)

    @classmethod
    def geometric_mean(cls, name: str, ratios: Sequence[Ratio], goal: Goal | None = None) -> Ratio:
        """The geometric mean of ratios, round by round; the rounds that all of them have."""
        rounds = zip(*(ratio.values for ratio in ratios), strict=False)
        return cls(name, tuple(map(statistics.geometric_mean, rounds)), goal=goal)

    @property
    def standing(self) -> Standing | None:
        """Whether the goal is reached; None without one."""
        if self.goal is None:
            return None
        ends = self.judged_interval
        return Standing.undecided if ends is None else self.goal.standing(*ends)

    @property
    def judged_interval(self) -> tuple[float, float] | None:
        """The interval by which a goal is judged; None for a single round.

        It is that of the median, at all looks together with 95 %; for fewer than six rounds that of
        the geometric mean by Student's t. An exact ratio is its own interval.
        """
        if self.goal is not None and self.goal.is_exact:
            return self.median, self.median
        confidence = 1 - (1 - CONFIDENCE) / self.num_looks
        return median_interval(self.values, confidence) or _mean_interval(self.values, confidence)


def _mean_interval(values: Sequence[float], confidence: float) -> tuple[float, float] | None:
    """Interval of the geometric mean; None for a single value, and for one that is not positive."""
    if len(values) < 2 or min(values) <= 0:
        return None
    own = group([math.log(value) for value in values])
    reach = t_quantile(own.freedom, (1 + confidence) / 2) * math.sqrt(own.variance / own.num)
    return math.exp(own.mean - reach), math.exp(own.mean + reach)


@dataclass(frozen=True)
class Outcome:
    """The result of a benchmark's run; the ratios are quotients of the `figures`."""

    name: str
    command: str
    settings: Mapping[str, object]
    surroundings: Surroundings
    ratios: tuple[Ratio, ...]
    figures: tuple[Figure, ...] = ()

    def as_json(self) -> str:
        """JSON with every observation, to six digits; a list of numbers is on one line."""
        values = {
            "name": self.name,
            "command": self.command,
            "settings": dict(sorted(self.settings.items())),
            "surroundings": asdict(self.surroundings),
            "ratios": [_ratio_as_dict(ratio) for ratio in self.ratios],
            "figures": [_figure_as_dict(figure) for figure in self.figures],
        }
        text = json.dumps(_shortened(values), indent=1, ensure_ascii=False)
        return _SHORT_LIST.sub(lambda match: f"[{' '.join(match[1].split())}]", text) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        values = json.loads(text)
        ratios = tuple(
            Ratio(
                each["name"],
                tuple(each["values"]),
                goal=each["goal"] and Goal(**each["goal"]),
                num_looks=each.get("num_looks", 1),
            )
            for each in values["ratios"]
        )
        figures = tuple(
            Figure(each["name"], tuple(each["values"]), each["unit"]) for each in values["figures"]
        )
        return cls(
            values["name"],
            values["command"],
            values["settings"],
            Surroundings(**values["surroundings"]),
            ratios,
            figures,
        )


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark takes."""
    options = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    options.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON file")
    return options


def _without_place(value: object) -> object:
    """Return the name alone of an absolute path: where it lies is of one machine."""
    is_path = isinstance(value, (str, Path)) and Path(value).is_absolute()
    return Path(str(value)).name if is_path else value


def write(
    name: str,
    settings: argparse.Namespace,
    surroundings: Surroundings,
    ratios: Iterable[Ratio],
    figures: Iterable[Figure] = (),
) -> Outcome:
    """Write the outcome of a benchmark to `NAME.json`, and print it."""
    options = {key: _without_place(v) for key, v in vars(settings).items() if key != "results"}
    arguments = map(str, map(_without_place, sys.argv[1:]))
    command = shlex.join(["python", "-m", f"benchmarks.{name}", *arguments])
    outcome = Outcome(name, command, options, surroundings, tuple(ratios), tuple(figures))
    settings.results.mkdir(parents=True, exist_ok=True)
    (settings.results / f"{name}.json").write_text(outcome.as_json(), encoding="utf-8")
    for figure in outcome.figures:
        print(f"  {figure.name}: {in_words(figure)}")
    for ratio in outcome.ratios:
        print(f"  {ratio.name}: {in_words(ratio)}{verdict(ratio, '; goal {}: {}')}")
    return outcome


def in_words(figure: Figure) -> str:
    """Median, interval and unit: `1.012 [1.003, 1.020]`; with a goal, that which judges it."""
    interval = figure.interval
    if isinstance(figure, Ratio) and figure.goal is not None and not figure.goal.is_exact:
        interval = figure.judged_interval
    ends = f" [{number(interval[0])}, {number(interval[1])}]" if interval else ""
    return f"{number(figure.median)}{ends} {figure.unit}".rstrip()


def number(value: float) -> str:
    """The value with three decimals, or three digits if it is small."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) >= 0.1 else f"{value:.3g}"


def verdict(ratio: Ratio, form: str) -> str:
    """The goal and whether it is held, as `form` says; empty without a goal."""
    if ratio.goal is None or ratio.standing is None:
        return ""
    words = str(ratio.standing)
    if ratio.standing is Standing.missed:
        words = f"missed by {ratio.goal.missed_by(ratio):.1%}"
    if ratio.goal.is_exact:
        words = f"{words}, exact"
    elif len(ratio.values) == 1:
        words = f"{words}, one round"
    return form.format(ratio.goal, words)


def _ratio_as_dict(ratio: Ratio) -> dict[str, object]:
    bounds = asdict(ratio.goal) if ratio.goal else {}
    goal = {key: value for key, value in bounds.items() if value not in (None, False)} or None
    looks = {"num_looks": ratio.num_looks} if ratio.num_looks > 1 else {}
    return {**_figure_as_dict(ratio), **looks, "goal": goal, "standing": ratio.standing}


def _figure_as_dict(figure: Figure) -> dict[str, object]:
    """The figure as it is stored, with the median of the rounded values, which can be checked."""
    figure = replace(figure, values=tuple(map(_six_digits, figure.values)))
    low, high = figure.interval or (None, None)
    return {
        "name": figure.name,
        "unit": figure.unit,
        "median": figure.median,
        "low": low,
        "high": high,
        "values": list(figure.values),
    }


def _six_digits(value: float) -> float:
    return float(f"{value:.6g}")


def _shortened(value: object) -> object:
    """The value with floats to six digits, at any depth; types that JSON lacks become text."""
    if isinstance(value, float):
        return _six_digits(value)
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shortened(item) for item in value]
    return value if isinstance(value, int | str | None) else str(value)
