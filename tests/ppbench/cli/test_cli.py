"""The command line as people run it: its exit code and its words."""

import collections
import gzip
import json
import re
import subprocess
import sys

import pytest
import recordings
import torch
from command import PATIENCE_S, inside, ppbench

from engine.plan.lower import lower
from engine.plan.schedules.registry import build_program
from ppbench.run.job import read_state
from ppbench.run.sweep import control
from ppbench.store import Store

pytestmark = pytest.mark.usefixtures("warm_starts")

TINY = """\
name = "tiny"

[model]
preset = "llama-tiny"

[measure]
warmup_steps = 1
steps = 3

[grid]
schedule = ["afab", "1f1b"]
world_size = [2]
num_microbatches = [4]
seq_len = [32]
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A folder in which a small sweep has been run, and what it printed."""
    folder = tmp_path_factory.mktemp("swept")
    (folder / "tiny.toml").write_text(TINY)
    return folder, ppbench("sweep", "tiny.toml", folder=folder)


def test_a_sweep_leaves_one_ok_row_per_case_with_its_figures(swept):
    folder, done = swept
    assert done.returncode == 0, done.stderr
    runs = Store(folder / "results").last_sweep().runs
    assert list(runs["schedule"]) == ["afab", "1f1b"]
    assert set(runs["status"]) == {"ok"}
    for column in ("tokens_per_s", "step_ns", "peak_memory_bytes"):
        assert (runs[column] > 0).all(), column
    assert runs["bubble_fraction"].between(0, 1).all()
    assert runs["bubble_fraction_theory"].tolist() == pytest.approx([0.2, 0.2])
    assert runs["fingerprint"].nunique() == 1
    assert runs["num_warmup_steps"].between(3, 20).all()  # 1 at least, and until they settle
    assert runs["first_loss"].nunique() == 1
    assert runs["last_loss"].nunique() == 1
    ranks = Store(folder / "results").table("ranks", runs["run_id"])
    assert len(ranks) == 2 + 2
    assert (ranks["peak_memory_bytes"] > 0).all()
    assert (ranks["peak_held_microbatches"] == ranks["planned_peak_held_microbatches"]).all()


def test_a_sweep_prints_progress_a_table_and_the_path_of_its_report(swept):
    folder, done = swept
    begun = [line for line in done.stderr.splitlines() if line.startswith("run ")]
    assert [line.split(":")[0] for line in begun] == ["run 1 of 2", "run 2 of 2"]
    assert any("1f1b, 2 ranks, 4 microbatches" in line for line in begun)
    ended = [line for line in done.stderr.splitlines() if ": ok, " in line]
    assert len(ended) == 2
    assert all("tokens/s, bubble " in line and "MiB" in line for line in ended)
    assert not {"\x1b", "\r", "\b"} & set(done.stderr)
    assert done.stdout.count("llama") == 0
    table, answer = done.stdout.split("\n\n")[:2]
    assert ", ok" in table.splitlines()[0]  # of all rows: said once
    assert len([line for line in table.splitlines() if " afab " in line or " 1f1b " in line]) == 2
    assert re.match(r"Use |Open\. ", answer)
    path = done.stdout.splitlines()[-1].removeprefix("report: ")
    assert (folder / path).read_text().startswith("<!doctype html>")


def test_a_sweep_that_is_started_again_runs_nothing_unless_told_to(swept):
    folder, _ = swept
    before = len(Store(folder / "results").runs())
    again = recordings.ppbench(["sweep", "tiny.toml", "--no-report"], folder)
    assert again.exit_code == 0
    assert "2 of 2 runs are done already" in again.stderr
    assert len(Store(folder / "results").runs()) == before
    rerun = ("--rerun", "--no-report", "--only", "schedule=1f1b")
    assert recordings.ppbench(["sweep", "tiny.toml", *rerun], folder).exit_code == 0
    assert len(Store(folder / "results").runs()) == before + 1


def test_the_parts_of_every_bubble_add_up_to_the_nanosecond(swept):
    folder, _ = swept
    for run_id in Store(folder / "results").runs()["run_id"]:
        explained = json.loads(inside("explain", run_id, "--format", "json", folder=folder))
        parts = ("structure", "imbalance", "transfer", "jitter", "launch_gap", "between")
        assert list(explained["parts"]) == list(parts)
        for row in [*explained["by_step_and_rank"], *explained["by_step"], explained["all_steps"]]:
            assert sum(row[f"{part}_ns"] for part in parts) == row["idle_ns"]
            assert (
                sum(row[f"{phase}_ns"] for phase in ("warmup", "steady", "cooldown"))
                == row["idle_ns"]
            )
        assert len(explained["by_step_and_rank"]) == 3 * explained["world_size"]
        assert {answer["question"] for answer in explained["what_if"]} >= {
            "perfect balance", "free transfers", "zb_h1",
        }  # fmt: skip


