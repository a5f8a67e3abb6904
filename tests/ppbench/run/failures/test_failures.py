"""Failures become rows: stages that misbehave in one rank, sweeps that are stopped or meet."""

import contextlib
import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from command import EMULATED_SWEEP, printed, words_of
from command import ppbench as ppbench_within
from disks import mounted
from processes import naming, wait_until

from engine.flight import read_record
from ppbench.run.job import noted_node_folders, read_job
from ppbench.run.machine.node_folder import flight_path, last_start
from ppbench.store import Store

pytestmark = pytest.mark.usefixtures("warm_starts")

HERE = Path(__file__).parents[2]
PATIENCE_S = 600
TIMEOUT_S = 15
"""Of a case that hangs: a busy machine comes to its second step well before."""

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
    "fills_its_cgroup": ("oom", 1, "rank 1 was killed by the kernel, which had run out of memory"),
    "segfaults": ("crash", 1, "rank 1 crashed: Fatal Python error: Segmentation fault (SIGSEGV)"),
    "floods": ("error", 1, "characters left out; the whole is in results/launches/"),
    "opens_all_files": ("error", 1, "OSError: [Errno 24] Too many open files: '/dev/null'"),
    "stops": ("timeout", 1, "rank 1 is stopped (SIGSTOP or a debugger) in 1F2 of step 1"),
    "drops": ("timeout", 1, "the message of 1SEND_B2 was lost or never sent"),
    "unbuildable": ("invalid", 1, "no weights today"),
    "kills_an_idle_rank": ("crash", 1, "rank 1 was killed by SIGKILL"),
}
"""A fault for each way in which one is found.

What is made of exceptions and exit codes is in `test_errors.py`.
"""
HANGS = ("stops", "drops", "sleeps")
ALONE = (("engine", "drops", 2), ("torch", "stops", 2), ("single", "sleeps", 1))
"""Cases that hang, each in a sweep of its own: they wait for their ends at the same time."""
IN_A_STEP = ("fills_its_cgroup", "segfaults", "floods", "stops")
"""In 1F2 of step 1."""


ppbench = functools.partial(ppbench_within, patience_s=PATIENCE_S)


def case_of(runtime, name, world_size):
    return {
        "runtime": runtime,
        "model.preset": f"faulty:{name}",
        "world_size": world_size,
        "measure.timeout_s": TIMEOUT_S if name in HANGS else 300,
    }


def write_sweep(folder, cases, measure=""):
    """A sweep file of these cases, and the models beside it, where workers find them."""
    shutil.copy(HERE / "faulty.py", folder)
    grid = {key: list(dict.fromkeys(case[key] for case in cases)) for key in cases[0]}
    text = SWEEP.format(measure=measure)
    text += "".join(f'"{key}" = {json.dumps(values)}\n' for key, values in grid.items())
    for values in itertools.product(*grid.values()):
        if dict(zip(grid, values, strict=True)) not in cases:
            lines = (f'"{key}" = {json.dumps(v)}' for key, v in zip(grid, values, strict=True))
            text += "\n".join(["[[exclude]]", *lines, ""])
    (folder / "faulty.toml").write_text(text)


def names_of(runs):
    return runs["model_preset"].str.removeprefix("faulty:")


@contextlib.contextmanager
def limited_memory(num_bytes):
    """A control group's file of processes, None where none can be made here."""
    for base, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        group = Path("/sys/fs/cgroup", base, f"ppbench-test-{os.getpid()}")
        try:
            if not (group.parent / "cgroup.procs").exists():
                continue
            group.mkdir()
            (group / limit).write_text(str(num_bytes))
        except OSError:
            continue
        yield group / "cgroup.procs"
        until = time.monotonic() + 10
        while group.exists() and time.monotonic() < until:
            with contextlib.suppress(OSError):  # its processes are gone, or about to be
                group.rmdir()
            time.sleep(0.1)
        return
    yield None


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """A folder where a sweep of the faults has been run, and what it printed.

    Below it are those of the sweeps of one case.
    """
    folder = tmp_path_factory.mktemp("failed")
    with limited_memory(2**26) as procs:
        cases = [
            case_of("engine", name, world_size)
            for name, world_size in [
                *((name, 1 if name == "kills_an_idle_rank" else 2) for name in FAULTS),
                *(("sound", world_size) for world_size in (1, 2)),
            ]
            if (procs is not None or name != "fills_its_cgroup")
            and ("engine", name, world_size) not in ALONE
        ]
        write_sweep(folder, cases)
        for case in ALONE:
            alone = folder_of(folder, *case[:2])
            alone.mkdir()
            write_sweep(alone, [case_of(*case)])
        run = functools.partial(ppbench, "sweep", "faulty.toml", "--no-report")
        with ThreadPoolExecutor() as pool:
            others = [pool.submit(run, folder=folder_of(folder, *case[:2])) for case in ALONE]
            done = run(folder=folder, FAULTY_CGROUP=f"{procs}:{2**28}")
        assert {other.result().returncode for other in others} == {4}
    return folder, done


