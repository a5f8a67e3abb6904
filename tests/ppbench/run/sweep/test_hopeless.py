"""A case that fails each time in the same way is given up after its second launch."""

from __future__ import annotations

import os

import pytest
from command import EMULATED_SWEEP, ppbench

from ppbench.run.job import noted_node_folders
from ppbench.run.sweep import control
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
measure = {warmup_steps = 1, max_warmup_steps = 1, steps = 1, launches = 3}

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
    assert counts == {("mistaken:build", "invalid"): 2, ("llama-tiny", "ok"): 3}
    assert done.stderr.count("has failed twice in the same way: rank 0: InexactError") == 1


def test_ranks_that_die_before_they_begin_are_soon_not_started_again(tmp_path, monkeypatch, caplog):
    (tmp_path / "dies.py").write_text("import sys, time\ntime.sleep(0.5)\nsys.exit('not today')\n")
    (tmp_path / "a.toml").write_text(f"{EMULATED_SWEEP}steps = 1\nretry = 40\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(control, "WORKER", "dies")
    done = control.sweep(tmp_path / "a.toml", results=tmp_path / "results")
    assert not done.is_ok
    (error,) = [text for text in caplog.messages if "ended without finishing" in text]
    assert "not today" in error
    (launch,) = (tmp_path / "results" / "launches").iterdir()
    assert not (launch / "running").exists()
    assert noted_node_folders(launch) == []
    assert len(list((launch / "logs").iterdir())) <= 5  # of 42 starts that were allowed
