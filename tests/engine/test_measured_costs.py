"""The process that measures a model's costs for those who have no torch."""

import pytest

from engine.costs import answer_to
from engine.model.descriptions import CostRequest, Identity
from engine.model.spec import ModelSpec


def request_for(model, settings=((1, False),), seq_len=16, **rest):
    identity = Identity(ModelSpec(model, weights="random"), "bytes")
    return CostRequest(identity, seq_len, settings, budget_s=0, has_link=False, **rest)


def test_the_answer_has_the_costs_of_every_setting(capfd):
    answer = answer_to(request_for("llama-tiny", ((1, False), (2, True))))
    assert answer["problem"] is None
    of = [(c["microbatch_size"], c["recompute"], c) for c in answer["costs"]]
    assert [setting for *setting, _ in of] == [[1, False], [2, True]]
    for _, _, costs in of:
        assert len(costs["layers"]) == 4
        assert costs["before"]["message_bytes"] > 0
    single, recomputed = (costs["layers"][1]["held_after_forward"] for *_, costs in of)
    assert recomputed < single
    assert "llama-tiny, microbatches of 2, recomputed: 6 of 6 parts" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("request_", "key", "message"),
    [
        (request_for("models:no_module"), "model.preset", "no_module"),
        (request_for("llama-tiny", seq_len=4096), "seq_len", "at most 1024"),
        (request_for("llama-tiny", device="cuda"), "device", "sees no accelerator"),
    ],
)
def test_what_cannot_be_measured_is_the_answers_problem(request_, key, message, monkeypatch):
    monkeypatch.setattr("engine.run.device.kind", lambda: None)
    answer = answer_to(request_)
    assert answer["problem"]["key"] == key
    assert message in answer["problem"]["message"]
    assert answer["costs"] == []


def test_a_setting_that_has_no_room_is_left_out():
    answer = answer_to(request_for("llama-tiny", ((2**40, False), (1, False))))
    assert [c["microbatch_size"] for c in answer["costs"]] == [1]
    (left_out,) = answer["left_out"]
    assert left_out["microbatch_size"] == 2**40
    assert "no room for it" in left_out["reason"]
