"""The command as a process: signals at any moment, closed pipes, odd arguments.

As people run it: by the script that is installed for it, in a process of its own. Where a test is
about how an interpreter begins or ends, or about its streams, that process is fresh.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import recordings
from stored_runs import demo_store

from ppbench.run.machine.node_folder import SHARED_MEMORY
from ppbench.store import Store

pytestmark = pytest.mark.usefixtures("warm_starts")
fresh = pytest.mark.usefixtures("fresh_starts")
thorough = pytest.mark.thorough

ROOT = Path(__file__).parents[3]
PATIENCE_S = 180
BEFORE_MAIN = ("ppbench/__init__.py", "ppbench/__main__.py")
"""Until the second has been read, what Ctrl-C does is Python's own doing."""
SCRIPT = """\
import sys
from {module} import {function}
if __name__ == '__main__':
    sys.exit({function}())
"""
SWEEP = """\
name = "short"
device = "emulated"
num_microbatches = 2
seq_len = 8
world_size = 2

[model]
preset = "llama-tiny"

[emulated]
I_ms = 1
W_ms = 1

[measure]
warmup_steps = 1
max_warmup_steps = 1
steps = 3

[grid]
"emulated.F_ms" = [1, 200, 201, 202]
"""
ONE_CASE = ("short.toml", "--only", "emulated.F_ms=1", "--no-report")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The console script, as installers write it."""
    text = (ROOT / "pyproject.toml").read_text()
    module, _, function = tomllib.loads(text)["project"]["scripts"]["ppbench"].partition(":")
    path = tmp_path_factory.mktemp("bin") / "ppbench"
    path.write_text(SCRIPT.format(module=module, function=function))
    return str(path)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A folder with a store of a few runs and a sweep file."""
    folder = tmp_path_factory.mktemp("stored")
    demo_store(folder / "results")
    (folder / "short.toml").write_text(SWEEP)
    return folder


@pytest.fixture
def ppbench(script, stored):
    def run(*arguments, folder=stored, **options):
        words = [sys.executable, script, *map(os.fsencode, arguments)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        return subprocess.run(
            words, cwd=folder, timeout=PATIENCE_S, check=False, text=True,
            errors="backslashreplace", **streams,
        )  # fmt: skip

    return run


def is_quiet(stderr):
    return not any(words in stderr for words in ("Traceback", "Exception ignored", "Fatal"))


def is_before_main(stderr):
    """Whether a traceback is one of Python's own start, which no program can change."""
    files = [line for line in stderr.splitlines() if line.strip().startswith("File ")]
    return not any(
        "/ppbench/" in line and not any(f in line for f in BEFORE_MAIN) for line in files
    )


def interrupted(script, folder, arguments, delay_s, number=signal.SIGINT):
    with subprocess.Popen(
        [sys.executable, script, *arguments], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(delay_s)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=PATIENCE_S)
    return process.returncode, stderr


@fresh
def test_ctrl_c_at_any_moment_ends_a_command_with_130_and_no_traceback(
    script, stored, tmp_path, is_thorough
):
    rng, num = random.Random(19), 400 if is_thorough else 3
    begun_s = time.monotonic()
    out = tmp_path / "whole.html"
    arguments = ("report", "--results", "results", "-o", str(out))
    whole = subprocess.run([sys.executable, script, *arguments], cwd=stored, check=True)
    took_s = time.monotonic() - begun_s
    assert whole.returncode == 0
    assert out.read_text().rstrip().endswith("</html>")
    out.unlink()
    codes = []
    for place in range(num):
        delay_s, begun_s = (place + rng.random()) / num * took_s, time.monotonic()
        code, stderr = interrupted(script, stored, arguments, delay_s)
        if code == 0:  # on a machine that has become quieter; it is to be met under way
            took_s = min(took_s, time.monotonic() - begun_s)
        if code not in (0, 130) or not is_quiet(stderr):
            assert is_before_main(stderr), (delay_s, code, stderr)
        codes.append(code)
        if out.exists():
            assert out.read_text().rstrip().endswith("</html>")
            out.unlink()
        assert list(tmp_path.iterdir()) == []
    assert codes.count(130) > num / 2, codes


@fresh
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=thorough)], ids=lambda n: n.name
)
def test_other_signals_that_end_a_process_do_as_ctrl_c(script, stored, number):
    code, stderr = interrupted(script, stored, ("ls",), 0.3, number)
    assert code in (0, 130, -number), stderr
    assert is_quiet(stderr)


