"""The axis `runtime`: what each can run, how others are added, and that losses must agree."""

import dataclasses
import json
import os
import re
import shutil

import command
import pandas as pd
import pytest

from engine.plan.program import from_json
from engine.plan.schedules.registry import SCHEDULES
from ppbench.config.case import Case, Measure
from ppbench.config.feasibility import TORCH_SCHEDULES, problems_of_runtime
from ppbench.config.reader import read_sweep
from ppbench.report.charts.scaling import efficiencies
from ppbench.run.job import PlannedRun
from ppbench.run.sweep.plan import Choice, plan_sweep
from ppbench.run.verification.losses import (
    DisagreementError,
    check_first_loss,
    check_last_loss,
    key_of_training,
)
from ppbench.runtimes import RUNTIMES
from ppbench.store import Store

pytestmark = pytest.mark.usefixtures("warm_starts")

PATIENCE_S = 300
TORCH = Case(runtime="torch")


@pytest.mark.parametrize(
    ("runtime", "settings", "message"),
    [
        ("torch", {"schedule": "csv:a.csv"}, 'no schedule "csv:a.csv"'),
        ("mine", {"device": "emulated"}, 'needs runtime = "engine"'),
    ],
)
def test_what_a_runtime_cannot_run_is_refused(runtime, settings, message):
    """Others are recorded, in `recorded/errors/sweep-settings.txt`."""
    (problem,) = problems_of_runtime(Case(runtime=runtime, **settings))
    assert message in problem.message


@pytest.mark.parametrize("schedule", TORCH_SCHEDULES)
def test_torch_runs_the_schedules_that_it_knows(schedule):
    v = SCHEDULES[schedule].stages_per_rank.default
    assert not list(problems_of_runtime(dataclasses.replace(TORCH, schedule=schedule)))
    compiled = Case(runtime="torch", schedule=schedule, stages_per_rank=v, train_compile=True)
    splits = schedule in ("interleaved_zb", "zbv", "dualpipev")
    assert bool(list(problems_of_runtime(compiled))) == splits


def read(tmp_path, text):
    path = tmp_path / "a.toml"
    path.write_text(f'name = "a"\n{text}')
    return read_sweep(path, [], "cpu")


def test_the_runtime_is_an_axis_and_leaves_stored_case_ids_alone(tmp_path):
    sweep = read(tmp_path, '[grid]\nruntime = ["engine", "torch"]')
    assert [case.runtime for case, _ in sweep.cases] == ["engine", "torch"]
    assert sweep.axes == ("runtime",)
    assert sweep.cases[0][0].case_id == Case().case_id != sweep.cases[1][0].case_id


def test_the_engine_comes_before_its_likes_in_the_first_launch(tmp_path):
    text = '[measure]\nlaunches = 3\n[grid]\nruntime = ["torch", "engine"]\n'
    text += 'schedule = ["1f1b", "afab"]\nnum_microbatches = [2, 3, 4, 5, 6]'
    plan = plan_sweep(read(tmp_path, text), Store(tmp_path / "results"), Choice())
    places = {(i.launch, i.case): at for at, i in enumerate(plan.missing)}
    is_first = [
        [places[launch, case] < places[launch, dataclasses.replace(case, runtime="torch")]
         for first, case in places if first == launch and case.runtime == "engine"]
        for launch in range(3)
    ]  # fmt: skip
    assert all(is_first[0])
    assert not all(is_first[1] + is_first[2])
    assert len(places) == 60


def test_a_first_loss_must_be_the_unsplit_models_but_for_rounding():
    check_first_loss(TORCH, 4.0 + 3e-4, 4.0)
    check_first_loss(TORCH, float("nan"), float("nan"))
    for loss in (4.0 + 5e-4, None, float("nan")):
        with pytest.raises(DisagreementError, match=r"of the unsplit model by more than 0\.0001"):
            check_first_loss(TORCH, loss, 4.0)
    with pytest.raises(DisagreementError, match="float64 rounding"):
        check_first_loss(dataclasses.replace(TORCH, model_dtype="float64"), 4.0 + 1e-7, 4.0)
    check_first_loss(dataclasses.replace(TORCH, train_autocast="bfloat16"), 4.0 + 5e-2, 4.0)


def test_a_last_loss_must_be_that_of_the_engines_first_run_of_the_same(tmp_path):
    on_torch, on_engine = (PlannedRun(case, Measure(), 0, "") for case in (TORCH, Case()))
    check_last_loss(tmp_path, on_torch, "this", 9.0, "run-1")  # nothing to compare with, nor kept
    check_last_loss(tmp_path, on_engine, "this", 4.0, "run-2")
    for item in (on_torch, on_engine):
        check_last_loss(tmp_path, item, "this", 4.005, "run-3")
        words = r"4\.0 of the engine's run run-2, .*float32 rounding after 13 steps"
        with pytest.raises(DisagreementError, match=words):
            check_last_loss(tmp_path, item, "this", 4.01, "run-4")
    longer = dataclasses.replace(on_torch, measure=Measure(steps=20))
    check_last_loss(tmp_path, longer, "this", 9.0, "run-5")
    check_last_loss(tmp_path, on_torch, "another", 9.0, "run-6")


