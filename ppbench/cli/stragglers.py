"""`ppbench stragglers`: who slows a job of many replicas down, and what that costs."""

from __future__ import annotations

import dataclasses
import json

from ppbench.cli.options import RESULTS, HowToPrint, Run, StoredResults, print_text
from ppbench.display.formats import Format
from ppbench.display.tables import View, as_records, render

_WHOLE = View(remedy="--format json shows all")
_TRIED = ["straggler", "cost_ns", "share_of_step", "explained"]
_FIGURES = ["slowness", "wasted", "share"]
_MOST_ROWS = 8


def stragglers(run: Run, results: StoredResults = RESULTS, how: HowToPrint = Format.table) -> None:
    """Say who slows a job down: a worker, stage, replica, link, op type or sequence lengths."""
    from ppbench.display.stragglers import heat_map, sentences_of, table_of
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
        parts = [
            f"{run_id}: stragglers, by replay (arXiv 2505.05713).",
            "\n".join(sentences_of(found)),
            "With one of them like the others, the step would be shorter by:",
            render(table_of(found).head(_MOST_ROWS), how, _TRIED, _WHOLE),
            "S with the times of one kind as they are and all others ideal:",
            render(found.by_op, how, ["op", *_FIGURES], _WHOLE),
            render(found.by_stage, how, ["rank", *_FIGURES], _WHOLE),
        ]
        if len(found.by_replica) > 1:
            for keys, frame in (
                (["replica"], found.by_replica),
                (["replica", "rank"], found.by_worker),
            ):
                slowest = frame.nlargest(_MOST_ROWS, "slowness")
                parts.append(render(slowest, how, [*keys, *_FIGURES], _WHOLE, keys))
            shown = heat_map(found.by_worker, _MOST_ROWS)
            parts += [
                f"```\n{shown}\n```" if how is Format.markdown else shown,
                f"All workers: ppbench figure stragglers {run_id} -o stragglers.html",
            ]
        print_text("\n\n".join(parts), how)
