"""Cases of a launch are alive together and take turns; each is measured as if it were alone."""

import json
import signal
import subprocess
import sys

import pytest
from command import PATIENCE_S, TINY, ppbench, words_of
from processes import is_loopback, listened, wait_until

from ppbench.run.job import Journal
from ppbench.run.sweep.progress import PHASES
from ppbench.store import Store

pytestmark = pytest.mark.usefixtures("warm_starts")

SWEEP = f"""\
name = "turns"
device = "cpu"
seq_len = 16
world_size = 2
num_microbatches = 4
{TINY}steps = 5
block = 2

[grid]
schedule = ["1f1b", "zb_h1"]
"""
EMULATED = SWEEP.replace('"cpu"', '"emulated"').replace("steps = 5", "steps = 400") + (
    "\n[emulated]\nF_ms = 20\nI_ms = 10\nW_ms = 10\n"
)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """The folder of a launch in which both cases took turns."""
    folder = tmp_path_factory.mktemp("turns")
    (folder / "turns.toml").write_text(SWEEP)
    with (folder / "log").open("w") as log:
        words = words_of("sweep", "turns.toml", "--no-report")
        process = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log)
    (seen,) = listened([process], (folder / "log").read_text, PATIENCE_S)
    assert process.returncode == 0, (folder / "log").read_text()
    assert seen or sys.platform != "linux"
    assert all(map(is_loopback, seen)), f"a local sweep listens on {seen}"
    return folder


def test_cases_of_a_launch_share_its_start_and_have_each_a_turn_in_every_round(swept):
    store = Store(swept / "results")
    runs = store.runs()
    assert runs["process_start"].nunique() == 1
    for run_id, text, schedule in zip(
        runs["run_id"], runs["rounds"], runs["schedule"], strict=True
    ):
        rounds, steps = json.loads(text), store.table("steps", [run_id])
        # Steps of zb_h1 overlap, so that before each turn comes a lead-in.
        numbers = [1, 2, 3, 4, 5] if schedule == "1f1b" else [2, 4, 5, 7, 8]
        assert rounds["round"] == [0, 1, 2]
        assert steps["round"].tolist() == [0, 1, 1, 2, 2]
        assert steps["step"].tolist() == numbers
        medians = steps.groupby("round")["step_ns"].median()
        assert rounds["step_ns"] == medians.tolist()
        assert sorted(store.table("spans", [run_id])["step"].unique()) == numbers
    events = list(Journal(swept / "results" / "launches" / launch_in(swept)).new_events())
    order = [(int(e["turn"]), int(e["index"])) for e in events if e["event"] == "turn"]
    assert order == [(0, 0), (0, 1), (1, 1), (1, 0), (2, 1), (2, 0)]
    phases = dict.fromkeys(e["what"] for e in events if e["event"] == "phase")
    assert set(PHASES.values()) - set(phases) == {"profile"}
    assert list(phases)[-3:] == ["warm-up", "memory step", "storing"]


def launch_in(folder):
    (launch,) = (folder / "results" / "launches").iterdir()
    return launch.name


def test_a_case_in_turns_needs_as_many_bytes_and_trains_as_it_does_alone(swept, tmp_path):
    together = Store(swept / "results")
    (tmp_path / "turns.toml").write_text(SWEEP)
    only = ("--only", "schedule=zb_h1", "--no-report")
    assert ppbench("sweep", "turns.toml", *only, folder=tmp_path).returncode == 0
    alone = Store(tmp_path / "results")
    ids = [one.runs().set_index("schedule").loc["zb_h1", "run_id"] for one in (together, alone)]
    figures = ["rank", "peak_memory_bytes", "parameter_bytes", "optimizer_bytes"]
    stores = list(zip((together, alone), ids, strict=True))
    memory = [store.table("ranks", [run_id])[figures].to_dict() for store, run_id in stores]
    losses = [store.table("steps", [run_id])["loss"].tolist() for store, run_id in stores]
    assert memory[0] == memory[1]
    assert losses[0] == losses[1]


def test_a_sweep_that_is_stopped_between_rounds_keeps_them(tmp_path):
    (tmp_path / "turns.toml").write_text(EMULATED)
    words = words_of("sweep", "turns.toml", "--no-report")
    process = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    journals = (tmp_path / "results").glob
    wait_until(
        lambda: any('"turn": 2' in j.read_text() for j in journals("launches/*/journal.jsonl")),
        "the third round",
    )
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert "stopping after this round, which is kept" in stderr
    runs = Store(tmp_path / "results").every_run()
    assert runs["status"].tolist() == ["interrupted"] * 2
    rounds = [json.loads(text)["round"] for text in runs["rounds"]]
    assert rounds[0] == rounds[1]
    assert 2 <= len(rounds[0]) < 200
