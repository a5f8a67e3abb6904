"""Verification from outside: mistakes are planted in real ranks, and each is found and named."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import shutil
from pathlib import Path

import planted
import pytest
import torch
from command import ppbench
from models import configuration_folder
from transformers import AutoConfig, AutoModelForCausalLM

from engine.connection import agree
from engine.flight import NO_FLIGHT
from ppbench.config.case import Case, Measure
from ppbench.run.runtimes.runtime import RankContext, trainer_config
from ppbench.run.verification import ranks as verifying
from ppbench.run.verification import record
from ppbench.run.verification.author import verdict_of
from ppbench.run.verification.exchange import BATCHES, NUM_STEPS, REQUEST, Way, write
from ppbench.runtimes import load_factory
from ppbench.store import Store

pytestmark = pytest.mark.usefixtures("warm_starts")

HERE = Path(__file__).parents[2]
SWEEP = """\
name = "authors"
num_microbatches = 4
world_size = 2
exclude = [
    { seq_len = 24, model.preset = "authors:failing" },
    { seq_len = 24, model.preset = "authors:leaving" },
    { seq_len = 24, model.preset = "authors:too_large" },
    { seq_len = 24, model.preset = "llama-tiny" },
]
measure = {warmup_steps = 1, max_warmup_steps = 1, steps = 2}

[grid]
model.preset = [
    "authors:dropping", "authors:failing", "authors:leaving", "authors:too_large", "llama-tiny",
]
seq_len = [12, 24]
"""
CASE = Case(
    model_preset="authors:plain",
    model_dtype="float64",
    world_size=2,
    num_microbatches=4,
    seq_len=12,
    train_learning_rate=1e-3,
)
CLIPPED = {"train_clip_norm": 0.01}
DROPPING, BATCHED = ({"model_preset": f"authors:{name}"} for name in ("dropping", "batched"))
TIED = {"model_preset": "authors:tied"}
ROTATING = {"model_preset": "authors:rotating"}
SPLIT = {"schedule": "zb_h1"}
TRACED = {
    "model_preset": "authors:skipping",
    "model_split": "trace",
    "model_split_points": ("second",),
}
RECOMPUTED = {**DROPPING, "train_recompute": True}

SOUND = [
    {},
    TIED,
    DROPPING,
    pytest.param(RECOMPUTED, marks=pytest.mark.thorough),
    {**DROPPING, "schedule": "interleaved_1f1b", "stages_per_rank": 2},
    ROTATING,
    pytest.param(
        {**ROTATING, "train_optimizer": "sgd", "train_clip_norm": 0.01}, marks=pytest.mark.thorough
    ),
    {**BATCHED, "model_dtype": "float32"},
    pytest.param(CLIPPED, marks=pytest.mark.thorough),
    SPLIT,
    TRACED,
    pytest.param({"train_optimizer": "sgd", "train_momentum": 0.9}, marks=pytest.mark.thorough),
    {"seq_len": "variable", "data_max_seq_len": 12, "train_microbatch_size": 2},
    {"model_preset": "llama-tiny", "runtime": "torch", "schedule": "zbv", "stages_per_rank": 2},
    {"world_size": 1, "runtime": "single", **DROPPING},
]
FOUND = [
    ("unsummed_tie", TIED, r"gradient of 0\.weight on rank . .* in step 0 is .* away"),
    ("wrong_gradient", {}, r"gradient of \S+ on rank 0 \(stage 0\) in step 0 is .* away"),
    ("loss_told_wrong", {}, r"loss in step 0 is [\d.]+; the author's module has [\d.]+$"),
    ("missing_bias_gradient", {}, r"gradient of 5\.down\.bias on rank 1 .*the author's module has"),
    ("stale_weight", {}, r"5\.up\.weight on rank 1 \(stage 1\) after the update in step 0 differs"),
    ("stale_imaginary_part", ROTATING, r"2\.turns on rank 0 .* after the update in step 0 differs"),
    ("other_initial_weight", {}, r"4\.layer\.down\.weight on rank 1 \(stage 1\) begins with"),
    ("trained_frozen", {}, r"2\.up\.weight on rank 0 .*requires_grad is True, .* False"),
    ("lost_state", {}, r"3\.norm\.bias: the author's module has it, and no rank does"),
    ("superfluous_state", {}, r"9\.weight on rank 0 .*: the author's module has no such weight"),
    ("frozen_statistics", BATCHED, r"3\.norm\.running_\S+ on rank 0 .* after the update in step 0"),
    ("norm_of_one_rank", CLIPPED, "gradient norm in step 0 is "),
    ("recomputed_with_other_numbers", DROPPING, "gradient of .* away|do not follow the forward be"),
    ("same_numbers_each_microbatch", DROPPING, r"rank 0 in step 0: the random numbers of its forw"),
    ("same_numbers_each_step", DROPPING, "rank 0 in step 0: .* do not follow the seed of the step"),
    ("no_dropout", DROPPING, "draws random numbers, as dropout does, and no rank draws any"),
]


def steps_on(fabric, is_member, case, mistake, folder):
    """The ranks' side of a verification, with a mistake planted."""
    fabric.connect([], tuple(range(case.world_size)), ())
    agreement = agree(trainer_config(case), fabric)
    if not is_member:
        return None
    runtime = load_factory(case.runtime)(case, agreement, fabric, NO_FLIGHT)
    getattr(planted, mistake)(runtime)
    folder = folder if mistake != "sees_no_files_on_rank_1" or runtime._trainer.rank == 0 else "x"
    group = fabric.group_of(tuple(range(case.world_size)))
    member = RankContext(case, runtime, fabric, group, NO_FLIGHT, agreement.config)
    try:
        return verifying.take_steps(member, verifying.Plan(None, folder=str(folder)))
    finally:
        runtime.close()


