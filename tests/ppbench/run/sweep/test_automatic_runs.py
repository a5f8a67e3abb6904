"""Sweeps with `schedule = "auto"`: all ranks run the program that was found, and it is stored."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from command import TINY, inside, ppbench, printed

from engine.plan.check import check
from engine.plan.program import from_json
from engine.plan.rules import peak_activations
from ppbench.errors import ExitCode
from ppbench.run.job import read_job
from ppbench.run.sweep import open_runs
from ppbench.store import Store

pytestmark = pytest.mark.usefixtures("warm_starts")

SWEEP = f"""\
name = "found"
schedule = "auto"
world_size = 2
num_microbatches = 4
seq_len = 16
{TINY}steps = 2

[grid]
device = ["emulated", "cpu"]

[[override]]
where = {{device = "emulated"}}
set = {{memory_limit = 1, emulated = {{F_ms = [2, 3], I_ms = [2, 3], W_ms = [1, 2]}}}}

[[override]]
where = {{device = "cpu"}}
set = {{memory_limit = "64 MiB"}}
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("found")
    (folder / "sweep.toml").write_text(SWEEP)
    done = ppbench("sweep", "sweep.toml", "--no-report", folder=folder)
    assert "emulated" in done.stdout + done.stderr, done.stderr
    return folder


def run_of(folder: Path, device: str) -> pd.Series:
    runs = Store(folder / "results").every_run()
    ((_, row),) = runs[runs["device"] == device].iterrows()
    return row


@pytest.mark.parametrize("device", ["emulated", "cpu"])
def test_the_program_that_was_run_is_stored_with_its_spans(swept, device):
    run = run_of(swept, device)
    assert run["status"] == "ok", run["error"]
    program = from_json(run["program"])
    check(program)
    assert (program.schedule, program.world_size, program.num_microbatches) == ("auto", 2, 4)
    assert json.loads(run["layers_per_stage"]) == [2, 2]
    spans = Store(swept / "results").table("spans", [run["run_id"]])
    first = spans[(spans["step"] == spans["step"].min()) & (spans["lane"] == "compute")]
    for rank, row in enumerate(program.actions):
        ran = first[(first["rank"] == rank) & (first["op"] != "OPT")].sort_values("start_ns")
        names = [f"{a.stage}{a.op}{a.microbatch}" for a in ran.itertuples()]
        assert names == [str(action) for action in row]


@pytest.mark.parametrize("device", ["emulated", "cpu"])
def test_who_accounts_for_a_run_that_died_knows_its_program(swept, device):
    """The case does not say it: it is in the folder of the launch."""
    run = run_of(swept, device)
    (file,) = (swept / "results" / "launches").glob("*/job.json")
    items = read_job(file).items
    index = next(n for n, item in enumerate(items) if item.case.case_id == run["case_id"])
    lowered = open_runs.lowered_of_launch(items[index].case, file.parent, index)
    assert lowered.has_transfers
    assert lowered.compute_only().actions == from_json(run["program"]).actions


def test_ranks_hold_no_more_than_the_limit(swept):
    run = run_of(swept, "emulated")
    assert max(peak_activations(from_json(run["program"]))) == 1
    assert run["peak_held_microbatches"] == 1
    assert run["planned_step_ns"] == 4 * (2 + 3 + 3 + 2 + 1) * 1_000_000  # one after the other
    assert run_of(swept, "cpu")["peak_memory_bytes"] <= 64 * 2**20


def test_a_limit_that_nothing_keeps_within_is_an_invalid_run_without_ranks(swept, monkeypatch):
    (swept / "limited.toml").write_text(SWEEP.replace("64 MiB", "1 KiB"))
    monkeypatch.chdir(swept)
    only = ("--only", "device=cpu", "--results", "limited")
    done = printed("sweep", "limited.toml", "--no-report", *only)
    assert done.exit_code == ExitCode.failed_runs, done.notes
    words = "memory_limit 1 KiB: no program keeps within it; the least that would"
    assert any(words in note for note in done.notes)
    ((_, run),) = Store(swept / "limited").every_run().iterrows()
    assert (run["status"], run["memory_limit"]) == ("invalid", "1 KiB")
    assert not list((swept / "limited" / "launches").glob("*/logs"))


def test_what_reads_programs_reads_that_of_the_run(swept):
    run_id = run_of(swept, "emulated")["run_id"]
    assert inside("explain", run_id, folder=swept)
    assert inside("timeline", run_id, "-o", "timeline.html", folder=swept)


@pytest.mark.parametrize(("device", "work"), [("emulated", "sleep 2 ms"), ("cpu", "train")])
def test_the_reference_is_of_the_same_kind_as_the_work(swept, device, work):
    run = run_of(swept, device)
    assert run["reference"] == f"{work}, version 2, 2 x 1"
    assert run["reference_ns"] >= (2_000_000 if device == "emulated" else 1)
    assert run["reference_share"] > 0
    for times in Store(swept / "results").table("ranks", [run["run_id"]])["reference_times_ns"]:
        before, after = json.loads(times)
        assert min(len(before), len(after)) >= 1
