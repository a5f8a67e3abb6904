"""A save that is killed at any moment leaves a whole checkpoint, and none that is half."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from pipeline import config, lone_trainer

from engine import checkpoints
from engine.checkpoints import CheckpointError, Progress
from engine.run.optimizer import OptimizerSpec

TOUCHES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")
"""Events of CPython's audit hooks: each operation on files of Python's own."""


@pytest.fixture(scope="module")
def trainer():
    """A trainer whose parameters have momentum."""
    optimizer = OptimizerSpec("sgd", momentum=0.9)
    trainer = lone_trainer(config("1f1b", 1, 1, optimizer=optimizer))
    trainer.step(0)
    yield trainer
    trainer.close()


def tensors_of(trainer):
    moments = [state["momentum_buffer"] for state in trainer.optimizer.state.values()]
    return [*(p.detach() for p in trainer.parameters().values()), *moments]


def save(trainer, root: Path, step: int, value: float) -> None:
    """A checkpoint whose elements are all `value`."""
    for tensor in tensors_of(trainer):
        tensor.fill_(value)
    checkpoints.save(trainer, root, Progress(step))


def value_of(trainer, folder: Path) -> float:
    """The value of all elements of a checkpoint, which must be whole."""
    checkpoints.resume(trainer, folder)
    values = {float(x) for tensor in tensors_of(trainer) for x in (tensor.min(), tensor.max())}
    assert len(values) == 1
    return values.pop()


def in_child(work) -> int:
    """Run in a child process; its process id."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def kill_before_touch(number: int) -> None:
    count = 0

    def hook(event: str, _arguments: object) -> None:
        nonlocal count
        if event in TOUCHES:
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def was_killed(child: int) -> bool:
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == -signal.SIGKILL


@pytest.mark.parametrize("step", [2, 1], ids=["a new step", "the same step again"])
def test_a_save_killed_at_any_operation_leaves_a_whole_checkpoint(
    trainer, tmp_path, step, is_thorough
):
    number, is_over = 0, False
    seen = set()
    while not is_over:
        number += 1 if is_thorough else 5  # a fork of this process costs more than the save
        root = tmp_path / str(number)
        save(trainer, root, 1, 1.0)

        def work(root=root, number=number):
            kill_before_touch(number)
            save(trainer, root, step, 2.0)

        is_over = not was_killed(in_child(work))
        newest = checkpoints.latest(root)
        assert newest is not None
        value = value_of(trainer, newest)
        assert value == 2.0 if newest.name != "step-000001" else value in (1.0, 2.0)
        seen.add(value)
        save(trainer, root, 3, 3.0)  # nothing that is left is in the way, or is left for good
        assert value_of(trainer, checkpoints.latest(root)) == 3.0
        assert not list(root.glob(".step-*.partial"))
    assert number > 20
    assert seen == {1.0, 2.0}


def test_a_disk_that_is_full_leaves_the_last_checkpoint_and_no_rest(trainer, tmp_path):
    resource = pytest.importorskip("resource")
    save(trainer, tmp_path, 1, 1.0)
    said = tmp_path / "said"

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            save(trainer, tmp_path, 2, 2.0)
        except CheckpointError as error:
            said.write_text(str(error))

    os.waitpid(in_child(work), 0)
    assert "the checkpoint could not be written" in said.read_text()
    assert "\n" not in said.read_text()
    assert value_of(trainer, checkpoints.latest(tmp_path)) == 1.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["said", "step-000001"]
