"""Scripts with FSDP2 or DDP inside are watched; torch's profiler is the oracle of collectives."""

import attached_replicas as script
import pytest
import torch
from samples import sampled

from engine.plan.program import from_json
from engine.plan.spans import Lane
from ppbench.store import Store

pytestmark = pytest.mark.usefixtures("warm_starts")

LAST = script.STEPS - 1  # the step that is profiled
CLOCK_NS = 100_000  # between the profiler's clock and the host's
UNSHARDED = {"kept": 1, "resharded": 4}  # least gathers of a stage, in a step
GLOO = {"UNSHARD": "gloo:all_gather", "REDUCE_GRAD": "gloo:all_reduce"}  # it has no reduce-scatter
CASES = [
    ("kept", 2, "rank by rank"),  # torch's runtime, with UNSHARD among the actions
    ("resharded", 2, "replica by replica"),
    ("ddp", 1, "rank by rank"),
    ("replicate", 2, "rank by rank"),
    ("kept", 1, "replica by replica"),  # Schedule1F1B
    ("kept", 2, "one rank"),
]


def joined(intervals):
    """The intervals, those as one that follow one another without a break."""
    whole = []
    for start, end in sorted(intervals):
        if whole and start <= whole[-1][1] + CLOCK_NS:
            whole[-1] = (whole[-1][0], max(end, whole[-1][1]))
        else:
            whole.append((start, end))
    return whole


def assert_as_profiled(outcome):
    """Each gather and sum of gloo's begins in a span of its op, and in each span at least one does.

    Where it ends is not compared: gloo's thread may be put off between handing over its result,
    with which the span ends, and the profiler's record of the end.
    """
    done = [s for s in outcome.spans if s.step == LAST and s.lane is Lane.COLLECTIVE]
    assert {name for name, _, _ in outcome.profiled} == {GLOO[span.op] for span in done}
    for op, name in GLOO.items():
        spans = joined((span.start_ns, span.end_ns) for span in done if span.op == op)
        begun = [start for kind, start, _ in outcome.profiled if kind == name]
        for at in begun:
            assert any(start - CLOCK_NS <= at <= end + CLOCK_NS for start, end in spans)
        for start, end in spans:
            assert any(start - CLOCK_NS <= at <= end + CLOCK_NS for at in begun)


@pytest.mark.parametrize(("wrap", "stages_per_rank", "order"), sampled(CASES, 3))
def test_all_replicas_are_one_run_with_the_collectives_that_torch_profiled(
    ranks, tmp_path, wrap, stages_per_rank, order
):
    found = [
        ranks.run(4, script.trained, wrap, stages_per_rank, order, f) for f in (tmp_path, None)
    ]
    watched, alone = ([one for one in outcomes if one] for outcomes in found)
    for outcome, other in zip(watched, alone, strict=True):
        assert outcome.warnings == []
        assert outcome.losses == other.losses  # to the last bit
        assert all(map(torch.equal, outcome.weights, other.weights))
        assert_as_profiled(outcome)
    run = Store(tmp_path).runs().iloc[0]
    pipelines = script.MESHES[order]
    assert [one.run_id for one in watched] == [run["run_id"]] + [None] * (len(watched) - 1)
    assert (run["replicas"], run["world_size"]) == (len(pipelines), len(pipelines[0]))
    spans = Store(tmp_path).table("spans", [run["run_id"]])
    collectives = spans[spans["lane"] == "collective"]
    places = {(replica, rank) for replica in range(2) for rank in range(run["world_size"])}
    assert set(zip(collectives["replica"], collectives["rank"], strict=True)) == places
    assert set(collectives["step"]) == {1, 2, LAST}
    assert (collectives["num_bytes"] > 0).all()
    rows = [[str(action) for action in row] for row in from_json(run["program"]).actions]
    for stage in range(run["num_stages"]):
        row = rows[stage % run["world_size"]]
        assert row.count(f"{stage}UNSHARD") >= UNSHARDED.get(wrap, 0)
        assert (f"{stage}UNSHARD" in row) == (wrap in UNSHARDED)
        assert row.count(f"{stage}REDUCE_GRAD") == 1
