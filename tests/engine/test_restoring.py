"""Damaged checkpoints are refused by name before anything trains; whole ones go on exactly."""

from __future__ import annotations

import json
import random
import shutil
import subprocess

import pytest
import torch
from corruptions import CHECKSUMS, LIST, mutate
from pipeline import config
from safetensors.torch import load_file

from engine.model.spec import ModelSpec
from engine.model.split import open_model
from engine.model.stage_module import ModelError
from engine.run import restoring
from engine.run.clock import HostClock
from engine.run.optimizer import OptimizerSpec
from engine.run.p2p.fabric import Fabric
from engine.run.snapshot import SnapshotError
from engine.trainer import Progress, Trainer, connect

CPU = torch.device("cpu")


def run(fabric, is_member, settings, first, stop, folder=None, source=None):
    """Steps `first` to `stop`, saving each; the loss of each step on the last rank."""
    settings = connect(settings, fabric)
    if not is_member:
        return None
    trainer = Trainer(settings, fabric)
    if source is not None:
        assert trainer.resume(source).step == first
    losses = []
    for step in range(first, stop):
        losses.append(trainer.step(step).loss)
        if folder is not None:
            trainer.save(folder, Progress(step + 1, 64 * (step + 1)))
    trainer.close()
    return losses


def settings_for(world_size, **rest):
    return config("1f1b", world_size, 2, dtype="float32", **rest)


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """A folder of the checkpoints of steps 1 and 2 of two ranks, and the loss of step 2."""
    folder = tmp_path_factory.mktemp("saved")
    ranks.run(2, run, settings_for(2), 0, 2, folder)
    losses = ranks.run(2, run, settings_for(2), 0, 3)
    return folder, losses[-1][2]


@pytest.fixture
def checkpoint(saved, tmp_path):
    """A copy of the newest, beside a copy of the other."""
    shutil.copytree(saved[0], tmp_path / "copy")
    return tmp_path / "copy" / "step-000002"


@pytest.fixture(scope="module")
def alone():
    """A trainer in this process, of the model that was saved."""
    fabric = Fabric(CPU, HostClock(), is_device_shared=False)
    trainer = Trainer(connect(settings_for(1), fabric), fabric)
    yield trainer
    trainer.close()


def state_of(trainer):
    optimizer = trainer._optimizer.state_dict()["state"]
    return [p.detach().clone() for p in trainer.parameters().values()], optimizer


@pytest.mark.parametrize("name", LIST)
def test_a_damaged_checkpoint_is_refused_by_name_and_nothing_changes(name, checkpoint, alone):
    before, moments = state_of(alone)
    says = LIST[name](checkpoint)
    with pytest.raises(SnapshotError) as refusal:
        alone.resume(checkpoint)
    message = str(refusal.value)
    assert says in message
    assert str(checkpoint) in message
    assert message.isprintable()
    assert len(message) < 1000
    after, moments_after = state_of(alone)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert moments.keys() == moments_after.keys()


def test_random_damage_is_refused_or_provably_harmless(saved, tmp_path, alone, is_thorough):
    whole = saved[0] / "step-000002"
    expected = {
        name: tensor for f in whole.glob("m*.safetensors") for name, tensor in load_file(f).items()
    }
    refused = 0
    for seed in range(200 if is_thorough else 40):
        draw = random.Random(seed)
        folder = tmp_path / "step-000002"
        shutil.copytree(whole, folder)
        done = mutate(folder, saved[0] / "step-000001", draw)
        try:
            assert alone.resume(folder) == Progress(2, 128), done
        except SnapshotError as error:
            assert any(path.name in str(error) for path in whole.iterdir()), (done, error)
            assert str(error).isprintable(), done
            refused += 1
        else:  # nothing that is read was changed
            ours = alone._checkpoints._restored().model
            assert all(torch.equal(ours[name], expected[name]) for name in expected), done
            assert done.split()[1] == CHECKSUMS or done.startswith("swapped"), done
        shutil.rmtree(folder)
    assert refused > 30


