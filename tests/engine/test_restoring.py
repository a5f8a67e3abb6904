"""Checkpoints that do not open or do not fit are refused on all ranks before anything changes."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from pipeline import config, lone_trainer, with_trainer
from safetensors.torch import load_file, save_file

from engine.run.optimizer import OptimizerSpec
from engine.run.snapshot import SnapshotError
from engine.trainer import Progress


def run(trainer, first, stop, folder=None, source=None):
    """Steps `first` to `stop`, saving each; the loss of each step on the last rank."""
    if source is not None:
        assert trainer.resume(source).step == first
    losses = []
    for step in range(first, stop):
        losses.append(trainer.step(step).loss)
        if folder is not None:
            trainer.save(folder, Progress(step + 1, 64 * (step + 1)))
    return losses


def settings_for(world_size, **rest):
    return config("1f1b", world_size, 2, dtype="float32", **rest)


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """The checkpoint of step 2 of two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    ranks.run(2, with_trainer, settings_for(2), run, 0, 2, folder)
    return folder / "step-000002"


@pytest.fixture
def checkpoint(saved, tmp_path):
    """A copy of it."""
    return shutil.copytree(saved, tmp_path / "copy" / saved.name)


@pytest.fixture(scope="module")
def alone():
    """A trainer in this process, of the model that was saved."""
    trainer = lone_trainer(settings_for(1))
    yield trainer
    trainer.close()


def state_of(trainer):
    optimizer = trainer._optimizer.state_dict()["state"]
    return [p.detach().clone() for p in trainer.parameters().values()], optimizer


def without(file):
    return lambda folder: (folder / file).unlink()


def cut(file):
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:-1])


def with_text(file, text):
    return lambda folder: (folder / file).write_text(text)


def with_tensors(file, change):
    def damage(folder):
        held = load_file(folder / file)
        change(held)
        save_file(held, folder / file, metadata={"format": "pt"})

    return damage


MODEL, MOMENTS = (f"{kind}-00001-of-00002.safetensors" for kind in ("model", "optimizer"))
MOMENT = "model.layers.0.mlp.up_proj.weight/exp_avg"
UNFIT = {
    "no state": (without("trainer.json"), "no checkpoint to resume from: it has no trainer.json"),
    "state is no JSON": (with_text("trainer.json", "{"), "trainer.json: not readable as JSON"),
    "state is empty": (with_text("trainer.json", "{}"), "trainer.json: holds no state"),
    "no weights": (without(MODEL), f"{MODEL}: cannot be read: "),
    "weights cut short": (cut(MODEL), f"{MODEL}: corrupt: "),
    "moments cut short": (cut(MOMENTS), f"{MOMENTS}: corrupt: "),
    "no optimizer": (without("optimizer.safetensors.index.json"), "index.json: cannot be read: "),
    "index is no index": (
        with_text("model.safetensors.index.json", '{"weight_map": ["a"]}'),
        "index.json: not a readable index",
    ),
    "a moment of another shape": (
        with_tensors(MOMENTS, lambda held: held.update({MOMENT: held[MOMENT].flatten()})),
        "up_proj.weight: exp_avg has shape",
    ),
    "a moment is not there": (
        with_tensors(MOMENTS, lambda held: held.pop(MOMENT)),
        f"{MOMENTS}: is not as its index says: ",
    ),
    "another model's configuration": (
        lambda folder: with_text(
            "config.json", (folder / "config.json").read_text().replace("silu", "gelu")
        )(folder),
        'config.json: hidden_act is "gelu", the model\'s "silu"',
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_checkpoint_that_does_not_open_or_fit_is_refused_and_nothing_changes(
    name, checkpoint, alone
):
    damage, words = UNFIT[name]
    before, moments = state_of(alone)
    damage(checkpoint)
    with pytest.raises(SnapshotError) as refusal:
        alone.resume(checkpoint)
    message = str(refusal.value)
    assert words in message
    assert message.startswith(str(checkpoint))
    assert "\n" not in message
    after, moments_after = state_of(alone)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert moments.keys() == moments_after.keys()


def test_files_of_the_user_and_links_do_no_harm(saved, checkpoint, alone):
    (checkpoint / "notes.txt").write_text("best so far")
    (checkpoint / "model.safetensors").write_bytes(b"no safetensors")
    weights = checkpoint / "model-00001-of-00002.safetensors"
    weights.unlink()
    weights.symlink_to(saved / weights.name)
    link = checkpoint.parent / "best"
    link.symlink_to(checkpoint)
    assert alone.resume(link) == Progress(2, 128)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"preset": "llama-tiny-tied"}, "k_proj.weight has shape .*, the model"),
        ({"dtype": "float64"}, "has dtype float32, the model float64; resume with float32"),
        ({"optimizer": OptimizerSpec("sgd")}, "trained with adamw and cannot go on with sgd"),
    ],
    ids=["model", "dtype", "optimizer"],
)
def test_a_checkpoint_of_another_run_is_refused(checkpoint, changes, words):
    other = config("1f1b", 1, 2, **({"dtype": "float32"} | changes))
    assert re.search(words, refusal(lone_trainer(other), checkpoint))


def test_a_model_of_fewer_layers_does_not_take_some_of_a_larger_ones(checkpoint):
    """Every tensor that it asks for is there, of the right shape."""
    text = (checkpoint / "config.json").read_text()
    half = checkpoint.parent / "half"
    half.mkdir()
    (half / "config.json").write_text(
        text.replace('"num_hidden_layers": 4', '"num_hidden_layers": 2')
    )
    words = refusal(lone_trainer(settings_for(1, preset=str(half))), checkpoint)
    assert re.search(r"model\.layers\.2.* that the model does not have", words)


def test_damage_on_one_rank_is_refused_on_all(ranks, checkpoint):
    weights = checkpoint / "model-00002-of-00002.safetensors"  # of the second rank
    cut(weights.name)(checkpoint)
    messages = ranks.run(2, with_trainer, settings_for(2), refusal, checkpoint)
    assert messages[0] == messages[1]
    assert weights.name in messages[0]


def refusal(trainer, source):
    with pytest.raises(SnapshotError) as refused:
        trainer.resume(source)
    return str(refused.value)


def test_sgd_goes_on_with_its_momentum_and_is_held_to_it(ranks, tmp_path):
    momentum = settings_for(1, optimizer=OptimizerSpec("sgd", momentum=0.9))
    expected = ranks.run(1, with_trainer, momentum, run, 0, 3, tmp_path)[0]
    source = tmp_path / "step-000002"
    assert ranks.run(1, with_trainer, momentum, run, 2, 3, None, source)[0] == expected[2:]
    plain = settings_for(1, optimizer=OptimizerSpec("sgd"))
    (message,) = ranks.run(1, with_trainer, plain, refusal, source)
    assert "was trained with momentum 0.9" in message
