"""Processes that have traced a module and trained it end as any other does.

They are forks of one that has torch imported, as the ranks of a sweep are, and go through the whole
of Python's end, where what the trace has left is destroyed. A weight that two pieces use, beside a
constant, once made torch's cut free one reference twice.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import torch
import traced_models
from engine.model.spec import ModelSpec
from engine.model.split import open_model
from engine.run.heap import keep_freed_memory

torch.set_num_threads(1)
statuses = []
for _ in range(int(sys.argv[2])):
    if pid := os.fork():
        statuses.append(os.waitpid(pid, 0)[1])
        continue
    errors = os.open("errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 2)
    keep_freed_memory()
    spec = ModelSpec("traced_models:Blocks", "float64", split="trace", split_points=("second",))
    chain = open_model(spec, (2, 8), torch.device("cpu"))
    partition = [range(2)]
    chain.messages(partition, 2, 8)
    stage = chain.build_stage(partition, 0, torch.device("cpu"))
    (logits,) = stage.run(torch.zeros(2, 8, dtype=torch.int64))
    logits.sum().backward()
    break
else:
    print(json.dumps(statuses))
"""


@pytest.mark.thorough
def test_a_process_that_has_traced_ends_cleanly(tmp_path):
    count = 10
    folder = str(Path(__file__).parent)
    command = [sys.executable, "-W", "ignore", "-c", CODE, folder, str(count)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [0] * count
    assert (tmp_path / "errors").read_text() == ""
