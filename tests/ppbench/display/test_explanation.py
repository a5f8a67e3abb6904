"""Sentences on a bubble, from hand-written rows of the store."""

import json

import pandas as pd
import pytest

from engine.plan.program import to_json
from engine.plan.schedules.registry import build_program
from ppbench.display.explanation import OF_REPLICAS, PART_NAMES, explain, headline, what_if

MS = 1_000_000


def run_with(op_costs_ms=None, **parts):
    """A run of 1F1B, 4 ranks and 8 microbatches, with these parts of its bubble."""
    costs = op_costs_ms or {"F": [10] * 4, "B": [20] * 4}
    names = [name for name in PART_NAMES if name in parts or name not in OF_REPLICAS]
    shares = {f"bubble_{name}": parts.get(name, 0.0) for name in names}
    return pd.Series(
        {
            **shares,
            "bubble_mean": sum(shares.values()),
            "following": '{"optimizer_ns": [0, 0, 0, 0], "meets": false}',
            "op_costs_ns": json.dumps({op: [ms * MS for ms in of] for op, of in costs.items()}),
            "op_variation": 0.123,
            "modelled_step_ns": 330 * MS,
            "model_residual": 0.021,
            "world_size": 4,
            "replicas": 1,
            "transfer_policy": "early",
            "transfer_look_ahead": 1,
            "program": to_json(build_program("1f1b", 4, 8)),
        },
        dtype=object,
    )


def edges_with(*moving_ms):
    """A message's time on the link from each stage to the next, the same both ways."""
    rows = [
        {"source": source, "target": target, "moving_ns": ms * MS}
        for link, ms in enumerate(moving_ms)
        for source, target in ((link, link + 1), (link + 1, link))
    ]
    return pd.DataFrame(rows)


ALIKE = edges_with(0.5, 0.5, 0.5)
SLOW_STAGE = {"F": [10, 15, 10, 10], "B": [20, 30, 20, 20]}
TWO_SLOW = {"F": [10, 15, 15, 10], "B": [20, 30, 30, 20]}


def test_the_parts_are_told_in_order_and_add_up():
    run = run_with(structure=0.2, imbalance=0.05, transfer=0.02, jitter=0.01, launch_gap=-0.00001)
    first, *_ = explain(run, ALIKE)
    assert first.endswith(
        "ranks were idle 28.0 % of the time: schedule 20.0, stage imbalance 5.0, exposed transfer "
        "2.0, jitter 1.0, launch gaps 0.0, between steps 0.0."
    )


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        (SLOW_STAGE, "stage 1 takes 1.50 times as long as the others (45.0 ms per microbatch"),
        (TWO_SLOW, "takes 30.0 ms to 45.0 ms on a stage, longest on stages 1, 2"),
    ],
)
def test_imbalance_names_the_stage_that_is_slow_alone_or_those_that_are_together(costs, words):
    sentence = headline(run_with(costs, structure=0.2, imbalance=0.1), ALIKE)
    assert "The largest avoidable loss is stage imbalance: " in sentence
    assert words in sentence


@pytest.mark.parametrize(
    ("edges", "words"),
    [
        (
            edges_with(0.5, 10, 0.5),
            "messages between stages 1 and 2 take 10.0 ms, elsewhere 0.5 ms",
        ),
        (edges_with(8, 8, 0.5), "a message takes 0.5 ms to 8.0 ms"),
        (ALIKE, "a message takes 0.5 ms."),
    ],
)
def test_exposed_transfer_names_the_link_that_is_slow_alone(edges, words):
    assert words in headline(run_with(structure=0.2, transfer=0.1), edges)


def test_jitter_is_told_with_its_size():
    sentence = headline(run_with(structure=0.2, jitter=0.1), ALIKE)
    assert "loss is jitter: the time of an action varies by 12.3 % around its mean" in sentence


def test_a_bubble_that_is_the_schedules_alone_has_no_other_cause():
    sentence = headline(run_with(structure=0.2, imbalance=0.004), ALIKE)
    assert sentence.endswith("Nearly all idle time is due to the schedule.")


def test_the_prediction_is_told_with_its_residual():
    *_, last = explain(run_with(structure=0.2), ALIKE)
    assert "a step takes 330.0 ms; the measured ones were 2.1 % longer on average" in last


def test_what_if_is_modelled_from_the_same_costs():
    (sentence,) = what_if(run_with(SLOW_STAGE, structure=0.2), edges_with(0, 0, 0), pd.DataFrame())
    # 420 ms with the slow stage, 11 x 33.75 with its work spread evenly.
    assert sentence.startswith(
        "What if, with a modelled step of 420.0 ms now: perfect balance 371.2 ms (-11.6%);"
    )
    assert "free transfers 420.0 ms (+0.0%)" in sentence


def test_replica_skew_names_the_slowest_replica():
    run = run_with(structure=0.2, skew=0.1)
    own = [{"F": [ms * MS] * 4, "B": [2 * ms * MS] * 4} for ms in (10, 10, 12)]
    run["replica_costs_ns"], run["run_id"] = json.dumps(own), "a-run"
    assert (
        "loss is replica skew: replica 2 takes 144.0 ms for a microbatch over all its stages, the "
        "others 120.0 ms (ppbench stragglers a-run says more)"
    ) in headline(run, ALIKE)


def test_replica_skew_names_a_link_that_costs_more_than_any_replica_computes():
    run = run_with(structure=0.2, skew=0.1)
    own = [
        {
            "F": [10 * MS] * 3,
            "B": [20 * MS] * 3,
            "SEND_F": [MS, ms * MS, None],
            "SEND_B": [None, MS, MS],
        }
        for ms in (1, 1, 7)
    ]
    own[1]["F"] = [11 * MS] * 3  # 3 ms more, and a message takes 6 ms more
    run["replica_costs_ns"], run["run_id"] = json.dumps(own), "a-run"
    assert (
        "loss is replica skew: messages between stages 1 and 2 of replica 2 take 4.0 ms, those of "
        "the others 1.0 ms (ppbench stragglers a-run says more)"
    ) in headline(run, ALIKE)