def verdict(ranks, folder, mistake="nothing", meanwhile=lambda: None, **settings):
    """The author's verdict, computed in this process, since a process each would take minutes.

    `meanwhile` is called when the ranks are done and the author's module is not made yet.
    """
    case = dataclasses.replace(CASE, **settings)
    length = case.data_max_seq_len if case.seq_len == "variable" else case.seq_len
    way = Way(case.model_dtype, "cpu", case.train_microbatch_size, length)
    request = verifying.request_of(case, [way])
    write(folder / REQUEST, dataclasses.asdict(request))
    taken, *_ = ranks.run(case.world_size, steps_on, case, mistake, folder)
    training = verifying.training_of(case, *taken)
    torch.save(verifying.batches_of(trainer_config(case), NUM_STEPS), folder / BATCHES)
    meanwhile()
    return verdict_of(folder, request, way, training)


@pytest.mark.parametrize("settings", SOUND, ids=lambda settings: json.dumps(settings)[:60])
def test_training_as_the_author_wrote_it_passes(ranks, tmp_path, settings):
    found = verdict(ranks, tmp_path, **settings)
    assert found.error == ""
    assert found.notes == []
    assert found.num_gradients > 0
    assert found.difference < (1e-3 if settings.get("model_dtype") == "float32" else 1e-9)


@pytest.mark.parametrize(("mistake", "settings", "place"), FOUND, ids=lambda value: str(value)[:30])
def test_a_planted_mistake_is_found_and_named(ranks, tmp_path, mistake, settings, place):
    found = verdict(ranks, tmp_path, mistake, **settings)
    assert re.search(place, found.error), found.error


def checkpoint_folder(folder, architecture, **changes):
    """A tiny checkpoint with weights, as transformers writes it."""
    path = configuration_folder(folder, architecture, **changes)
    drawn = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    drawn.save_pretrained(path)
    return path


def change_one_weight(path):
    model = AutoModelForCausalLM.from_pretrained(path)
    model.get_parameter("model.layers.2.mlp.up_proj.weight").data[1, 1] += 1e-3
    model.save_pretrained(path)


def test_a_checkpoint_passes_and_one_weight_that_is_not_the_files_is_found(ranks, tmp_path):
    path = checkpoint_folder(tmp_path, "llama", tied=True)
    assert verdict(ranks, tmp_path, model_preset=path).error == ""
    found = verdict(ranks, tmp_path, meanwhile=lambda: change_one_weight(path), model_preset=path)
    place = r"^model\.layers\.2\.mlp\.up_proj\.weight on rank 1 \(stage 1\) begins with "
    assert re.search(place, found.error), found.error


@pytest.mark.parametrize(
    "architecture",
    ["gpt_neox", pytest.param("gemma2", marks=pytest.mark.thorough), "qwen3_moe"],
)
def test_a_configuration_passes_with_the_weights_that_its_seed_gives(ranks, tmp_path, architecture):
    """The configurations have dropout, scaled tied embeddings, or experts."""
    changes = {"hidden_dropout": 0.2} if architecture == "gpt_neox" else {}
    path = configuration_folder(tmp_path, architecture, **changes)
    found = verdict(ranks, tmp_path, model_preset=path, model_seed=5, model_dtype="float32")
    assert found.error == ""
    found = verdict(
        ranks, tmp_path, "other_seed", model_preset=path, model_seed=5, model_dtype="float32"
    )
    assert "begins with" in found.error


def test_an_emulated_run_and_a_preset_are_not_verified_and_a_program_file_is(tmp_path):
    emulated = dataclasses.replace(CASE, device="emulated", model_preset="llama-tiny")
    verifier = verifying.Verifier(tmp_path, tmp_path / "verification")
    outcome = verifier.verify(emulated, Measure(), None)
    assert outcome.how == "no: an emulated run computes nothing"
    preset = dataclasses.replace(CASE, model_preset="llama-tiny")
    assert not record.is_asked_for(preset, is_preset=True)
    program = dataclasses.replace(preset, schedule="csv:a.csv", program_digest="1")
    assert record.is_asked_for(program, is_preset=True)
    assert record.is_asked_for(CASE, is_preset=False)


