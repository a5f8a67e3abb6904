"""Checkpoints: resumed bit for bit, at any world size and sharding, readable by transformers."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch
from models import configuration_folder
from pipeline import config, lone_trainer, merged, with_trainer
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from transformers import AutoModelForCausalLM

from engine import checkpoints
from engine.checkpoints import CheckpointError, Progress
from engine.plan.collectives import DataParallel, NoCollectives, Zero1, Zero2, Zero3
from engine.run.optimizer import OptimizerSpec

OTHERS = [("llama", True), ("llama", False), ("gemma2", False), ("mixtral", True)]
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
OPTIMIZER = OptimizerSpec(
    learning_rate=1e-3, lr_schedule="cosine", lr_decay_steps=10, clip_norm=1.0
)


def run(trainer, first, stop, folder=None, source=None):
    """Steps `first` to `stop`, from a checkpoint if there is one; the parameters at the end."""
    if source is not None:
        assert checkpoints.resume(trainer, source) == Progress(first, 64 * first)
    for step in range(first, stop):
        trainer.step(step)
    if folder is not None:
        checkpoints.save(trainer, folder, Progress(stop, 64 * stop))
    parameters = trainer.gathered(lambda held: held.detach())
    return {name: parameter.clone() for name, parameter in parameters.items()}


def refusal(trainer, source):
    with pytest.raises(CheckpointError) as refused:
        checkpoints.resume(trainer, source)
    return str(refused.value)


REPLICATED = {
    "alone": (1, 1, NoCollectives()),
    "pipeline": (1, 2, NoCollectives()),
    "long": (1, 4, NoCollectives()),
    "with a rank of nothing": (1, 3, NoCollectives()),
    "two way": (1, 2, NoCollectives()),
    "in slices": (2, 2, Zero1()),
    "whole": (2, 2, DataParallel()),
    "zero1": (4, 1, Zero1()),
    "zero1 of pipelines": (2, 2, Zero1()),
    "zero2": (2, 3, Zero2()),
    "zero3": (2, 2, Zero3()),
}


def settings_for(name, preset="llama-tiny-tied", *, num_microbatches=4, **rest):
    replicas, world_size, sharding = REPLICATED[name]
    rest = {"optimizer": OPTIMIZER, "preset": preset, **rest}
    schedule = {"two way": "chimera", "in slices": "seq1f1b"}.get(name, "1f1b")
    if name == "in slices":
        rest["slices"] = (7, 5, 3, 1)
    return config(
        *(schedule, world_size, num_microbatches), replicas=replicas, sharding=sharding, **rest
    )


@pytest.mark.parametrize(
    ("preset", "name"),
    [
        ("llama-tiny-tied", "zero3"),
        ("models:tied_sequential", "pipeline"),
        ("llama-tiny-tied", "zero1 of pipelines"),
        *(
            pytest.param("llama-tiny", name, marks=pytest.mark.thorough)
            for name in REPLICATED
            if name != "pipeline"
        ),
    ],
)
def test_a_resumed_run_ends_bit_for_bit_as_an_uninterrupted_one(ranks, tmp_path, preset, name):
    num_empty = name == "with a rank of nothing"
    partition = (2, 0, 2) if num_empty else "uniform"
    settings = settings_for(name, preset, dtype="float32", partition=partition)
    num = settings.num_processes
    expected = ranks.run(num, with_trainer, settings, run, 0, 4)
    ranks.run(num, with_trainer, settings, run, 0, 2, tmp_path)
    source = checkpoints.latest(tmp_path)
    assert source.name == "step-000002"
    num_files = len(list(source.glob("model-*.safetensors")))
    # Of one replica, in which each weight is written once; of two ways each rank has them all.
    assert num_files == (1 if name == "two way" else settings.world_size - num_empty)
    resumed = ranks.run(num, with_trainer, settings, run, 2, 4, None, source)
    for ours, theirs in zip(resumed, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def trained(ranks, name, *arguments):
    """The whole model, trained on four microbatches a step."""
    settings = settings_for(name, num_microbatches=4 // REPLICATED[name][0])
    found = ranks.run(settings.num_processes, with_trainer, settings, run, *arguments)
    return merged(found[-settings.world_size :], TIED)


@pytest.fixture(scope="module")
def uninterrupted(ranks):
    return trained(ranks, "whole", 0, 4)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ("zero3", "alone"),
        ("alone", "zero2"),
        ("zero1", "zero3"),
        ("long", "zero1"),
        ("zero2", "long"),
        ("pipeline", "whole"),
        ("two way", "zero1 of pipelines"),
        ("zero2", "two way"),
        ("in slices", "zero3"),
        ("pipeline", "in slices"),
    ],
)
def test_a_run_resumes_with_other_ranks_replicas_and_shards(
    ranks, tmp_path, uninterrupted, saved, resumed
):
    trained(ranks, saved, 0, 2, tmp_path)
    ours = trained(ranks, resumed, 2, 4, None, checkpoints.latest(tmp_path))
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
    settings = settings_for("pipeline", preset, dtype="float32")
    trained = ranks.run(2, with_trainer, settings, run, 0, 2, tmp_path / "saved")
    trained = merged(trained, TIED if tied else None)
    folder = checkpoints.latest(tmp_path / "saved")
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, trained[name]), name


PLAIN = {"preset": "llama-tiny", "num_microbatches": 2, "dtype": "float32"}


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """The checkpoint of step 2 of two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    ranks.run(2, with_trainer, settings_for("pipeline", **PLAIN), run, 0, 2, folder)
    return folder / "step-000002"


