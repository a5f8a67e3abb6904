"""Workers that run case after case: what came before does not show in a case's memory."""

import subprocess
import sys
import time

import pytest
from command import words_of
from sockets import descendants, is_loopback, listening

from ppbench.store import Store

pytestmark = pytest.mark.usefixtures("warm_starts")

SWEEP = """\
name = "living"
device = "cpu"
seq_len = 32

[model]
preset = "llama-tiny"

[measure]
warmup_steps = 1
max_warmup_steps = 1
steps = 1
launches = 2

[grid]
num_microbatches = [2, 6]
"""
FEW = 'schedule = ["1f1b", "zbv"]\nworld_size = [2]\n'
MANY = 'schedule = ["afab", "1f1b", "zb_h1", "zbv"]\nworld_size = [1, 2]\n'
CASE = ["schedule", "world_size", "num_microbatches"]
MESSAGE_BYTES = 32 * 64 * 4


@pytest.fixture(scope="module")
def living(tmp_path_factory, is_thorough):
    """A folder in which all cases were run in two launches, each in an order of its own.

    And the addresses on which any process of the sweep has listened.
    """
    folder = tmp_path_factory.mktemp("living")
    (folder / "living.toml").write_text(SWEEP + (MANY if is_thorough else FEW))
    command = words_of("sweep", "living.toml", "--no-report")
    with (folder / "log").open("w") as log:
        sweep = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    seen, most = set[str](), 0
    while sweep.poll() is None:
        seen |= listening(sweep.pid)
        most = max(most, len(descendants(sweep.pid)))
        time.sleep(0.25)
    assert sweep.returncode == 0, (folder / "log").read_text()
    assert most >= 4  # it, the agent, two ranks
    return folder, seen


def peaks_of(results, launch):
    """The peak of each rank in each case of a launch, in the order of execution."""
    store = Store(results)
    runs = store.runs().sort_values("run_id")
    runs = runs[runs["launch"] == launch]
    ranks = store.table("ranks", runs["run_id"]).sort_values(["run_id", "rank"])
    peaks = ranks.groupby("run_id")["peak_memory_bytes"].agg(tuple)
    return {tuple(run[CASE]): peaks[run["run_id"]] for _, run in runs.iterrows()}


def are_same(case, ours, theirs):
    """Whether peaks are equal, except for messages: each is freed once it has arrived."""
    _, world_size, num_microbatches = case
    on_their_way = 0 if world_size == 1 else 2 * num_microbatches * MESSAGE_BYTES
    return all(abs(a - b) <= on_their_way for a, b in zip(ours, theirs, strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_local_sweep_listens_on_loopback_alone(living):
    _, seen = living
    assert seen
    assert all(map(is_loopback, seen)), seen


def test_a_case_has_the_same_peaks_whatever_was_run_before_it(living, is_thorough):
    first, second = (peaks_of(living[0] / "results", launch) for launch in (0, 1))
    assert list(first) != list(second)  # not in the same order
    assert len(first) == len(second) == (16 if is_thorough else 4)
    assert len(set(first.values())) > len(first) / 2  # cases do differ
    different = {
        case: (peaks, second[case])
        for case, peaks in first.items()
        if not are_same(case, peaks, second[case])
    }
    assert different == {}
