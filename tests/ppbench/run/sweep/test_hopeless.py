"""A case that fails each time in the same way is given up after its second launch."""

from __future__ import annotations

import pytest
from command import ppbench

from ppbench.store import Store

pytestmark = pytest.mark.usefixtures("warm_starts")

MODEL = """\
from torch import Tensor, nn

class Failing(nn.Module):
    def forward(self, x):
        if type(x) is Tensor:
            raise RuntimeError("the author's own mistake")
        return x

def build():
    return nn.Sequential(nn.Embedding(256, 8), Failing(), nn.Linear(8, 256))
"""
SWEEP = """\
name = "hopeless"
world_size = 1
num_microbatches = 1
seq_len = 8
measure = {warmup_steps = 1, max_warmup_steps = 1, steps = 1, launches = 4}

[grid]
model.preset = ["mistaken:build", "llama-tiny"]
"""


def test_a_case_that_failed_twice_in_the_same_way_is_left_out_and_said_once(tmp_path):
    (tmp_path / "mistaken.py").write_text(MODEL)
    (tmp_path / "a.toml").write_text(SWEEP)
    done = ppbench("sweep", "a.toml", "--no-report", folder=tmp_path)
    assert done.returncode == 4
    runs = Store(tmp_path / "results").last_sweep().runs
    counts = runs.groupby(["model_preset", "status"]).size().to_dict()
    assert counts == {("mistaken:build", "invalid"): 2, ("llama-tiny", "ok"): 4}
    assert done.stderr.count("has failed twice in the same way: rank 0: InexactError") == 1