def test_coreutils_agrees_with_the_checksums(checkpoint):
    done = subprocess.run(
        ["sha256sum", "--strict", "-c", CHECKSUMS],
        cwd=checkpoint,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    files = {path.name for path in checkpoint.iterdir()} - {CHECKSUMS}
    assert {line.removesuffix(": OK") for line in done.stdout.splitlines()} == files


def test_a_checkpoint_of_an_older_version_goes_on_unchecked(ranks, saved, checkpoint):
    """The checkpoint is as an older version wrote it: four facts, and no checksums."""
    (checkpoint / CHECKSUMS).unlink()
    state = json.loads((checkpoint / "trainer.json").read_text())
    old = {name: state[name] for name in ("step", "num_tokens", "world_size", "optimizer")}
    (checkpoint / "trainer.json").write_text(json.dumps(old))
    assert not restoring.check(checkpoint).has_checksums
    losses = ranks.run(2, run, settings_for(2), 2, 3, None, checkpoint)
    assert losses[-1] == [saved[1]]


def test_files_of_the_user_and_links_do_no_harm(saved, checkpoint, alone):
    (checkpoint / "notes.txt").write_text("best so far")
    (checkpoint / "model.safetensors").write_bytes(b"no safetensors")
    weights = checkpoint / "model-00001-of-00002.safetensors"
    weights.unlink()
    weights.symlink_to(saved[0] / "step-000002" / weights.name)
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
    fabric = Fabric(CPU, HostClock(), is_device_shared=False)
    other = config("1f1b", 1, 2, **({"dtype": "float32"} | changes))
    trainer = Trainer(connect(other, fabric), fabric)
    with pytest.raises(SnapshotError, match=words):
        trainer.resume(checkpoint)
    trainer.close()


def test_a_model_of_fewer_layers_does_not_take_some_of_a_larger_ones(checkpoint):
    """Every tensor that it asks for is there, of the right shape."""
    text = (checkpoint / "config.json").read_text()
    half = checkpoint.parent / "half"
    half.mkdir()
    (half / "config.json").write_text(
        text.replace('"num_hidden_layers": 4', '"num_hidden_layers": 2')
    )
    fabric = Fabric(CPU, HostClock(), is_device_shared=False)
    settings = config("1f1b", 1, 2, preset=str(half), dtype="float32")
    trainer = Trainer(connect(settings, fabric), fabric)
    with pytest.raises(SnapshotError, match=r"model\.layers\.2.* that the model does not have"):
        trainer.resume(checkpoint)
    trainer.close()


def test_damage_on_one_rank_is_refused_on_all(ranks, checkpoint):
    weights = checkpoint / "model-00002-of-00002.safetensors"  # of the second rank
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    messages = ranks.run(2, refusals, settings_for(2), checkpoint)
    assert messages[0] == messages[1]
    assert weights.name in messages[0]


def refusals(fabric, is_member, settings, source):
    settings = connect(settings, fabric)
    if not is_member:
        return None
    trainer = Trainer(settings, fabric)
    try:
        trainer.resume(source)
    except SnapshotError as error:
        return str(error)
    finally:
        trainer.close()
    return None


def test_sgd_goes_on_with_its_momentum_and_is_held_to_it(ranks, tmp_path):
    momentum = settings_for(1, optimizer=OptimizerSpec("sgd", momentum=0.9))
    expected = ranks.run(1, run, momentum, 0, 3, tmp_path)[0]
    source = tmp_path / "step-000002"
    assert ranks.run(1, run, momentum, 2, 3, None, source)[0] == expected[2:]
    plain = settings_for(1, optimizer=OptimizerSpec("sgd"))
    (message,) = ranks.run(1, refusals, plain, source)
    assert "was trained with momentum 0.9" in message


def test_a_model_folder_of_ours_is_checked_and_one_of_others_is_not(checkpoint):
    def opened():
        spec = ModelSpec(str(checkpoint), "float32", "uniform")
        return open_model(spec, (1, 16), CPU)

    assert opened().num_layers == 4
    weights = checkpoint / "model-00001-of-00002.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    with pytest.raises(ModelError, match=f"{weights.name}: corrupt"):
        opened()
    (checkpoint / CHECKSUMS).unlink()
    assert opened().num_layers == 4
