"""What a benchmark found, as it is kept and shown: ratios with their goals, and what they are of.

A JSON file per benchmark holds every observation, so that a page, or anyone, can count again.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.surroundings import ROOT, Surroundings
from ppbench.statistics.step_times import median_interval

RESULTS = ROOT / "benchmarks" / "results"
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
        """Where the median lies with 95 %; None for fewer than 6 observations."""
        return median_interval(self.values)


@dataclass(frozen=True)
class Goal:
    """What a ratio is to be: the median, and if asked for the nearer end of its interval."""

    at_least: float | None = None
    at_most: float | None = None
    low_at_least: float | None = None

    def missed_by(self, ratio: Ratio) -> float:
        """How far it is from being held, as a part of the goal; 0 where it holds."""
        low = ratio.interval[0] if ratio.interval else min(ratio.values)
        short = [
            1 - value / bound
            for value, bound in ((ratio.median, self.at_least), (low, self.low_at_least))
            if bound is not None
        ]
        over = [ratio.median / self.at_most - 1] if self.at_most is not None else []
        return max(0.0, *short, *over)

    def __str__(self) -> str:
        words = [
            f"{words} {bound:g}"
            for words, bound in (
                ("≥", self.at_least),
                ("≤", self.at_most),
                ("low end ≥", self.low_at_least),
            )
            if bound is not None
        ]
        return ", ".join(words)


@dataclass(frozen=True)
class Ratio(Figure):
    """One thing over another; an observation for each time that both were measured in turn."""

    goal: Goal | None = None

    @classmethod
    def of(
        cls,
        name: str,
        numerators: Sequence[float],
        denominators: Sequence[float],
        goal: Goal | None = None,
    ) -> Ratio:
        pairs = zip(numerators, denominators, strict=True)
        return cls(name, tuple(one / other for one, other in pairs), goal=goal)

    @classmethod
    def geometric_mean(cls, name: str, ratios: Sequence[Ratio], goal: Goal | None = None) -> Ratio:
        """Of several ratios, round by round; all have as many rounds."""
        rounds = zip(*(ratio.values for ratio in ratios), strict=True)
        return cls(name, tuple(map(statistics.geometric_mean, rounds)), goal=goal)

    @property
    def holds(self) -> bool | None:
        """Whether the goal is reached; None without one."""
        return None if self.goal is None else self.goal.missed_by(self) == 0


@dataclass(frozen=True)
class Outcome:
    """All that a benchmark's run has found; `figures` is what the ratios are of."""

    name: str
    command: str
    settings: Mapping[str, object]
    surroundings: Surroundings
    ratios: tuple[Ratio, ...]
    figures: tuple[Figure, ...] = ()

    def as_json(self) -> str:
        """Every observation to six digits; lists of them in a line."""
        told = {
            "name": self.name,
            "command": self.command,
            "settings": dict(sorted(self.settings.items())),
            "surroundings": asdict(self.surroundings),
            "ratios": [_ratio_as_dict(ratio) for ratio in self.ratios],
            "figures": [_figure_as_dict(figure) for figure in self.figures],
        }
        text = json.dumps(_shortened(told), indent=1, ensure_ascii=False)
        return _SHORT_LIST.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        told = json.loads(text)
        ratios = tuple(
            Ratio(one["name"], tuple(one["values"]), goal=one["goal"] and Goal(**one["goal"]))
            for one in told["ratios"]
        )
        figures = tuple(
            Figure(one["name"], tuple(one["values"]), one["unit"]) for one in told["figures"]
        )
        surroundings = Surroundings(**told["surroundings"])
        return cls(told["name"], told["command"], told["settings"], surroundings, ratios, figures)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Of a benchmark's command line: what all of them take."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--results", type=Path, default=RESULTS, help="where the JSON file goes")
    return made


def write(
    name: str,
    settings: argparse.Namespace,
    surroundings: Surroundings,
    ratios: Iterable[Ratio],
    figures: Iterable[Figure] = (),
) -> Outcome:
    """Keep what a benchmark found as `NAME.json`, and print it."""
    told = {key: value for key, value in vars(settings).items() if key != "results"}
    command = shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]])
    outcome = Outcome(name, command, told, surroundings, tuple(ratios), tuple(figures))
    settings.results.mkdir(parents=True, exist_ok=True)
    (settings.results / f"{name}.json").write_text(outcome.as_json(), encoding="utf-8")
    for figure in outcome.figures:
        print(f"  {figure.name}: {in_words(figure)}")
    for ratio in outcome.ratios:
        print(f"  {ratio.name}: {in_words(ratio)}{verdict(ratio, '; goal {}: {}')}")
    return outcome


def in_words(figure: Figure) -> str:
    """Median, interval and unit: `1.012 [1.003, 1.020]`."""
    interval = figure.interval
    ends = f" [{number(interval[0])}, {number(interval[1])}]" if interval else ""
    return f"{number(figure.median)}{ends} {figure.unit}".rstrip()


def number(value: float) -> str:
    """With three decimals, or three digits where it is small."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) >= 0.1 else f"{value:.3g}"


def verdict(ratio: Ratio, form: str) -> str:
    """The goal and whether it is held, in `form`; nothing without a goal."""
    if ratio.goal is None:
        return ""
    missed = ratio.goal.missed_by(ratio)
    return form.format(ratio.goal, "held" if missed == 0 else f"missed by {missed:.1%}")


def _ratio_as_dict(ratio: Ratio) -> dict[str, object]:
    bounds = asdict(ratio.goal) if ratio.goal else {}
    goal = {key: bound for key, bound in bounds.items() if bound is not None} or None
    return {**_figure_as_dict(ratio), "goal": goal, "holds": ratio.holds}


def _figure_as_dict(figure: Figure) -> dict[str, object]:
    """Of the values as they are kept, so that whoever reads them comes to the same median."""
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
    """Floats to six digits, at any depth; what JSON does not know as text."""
    if isinstance(value, float):
        return _six_digits(value)
    if isinstance(value, dict):
        return {key: _shortened(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_shortened(one) for one in value]
    return value if isinstance(value, int | str | None) else str(value)
