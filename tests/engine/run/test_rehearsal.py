"""Stages that rehearse their computations train on as if they had not, bit for bit."""

import dataclasses

import pytest
import torch
from pipeline import CPU, config, lone_trainer, train, with_trainer
from ranks import Ranks

from engine.plan.collectives import Zero3
from engine.run import rehearsal
from engine.run.clock import HostClock
from engine.run.p2p.fabric import Fabric
from engine.trainer import Trainer

CHANGING = [
    *("statistics", "dropped", "renormed", "in_place_on_ids", "frozen_front", "normed"),
]
"""Models whose forward draws, or changes buffers, weights or its input."""


def both(settings):
    """The same configuration without and with a rehearsal."""
    return [dataclasses.replace(settings, rehearses=it) for it in (False, True)]


def assert_equal(one, other):
    assert one.loss == other.loss
    assert [r.loss for r in one.results] == [r.loss for r in other.results]
    for kind in ("gradients", "trained"):
        ours, theirs = getattr(one, kind), getattr(other, kind)
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert (tensor is None) == (theirs[name] is None), name
            assert tensor is None or torch.equal(tensor, theirs[name]), name
    assert one.peak_held == other.peak_held


def alone(settings):
    return train(Fabric(CPU, HostClock(), is_device_shared=False), True, settings)


@pytest.mark.parametrize("name", CHANGING)
def test_a_rehearsal_changes_nothing_of_a_model_that_changes_itself(name):
    settings = config("1f1b", 1, 3, preset=f"awkward_models:{name}")
    assert_equal(*map(alone, both(settings)))


def test_a_rehearsal_of_split_backwards_changes_nothing(ranks: Ranks):
    for settings in (config("zb_h1", 2, 4), config("1f1b", 2, 4, preset="awkward_models:dropped")):
        without, with_it = (ranks.run(2, train, one) for one in both(settings))
        for one, other in zip(without, with_it, strict=True):
            assert_equal(one, other)


def test_a_rehearsal_of_replicas_changes_nothing(ranks: Ranks):
    settings = config("1f1b", 2, 4, replicas=2, sharding=Zero3())
    without, with_it = (ranks.run(4, with_trainer, one, losses) for one in both(settings))
    assert without == with_it


def losses(trainer: Trainer):
    steps = [trainer.step(step).loss for step in range(3)]
    weights = trainer.gathered(lambda parameter: parameter.detach().clone())
    return steps, {name: float(w.double().sum()) for name, w in weights.items() if w is not None}


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
