"""Checkpoints: resumed bit for bit, at any world size, and readable by plain transformers."""

import dataclasses

import pytest
import torch
from models import configuration_folder
from pipeline import config, merged, with_trainer
from transformers import AutoModelForCausalLM

from engine.plan.collectives import DataParallel, NoCollectives, Zero1, Zero2, Zero3
from engine.run import snapshot
from engine.run.optimizer import OptimizerSpec
from engine.run.snapshot import SnapshotError
from engine.trainer import Progress

OTHERS = [("llama", True), ("llama", False), ("gemma2", False), ("mixtral", True)]
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
OPTIMIZER = OptimizerSpec(
    learning_rate=1e-3, lr_schedule="cosine", lr_decay_steps=10, clip_norm=1.0
)


def run(trainer, first, stop, folder=None, source=None):
    """Steps `first` to `stop`, from a checkpoint if there is one; the parameters at the end."""
    if source is not None:
        assert trainer.resume(source).step == first
    for step in range(first, stop):
        trainer.step(step)
    if folder is not None:
        trainer.save(folder, Progress(stop))
    parameters = trainer.gathered(lambda held: held.detach())
    return {name: parameter.clone() for name, parameter in parameters.items()}


def settings_for(world_size, preset, **rest):
    return config("1f1b", world_size, 4, preset=preset, optimizer=OPTIMIZER, **rest)


REPLICATED = {
    "alone": (1, 1, NoCollectives()),
    "pipeline": (1, 2, NoCollectives()),
    "whole": (2, 2, DataParallel()),
    "zero1": (4, 1, Zero1()),
    "zero2": (2, 3, Zero2()),
    "zero3": (2, 2, Zero3()),
}


@pytest.mark.parametrize(
    ("preset", "name"),
    [("llama-tiny-tied", "zero3"), ("models:tied_sequential", "pipeline")],
)
def test_a_resumed_run_ends_bit_for_bit_as_an_uninterrupted_one(ranks, tmp_path, preset, name):
    replicas, world_size, sharding = REPLICATED[name]
    settings = settings_for(
        world_size, preset, dtype="float32", replicas=replicas, sharding=sharding
    )
    num = settings.num_processes
    expected = ranks.run(num, with_trainer, settings, run, 0, 4)
    ranks.run(num, with_trainer, settings, run, 0, 2, tmp_path)
    source = snapshot.latest(tmp_path)
    assert source.name == "step-000002"
    assert len(list(source.glob("model-*.safetensors"))) == world_size  # of one replica
    resumed = ranks.run(num, with_trainer, settings, run, 2, 4, None, source)
    for ours, theirs in zip(resumed, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def trained(ranks, name, *arguments):
    """The whole model, trained on four microbatches a step."""
    replicas, world_size, sharding = REPLICATED[name]
    settings = settings_for(world_size, "llama-tiny-tied", replicas=replicas, sharding=sharding)
    data = dataclasses.replace(settings.data, num_microbatches=4 // replicas)
    settings = dataclasses.replace(settings, data=data)
    found = ranks.run(settings.num_processes, with_trainer, settings, run, *arguments)
    return merged(found[-world_size:], TIED)


@pytest.fixture(scope="module")
def uninterrupted(ranks):
    return trained(ranks, "whole", 0, 4)


@pytest.mark.parametrize(
    ("saved", "resumed"), [("zero3", "alone"), ("alone", "zero2"), ("zero1", "zero3")]
)
def test_a_run_resumes_with_other_replicas_and_shards(
    ranks, tmp_path, uninterrupted, saved, resumed
):
    trained(ranks, saved, 0, 2, tmp_path)
    ours = trained(ranks, resumed, 2, 4, None, snapshot.latest(tmp_path))
    assert ours.keys() == uninterrupted.keys()
    for name, value in uninterrupted.items():
        assert torch.allclose(ours[name], value, rtol=1e-10, atol=1e-13), name


@pytest.mark.parametrize(
    ("architecture", "tied"),
    [
        ("gemma2", True),
        ("mixtral", False),
        *(pytest.param(*other, marks=pytest.mark.thorough) for other in OTHERS),
    ],
)
def test_a_saved_folder_loads_with_plain_transformers(ranks, tmp_path, architecture, tied):
    preset = configuration_folder(tmp_path, architecture, tied=tied)
    settings = settings_for(2, preset, dtype="float32")
    trained = ranks.run(2, with_trainer, settings, run, 0, 2, tmp_path / "saved")
    trained = merged(trained, TIED if tied else None)
    folder = snapshot.latest(tmp_path / "saved")
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, trained[name]), name


def test_a_checkpoint_that_is_not_whole_is_not_seen_and_one_that_was_being_replaced_is(tmp_path):
    whole = tmp_path / "step-000007"
    for name in (whole.name, "step-best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer.json").write_text("{}")
    (tmp_path / ".step-000009.partial").mkdir()
    (tmp_path / "step-000008").mkdir()
    assert snapshot.latest(tmp_path) == whole
    assert snapshot.latest(tmp_path / "nothing") is None
    whole.rename(tmp_path / f".{whole.name}.old")
    assert snapshot.latest(tmp_path) == whole


def test_weights_that_no_file_can_hold_are_refused_before_training():
    can_be = {"whole": torch.zeros(2, dtype=torch.int64), "turns": torch.zeros(2).to(torch.cfloat)}
    snapshot.check_storable(can_be)
    with pytest.raises(SnapshotError, match=r"turns is torch\.complex128, which safetensors"):
        snapshot.check_storable({**can_be, "turns": torch.zeros(2, dtype=torch.complex128)})
