"""`ppbench explain`: where a run's idle time went, by rank, and what its step could be instead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ppbench.cli.options import RESULTS, HowToPrint, Run, StoredResults, print_text
from ppbench.display.formats import Format
from ppbench.display.tables import View, render

if TYPE_CHECKING:
    from ppbench.explanation import Explanation

_WHOLE = View(remedy="--format markdown shows all")
PART_COLUMNS = ["part", "per_step_ns", "share_of_bubble", "share_of_rank_time"]
EDGE_COLUMNS = [
    *("edge", "num_bytes", "moving_ns", "bytes_per_s"),
    *("sender_waiting_ns", "receiver_waiting_ns"),
]
BY_RANK_HEADING = (
    "Idle time by rank, mean over steps: by part, and by phase. The schedule, transfers "
    "and launch gaps lengthen the step, so they cost every rank the same."
)
WHAT_IF_COLUMNS = ["what_if", "step_ns", "change", "idle_ns", "bubble_fraction", "held"]


def explain(run: Run, results: StoredResults = RESULTS, how: HowToPrint = Format.table) -> None:
    """Explain where a run's idle time went, and how long its step would take otherwise."""
    from ppbench.explanation import explain as explanation_of

    explanation = explanation_of(run, results=results)
    if how is Format.json:
        print(json.dumps(explanation.as_dict(), indent=2, allow_nan=False))
    elif how is Format.csv:
        print(render(explanation.frame, how, []))
    else:
        print_text("\n\n".join(_paragraphs(explanation, how)), how)


def _paragraphs(explanation: Explanation, how: Format) -> Iterator[str]:
    from ppbench.analysis.attribution import PARTS, PHASES

    yield explanation.title
    yield "\n".join([*explanation.sentences, *explanation.doubts])
    yield render(explanation.parts, how, PART_COLUMNS, _WHOLE)
    yield BY_RANK_HEADING
    for kinds in (PARTS, PHASES):  # in tables of their own, so that each adds up at any width
        yield render(explanation.ranks, how, ["rank", "idle_ns", *kinds], _WHOLE, kinds)
    if not (edges := explanation.edges).empty:
        names = [f"{s} to {t}" for s, t in zip(edges["source"], edges["target"], strict=True)]
        yield "Messages: means over all measured steps."
        yield render(edges.assign(edge=names), how, EDGE_COLUMNS, _WHOLE)
    if explanation.run["world_size"] > 1:
        yield "What if: the modelled step, at the measured costs."
        yield render(explanation.what_if, how, WHAT_IF_COLUMNS, _WHOLE)
        yield from explanation.notes
        for question in explanation.not_asked:
            yield f"{question.question} does not fit: {question.reason}."
