"""A replica that dies in a collective: which rank, of which replica, in which action."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest
from command import words_of

from engine.flight import read_record
from engine.plan.action import Op
from ppbench.run.job import noted_node_folders
from ppbench.store import Store

pytestmark = pytest.mark.usefixtures("warm_starts")

PATIENCE_S = 120
SWEEP = """\
name = "replicas"
replicas = 2
world_size = 2
num_microbatches = 2
seq_len = 8
model.preset = "llama-tiny"
data.source = "synthetic"
measure = {warmup_steps = 1, max_warmup_steps = 1, steps = 100000, timeout_s = 600}
device = "emulated"
sharding.policy = "zero3"
emulated = {F_ms = 1, I_ms = 1, W_ms = 1, gather_ms = 600000}
"""


def start(folder):
    (folder / "replicas.toml").write_text(SWEEP)
    return subprocess.Popen(
        words_of("sweep", "replicas.toml", "--no-report"),
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )


def record_of(folder, rank, is_there):
    """The record of a process, once it is as it shall be."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        for launch in (folder / "results" / "launches").glob("*"):
            folders = noted_node_folders(launch)
            record = read_record(folders[0] / f"flight-rank{rank}") if folders else None
            if record is not None and is_there(record):
                return record
        time.sleep(0.01)
    pytest.fail(f"process {rank} does not come to it")


def ended(process, folder):
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in stderr
    (run,) = Store(folder / "results").runs().to_dict("records")
    flight = Store(folder / "results").table("flight", [run["run_id"]])
    assert list(zip(flight["replica"], flight["rank"], strict=True)) == [
        (0, 0), (0, 1), (1, 0), (1, 1)
    ]  # fmt: skip
    assert len(json.loads(run["last_actions"])) == 4
    return run


def is_in_gather(record):
    return record.collective is not None and record.collective.op is Op.UNSHARD


def test_an_emulated_replica_that_is_killed_in_a_collective_is_named_with_it(tmp_path):
    process = start(tmp_path)
    for other in range(4):
        record = record_of(tmp_path, other, is_in_gather)
    killed_s = time.monotonic()
    os.kill(record.pid, signal.SIGKILL)
    run = ended(process, tmp_path)
    assert time.monotonic() - killed_s < 60  # a bound on hangs, not a measurement
    assert (run["status"], run["error_rank"]) == ("crash", 1)
    assert run["error"].startswith("rank 1 of replica 1 was killed by SIGKILL")
    assert "rank 1 of replica 1 died in 1UNSHARD of step 0" in run["error"]
    assert "rank 1 of replica 0 waits for it" in run["error"]
