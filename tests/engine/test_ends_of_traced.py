"""Processes that have traced a module and trained it end as any other does.

They are forks of one that has torch imported, as the ranks of a sweep are, and go through the whole
of Python's end, where what the trace has left is destroyed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch
import traced_models
from engine.model.factory import Factory
from engine.model.traced import traced
from engine.run.heap import keep_freed_memory

torch.set_num_threads(1)
for _ in range(int(sys.argv[3])):
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0
        continue
    keep_freed_memory()
    factory = Factory("m", getattr(traced_models, sys.argv[2]), 0)
    chain = traced(factory, ("second",), torch.float64, (2, 8))
    partition = [range(2)]
    chain.messages(partition, 2, 8)
    stage = chain.build_stage(partition, 0, torch.device("cpu"))
    (logits,) = stage.run(torch.zeros(2, 8, dtype=torch.int64))
    logits.sum().backward()
    break
"""


@pytest.mark.parametrize("name", ["Normalised", "WrittenSkip", "Paired"])
def test_a_process_that_has_traced_ends_cleanly(name, is_thorough):
    command = [sys.executable, "-W", "ignore", "-c", CODE, str(Path(__file__).parent), name]
    count = "10" if is_thorough else "2"
    done = subprocess.run([*command, count], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
