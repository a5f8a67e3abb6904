"""Workers that run case after case: what came before does not show in a case's memory."""

import pytest
from test_cli import ppbench

from ppbench.store import Store

SWEEP = """\
name = "living"
device = "cpu"
world_size = 2
seq_len = 32

[model]
preset = "llama-tiny"

[measure]
warmup_steps = 1
max_warmup_steps = 1
steps = 1
launches = 2

[grid]
schedule = ["afab", "1f1b", "zb_h1", "interleaved_1f1b", "zbv"]
num_microbatches = [2, 6]
"""
CASE = ["schedule", "num_microbatches"]


@pytest.fixture(scope="module")
def living(tmp_path_factory):
    """A folder in which all cases were run in two launches, each in an order of its own."""
    folder = tmp_path_factory.mktemp("living")
    (folder / "living.toml").write_text(SWEEP)
    done = ppbench("sweep", "living.toml", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder


def peaks_of(results):
    """Of each run, in the order in which they were made: its case, and each rank's peak."""
    store = Store(results)
    runs = store.runs().sort_values("run_id")
    ranks = store.table("ranks", runs["run_id"]).sort_values(["run_id", "rank"])
    peaks = ranks.groupby("run_id")["peak_memory_bytes"].agg(tuple)
    return [(tuple(run[CASE]), run["launch"], peaks[run["run_id"]]) for _, run in runs.iterrows()]


def test_a_case_has_the_same_peaks_whatever_was_run_before_it(living):
    first, second = (
        {case: peaks for case, launch, peaks in peaks_of(living / "results") if launch == number}
        for number in (0, 1)
    )
    assert list(first) != list(second)  # not in the same order
    assert len(first) == 10
    assert len(set(first.values())) > 5  # cases do differ
    assert first == second


def test_a_case_has_the_same_peaks_alone_and_last(living):
    (schedule, count), _, peaks = [one for one in peaks_of(living / "results") if one[1] == 0][-1]
    only = ["--only", f"schedule={schedule}", "--only", f"num_microbatches={count}"]
    alone = ["--set", "measure.launches=1", "--results", "alone"]
    done = ppbench("sweep", "living.toml", *alone, *only, folder=living)
    assert done.returncode == 0, done.stderr
    assert "done already" not in done.stderr
    (run,) = peaks_of(living / "alone")
    assert run == ((schedule, count), 0, peaks)
