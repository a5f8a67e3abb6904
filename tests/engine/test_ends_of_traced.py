"""Processes that have traced a module and trained it end as any other does.

They are forks of one that has torch imported, as the ranks of a sweep are, and go through the whole
of Python's end, where what the trace has left is destroyed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ("Normalised", "WrittenSkip", "Paired")
CODE = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import torch
import traced_models
from engine.model.factory import Factory
from engine.model.traced import traced
from engine.run.heap import keep_freed_memory

torch.set_num_threads(1)
statuses = {name: [] for name in sys.argv[3:]}
for name in int(sys.argv[2]) * sys.argv[3:]:
    if pid := os.fork():
        statuses[name].append(os.waitpid(pid, 0)[1])
        continue
    errors = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 2)
    keep_freed_memory()
    factory = Factory("m", getattr(traced_models, name), 0)
    chain = traced(factory, ("second",), torch.float64, (2, 8))
    partition = [range(2)]
    chain.messages(partition, 2, 8)
    stage = chain.build_stage(partition, 0, torch.device("cpu"))
    (logits,) = stage.run(torch.zeros(2, 8, dtype=torch.int64))
    logits.sum().backward()
    break
else:
    print(json.dumps(statuses))
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory, is_thorough) -> dict[str, tuple[list[int], str]]:
    """Return, by module, the exit statuses of processes that traced it and their stderr."""
    folder, count = tmp_path_factory.mktemp("stderr"), 10 if is_thorough else 1
    command = [sys.executable, "-W", "ignore", "-c", CODE, str(Path(__file__).parent), str(count)]
    done = subprocess.run(
        [*command, *NAMES], cwd=folder, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    statuses = json.loads(done.stdout)
    assert [len(some) for some in statuses.values()] == [count] * len(NAMES)
    return {name: (statuses[name], (folder / name).read_text()) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_process_that_has_traced_ends_cleanly(ends, name):
    statuses, errors = ends[name]
    assert set(statuses) == {0}
    assert errors == ""
