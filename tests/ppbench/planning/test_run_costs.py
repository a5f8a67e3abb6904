"""Costs of layers from a run: as its stages show them, or refused with the reason."""

import json
import math
from itertools import accumulate, pairwise

import pandas as pd
import pytest
from stored_runs import run_row

from engine.plan.model_costs import LayerCosts, ModelCosts
from engine.plan.program import to_json
from engine.plan.schedules.registry import build_program
from ppbench.config.case import Case
from ppbench.errors import UsageError
from ppbench.planning.costs import Setting, costs_of_run
from ppbench.store import Store

HIDDEN = 8192
LAYER = LayerCosts(
    *(2e6, 5e6, 3e6, 2.5e6, 0.0, 40_000, 40_000, 0, 16_000_000, HIDDEN), optimizer_ns=100_000
)
BEFORE = LayerCosts(1e5, 3e5, 2e5, 1e5, 0.0, 0, 0, 0, 8_000_000, HIDDEN, 50_000)
AFTER = LayerCosts(9e5, 2e6, 1e6, 1e6, 0.0, 30_000, 30_000, 0, 8_000_000, 0, 50_000)
BYTES_PER_PARAMETER = 16  # of weight, gradient and two numbers of AdamW, in float32
SCHEDULE_OF = {(0, 1, 0, 1): ("looped_bfs", 2), (0, 1, 1, 0): ("zbv", 2)}
OPS = {"F": "forward_ns", "B": "backward_ns", "I": "input_ns", "W": "weight_ns"}


def partition_of(counts):
    ends = [0, *accumulate(counts)]
    return [range(start, end) for start, end in pairwise(ends)]


