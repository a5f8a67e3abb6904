"""`ppbench explain`: where runs' idle time went, by rank, and what their steps could be instead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ppbench.cli.options import RESULTS, HowToPrint, Runs, StoredResults, print_text
from ppbench.display.formats import Format
from ppbench.display.replicas import folded, folding_note
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
    "Idle time by rank, mean over steps: by part, and by phase. The schedule and "
    "transfers lengthen the step, so they cost every rank the same."
)
WHAT_IF_COLUMNS = ["what_if", "step_ns", "change", "idle_ns", "bubble_fraction", "held"]


def explain(runs: Runs, results: StoredResults = RESULTS, how: HowToPrint = Format.table) -> None:
    """Explain where runs' idle time went, and how long their steps would take otherwise."""
    import pandas as pd

    from ppbench.explanation import explanations_of
    from ppbench.store import Store

    explanations = explanations_of(Store(results), runs)
    if how is Format.json:
        facts = [explanation.as_dict() for explanation in explanations]
        one_or_all = facts[0] if len(facts) == 1 else facts
        print(json.dumps(one_or_all, indent=2, allow_nan=False))
    elif how is Format.csv:
        frames = {explanation.run["run_id"]: explanation.frame for explanation in explanations}
        several = pd.concat(frames, names=["run_id"]).reset_index("run_id")
        print(render(explanations[0].frame if len(frames) == 1 else several, how, []))
    else:
        paragraphs = (text for each in explanations for text in _paragraphs(each, how))
        print_text("\n\n".join(paragraphs), how)


def _paragraphs(explanation: Explanation, how: Format) -> Iterator[str]:
    from ppbench.analysis.attribution import PHASES, parts_in

    yield explanation.title
    yield "\n".join([*explanation.sentences, *explanation.doubts])
    yield render(explanation.parts, how, PART_COLUMNS, _WHOLE)
    yield BY_RANK_HEADING
    tables = parts_in(explanation.frame), PHASES  # so that each adds up at any width
    for kinds in tables:
        ranks, names = folded(explanation.ranks, "rank", ["rank", "idle_ns", *kinds], "idle_ns")
        yield render(ranks, how, names, _WHOLE, kinds)
    if note := folding_note(explanation.ranks, "rank"):
        yield note
    if not (edges := explanation.edges).empty:
        names = [f"{s} to {t}" for s, t in zip(edges["source"], edges["target"], strict=True)]
        yield "Messages: means over all measured steps."
        named, columns = folded(
            edges.assign(edge=names), "edge", EDGE_COLUMNS, "receiver_waiting_ns"
        )
        yield render(named, how, columns, _WHOLE)
    if explanation.run["world_size"] > 1:
        yield "What if: the modelled step, at the measured costs."
        yield render(explanation.what_if, how, WHAT_IF_COLUMNS, _WHOLE)
        yield from explanation.notes
        for question in explanation.not_asked:
            yield f"{question.question} does not fit: {question.reason}."