def test_what_decides_what_is_trained_is_verified_anew_and_what_does_not_is_not(
    tmp_path, monkeypatch
):
    (tmp_path / "written.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("written")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"1")

    def key(num_microbatches=4, **settings):
        return record.key_of(dataclasses.replace(CASE, **settings), num_microbatches, False)

    def checkpoint_key():
        return key(model_preset=str(folder))

    assert key() == key(seq_len=99, train_learning_rate=1.0, data_seed=7, launch_bind=False)
    others = {"world_size": 4, "schedule": "zbv", "model_seed": 1, "train_recompute": True}
    others |= {"model_partition": (1, 7), "runtime": "torch", "train_clip_norm": 1.0}
    keys = [key(), key(8), *(key(**{name: value}) for name, value in others.items())]
    assert len(set(keys)) == len(keys)
    before = key(), checkpoint_key()
    (tmp_path / "written.py").write_text("x = 2\n")
    (folder / "model.safetensors").write_bytes(b"2")
    assert key() != before[0]
    assert checkpoint_key() != before[1]


def test_a_rank_that_does_not_see_rank_0s_files_sends_them(ranks, tmp_path):
    seen = verdict(ranks, tmp_path, "sees_no_files_on_rank_1")
    assert seen.error == ""
    assert (tmp_path / "rank1-before.pt").exists()


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep over models of an author, and what it printed."""
    folder = tmp_path_factory.mktemp("authors")
    shutil.copy(HERE / "authors.py", folder)
    (folder / "a.toml").write_text(SWEEP)
    return folder, ppbench("sweep", "a.toml", folder=folder)


@pytest.fixture(scope="module")
def runs(swept):
    folder, done = swept
    assert done.returncode == 4, done.stdout + done.stderr
    runs = Store(folder / "results").last_sweep().runs.set_index(["model_preset", "seq_len"])
    return {key: runs.loc[key] for key in runs.index}


def test_a_factorys_model_is_verified_once_on_a_machine_and_each_run_says_so(swept, runs):
    both = [runs["authors:dropping", length] for length in (12, 24)]
    assert [run["status"] for run in both] == ["ok", "ok"]
    how = "against the factory's module, unsplit: weights, loss and 28 gradients of 2 steps"
    assert all(run["verified"].startswith(how) for run in both)
    assert sorted("(before, on this machine)" in run["verified"] for run in both) == [False, True]
    assert all(0 <= run["verified_difference"] < 1e-9 for run in both)
    folder, _ = swept
    assert len(list((folder / "results" / "verified").iterdir())) == 1
    assert not list((folder / "results" / "launches").glob("*/verification"))


def test_a_preset_says_that_it_was_not_verified(swept, runs):
    folder, _ = swept
    run = runs["llama-tiny", 12]
    assert (run["status"], run["verified"][:12]) == ("ok", "no: a preset")
    shown = ppbench("show", run["run_id"], folder=folder).stdout
    assert "no: a preset on a built-in schedule is verified with measure.verify only" in shown
    (page,) = (folder / "reports").glob("authors*.html")
    text = page.read_text()
    assert "<h3>Verified</h3>" in text
    assert "is verified with measure.verify only" in text


def test_an_authors_module_that_fails_or_dies_alone_makes_its_run_invalid_and_says_why(runs):
    failing, leaving = (runs[f"authors:{name}", 12] for name in ("failing", "leaving"))
    assert failing["status"] == leaving["status"] == "invalid"
    assert "itself fails when it is called unsplit: RuntimeError: the author's" in failing["error"]
    assert "the process of the unsplit module exited with code 7" in leaving["error"]
    assert {failing["verified"], leaving["verified"]} == {"no: the run failed"}


def test_a_verification_that_runs_out_of_memory_costs_itself_alone(runs):
    run = runs["authors:too_large", 12]
    assert run["status"] == "ok"
    assert run["verified"].startswith("no: the process of the unsplit module was killed")


def test_a_run_measures_the_same_whether_it_began_with_a_verification_or_not(swept, runs):
    folder, _ = swept
    only = ["--only", "model.preset=authors:dropping", "--rerun", "--no-report"]
    done = ppbench("sweep", "a.toml", *only, folder=folder)
    assert done.returncode == 0, done.stderr
    again = Store(folder / "results").runs()
    again = again[again["run_id"] > max(run["run_id"] for run in runs.values())]
    assert len(again) == 2
    for run in again.to_dict("records"):
        first = runs["authors:dropping", run["seq_len"]]
        assert "(before, on this machine)" in run["verified"]
        for column in ("first_loss", "last_loss"):
            assert run[column] == first[column]
        for column in ("peak_memory_bytes", "peak_held_microbatches"):
            assert run[column] == pytest.approx(first[column], rel=0.02)