def test_a_signal_that_is_ignored_stays_ignored(tmp_path):
    """SIGHUP is ignored under nohup."""
    program = """\
import signal
from ppbench.cli import main
signal.signal(signal.SIGHUP, signal.SIG_IGN)
try:
    main()
finally:
    for number in (signal.SIGHUP, signal.SIGTERM):
        print(signal.getsignal(number) is signal.SIG_IGN)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "--version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stdout.splitlines()[1:] == ["True", "False"], done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    done = recordings.ppbench(["sweep", "tiny.toml", "--set", "device=cuda"], tmp_path)
    assert done.exit_code == 2
    assert "needs an NVIDIA GPU" in done.stderr
    done = recordings.ppbench(["sweep", "tiny.toml", "--set", "device=cuda", "--dry-run"], tmp_path)
    assert done.exit_code == 0
    assert done.stderr.startswith("note: not to be run on this machine: tiny.toml: device: ")


EMULATED = """\
device = "emulated"
num_microbatches = 6

[model]
preset = "llama-tiny"

[emulated]
F_ms = 1
I_ms = 1
W_ms = 1

[measure]
warmup_steps = 0
steps = 2
profile_steps = 1

[grid]
schedule = ["1f1b", "zb_h1", "zbv", "interleaved_1f1b"]
world_size = [3]
"""


def test_a_report_has_the_file_that_was_measured_whatever_became_of_it(tmp_path, monkeypatch):
    """The file was read again after measuring (FAULTS 23)."""
    file, run = tmp_path / "emulated.toml", control.run_sweep
    file.write_text(EMULATED)

    def run_and_remove(*asked, **named):
        done = run(*asked, **named)
        file.unlink()
        return done

    monkeypatch.setattr(control, "run_sweep", run_and_remove)
    words = ["--only", "schedule=1f1b and num_microbatches>=6", "--reports", "pages"]
    done = recordings.ppbench(["sweep", "emulated.toml", *words], tmp_path)
    assert done.exit_code == 0, done.stderr
    file.write_text("# edited\n" + EMULATED)
    assert recordings.ppbench(["report", "-o", "later.html"], tmp_path).exit_code == 0
    (page,) = (tmp_path / "pages").glob("emulated*.html")
    for text in (page.read_text(), (tmp_path / "later.html").read_text()):
        assert "num_microbatches = 6" in text
        assert "# edited" not in text


def test_an_emulated_sweep_holds_schedules_against_their_plans(tmp_path):
    (tmp_path / "emulated.toml").write_text(EMULATED)
    done = ppbench("sweep", "emulated.toml", "--live", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (launch,) = (tmp_path / "results" / "launches").iterdir()
    assert read_state(launch).num_shown == 4  # ranks have waited while the page was written
    assert "planned" in done.stdout  # a heading, whose unit may be below it
    store = Store(tmp_path / "results")
    runs = store.last_sweep().runs
    assert list(runs["status"]) == ["ok"] * 4
    assert list(runs["stages_per_rank"]) == [1, 1, 2, 2]
    assert (runs["makespan_ns"] >= runs["planned_step_ns"]).all()
    assert runs["cautions"].str.contains("oversubscribed").sum() == 0
    ranks = store.table("ranks", runs["run_id"])
    assert (ranks["peak_held_microbatches"] == ranks["planned_peak_held_microbatches"]).all()
    (page,) = (tmp_path / "reports").glob("emulated*.html")
    assert page.name in (tmp_path / "reports" / "index.html").read_text()
    text = page.read_text()
    assert 'id="live"' not in text
    assert "planned (ms)" in text
    assert "<h2>Peak memory</h2>" not in text  # nothing was allocated
    assert f"results/profiles/{max(runs['run_id'])}" in inside("show", "last", folder=tmp_path)
    for run_id, schedule in zip(runs["run_id"], runs["schedule"], strict=True):
        # The step after the measured ones is for memory.
        profiled = store.table("steps", [run_id])["step"].max() + 2
        for rank in range(3):
            ranges = ranges_of_rank(store, run_id, rank)
            assert collections.Counter(ranges) == {
                f"step {profiled}": 1, **dict.fromkeys(lowered_row(schedule, 3, 6, rank), 1)
            }  # fmt: skip


def lowered_row(schedule, world_size, num_microbatches, rank):
    """The names of what a rank does in a step, messages included."""
    program = lower(build_program(schedule, world_size, num_microbatches))
    return [str(action) for action in program.actions[rank]]


def ranges_of_rank(store, run_id, rank):
    """The names of steps and actions in a rank's trace, which also has operators within them."""
    with gzip.open(store.profiles_of(run_id) / f"rank{rank}.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    ranges = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    return [name for name in ranges if re.fullmatch(r"\d+[A-Z_]+\d+|OPT|step \d+", name)]