@pytest.fixture
def checkpoint(saved, tmp_path):
    """A copy of it."""
    return shutil.copytree(saved, tmp_path / "copy" / saved.name)


@pytest.fixture(scope="module")
def alone():
    """A trainer in this process, of the model that was saved."""
    trainer = lone_trainer(settings_for("alone", **PLAIN))
    yield trainer
    trainer.close()


def without(file):
    return lambda folder: (folder / file).unlink()


def cut(file):
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:-1])


def changed(file, old, new):
    return lambda folder: (folder / file).write_text(
        (folder / file).read_text().replace(old, new, 1)
    )


MODEL = "model-00002-of-00002.safetensors"
MOMENTS = "optimizer/shard-00002-model-00001-of-00001.safetensors"
UNFIT = {
    "no state": (without("trainer.json"), "trainer.json: cannot be read: "),
    "no weights": (without(MODEL), f"{MODEL}: cannot be read: "),
    "weights cut short": (cut(MODEL), f"{MODEL}: corrupt: "),
    "moments cut short": (cut(MOMENTS), f"{MOMENTS}: corrupt: "),
    "a file too many": (
        lambda folder: shutil.copy(folder / MODEL, folder / "model.safetensors"),
        "model.safetensors was not saved with it; remove it",
    ),
    "another model's configuration": (
        changed("config.json", "silu", "gelu"),
        'config.json: hidden_act is "gelu", the model\'s "silu"',
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_checkpoint_that_does_not_open_or_fit_is_refused_and_nothing_changes(
    name, checkpoint, alone
):
    damage, words = UNFIT[name]
    before = [p.detach().clone() for p in alone.parameters().values()]
    damage(checkpoint)
    message = refusal(alone, checkpoint)
    assert words in message
    assert message.startswith(str(checkpoint))
    assert "\n" not in message
    after = alone.parameters().values()
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert not alone.optimizer.state


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"preset": "llama-tiny-tied"}, "lm_head.weight is float32 [256, 64], in the model not"),
        ({"dtype": "float64"}, "is float32 [256, 64], in the model float64 [256, 64]"),
        ({"optimizer": OptimizerSpec("sgd")}, "trained with optimizer adamw and cannot go on with"),
    ],
    ids=["model", "dtype", "optimizer"],
)
def test_a_checkpoint_of_another_run_is_refused(saved, changes, words):
    other = settings_for("alone", **(PLAIN | changes))
    assert words in refusal(lone_trainer(other), saved)


