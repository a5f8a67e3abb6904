"""`benchmarks/README.md`, made of the results, of each benchmark's docstring and its notes.

    python -m benchmarks.page

What was tried where a goal is missed is written by hand, in `notes/NAME.md`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from benchmarks import BENCHMARKS
from benchmarks.outcome import RESULTS, Figure, Outcome, Ratio, in_words, verdict

FOLDER = Path(__file__).parent
PAGE = FOLDER / "README.md"
HEAD = """\
# Benchmarks

Made by `python -m benchmarks.page` of `results/*.json`, which hold every observation; do not edit.

    make bench                                   # all, with a progress display; on a quiet machine
    python -m benchmarks --only simulate store   # some
    python -m benchmarks.simulate                # one; --help has its settings

Every figure is the ratio of two things that one run measured in turn: the median of the rounds,
and in brackets the 95 % interval of that median, by order statistics (none for fewer than six
rounds). Seconds differ from machine to machine and from hour to hour, these ratios much less. What
a goal is missed by is a part of the goal.
"""


def main() -> None:
    PAGE.write_text(page_of(RESULTS), encoding="utf-8")
    print(f"wrote {PAGE.name}")


def page_of(results: Path) -> str:
    """All benchmarks that have a result, in their order."""
    files = [results / f"{name}.json" for name in BENCHMARKS]
    outcomes = [Outcome.from_json(file.read_text("utf-8")) for file in files if file.exists()]
    return "\n".join([HEAD, *_goals(outcomes), *(_section(outcome) for outcome in outcomes)])


def _goals(outcomes: Iterable[Outcome]) -> list[str]:
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
    return [*head, *rows, ""] if rows else []


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
    told = verdict(ratio, " {} | {} |") or " | |"
    return f"| {ratio.name} | {in_words(ratio)} |{rounds}{told}"


def _figures(figures: Iterable[Figure]) -> list[str]:
    rows = [f"| {figure.name} | {in_words(figure)} | {len(figure.values)} |" for figure in figures]
    if not rows:
        return []
    table = ["| measured | median [95 %] | rounds |", "|---|---|---:|", *rows]
    return ["<details><summary>What the ratios are of</summary>", "", *table, "", "</details>", ""]


def _notes(name: str) -> list[str]:
    """What is written by hand, if there is any."""
    file = FOLDER / "notes" / f"{name}.md"
    return [file.read_text("utf-8").strip(), ""] if file.exists() else []


def _docstring(name: str) -> tuple[str, str]:
    """First line and rest, without running the module."""
    module = ast.parse((FOLDER / f"{name}.py").read_text("utf-8"))
    title, _, text = (ast.get_docstring(module) or "").partition("\n")
    return title, text.strip("\n")


if __name__ == "__main__":
    main()
