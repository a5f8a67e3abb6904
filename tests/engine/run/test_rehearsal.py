"""Stages that rehearse their computations train on as if they had not, bit for bit."""

import dataclasses

import pytest
import torch
from pipeline import config, lone_trainer, train, with_trainer
from ranks import Ranks

from engine.plan.collectives import Zero3
from engine.run import rehearsal

CHANGING = [
    *("statistics", "dropped", "renormed", "in_place_on_ids", "frozen_front", "normed"),
]
"""Models whose forward draws, or changes buffers, weights or its input."""


def both(settings):
    """The same configuration without and with a rehearsal."""
    return [dataclasses.replace(settings, rehearses=it) for it in (False, True)]


def assert_equal(one, other):
    assert one.losses == other.losses
    for kind in ("gradients", "state"):
        ours, theirs = getattr(one, kind), getattr(other, kind)
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert (tensor is None) == (theirs[name] is None), name
            assert tensor is None or torch.equal(tensor, theirs[name]), name
    assert one.peak_held == other.peak_held


def alone(settings):
    return train(lone_trainer(settings))


@pytest.mark.parametrize("name", CHANGING)
def test_a_rehearsal_changes_nothing_of_a_model_that_changes_itself(name):
    settings = config("1f1b", 1, 3, preset=f"awkward_models:{name}")
    assert_equal(*map(alone, both(settings)))


@pytest.mark.parametrize(
    ("schedule", "changes"),
    [
        ("zb_h1", {}),
        ("1f1b", {"preset": "awkward_models:dropped"}),
        ("1f1b", {"replicas": 2, "sharding": Zero3()}),
    ],
    ids=str,
)
def test_a_rehearsal_of_several_ranks_changes_nothing(ranks: Ranks, schedule, changes):
    settings = config(schedule, 2, 4, **changes)
    trained = (ranks.run(settings.num_processes, with_trainer, one) for one in both(settings))
    for one, other in zip(*trained, strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize(
    ("schedule", "expected"), [("1f1b", ["F", "B"]), ("zb_h1", ["F", "I", "W"])]
)
def test_each_computation_of_the_program_is_rehearsed_once(monkeypatch, schedule, expected):
    done = []
    for op, name in zip(
        "FBIW", ("forward", "backward", "backward_input", "backward_weight"), strict=True
    ):
        usual = getattr(rehearsal.Stage, name)
        monkeypatch.setattr(
            rehearsal.Stage,
            name,
            lambda *given, op=op, usual=usual: (done.append(op), usual(*given))[1],
        )
    settings = dataclasses.replace(config(schedule, 1, 3), rehearses=True)
    lone_trainer(settings)
    assert done == expected


def test_on_the_cpu_nothing_is_rehearsed_unless_asked(monkeypatch):
    monkeypatch.setattr("engine.trainer.rehearse", lambda *_: pytest.fail("rehearsed"))
    lone_trainer(config("1f1b", 1, 3))