def processes_in(folder):
    """Those that name the folder, or work in it."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes()
            if str(folder).encode() in words or (path / "cwd").readlink() == folder:
                found.append(words)
    return found


def wait_until_gone(folder):
    until = time.monotonic() + 30
    while processes_in(folder):
        assert time.monotonic() < until, processes_in(folder)
        time.sleep(0.05)


def test_ctrl_c_at_any_moment_of_a_sweep_keeps_what_is_done_and_leaves_no_process(
    script, tmp_path, is_thorough
):
    (tmp_path / "short.toml").write_text(SWEEP)
    rng = random.Random(7)
    for _ in range(30 if is_thorough else 1):
        delay_s = rng.uniform(0.5, 8)
        code, stderr = interrupted(script, tmp_path, ("sweep", "short.toml"), delay_s)
        if code not in (0, 130) or not is_quiet(stderr):
            assert is_before_main(stderr), (delay_s, code, stderr)
        wait_until_gone(tmp_path)
        if code == 0:
            break
    done = Store(tmp_path / "results").runs()
    good = done[done["status"] == "ok"]
    assert not good["case_id"].duplicated().any()
    assert set(done["status"]) <= {"ok", "interrupted"}


def begin_sweep(script, folder):
    """A sweep in its second case, and its launch's id."""
    process = subprocess.Popen(
        [sys.executable, script, "sweep", "short.toml", "--no-report"], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    until = time.monotonic() + PATIENCE_S
    while True:
        for journal in (folder / "results" / "launches").glob("*/journal.jsonl"):
            if journal.read_text().count('"row"') >= 1:
                return process, journal.parent.name
        assert time.monotonic() < until
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.parametrize(
    "is_renamed",
    [pytest.param(False, marks=pytest.mark.thorough), True],
    ids=["deleted", "renamed"],
)
def test_a_results_folder_that_goes_during_a_sweep_is_one_clear_error(script, tmp_path, is_renamed):
    (tmp_path / "short.toml").write_text(SWEEP)
    process, launch = begin_sweep(script, tmp_path)
    if is_renamed:
        (tmp_path / "results").rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(tmp_path / "results", ignore_errors=True)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2, stderr
    assert is_quiet(stderr)
    (error,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: results: was deleted or renamed while the sweep ran")
    assert "the ranks were stopped" in error
    wait_until_gone(tmp_path)
    assert list(SHARED_MEMORY.glob(f"*{launch}*")) == []
    if is_renamed:
        assert list(Store(tmp_path / "elsewhere").runs()["status"]) == ["ok"]


@fresh
@pytest.mark.parametrize("arguments", [("--help",), ("export", "--format", "csv")], ids=" ".join)
def test_a_reader_that_goes_away_closes_a_command_quietly(ppbench, arguments):
    reader, writer = os.pipe()
    os.close(reader)
    done = ppbench(*arguments, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_sweep_whose_progress_nobody_reads_is_measured_to_its_end(ppbench, tmp_path):
    (tmp_path / "short.toml").write_text(SWEEP)
    reader, writer = os.pipe()
    os.close(reader)
    words = ("sweep", *ONE_CASE)
    done = ppbench(*words, folder=tmp_path, stdout=writer, stderr=writer)
    os.close(writer)
    assert done.returncode == 0
    assert list(Store(tmp_path / "results").runs()["status"]) == ["ok"]


@fresh
def test_output_that_is_full_is_one_clear_error(ppbench):
    with Path("/dev/full").open("w") as full:
        done = ppbench("ls", stdout=full)
    assert done.returncode == 2
    assert done.stderr.startswith("error: standard output: No space left on device; make room")
    assert done.stderr.count("\n") == 1


LONG = "x" * 300
REFUSED = {  # arguments: what the error says
    ("ls", "--results", LONG): "File name too long; choose a shorter path",
    ("sweep", "short.toml", "--results", LONG): "File name too long",
    ("show", b"\xff\xfe"): "is not UTF-8",
    ("ls", "--results", b"\xff"): "--results: \\udcff: is not UTF-8",
    ("sweep", b"\xff.toml", "--dry-run"): "cannot read the sweep file",
    ("show", "\x1b[31mred\u202e"): '"\\x1b[31mred\\u202e": not in results',
}


@pytest.mark.parametrize("arguments", REFUSED, ids=lambda words: ascii(words)[:60])
def test_odd_arguments_are_one_clear_error(ppbench, stored, arguments):
    if any(isinstance(word, bytes) for word in arguments):  # as the system passes it on
        done = ppbench(*arguments)
        exit_code = done.returncode
    else:
        done = recordings.ppbench(arguments, stored)
        exit_code = done.exit_code
    assert exit_code == 2, done.stderr
    assert REFUSED[arguments] in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