def folder_of(folder, runtime, name):
    """Where the sweep with a case has been run."""
    is_alone = (runtime, name) in {case[:2] for case in ALONE}
    return folder / f"{runtime} {name}" if is_alone else folder


def run_of(failed, name, runtime="engine"):
    runs = Store(folder_of(failed[0], runtime, name) / "results").runs()
    runs = runs[runs["runtime"] == runtime]
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
    assert (run["status"], run["error_rank"]) == (status, rank), run["error"]
    assert words in run["error"]
    assert len(json.loads(run["last_actions"])) == run["world_size"]


@pytest.mark.parametrize("name", IN_A_STEP)
def test_it_tells_what_every_rank_did_last_and_had_finished(failed, name):
    run = run_of(failed, name)
    flight = Store(failed[0] / "results").table("flight", [run["run_id"]])
    assert list(flight["rank"]) == [0, 1]
    assert json.loads(run["last_actions"])[1] == "1F2"
    assert list(flight["action"]) == json.loads(run["last_actions"])
    assert list(flight["step"]) == [1, 1]
    assert flight["process"][1] == ("stopped" if name == "stops" else "dead")
    spans = Store(failed[0] / "results").table("spans", [run["run_id"]])
    done = spans[(spans["rank"] == 0) & (spans["op"] == "F")]
    assert {(0, 3), (1, 0)} <= set(zip(done["step"], done["microbatch"], strict=True))
    assert (spans["end_ns"] >= spans["start_ns"]).all()


@pytest.mark.parametrize(
    ("runtime", "name", "rank", "words"),
    [
        ("torch", "stops", 1, "rank 1 is stopped (SIGSTOP or a debugger) in 1F2 of step 1"),
        ("single", "sleeps", 0, "rank 0 is in the work of 0F2 of step 1"),
    ],
)
def test_of_a_hang_on_another_runtime_the_computation_is_named_too(
    failed, runtime, name, rank, words
):
    run = run_of(failed, name, runtime)
    assert (run["status"], run["error_rank"]) == ("timeout", rank), run["error"]
    assert words in run["error"]
    assert json.loads(run["last_actions"])[rank] == f"{rank}F2"
    if name == "stops":  # the other waits for what it cannot have
        assert "rank 0 waits in 0B2 of step 1 for 1B2 of rank 1" in run["error"]


@pytest.fixture
def mendable(tmp_path):
    """A folder with a sweep of which two cases fail, one of them but once."""
    names = ["once", "sound", "broken"]
    cases = [{"model.preset": f"faulty:{name}", "world_size": 1} for name in names]
    write_sweep(tmp_path, cases, measure="retry = 1")
    return tmp_path


def statuses_of(folder):
    """Status and attempt of each case's runs, in their order."""
    runs = Store(folder / "results").runs()
    return {
        name: list(zip(of["status"], of["attempt"], strict=True))
        for name, of in runs.groupby(names_of(runs))
    }


def test_failed_cases_are_tried_again_and_when_asked_for(mendable):
    done = ppbench("sweep", "faulty.toml", "--no-report", folder=mendable)
    assert done.returncode == 4, done.stderr
    first = {
        "broken": [("error", 1), ("error", 2)],
        "once": [("error", 1), ("ok", 2)],
        "sound": [("ok", 1)],
    }
    assert statuses_of(mendable) == first
    with contextlib.chdir(mendable):
        again = printed("sweep", "faulty.toml", "--no-report")
    assert again.exit_code == 4
    assert any("1 failed before (1 error); --retry-failed runs them" in n for n in again.notes)
    assert statuses_of(mendable) == first
    (mendable / "mended").touch()
    again = ("sweep", "faulty.toml", "--retry-failed", "--no-report")
    mended = ppbench(*again, folder=mendable)
    assert mended.returncode == 0, mended.stderr
    assert statuses_of(mendable) == {**first, "broken": [*first["broken"], ("ok", 1)]}


