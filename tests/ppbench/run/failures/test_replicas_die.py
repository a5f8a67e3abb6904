"""A replica that dies in a collective: which rank, of which replica, in which action."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest
from command import words_of
from processes import wait_until

from engine.flight import read_record
from engine.plan.action import Op
from ppbench.run.job import noted_node_folders
from ppbench.run.machine.node_folder import flight_path, start_folder
from ppbench.store import Store

pytestmark = pytest.mark.usefixtures("warm_starts")

PATIENCE_S = 120
SWEEP = """\
name = "replicas"
device = "emulated"
replicas = 2
world_size = 2
num_microbatches = 2
seq_len = 8
model.preset = "llama-tiny"
data.source = "synthetic"
sharding.policy = "zero3"
emulated = {F_ms = 1, I_ms = 1, W_ms = 1, gather_ms = 600000}
measure = {warmup_steps = 1, max_warmup_steps = 1, steps = 100000, timeout_s = 600}
"""


def in_gather(folder, rank):
    """The record of a process that is in the gather; None before."""
    for launch in (folder / "results" / "launches").glob("*"):
        folders = noted_node_folders(launch)
        path = flight_path(start_folder(folders[0], 0), rank) if folders else None
        record = read_record(path) if path else None
        if record and record.collective and record.collective.op is Op.UNSHARD:
            return record
    return None


def test_an_emulated_replica_that_is_killed_in_a_collective_is_named_with_it(tmp_path):
    (tmp_path / "replicas.toml").write_text(SWEEP)
    process = subprocess.Popen(
        words_of("sweep", "replicas.toml", "--no-report"),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    for rank in range(4):
        wait_until(lambda rank=rank: in_gather(tmp_path, rank), f"rank {rank} in the gather")
    killed_s = time.monotonic()
    os.kill(in_gather(tmp_path, 3).pid, signal.SIGKILL)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert time.monotonic() - killed_s < 60  # a bound on hangs, not a measurement
    assert "Traceback" not in stderr
    (run,) = Store(tmp_path / "results").runs().to_dict("records")
    flight = Store(tmp_path / "results").table("flight", [run["run_id"]])
    assert flight[["replica", "rank"]].to_numpy().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert len(json.loads(run["last_actions"])) == 4
    assert (run["status"], run["error_rank"]) == ("crash", 1)
    assert run["error"].startswith("rank 1 of replica 1 was killed by SIGKILL")
    assert "rank 1 of replica 1 died in 1UNSHARD of step 0" in run["error"]
    assert "rank 1 of replica 0 waits for it" in run["error"]
