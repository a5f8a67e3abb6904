"""Samples of this machine, and how they are read again."""

import contextlib
import json
import subprocess
import sys
import time
from dataclasses import asdict

import pytest

from ppbench.run.machine.sampler import (
    LOOK_BACK_NS,
    Sample,
    Sampler,
    read_samples,
)
from ppbench.run.machine.telemetry import sample_rows, summarize

S = 1_000_000_000
HOST, GPU = {"num_cores": 2, "total_s": 1.5}, {"throttle_reasons": ["gpu_idle"]}


@contextlib.contextmanager
def running(code, *arguments):
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="counts CPU time in /proc")
def test_a_core_that_another_process_burns_is_other_load_and_is_own_load_under_the_root(tmp_path):
    with running("while True: pass") as burner, running("input()") as idler:
        roots = {"other": idler, "own": burner}
        samplers = {name: Sampler(tmp_path / name, root.pid) for name, root in roots.items()}
        for sampler in samplers.values():
            sampler.sample()
        begin_ns = time.monotonic_ns()
        while time.monotonic_ns() < begin_ns + 0.6 * S:
            for sampler in samplers.values():
                sampler.sample_if_due()
            time.sleep(0.01)
        for sampler in samplers.values():
            sampler.sample()
        end_ns = time.monotonic_ns()
    found = {name: read_samples(tmp_path / name, begin_ns, end_ns) for name in samplers}
    load = {
        name: summarize(samples, [(begin_ns, end_ns)], None)["other_load_cores"]
        for name, samples in found.items()
    }
    assert load["other"] > 0.5
    assert load["own"] < load["other"] - 0.1
    assert 2 <= len(sample_rows(found["own"], begin_ns, end_ns)) <= 6


def written(path, *times_ns, end="\n"):
    lines = [json.dumps(asdict(Sample(t, HOST, [GPU], {"a": "b"}))) for t in times_ns]
    path.write_text("\n" + "\n".join(lines) + end)
    return path


def times_of(samples):
    return [sample.time_ns for sample in samples]


def test_a_window_is_read_with_what_is_around_it(tmp_path):
    path = written(tmp_path / "s", *(n * S for n in range(2000)))
    begin_ns, end_ns = 1500 * S, 1502 * S - 1
    assert times_of(read_samples(path, begin_ns, end_ns)) == [
        1499 * S,
        1500 * S,
        1501 * S,
        1502 * S,
    ]
    assert LOOK_BACK_NS == S
    assert times_of(read_samples(path, 5000 * S, 5001 * S)) == [1999 * S]
    assert times_of(read_samples(path, -9, -8)) == [0]


def test_a_sample_is_read_as_it_was_written(tmp_path):
    path = written(tmp_path / "s", 5)
    assert read_samples(path, 5, 5) == [Sample(5, HOST, [GPU], {"a": "b"})]


def test_a_line_that_was_cut_short_is_skipped(tmp_path):
    path = written(tmp_path / "s", S, 2 * S, end='\n{"time_ns": 3, "ho\n')
    assert times_of(read_samples(path, S, 9 * S)) == [S, 2 * S]