@contextlib.contextmanager
def sweep_in_long_case(folder, *arguments):
    """A running sweep, in the middle of its longest case, and its launch."""
    before = set((folder / "results" / "launches").glob("*"))
    with subprocess.Popen(
        words_of("sweep", *arguments), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        is_there = functools.partial(launch_in_long_case, folder, before)
        wait_until(lambda: is_there() or process.poll() is not None, "its longest case", PATIENCE_S)
        yield process, is_there()


def launch_in_long_case(folder, known):
    for launch in set((folder / "results" / "launches").glob("*")) - known:
        (*folders,) = noted_node_folders(launch)
        start = last_start(folders[0]) if folders else None
        record = read_record(flight_path(start, 0)) if start else None
        if record is not None and record.number is not None and record.entries:
            case = read_job(launch / "job.json").items[record.number].case
            if record.entries[-1].index is not None and case.emulated_F_ms == (LONG_MS,):
                return launch
    return None


LONG_MS = 500
EMULATED = f"""\
world_size = 1
{EMULATED_SWEEP.replace("warmup_steps = 1", "warmup_steps = 3")}
steps = 2

[grid]
emulated.F_ms = """


def write_emulated(folder, name, times):
    """Cases that differ in how long they take."""
    (folder / f"{name}.toml").write_text(f"{EMULATED}{times}")
    return f"{name}.toml"


def test_a_rerun_that_is_stopped_goes_on_where_it_was(tmp_path):
    file = write_emulated(tmp_path, "times", [1, 2, LONG_MS])
    with sweep_in_long_case(tmp_path, file, "--rerun") as (process, launch):
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert f"Go on with: ppbench sweep {file} --rerun\n" in stderr
    assert "Traceback" not in stderr
    assert naming(launch.name) == []
    assert noted_node_folders(launch) == []
    finished = ppbench("sweep", file, "--rerun", "--no-report", folder=tmp_path)
    assert finished.returncode == 0, finished.stderr
    runs = Store(tmp_path / "results").runs()
    of = {ms: list(some["status"]) for ms, some in runs.groupby("emulated_F_ms")}
    assert of == {
        "[1.0]": ["ok"],
        "[2.0]": ["ok"],
        f"[{LONG_MS}.0]": ["interrupted", "ok"],
    }
    stopped = runs[runs["status"] == "interrupted"]
    assert set(stopped["last_actions"]) <= {'["0F0"]', '["0F1"]'}


def test_sweeps_that_meet_in_one_store_take_turns_and_repeat_nothing(tmp_path):
    one = write_emulated(tmp_path, "one", [1, 2])
    other = write_emulated(tmp_path, "other", [4, 5])
    started = [
        subprocess.Popen(
            words_of("sweep", file, "--no-report"), cwd=tmp_path, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )
        for file in (one, one, other)
    ]  # fmt: skip
    told = [process.communicate(timeout=PATIENCE_S)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], told
    assert sum("waiting for sweep o" in text for text in told) >= 1
    runs = Store(tmp_path / "results").runs()
    assert list(runs["status"]) == ["ok"] * 4
    assert runs["case_id"].nunique() == 4


def test_a_disk_that_fills_up_is_one_clear_error_and_nothing_is_lost(tmp_path):
    """There is room for the first of a run's files, and for no other."""
    file = write_emulated(tmp_path, "full", [1, LONG_MS])
    results = tmp_path / "results"
    with mounted(results, "size=20m"):
        with sweep_in_long_case(tmp_path, file) as (process, _):
            left = os.statvfs(results).f_bavail * os.statvfs(results).f_frsize
            (results / "filler").write_bytes(bytes(left - 40 * 1024))
            _, stderr = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 2, stderr
        (error,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
        assert "No space left on device" in error
        assert "Traceback" not in stderr
        (results / "filler").unlink()
        again = ppbench("sweep", file, "--no-report", folder=tmp_path)
        assert again.returncode == 0, again.stderr
        runs = Store(results).runs()
        good = runs.loc[runs["status"] == "ok", "emulated_F_ms"]
        assert sorted(good) == ["[1.0]", f"[{LONG_MS}.0]"]


def test_a_store_that_is_read_only_is_refused_before_anything_starts(tmp_path):
    file = write_emulated(tmp_path, "locked", [1, 2, 3])
    with mounted(tmp_path / "results", "size=20m,ro"):
        done = ppbench("sweep", file, folder=tmp_path)
        assert done.returncode == 2
        (error,) = done.stderr.splitlines()
        assert error.startswith("error: results: cannot be written to: Read-only file system")
        assert list((tmp_path / "results").iterdir()) == []
