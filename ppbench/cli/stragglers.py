"""`ppbench stragglers`: who slows a job of many replicas down, and what that costs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ppbench.cli.commands import LOOK
from ppbench.cli.emit import answers
from ppbench.cli.options import RESULTS, Run, StoredResults
from ppbench.display.document import Block, Picture, Result, Text
from ppbench.display.rows import Rows, as_records
from ppbench.display.tables import ALL_IN_MARKDOWN, Table

if TYPE_CHECKING:
    import pandas as pd

_TRIED = ["straggler", "cost_ns", "share_of_step", "explained"]
_FIGURES = ["slowness", "wasted", "share"]
_MOST_ROWS = 8


@answers("stragglers", LOOK, 4)
def stragglers(run: Run, results: StoredResults = RESULTS) -> Result:
    """Say who slows a job down: a worker, stage, replica, link, op type or sequence lengths."""
    from ppbench.display.stragglers import heat_map, sentences_of, table_of
    from ppbench.explanation import stragglers_of_run
    from ppbench.store import Store

    run_id, found = stragglers_of_run(Store(results), run)
    sentences = list(sentences_of(found))
    values = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    frames = {name: as_records(values.pop(name)) for name in ("by_op", "by_stage", "by_replica")}
    tried, cause = values.pop("tried"), values.pop("cause")
    workers = Rows.of(values.pop("by_worker"))
    data = {
        "run_id": run_id,
        "sentences": sentences,
        "cause": cause and dataclasses.asdict(cause),
        "slowness": found.slowness,
        "wasted": found.wasted,
        **values,
        "tried": [dataclasses.asdict(straggler) for straggler in tried],
        **frames,
    }

    def table(frame: pd.DataFrame, *keys: str) -> Table:
        return Table(Rows.of(frame), [*keys, *_FIGURES], keys, remedy=ALL_IN_MARKDOWN)

    blocks: list[Block] = [
        Text(f"{run_id}: stragglers, by replay (arXiv 2505.05713)."),
        Text(sentences),
        Text("With one of them like the others, the step would be shorter by:"),
        Table(Rows.of(table_of(found).head(_MOST_ROWS)), _TRIED, remedy=ALL_IN_MARKDOWN),
        Text("S with the times of one kind as they are and all others ideal:"),
        table(found.by_op, "op"),
        table(found.by_stage, "rank"),
    ]
    if len(found.by_replica) > 1:
        blocks += [
            table(found.by_replica.nlargest(_MOST_ROWS, "slowness"), "replica"),
            table(found.by_worker.nlargest(_MOST_ROWS, "slowness"), "replica", "rank"),
            Picture(heat_map(found.by_worker, _MOST_ROWS)),
            Text(f"All workers: ppbench figure stragglers {run_id} -o stragglers.html"),
        ]
    return Result(blocks, workers, data, key="by_worker")
