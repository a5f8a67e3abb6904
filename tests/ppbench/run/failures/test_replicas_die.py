"""A replica that dies or stops in a collective: which rank, of which replica, in which action."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.flight import read_record
from engine.plan.action import Op
from ppbench.run.job import noted_node_folders
from ppbench.store import Store

pytestmark = pytest.mark.usefixtures("warm_starts")

PATIENCE_S = 120
TIMEOUT_S = 20
NUM_EARLY = 2  # first entries of a step: the first microbatch's forward, and what it needs
SWEEP = """\
name = "replicas"
replicas = 2
world_size = 2
num_microbatches = 2
seq_len = 8
model.preset = "llama-tiny"
data.source = "synthetic"
measure = {{warmup_steps = 1, max_warmup_steps = 1, steps = 100000, timeout_s = {timeout_s}}}
{more}
"""
EMULATED = """\
device = "emulated"
sharding.policy = "zero3"
emulated = {F_ms = 1, I_ms = 1, W_ms = 1, gather_ms = 600000}
"""
REAL = """\
device = "cpu"
sharding.policy = "zero2"
"""


def start(folder, more, timeout_s=600):
    (folder / "replicas.toml").write_text(SWEEP.format(more=more, timeout_s=timeout_s))
    words = "from ppbench.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", words, "sweep", "replicas.toml", "--no-report"],
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


def stop_early_in_a_step(folder, rank):
    """The record of a process that is stopped before it reduces any gradient of its step.

    One stopped later may have given its share: its fellow waits elsewhere, or not at all.
    """
    while True:
        record = record_of(folder, rank, is_early_in_a_step)
        os.kill(record.pid, signal.SIGSTOP)
        while not is_stopped(record.pid):
            time.sleep(0.001)
        if is_early_in_a_step(record_of(folder, rank, lambda _: True)):
            return record
        os.kill(record.pid, signal.SIGCONT)


def is_stopped(pid):
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "T"


def is_early_in_a_step(record):
    if not record.entries or record.collective is not None:
        return False
    last = record.entries[-1]
    return bool(last.step) and last.index is not None and last.index < NUM_EARLY


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
    process = start(tmp_path, EMULATED)
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


def test_a_replica_that_stops_is_named_when_the_time_is_up(tmp_path):
    process = start(tmp_path, REAL, TIMEOUT_S)
    stopped = stop_early_in_a_step(tmp_path, 2)
    run = ended(process, tmp_path)
    took_s = time.monotonic_ns() / 1e9 - stopped.began_ns / 1e9
    print(f"ended {took_s - TIMEOUT_S:.2f} s after measure.timeout_s")
    assert TIMEOUT_S <= took_s < TIMEOUT_S + 60
    assert (run["status"], run["error_rank"]) == ("timeout", 0)
    assert "rank 0 of replica 1 is stopped (SIGSTOP or a debugger)" in run["error"]
    assert "rank 0 of replica 0 waits in 0REDUCE_GRAD of step" in run["error"]
    assert "rank 0 of replica 1 is not there" in run["error"]