def test_a_last_loss_that_is_no_finite_number_is_not_kept(tmp_path):
    item = PlannedRun(Case(), Measure(), 0, "")
    for loss in (float("nan"), float("inf"), -float("inf"), None):
        check_last_loss(tmp_path, item, "this", loss, "run-1")
    check_last_loss(tmp_path, item, "this", 4.0, "run-2")
    (kept,) = (tmp_path / "verified").glob("last-this-*.json")
    assert json.loads(kept.read_text()) == {"loss": 4.0, "run_id": "run-2"}


def test_one_training_in_all_its_ways_has_one_key_and_another_training_another(tmp_path):
    text = '[grid]\nruntime = ["torch", "engine"]\nschedule = ["1f1b", "afab"]\n'
    text += "world_size = [1, 2]\ndata.seed = [0, 1]"
    items = plan_sweep(read(tmp_path, text), Store(tmp_path / "results"), Choice()).items
    keys = {(item.case.data_seed, key_of_training(item.case)) for item in items}
    assert len(items) == 16
    assert len(keys) == len({key for _, key in keys}) == 2


ON_RANKS_ALONE = """\
import os

assert "RANK" in os.environ
"""
OF_A_PACKAGE = """\
import dataclasses

from engine.run.recording import Recording
from ppbench.run.runtimes.trained import EngineRuntime


class Liar(EngineRuntime):
    def step(self, step, recording=Recording.spans):
        result = super().step(step, recording)
        if result.loss is None:
            return result
        return dataclasses.replace(result, loss=result.loss / 4)


class Forgetful(EngineRuntime):
    def __init__(self, case, *rest):
        super().__init__(case, *rest)
        self._update = lambda rate: None
"""
AGAIN = ("sweep", "a.toml", "--no-report", "--only", "runtime=forgetful")
SWEEP = """\
name = "side_by_side"
num_microbatches = 4
seq_len = 16
exclude = [
    { runtime = "engine", world_size = 1 },
    { runtime = "torch", world_size = 1 },
    { runtime = "liar", world_size = 1 },
    { runtime = "forgetful", world_size = 1 },
    { runtime = "single", world_size = 2 },
]
model.preset = "llama-tiny"
measure = {warmup_steps = 1, max_warmup_steps = 1, steps = 3}

[grid]
runtime = ["engine", "torch", "single", "liar", "forgetful"]
world_size = [2, 1]

[[override]]
where = {world_size = 2}
set = {schedule = "zbv"}
"""


def ppbench(*arguments, folder):
    path = os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")])
    return command.ppbench(*arguments, folder=folder, patience_s=PATIENCE_S, PYTHONPATH=path)


