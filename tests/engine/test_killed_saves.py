"""A save that is killed at any moment leaves a whole checkpoint, and none that is half."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.model.checkpoint import read_index
from engine.run import restoring, snapshot
from engine.run.snapshot import Part, SnapshotError, State

TOUCHES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")
"""Events of CPython's audit hooks: each operation on files of Python's own."""


def save(root: Path, step: int, value: float, size: int = 8) -> None:
    """A checkpoint of one weight of two stages, whose elements are all `value`."""
    weights = {stage: torch.full((size,), value) for stage in (0, 1)}
    snapshot.save(
        snapshot.folder_of(root, step),
        [Part(n, {f"w{n}": w}, {f"w{n}/momentum_buffer": w}) for n, w in weights.items()],
        num_stages=2,
        state=State(step, 64 * step, 2, "sgd", 0.9, None),
        write_configuration=lambda folder: (folder / "config.json").write_text("{}") and None,
        gather=lambda ours: [ours],
        is_first_rank=True,
    )


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


def value_of(folder: Path) -> float:
    """The value of all elements of a checkpoint, which must be whole."""
    restoring.read_state(folder)
    files = sorted(folder.glob("*.safetensors"))
    indexed = {
        (tensor, file)
        for kind in snapshot.KINDS
        for tensor, file in read_index(folder / snapshot.index_name(kind)).items()
    }
    assert indexed == {(tensor, file.name) for file in files for tensor in load_file(file)}
    values = {
        float(x) for file in files for t in load_file(file).values() for x in (t.min(), t.max())
    }
    assert len(files) == 4
    assert len(values) == 1
    return values.pop()


@pytest.mark.parametrize("step", [2, 1], ids=["a new step", "the same step again"])
def test_a_save_killed_at_any_operation_leaves_a_whole_checkpoint(tmp_path, step, is_thorough):
    number, is_over = 0, False
    seen = set()
    while not is_over:
        number += 1 if is_thorough else 3  # a fork of this process costs more than the save
        root = tmp_path / str(number)
        save(root, 1, 1.0)

        def work(root=root, number=number):
            kill_before_touch(number)
            save(root, step, 2.0)

        is_over = not was_killed(in_child(work))
        newest = snapshot.latest(root)
        assert newest is not None
        value = value_of(newest)
        assert value == 2.0 if newest.name != "step-000001" else value in (1.0, 2.0)
        seen.add(value)
        save(root, 3, 3.0)  # nothing that is left is in the way, or is left for good
        assert value_of(snapshot.latest(root)) == 3.0
        assert not list(root.glob(".step-*.partial"))
    assert number > 20
    assert seen == {1.0, 2.0}


def test_a_disk_that_is_full_leaves_the_last_checkpoint_and_no_rest(tmp_path):
    resource = pytest.importorskip("resource")
    save(tmp_path, 1, 1.0)
    said = tmp_path / "said"

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            save(tmp_path, 2, 2.0, 2**16)
        except SnapshotError as error:
            said.write_text(str(error))

    os.waitpid(in_child(work), 0)
    assert "the checkpoint could not be written" in said.read_text()
    assert value_of(snapshot.latest(tmp_path)) == 1.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["said", "step-000001"]