def test_a_model_of_fewer_layers_does_not_take_some_of_a_larger_ones(checkpoint):
    """Every tensor that it asks for is there, of the right shape."""
    half = shutil.copytree(checkpoint, checkpoint.parent / "half")
    changed("config.json", '"num_hidden_layers": 4', '"num_hidden_layers": 2')(half)
    for file in half.rglob("*.safetensors*"):
        file.unlink()
    words = refusal(
        lone_trainer(settings_for("alone", **(PLAIN | {"preset": str(half)}))), checkpoint
    )
    assert "model.layers.2" in words
    assert words.endswith("in the model not there")


def test_damage_on_one_rank_is_refused_on_all(ranks, checkpoint):
    cut(MODEL)(checkpoint)
    settings = settings_for("pipeline", **PLAIN)
    messages = ranks.run(2, with_trainer, settings, refusal, checkpoint)
    assert messages[0] == messages[1]
    assert MODEL in messages[0]


def saved_where_the_second_rank_cannot(trainer, folder):
    def write_data(*_):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if trainer.rank == 1:
            patch.setattr(HuggingFaceStorageWriter, "write_data", write_data)
        with pytest.raises(CheckpointError) as refused:
            checkpoints.save(trainer, folder, Progress(1))
    trainer.gather(None)  # the first rank removes the rest
    return str(refused.value), list(folder.iterdir())


def test_a_rank_that_cannot_write_ends_the_save_of_all(ranks, tmp_path):
    settings = settings_for("pipeline", **PLAIN)
    found = ranks.run(2, with_trainer, settings, saved_where_the_second_rank_cannot, tmp_path)
    words = "the checkpoint could not be written: rank 1: OSError: [Errno 28] No space left"
    for message, left in found:
        assert message.startswith(words)
        assert not left


def test_sgd_goes_on_with_its_momentum_and_is_held_to_it(tmp_path):
    def trainer(momentum):
        spec = OptimizerSpec("sgd", momentum=momentum)
        return lone_trainer(settings_for("alone", **(PLAIN | {"optimizer": spec})))

    expected = run(trainer(0.9), 0, 3)
    run(trainer(0.9), 0, 2, tmp_path)
    source = tmp_path / "step-000002"
    resumed = run(trainer(0.9), 2, 3, None, source)
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)
    run(trainer(0.0), 0, 2, tmp_path / "plain")  # of which there is no state
    assert run(trainer(0.0), 2, 2, None, tmp_path / "plain" / "step-000002")
    words = "was trained with optimizer sgd with momentum and cannot go on with sgd"
    assert words in refusal(trainer(0.0), source)


def test_a_run_does_not_go_on_with_another_tokenizer(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a few words " * 100)
    settings = settings_for("alone", **PLAIN, source=f"text:{text}", tokenizer="bytes")
    trainer = lone_trainer(settings)
    source = checkpoints.save(trainer, tmp_path, Progress(0, 0))
    assert checkpoints.resume(trainer, source) == Progress(0, 0)
    changed("trainer.json", '"bytes"', '"0a1b"')(source)
    assert "tokenizer 0a1b and cannot go on with bytes" in refusal(trainer, source)
    drawn = dataclasses.replace(settings.data, source="synthetic")
    assert checkpoints.resume(lone_trainer(dataclasses.replace(settings, data=drawn)), source)


def test_a_checkpoint_that_is_not_whole_is_not_seen_and_one_that_was_being_replaced_is(tmp_path):
    whole = tmp_path / "step-000007"
    for name in (whole.name, "step-best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer.json").write_text("{}")
    (tmp_path / ".step-000009.partial").mkdir()
    (tmp_path / "step-000008").mkdir()
    assert checkpoints.latest(tmp_path) == checkpoints.find(tmp_path) == whole
    assert checkpoints.latest(tmp_path / "nothing") is None
    whole.rename(tmp_path / f".{whole.name}.old")
    assert checkpoints.find(whole) == whole
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        checkpoints.find(tmp_path / "nothing")
