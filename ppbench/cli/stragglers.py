"""`ppbench stragglers`: who slows a job of many replicas down, and what that costs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ppbench.cli.options import RESULTS, HowToPrint, Run, StoredResults, print_text
from ppbench.display.formats import Format
from ppbench.display.tables import View, as_records, render

if TYPE_CHECKING:
    from ppbench.analysis.stragglers import Stragglers

_WHOLE = View(remedy="--format json shows all")
_TRIED = ["straggler", "cost_ns", "share_of_step", "explained"]
_FIGURES = ["slowness", "wasted", "share"]
_MOST_ROWS = 8


def stragglers(run: Run, results: StoredResults = RESULTS, how: HowToPrint = Format.table) -> None:
    """Say who slows a job down: a worker, stage, replica, link, op type or sequence lengths."""
    from ppbench.display.stragglers import sentences_of
    from ppbench.explanation import stragglers_of_run
    from ppbench.store import Store

    run_id, found = stragglers_of_run(Store(results), run)
    if how is Format.json:
        values = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
        names = ("by_op", "by_stage", "by_replica", "by_worker")
        frames = {name: as_records(values.pop(name)) for name in names}
        tried, cause = values.pop("tried"), values.pop("cause")
        facts = {
            "run_id": run_id,
            "sentences": list(sentences_of(found)),
            "cause": cause and dataclasses.asdict(cause),
            "slowness": found.slowness,
            "wasted": found.wasted,
            **values,
            "tried": [dataclasses.asdict(straggler) for straggler in tried],
            **frames,
        }
        print(json.dumps(facts, indent=2, allow_nan=False))
    elif how is Format.csv:
        print(render(found.by_worker, how, []))
    else:
        print_text("\n\n".join(_paragraphs(run_id, found, how)), how)


def _paragraphs(run_id: str, found: Stragglers, how: Format) -> Iterator[str]:
    from ppbench.display.stragglers import heat_map, sentences_of, table_of

    yield f"{run_id}: stragglers, by replay (arXiv 2505.05713)."
    yield "\n".join(sentences_of(found))
    yield "With one of them like the others, the step would be shorter by:"
    yield render(table_of(found).head(_MOST_ROWS), how, _TRIED, _WHOLE)
    yield "S with the times of one kind as they are and all others ideal:"
    for key, frame in (("op", found.by_op), ("rank", found.by_stage)):
        yield render(frame, how, [key, *_FIGURES], _WHOLE)
    if len(found.by_replica) > 1:
        for keys, frame in (
            (["replica"], found.by_replica),
            (["replica", "rank"], found.by_worker),
        ):
            slowest = frame.nlargest(_MOST_ROWS, "slowness")
            yield render(slowest, how, [*keys, *_FIGURES], _WHOLE, keys)
        shown = heat_map(found.by_worker, _MOST_ROWS)
        yield f"```\n{shown}\n```" if how is Format.markdown else shown
        yield f"All workers: ppbench figure stragglers {run_id} -o stragglers.html"