def stored(folder, counts, ranks, *, before=BEFORE, after=AFTER, ops="FB", **changes):
    """A store with a run whose rows follow from these costs; `ranks` owns each stage."""
    model = ModelCosts(before, (LAYER,) * sum(counts), after)
    stages = model.of_stages(partition_of(counts))
    parameters = [stage.static_bytes // BYTES_PER_PARAMETER for stage in stages]
    owned = [[s for s, r in enumerate(ranks) if r == rank] for rank in range(max(ranks) + 1)]
    rows, most = [], 0
    for rank, own in enumerate(owned):
        weights = 4 * sum(parameters[stage] for stage in own)
        held = 2 * len(own)
        bytes_held = sum(2 * stages[stage].held_after_forward for stage in own)
        most = max(most, sum(stages[stage].optimizer_ns for stage in own))
        row = {"rank": rank, "stages": json.dumps(own), "parameter_bytes": weights}
        row |= {"gradient_bytes": weights // 2, "optimizer_bytes": 2 * weights, "buffer_bytes": 0}
        rows.append({**row, "activation_bytes": bytes_held, "peak_held_microbatches": held})
    costs = {op: [getattr(stage, OPS[op]) for stage in stages] for op in ops}
    edge = {"num_bytes": float(HIDDEN), "moving_ns": 4096.0, "num_messages": 8}
    edges = [
        {"source": a, "target": b, **edge}
        for low in range(len(counts) - 1)
        for a, b in ((low, low + 1), (low + 1, low))
    ]
    run = run_row(1, Case(world_size=len(owned)))
    schedule, v = SCHEDULE_OF.get(tuple(ranks), ("1f1b", 1))
    run |= {"program": to_json(build_program(schedule, len(owned), 4, v))}
    run |= {"op_costs_ns": json.dumps(costs), "op_variation": 0.02, "optimizer_ns": most}
    run |= {"layers_per_stage": json.dumps(counts), "num_stages": len(counts)}
    run |= {"parameters_per_stage": json.dumps(parameters), "measure_steps": 20, **changes}
    tables = {"ranks": pd.DataFrame(rows), "edges": pd.DataFrame(edges)}
    store = Store(folder, pytest.fail)
    store.write_run(run, tables)
    return store, stages


def only(costs):
    (of_model,) = costs.by_setting.values()
    return of_model


@pytest.mark.parametrize(
    ("counts", "ranks"),
    [
        ([2, 3, 3, 2], [0, 1, 2, 3]),
        ([3, 3, 3], [0, 1, 2]),
        ([1, 2, 2, 1], [0, 1, 0, 1]),
        ([0, 4, 4, 0], [0, 1, 1, 0]),
    ],
)
@pytest.mark.parametrize("ops", ["FB", "FIW"])
def test_times_of_layers_and_of_what_is_around_them_are_found(tmp_path, counts, ranks, ops):
    store, _ = stored(tmp_path, counts, ranks, ops=ops)
    costs = costs_of_run(store, "last")
    assert costs.num_layers == sum(counts)
    assert costs.origin == f"run {store.find('last')['run_id']}"
    assert list(costs.by_setting) == [Setting(1, False)]
    of_model = only(costs)
    for found, true in [
        (of_model.before, BEFORE),
        *((layer, LAYER) for layer in of_model.layers),
        (of_model.after, AFTER),
    ]:
        assert found.forward_ns == pytest.approx(true.forward_ns)
        whole = true.backward_ns if "B" in ops else true.input_ns + true.weight_ns
        assert found.backward_ns == pytest.approx(whole)
        halves = (true.input_ns, true.weight_ns) if "I" in ops else (whole / 2, whole / 2)
        assert (found.input_ns, found.weight_ns) == pytest.approx(halves)
        assert found.optimizer_ns == pytest.approx(true.optimizer_ns, rel=0.1)
        assert found.error == 0.01


@pytest.mark.parametrize("counts", [[2, 3, 3, 2], [4, 4], [1, 7], [0, 3, 3], [5, 2, 0]])
def test_the_stages_of_the_run_cost_what_they_did(tmp_path, counts):
    store, stages = stored(tmp_path, counts, list(range(len(counts))))
    found = only(costs_of_run(store, "last")).of_stages(partition_of(counts))
    for ours, true in zip(found, stages, strict=True):
        assert ours.forward_ns == pytest.approx(true.forward_ns, abs=2)
        assert ours.backward_ns == pytest.approx(true.backward_ns, abs=2)
        assert ours.static_bytes == pytest.approx(true.static_bytes, abs=100)
        assert ours.held_after_forward == pytest.approx(true.held_after_forward, abs=10)
        assert ours.transient_bytes >= ours.held_after_forward - 10


def test_messages_tell_a_bandwidth_and_their_size(tmp_path):
    store, _ = stored(tmp_path, [2, 2, 2], [0, 1, 2])
    costs = costs_of_run(store, "last")
    assert costs.link.latency_ns == 0
    assert costs.link.bytes_per_s == pytest.approx(2e9)
    sizes = [part.message_bytes for part in only(costs).layers]
    assert sizes == [HIDDEN] * 6
    assert only(costs).after.message_bytes == 0


def test_a_run_that_recomputed_everywhere_is_of_that_setting(tmp_path):
    store, _ = stored(
        *(tmp_path, [2, 2], [0, 1]), train_recompute=True, train_recompute_stages="[true, true]"
    )
    assert list(costs_of_run(store, "last").by_setting) == [Setting(1, True)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": "oom", "error": "no room"}, "status is oom"),
        ({"device": "emulated"}, "it is emulated"),
        ({"model_preset": "unknown", "origin": "imported"}, "its model or optimizer is not known"),
        ({"replicas": 2}, "its replicas share what its stages"),
        ({"seq_len": "variable"}, "its microbatches are of many lengths"),
        ({"train_recompute_stages": "[true, false]"}, "it recomputes on some stages only"),
        ({"op_costs_ns": None}, "it has no costs of its stages"),
        ({"layers_per_stage": None}, "it has no costs of its stages"),
        ({"program": None}, "it has no costs of its stages"),
        ({"layers_per_stage": "[4]"}, "it has 1 stage, whose layers"),
    ],
)
def test_a_run_that_does_not_tell_is_refused(tmp_path, changes, message):
    store, _ = stored(tmp_path, [2, 2], [0, 1], **changes)
    with pytest.raises(UsageError, match=message):
        costs_of_run(store, "last")


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("activation_bytes", [None, 5.0]),
        ("optimizer_bytes", [None, None]),
        ("peak_held_microbatches", [0, 2]),
        ("peak_held_microbatches", [None, 2]),
    ],
)
def test_a_run_without_memory_is_refused(tmp_path, column, value):
    store, _ = stored(tmp_path, [2, 2], [0, 1])
    run = store.find("last")
    edges, ranks = (store.table(name, [run["run_id"]]) for name in ("edges", "ranks"))
    store.write_run(dict(run), {"ranks": ranks.assign(**{column: value}), "edges": edges})
    with pytest.raises(UsageError, match="its memory was not measured"):
        costs_of_run(store, "last")
    store.write_run(dict(run), {"edges": edges})
    with pytest.raises(UsageError, match="its memory was not measured"):
        costs_of_run(Store(tmp_path, lambda _problem: None), "last")


def test_a_run_that_is_not_there_is_said_so(tmp_path):
    with pytest.raises(UsageError, match="no runs here yet"):
        costs_of_run(Store(tmp_path), "last")


def test_errors_follow_from_how_single_actions_vary(tmp_path):
    store, _ = stored(tmp_path, [2, 2, 2], [0, 1, 2], op_variation=0.8)
    error = only(costs_of_run(store, "last")).layers[0].error
    assert error == pytest.approx(0.8 / math.sqrt(20 * Case().num_microbatches))
