"""What each chart of a report shows, in a sentence: its caption and its name in a screen reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pandas as pd

from ppbench.display.cases import ok_runs
from ppbench.display.explanation import PART_NAMES
from ppbench.display.units import counted, is_missing, percent, size
from ppbench.report.charts.memory import pareto_front
from ppbench.report.charts.speed import efficiencies, parts_of_runs
from ppbench.report.pages.judgement import Judged, alike


@dataclass(frozen=True)
class _Facts:
    """The figures that captions are made of."""

    runs: pd.DataFrame  # those that are ok
    cases: pd.DataFrame  # of `by_case`, without those that were not finite
    judged: Judged
    answer: str


def captions(runs: pd.DataFrame, judged: Judged, answer: str) -> Mapping[str, str]:
    """Return a sentence for each chart by its name; empty where there is nothing to say."""
    cases = judged.of_runs
    if cases.empty or cases["is_not_finite"].all():
        return {}
    cases = cases[~cases["is_not_finite"]]
    facts = _Facts(ok_runs(runs), alike(cases), judged, answer)
    return {name: text(facts) for name, text in _CAPTIONS.items()}


def _throughput(facts: _Facts) -> str:
    return facts.answer


def _scaling(facts: _Facts) -> str:
    if "world_size" not in facts.judged.axes:
        return ""
    cases = efficiencies(facts.cases, facts.judged.axes).dropna(subset=["efficiency"])
    grown = cases[cases["world_size"] > cases["base_size"]]
    most = grown[grown["world_size"] == grown["world_size"].max()]
    if most.empty:
        return "Every case on more ranks was oversubscribed."
    ends = _range(most["efficiency"])
    return f"On {counted(int(most['world_size'].iloc[0]), 'rank')} the efficiency is {ends}."


def _bubble(facts: _Facts) -> str:
    cases = facts.cases[facts.cases["world_size"] > 1].dropna(subset=["bubble_fraction"])
    if cases.empty:
        return ""
    measured = f"Measured bubbles are {_range(cases['bubble_fraction'])}"
    excess = (cases["bubble_fraction"] - cases["bubble_fraction_theory"]).fillna(-1).to_numpy()
    farthest = cases.iloc[int(excess.argmax())]
    if is_missing(farthest["bubble_fraction_theory"]):
        return f"{measured}."
    figures = (percent(farthest[f"bubble_fraction{end}"]) for end in ("", "_theory"))
    return f"{measured}; farthest above theory is {farthest['text']}: {', theory '.join(figures)}."


def _memory(facts: _Facts) -> str:
    peaks = facts.cases.dropna(subset=["peak_memory_bytes"])
    if peaks.empty:
        return ""
    num_bytes = peaks["peak_memory_bytes"].to_numpy()
    least, most = peaks.iloc[int(num_bytes.argmin())], peaks.iloc[int(num_bytes.argmax())]
    if len(peaks) == 1:
        return f"The fullest rank needs {size(least['peak_memory_bytes'])}."
    return (
        f"Least: {least['text']}, {size(least['peak_memory_bytes'])}; most: {most['text']}, "
        f"{size(most['peak_memory_bytes'])}."
    )


def _pareto(facts: _Facts) -> str:
    first = facts.judged.first
    cases = None if first is None else first.cases.dropna(subset=["peak_memory_bytes"])
    if first is None or cases is None or len(cases) < 2:
        return ""
    front = cases.iloc[
        pareto_front(cases["peak_memory_bytes"].tolist(), cases["tokens_per_s"].tolist())
    ]
    names = "; ".join(first.name(case) for _, case in front.iloc[::-1].head(_MOST_NAMED).iterrows())
    more = f" and {len(front) - _MOST_NAMED} more" if len(front) > _MOST_NAMED else ""
    return (
        f"Of {len(cases)} cases that do the same work, {len(front)} "
        f"{'has' if len(front) == 1 else 'have'} the most throughput for the memory: {names}{more}."
    )


def _idle(facts: _Facts) -> str:
    parts = parts_of_runs(facts.runs)
    if parts.empty:
        return ""
    means = parts.mean().sort_values(ascending=False, kind="stable")
    part = str(means.index[0]).removeprefix("bubble_")
    return (
        f"Over all runs the largest part is {PART_NAMES[part]}: "
        f"{percent(means.iloc[0])} of rank-time."
    )


def _steps(facts: _Facts) -> str:
    first = facts.judged.first
    if first is None:
        return ""
    return f"The median step of {first.best['text']} takes {first.best['step_ns'] / 1e6:,.1f} ms."


def _range(fractions: pd.Series) -> str:
    low, high = percent(fractions.min()), percent(fractions.max())
    return low if low == high else f"{low} to {high}"


_MOST_NAMED = 4
_CAPTIONS: dict[str, Callable[[_Facts], str]] = {
    "throughput": _throughput,
    "scaling": _scaling,
    "bubble": _bubble,
    "memory": _memory,
    "pareto": _pareto,
    "idle": _idle,
    "steps": _steps,
}
