"""Failures become rows: stages that misbehave in one rank, sweeps that are stopped or meet."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ppbench.run.job import Journal
from ppbench.run.launch.exits import read_exits
from ppbench.store import Store

HERE = Path(__file__).parent
PATIENCE_S = 600
TIMEOUT_S = 6
SWEEP = """\
name = "faulty"
device = "cpu"
num_microbatches = 4
seq_len = 8

[measure]
warmup_steps = 1
max_warmup_steps = 1
steps = 3
{measure}

[grid]
"""
FAULTS = {  # status, rank, what its row says
    "raises": ("error", 1, "RuntimeError: not today"),
    "wants_too_much": ("oom", 1, "MemoryError"),
    "allocates_too_much": ("oom", 1, "t allocate memory"),
    "fills_its_cgroup": ("oom", 1, "rank 1 was killed by the kernel, which had run out of memory"),
    "aborts": ("crash", 1, "rank 1 crashed: Fatal Python error: Aborted"),
    "segfaults": ("crash", 1, "rank 1 crashed: Fatal Python error: Segmentation fault"),
    "leaves": ("crash", 1, "rank 1 died without a Python error"),
    "exits": ("error", 1, "SystemExit: 0"),
    "is_killed": ("crash", 1, "rank 1 was killed by SIGKILL"),
    "stops": ("timeout", 1, "rank 1 is stopped in 1F2 of step 1"),
    "sleeps": ("timeout", 1, "rank 1 is at work in 1F2 of step 1"),
    "drops": ("timeout", 1, "the message of 1SEND_B2 was lost or never sent"),
    "creeps": ("timeout", None, "no rank is seen to hang"),
    "unbuildable": ("invalid", 1, "no weights today"),
    "too_big_to_build": ("oom", 1, "MemoryError"),
    "kills_an_idle_rank": ("crash", 1, "rank 1 was killed by SIGKILL"),
}
HANGS = ("stops", "sleeps", "drops", "creeps")
IN_A_STEP = [name for name in FAULTS if name not in ("unbuildable", "too_big_to_build", "creeps")]


def command(*arguments):
    return [sys.executable, "-c", "from ppbench.cli import main; main()", *arguments]


def ppbench(*arguments, folder, **environment):
    return subprocess.run(
        command(*arguments), cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S,
        check=False, env={**os.environ, **environment},
    )  # fmt: skip


def write_sweep(folder, grid, measure="", excluded=()):
    """A sweep file, and the models beside it, where workers find them."""
    shutil.copy(HERE / "faulty.py", folder)
    text = SWEEP.format(measure=measure)
    text += "\n".join(f'"{key}" = {json.dumps(values)}' for key, values in grid.items())
    for settings in excluded:
        text += "\n[[exclude]]\n"
        text += "\n".join(f'"{key}" = {json.dumps(value)}' for key, value in settings.items())
    (folder / "faulty.toml").write_text(text)


def names_of(runs):
    return runs["model_preset"].str.removeprefix("faulty:")


@contextlib.contextmanager
def limited_memory(num_bytes):
    """A control group's file of processes, None where none can be made here."""
    name = f"ppbench-test-{os.getpid()}"
    kinds = (("memory", "memory.limit_in_bytes"), ("", "memory.max"))
    for base, limit in kinds:
        group = Path("/sys/fs/cgroup", base, name)
        try:
            if not (group.parent / "cgroup.procs").exists():
                continue
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(num_bytes))
            yield group / "cgroup.procs"
        except OSError:
            yield None
        finally:
            remove_group(group)
        return
    yield None


