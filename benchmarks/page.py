"""Makes `benchmarks/README.md` of the results and each benchmark's docstring and notes.

    python -m benchmarks.page

`notes/NAME.md` is written by hand: where a goal is missed or not decided, it says what was tried.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import BENCHMARKS
from benchmarks.outcome import RESULTS, Figure, Outcome, Ratio, Standing, in_words, verdict

FOLDER = Path(__file__).parent
PAGE = FOLDER / "README.md"
HEAD = """\
# Benchmarks

This page is made by `python -m benchmarks.page` from `results/*.json`, which hold every
observation; do not edit it.

    make bench                                   # all, with a progress display; on a quiet machine
    python -m benchmarks --only simulate store   # some
    python -m benchmarks.simulate                # one; --help has its settings

Every figure is the ratio of two figures that one run measured in turn: the median of the rounds,
and in brackets the 95 % interval of that median, by order statistics. Seconds differ from machine
to machine and from hour to hour, these ratios much less.

A goal is *held* if the whole interval lies on its side, *missed* if the whole interval lies on the
other, and else *not decided*: more rounds are needed to say. With fewer than six rounds it is
judged by the interval of their geometric mean (Student's t), and a single round decides nothing.
A ratio that is counted or computed is *exact* and needs no interval. The amount by which a goal is
missed is that of the median, as a share of the goal. `--max-rounds N` measures on while a goal is
not decided: the rounds double up to N, and the 5 % are shared by the times that one looks.
"""


def main() -> None:
    PAGE.write_text(page_of(RESULTS), encoding="utf-8")
    print(f"wrote {PAGE.name}")


def page_of(results: Path) -> str:
    """The page: all benchmarks that have a result, in their order."""
    files = [results / f"{name}.json" for name in BENCHMARKS]
    outcomes = [Outcome.from_json(file.read_text("utf-8")) for file in files if file.exists()]
    return "\n".join([HEAD, *_goals(outcomes), *(_section(outcome) for outcome in outcomes)])


def _goals(outcomes: Sequence[Outcome]) -> list[str]:
    rows = [
        f"| [{outcome.name}](#{outcome.name}) {_row(ratio)}"
        for outcome in outcomes
        for ratio in outcome.ratios
        if ratio.goal is not None
    ]
    head = [
        "## Goals",
        "",
        "| benchmark | ratio | median [95 %] | goal | |",
        "|---|---|---|---|---|",
    ]
    return [*head, *rows, "", *_counts(outcomes)] if rows else []


def _counts(outcomes: Iterable[Outcome]) -> list[str]:
    """How many goals are held, missed and not decided, and which are not decided."""
    judged = [ratio for outcome in outcomes for ratio in outcome.ratios if ratio.standing]
    counts = Counter(ratio.standing for ratio in judged)
    parts = ", ".join(f"{counts[standing]} {standing}" for standing in Standing)
    return [f"Of {len(judged)} goals: {parts}.", ""]


def _section(outcome: Outcome) -> str:
    title, text = _docstring(outcome.name)
    table = ["| ratio | median [95 %] | rounds | goal | |", "|---|---|---:|---|---|"]
    rows = [_row(ratio, rounds=f" {len(ratio.values)} |") for ratio in outcome.ratios]
    return "\n".join(
        [
            f"## {outcome.name}",
            "",
            title,
            "",
            text,
            "",
            *table,
            *rows,
            "",
            *_figures(outcome.figures),
            *_notes(outcome.name),
            f"`{outcome.command}`, {outcome.surroundings.in_words()}.",
            f"[Raw data](results/{outcome.name}.json).",
            "",
        ]
    )


def _row(ratio: Ratio, rounds: str = "") -> str:
    goal = verdict(ratio, " {} | {} |") or " | |"
    return f"| {ratio.name} | {in_words(ratio)} |{rounds}{goal}"


def _figures(figures: Iterable[Figure]) -> list[str]:
    rows = [f"| {figure.name} | {in_words(figure)} | {len(figure.values)} |" for figure in figures]
    if not rows:
        return []
    table = ["| measured | median [95 %] | rounds |", "|---|---|---:|", *rows]
    return [
        "<details><summary>The figures behind the ratios</summary>",
        "",
        *table,
        "",
        "</details>",
        "",
    ]


def _notes(name: str) -> list[str]:
    """The notes written by hand, if there are any."""
    file = FOLDER / "notes" / f"{name}.md"
    return [file.read_text("utf-8").strip(), ""] if file.exists() else []


def _docstring(name: str) -> tuple[str, str]:
    """The first line and the rest of a benchmark's docstring, without importing the module."""
    module = ast.parse((FOLDER / f"{name}.py").read_text("utf-8"))
    title, _, text = (ast.get_docstring(module) or "").partition("\n")
    return title, text.strip("\n")


if __name__ == "__main__":
    main()
