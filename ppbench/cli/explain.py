"""`ppbench explain`: where runs' idle time went, by rank, and what their steps could be instead."""

from __future__ import annotations

from ppbench.cli.commands import LOOK
from ppbench.cli.emit import answers
from ppbench.cli.options import RESULTS, Runs, StoredResults
from ppbench.display.document import Result


@answers("explain", LOOK, 3)
def explain(runs: Runs, results: StoredResults = RESULTS) -> Result:
    """Explain where runs' idle time went, and how long their steps would take otherwise."""
    import pandas as pd

    from ppbench.display.rows import Rows
    from ppbench.explanation import BY_STEP_AND_RANK, explanations_of
    from ppbench.store import Store

    explanations = explanations_of(Store(results), runs)
    if len(explanations) == 1:
        return explanations[0].result
    frames = {str(explanation.run["run_id"]): explanation.frame for explanation in explanations}
    rows = Rows.of(pd.concat(frames, names=["run_id"]).reset_index("run_id"))
    blocks = [block for explanation in explanations for block in explanation.result.blocks]
    data = {"runs": [explanation.as_dict() for explanation in explanations]}
    return Result(blocks, rows, data, key=BY_STEP_AND_RANK)