def remove_group(group):
    """Its processes are gone, or about to be."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """A folder where a sweep of every fault has been run, and what it printed."""
    folder = tmp_path_factory.mktemp("failed")
    with limited_memory(2**26) as procs:
        faults = [name for name in FAULTS if procs is not None or name != "fills_its_cgroup"]
        lone = ("kills_an_idle_rank", "sound")
        excluded = [
            {"model.preset": f"faulty:{name}", "world_size": 1}
            for name in faults
            if name not in lone
        ]
        excluded += [{"model.preset": "faulty:kills_an_idle_rank", "world_size": 2}]
        excluded += [
            {
                "model.preset": f"faulty:{name}",
                "measure.timeout_s": 300 if name in HANGS else TIMEOUT_S,
            }
            for name in [*faults, "sound"]
        ]
        grid = {
            "model.preset": [f"faulty:{name}" for name in [*faults, "sound"]],
            "world_size": [1, 2],
            "measure.timeout_s": [TIMEOUT_S, 300],
        }
        write_sweep(folder, grid, excluded=excluded)
        done = ppbench("sweep", "faulty.toml", folder=folder, FAULTY_CGROUP=f"{procs}:{2**28}")
    return folder, done


def run_of(failed, name):
    runs = Store(failed[0] / "results").runs()
    if name not in set(names_of(runs)):
        pytest.skip("no control group with a limit can be made here")
    (run,) = [run for _, run in runs[names_of(runs) == name].iterrows()]
    return run


def test_a_sweep_of_failures_comes_to_its_end_and_its_sound_cases_are_ok(failed):
    folder, done = failed
    assert done.returncode == 4, done.stderr
    assert "Traceback" not in done.stderr
    runs = Store(folder / "results").runs()
    assert list(runs.loc[names_of(runs) == "sound", "status"]) == ["ok", "ok"]
    assert not runs["case_id"].duplicated().any()
    assert set(runs["attempt"]) == {1}


@pytest.mark.parametrize("name", FAULTS)
def test_a_failure_is_a_row_that_names_the_rank_and_the_cause(failed, name):
    status, rank, words = FAULTS[name]
    run = run_of(failed, name)
    assert (run["status"], run["error_rank"] if rank is not None else None) == (status, rank), run[
        "error"
    ]
    assert words in run["error"]


@pytest.mark.parametrize("name", IN_A_STEP)
def test_it_tells_what_every_rank_did_last(failed, name):
    run = run_of(failed, name)
    last = json.loads(run["last_actions"])
    assert len(last) == run["world_size"]
    flight = Store(failed[0] / "results").table("flight", [run["run_id"]])
    if name == "kills_an_idle_rank":
        return
    assert list(flight["rank"]) == [0, 1]
    assert list(flight["step"]) == [1, 1]
    if name == "drops":
        assert last[0] == "0B2"
        assert flight["waits_for_action"][0] == "1SEND_B2"
    else:
        assert last[1] == "1F2"
        assert flight["process"][1] == {"stops": "stopped", "sleeps": "alive"}.get(name, "dead")


@pytest.mark.parametrize("name", IN_A_STEP)
def test_what_its_ranks_had_finished_is_kept(failed, name):
    run = run_of(failed, name)
    spans = Store(failed[0] / "results").table("spans", [run["run_id"]])
    done = spans[(spans["rank"] == 0) & (spans["op"] == "F")]
    assert {(0, 3), (1, 0)} <= set(zip(done["step"], done["microbatch"], strict=True))
    assert (spans["end_ns"] >= spans["start_ns"]).all()


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_ends_soon_after_the_time_that_it_has(failed, name):
    """A bound on hangs, not a measurement."""
    run = run_of(failed, name)
    took_s = ended_s(failed[0], run["run_id"]) - begun_s(run["run_id"])
    print(f"{name}: ended {took_s - TIMEOUT_S:.2f} s after measure.timeout_s")
    assert TIMEOUT_S <= took_s < TIMEOUT_S + 60


def begun_s(run_id):
    """Seconds since the epoch: what a run id begins with."""
    stamp = run_id.partition("-")[0]
    parsed = time.strptime(stamp[:15], "%Y%m%dT%H%M%S")
    import calendar

    return calendar.timegm(parsed) + int(stamp[15:]) / 1000


def ended_s(folder, run_id):
    """When the first rank of the start that ran it was ended."""
    begun = begun_s(run_id)
    (launch,) = (folder / "results" / "launches").iterdir()
    return min(one.at for one in read_exits(launch) if one.at > begun)