def install(site, version, source):
    """The package as pip leaves it, with what it registers."""
    shutil.rmtree(site, ignore_errors=True)
    told = site / f"strange_runtimes-{version}.dist-info"
    told.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: strange-runtimes\nVersion: {version}\n"
    (told / "METADATA").write_text(metadata)
    entries = "liar = strange.wrong:Liar\nforgetful = strange.wrong:Forgetful\n"
    (told / "entry_points.txt").write_text(f"[ppbench.runtimes]\n{entries}")
    (site / "strange").mkdir()
    (site / "strange" / "__init__.py").write_text(ON_RANKS_ALONE)
    (site / "strange" / "wrong.py").write_text(source)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep over all runtimes and those of an installed package: one lies, one does not train."""
    folder = tmp_path_factory.mktemp("runtimes")
    install(folder / "site", "1.0", OF_A_PACKAGE)
    (folder / "a.toml").write_text(SWEEP)
    return folder, ppbench("sweep", "a.toml", "--no-report", folder=folder)


@pytest.fixture(scope="module")
def runs(swept):
    folder, done = swept
    assert done.returncode == 4, done.stdout + done.stderr  # the liar's run failed
    return Store(folder / "results").last_sweep().runs


def test_all_runtimes_have_the_same_losses(runs):
    assert list(zip(runs["runtime"], runs["schedule"], runs["status"], strict=True)) == [
        ("engine", "zbv", "ok"),
        ("torch", "zbv", "ok"),
        ("single", "1f1b", "ok"),
        ("liar", "zbv", "invalid"),
        ("forgetful", "zbv", "invalid"),
    ]
    sound = runs[runs["status"] == "ok"]
    for column in ("first_loss", "last_loss"):
        assert sound[column].to_list() == pytest.approx([sound[column].iloc[0]] * 3, rel=1e-4)


def test_a_run_whose_first_or_last_loss_is_wrong_is_invalid_and_told_why(runs):
    by_name = {row["runtime"]: row for row in runs.to_dict("records")}
    liar, run, engine = (by_name[name] for name in ("liar", "forgetful", "engine"))
    assert 'runtime "liar": first-step loss' in liar["error"]
    assert "of the unsplit model by more than" in liar["error"]
    assert 'runtime "forgetful": last-step loss' in run["error"]
    words = f"differs from {engine['last_loss']!r} of the engine's run {engine['run_id']}"
    assert words in run["error"]
    assert pd.isna(run["tokens_per_s"])


def test_a_run_tells_which_code_of_another_package_it_ran(runs):
    by_name = runs.drop_duplicates("runtime").set_index("runtime")["runtime_code"]
    assert by_name[list(RUNTIMES)].isna().all()
    assert re.fullmatch(r"strange-runtimes 1\.0 [0-9a-f]{12}", by_name["forgetful"])


def test_a_package_that_changes_has_its_runs_made_anew_and_compared(swept, runs, tmp_path):
    folder = shutil.copytree(swept[0], tmp_path / "again")
    ppbench(*AGAIN, folder=folder)
    num_runs = len(Store(folder / "results").runs())
    assert num_runs == len(runs)  # of the same package nothing is made again
    mended = OF_A_PACKAGE.replace("self._update = lambda rate: None", "pass")
    install(folder / "site", "1.0", mended)
    ppbench(*AGAIN, folder=folder)
    found = Store(folder / "results").runs()[num_runs:]
    assert list(found["runtime"]) == ["forgetful"]
    assert list(found["status"]) == ["ok"]
    assert found["runtime_code"].str.startswith("strange-runtimes 1.0 ").all()
    compared = found["first_loss"].item(), found["last_loss"].item()
    engine = runs[runs["runtime"] == "engine"]
    assert compared == (engine["first_loss"].item(), engine["last_loss"].item())


def test_every_figure_is_there_for_every_runtime(runs, swept):
    folder, _ = swept
    sound = runs[runs["status"] == "ok"]
    for column in ("bubble_fraction", "bubble_structure", "predicted_peak_memory_bytes", "mfu"):
        assert sound[column].notna().all(), column
    assert sound["peak_held_microbatches"].to_list() == [4, 4, 1]
    by_schedule = sound[sound["world_size"] == 2].groupby("schedule")["bubble_fraction_theory"]
    assert (by_schedule.max() == by_schedule.min()).all()
    ranks = Store(folder / "results").table("ranks", sound["run_id"])
    held = ["peak_held_microbatches", "planned_peak_held_microbatches"]
    assert ranks[held[0]].to_list() == ranks[held[1]].to_list()


def test_torchs_program_is_stored_with_its_own_transfers(runs):
    programs = runs.set_index("runtime")["program"]
    ours, theirs = (from_json(programs[runtime]) for runtime in ("engine", "torch"))
    assert (ours.has_transfers, theirs.has_transfers) == (False, True)
    assert theirs.compute_only().actions == ours.actions


def test_a_run_on_torch_is_explained_drawn_and_traced(runs, swept):
    folder, _ = swept
    (run_id,) = runs[runs["runtime"] == "torch"]["run_id"]
    explained = command.inside("explain", run_id, folder=folder)
    assert "ranks were idle" in explained
    assert f"{run_id}: zbv, runtime torch, 2 ranks, 4 microbatches" in explained
    assert "rank 1" in command.inside("timeline", run_id, "--terminal", folder=folder)
    command.inside("trace", run_id, "-o", "trace.json", folder=folder)
    names = {
        event.get("name")
        for event in json.loads((folder / "trace.json").read_text())["traceEvents"]
    }
    assert {"0F0", "3I3", "1W2"} <= names

    command.inside("report", "-o", "r.html", folder=folder)
    page = (folder / "r.html").read_text()
    assert "runtime torch" in page
    assert "  torch  " in command.inside("ls", folder=folder)
    listed = json.loads(command.inside("ls", "--format", "json", folder=folder))["rows"]
    assert {run["runtime"] for run in listed} == {*RUNTIMES, "liar", "forgetful"}


def test_what_a_pipeline_scales_by_is_the_unsplit_model_where_that_was_measured(runs):
    sound = runs[runs["status"] == "ok"]
    cases = sound.assign(is_not_finite=False)
    found = efficiencies(cases, ("runtime", "world_size", "schedule"))
    unsplit = sound[sound["runtime"] == "single"]["tokens_per_s"].item()
    expected = sound["tokens_per_s"] / unsplit / sound["world_size"]
    assert (found["efficiency"] - expected).abs().max() < 1e-9
