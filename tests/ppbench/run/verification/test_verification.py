"""Verification from outside: mistakes are planted in real ranks, and each is found and named."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import planted
import pytest
from command import ppbench
from models import configuration_folder
from transformers import AutoConfig, AutoModelForCausalLM

from engine.connection import agree
from engine.exactness import Exactness, InexactError
from engine.flight import NO_FLIGHT
from engine.plan.schedules.registry import SCHEDULES, build_program
from ppbench.config.case import Case, Measure
from ppbench.config.feasibility import SPLIT as SPLIT_BY_TORCH
from ppbench.config.feasibility import problems_of_settings
from ppbench.run.runtimes.runtime import RankContext, trainer_config
from ppbench.run.verification import ranks as verifying
from ppbench.run.verification import record
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
    { seq_len = 24, model.preset = "authors:too_large" },
    { seq_len = 24, model.preset = "llama-tiny" },
]
measure = {warmup_steps = 1, max_warmup_steps = 1, steps = 2}

[grid]
model.preset = [
    "authors:dropping", "authors:failing", "authors:too_large", "llama-tiny",
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
LOOPED = {"runtime": "torch", "schedule": "zbv", "stages_per_rank": 2}
NOT_CONTIGUOUS = {  # gradients between stages
    "model_preset": "models:Tutorial",
    "model_split": "trace",
    "model_split_points": ("layers.1", "layers.2", "norm"),
    "train_microbatch_size": 2,
}
SOUND = [
    {**BATCHED, "model_dtype": "float32"},
    TRACED,
    {**LOOPED, "model_preset": "llama-tiny", "model_partition": (2, 0, 0, 2)},
    {**LOOPED, **NOT_CONTIGUOUS},
    {"train_autocast": "bfloat16", "model_dtype": "float32", **SPLIT},
    {"model_dtype": "bfloat16"},
]
AXES: dict[str, list[Any]] = {
    "model_preset": [
        *(f"authors:{name}" for name in ("plain", "tied", "dropping", "rotating")),
        "models:sequential",
    ],
    "schedule": list(SCHEDULES),
    "world_size": [1, 2],
    "num_microbatches": [1, 2, 3, 4],
    "replicas": [1, 1, 1, 1, 2],
    "sharding_policy": ["none", "ddp", "zero1", "zero2", "zero3", "torch"],
    "seq_len": [12, 12, "variable"],
    "data_max_seq_len": [12],
    "train_microbatch_size": [1, 2],
    "train_optimizer": ["adamw", "sgd"],
    "train_momentum": [0.0, 0.9],
    "train_clip_norm": [0.0, 0.01],
    "train_recompute": [False, True],
}
RUNTIMES = ["engine", "torch", "engine", "engine", "torch", "single"]
LAYERS_TWICE = ("authors:plain", "authors:tied")
FEW, MANY = (0, 5, 20, 32, 37, 40, 48, 69, 74, 79, 82, 102, 103), 120
"""The seeds of few cases that have every model, schedule, runtime and policy among them."""


TORCH_REFUSES = (
    # No replicas share complex weights, nor those that two stages of a rank have in common.
    lambda case: case.replicas > 1 and case.model_preset in ("authors:tied", "authors:rotating"),
    # No backward is split where a weight is used twice.
    lambda case: case.schedule in SPLIT_BY_TORCH and case.model_preset in LAYERS_TWICE,
)


def drawn(seed: int) -> dict[str, Any]:
    """The settings of a case that can be run: model, program, runtime, replicas, training."""
    rng, runtime = random.Random(seed), RUNTIMES[seed % len(RUNTIMES)]
    while True:
        settings = {name: rng.choice(values) for name, values in AXES.items()}
        settings["runtime"] = runtime
        settings["stages_per_rank"] = SCHEDULES[settings["schedule"]].stages_per_rank.default
        case = dataclasses.replace(CASE, **settings)
        if any(case.runtime == "torch" and refused(case) for refused in TORCH_REFUSES):
            continue
        if not list(problems_of_settings(case, Measure())):
            return settings


FOUND = [
    ("unsummed_tie", TIED, r"gradient of 0\.weight on rank . in step 0 is .* away"),
    ("wrong_gradient", {}, r"gradient of \S+ on rank 0 in step 0 is .* away"),
    ("loss_told_wrong", {}, r"^the loss in step 0 is 1.0e-02 away: [^;]*; at most"),
    ("missing_bias_gradient", {}, r"gradient of 5\.down\.bias on rank 1 .*: none, the author's"),
    ("stale_weight", {}, r"5\.up\.weight on rank 1 after the update in step 0 is .* away"),
    ("stale_imaginary_part", ROTATING, r"2\.turns on rank 0 after the update in step 0 is .* away"),
    ("other_initial_weight", {}, r"4\.layer\.down\.weight on rank 1 at the beginning is 1.0e-04"),
    ("trained_frozen", {}, r"gradient of 2\.up\.weight on rank 0 .*, the author's module none"),
    ("lost_state", {}, r"3\.norm\.bias: the author's module has it, and no rank does"),
    ("superfluous_state", {}, r"9\.weight on rank 0: the author's module has no such weight"),
    ("frozen_statistics", BATCHED, r"3\.norm\.running_\S+ on rank 0 after the update in step 0"),
    ("norm_of_one_rank", CLIPPED, "^the gradient norm in step 0 is "),
    ("recomputed_with_other_numbers", DROPPING, "gradient of .* away"),
    ("same_numbers_each_microbatch", DROPPING, "numbers of an earlier forward again in step 0"),
    ("same_numbers_each_step", DROPPING, "numbers of an earlier forward again in step 1"),
    ("no_dropout", DROPPING, "draws random numbers in step 0, as dropout does, and no rank"),
]


def compared_on(fabric, is_member, case, mistake):
    """What the comparison of one way says, with a mistake planted in the ranks."""
    fabric.connect([], tuple(range(case.num_processes)), ())
    agreement = agree(trainer_config(case), fabric)
    if not is_member:
        return None
    runtime = load_factory(case.runtime)(case, agreement, fabric, NO_FLIGHT)
    getattr(planted, mistake)(runtime)
    group = fabric.group_of(tuple(range(case.num_processes)))
    member = RankContext(case, runtime, fabric, group, NO_FLIGHT, agreement.config)
    try:
        return verifying.compared_on(member)
    except InexactError as error:
        return str(error)
    finally:
        runtime.close()


def outcome(ranks, mistake="nothing", **settings):
    """The comparison's result, which is the same on all ranks: what was compared, or an error."""
    case = dataclasses.replace(CASE, **settings)
    told = ranks.run(case.num_processes, compared_on, case, mistake)
    assert all(one == told[0] for one in told)
    return told[0]


@pytest.mark.parametrize("settings", SOUND, ids=lambda settings: json.dumps(settings)[:60])
def test_training_as_the_author_wrote_it_passes(ranks, settings):
    found = outcome(ranks, **settings)
    assert isinstance(found, Exactness), found
    assert found.notes == []
    assert found.num_gradients > 0
    kinds = {settings.get("model_dtype"), settings.get("train_autocast")}
    assert found.difference < (
        5e-2 if "bfloat16" in kinds else 1e-3 if "float32" in kinds else 1e-9
    )


@pytest.mark.parametrize(
    "seed",
    [pytest.param(n, marks=() if n in FEW else pytest.mark.thorough) for n in range(MANY)],
)
def test_every_way_to_run_a_training_is_as_the_author_wrote_it(ranks, seed):
    settings = drawn(seed)
    found = outcome(ranks, **settings)
    assert isinstance(found, Exactness), (found, settings)
    assert found.num_gradients > 0
    assert found.difference < 1e-9, settings
    assert all("which depends on the order of microbatches" in note for note in found.notes)


@pytest.mark.parametrize(("mistake", "settings", "place"), FOUND, ids=lambda value: str(value)[:30])
def test_a_planted_mistake_is_found_and_named(ranks, mistake, settings, place):
    found = outcome(ranks, mistake, **settings)
    assert isinstance(found, str), found
    assert re.search(place, found), found


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
    assert isinstance(outcome(ranks, model_preset=path), Exactness)
    found = outcome(ranks, "other_weight_of_a_checkpoint", model_preset=path)
    assert re.search(r"^model\.layers\.2\.mlp\.up_proj\.weight on rank 1 at the beginning ", found)


@pytest.mark.parametrize(
    "architecture",
    ["gpt_neox", pytest.param("gemma2", marks=pytest.mark.thorough), "qwen3_moe"],
)
def test_a_configuration_passes(ranks, tmp_path, architecture):
    """The configurations have dropout, scaled tied embeddings, or experts."""
    changes = {"hidden_dropout": 0.2} if architecture == "gpt_neox" else {}
    path = configuration_folder(tmp_path, architecture, **changes)
    found = outcome(ranks, model_preset=path, model_seed=5, model_dtype="float32")
    assert isinstance(found, Exactness), found


def test_an_auxiliary_loss_that_is_left_out_is_said(ranks, tmp_path):
    path = configuration_folder(tmp_path, "qwen3_moe", output_router_logits=True)
    found = outcome(ranks, model_preset=path, model_dtype="float32")
    assert found.notes == ["the router's auxiliary loss, which is not trained"]


def test_an_emulated_run_and_a_preset_are_not_verified_and_a_program_file_is(tmp_path):
    emulated = dataclasses.replace(CASE, device="emulated", model_preset="llama-tiny")
    told = verifying.verify(tmp_path, emulated, Measure(), None, None)
    assert told.how == "no: an emulated run computes nothing"
    preset = dataclasses.replace(CASE, model_preset="llama-tiny")
    assert not record.is_asked_for(preset)
    program = dataclasses.replace(preset, schedule="csv:a.csv", program_digest="1")
    assert record.is_asked_for(program)
    assert record.is_asked_for(CASE)


def test_what_decides_what_is_trained_is_verified_anew_and_what_does_not_is_not(
    tmp_path, monkeypatch
):
    (tmp_path / "written.py").write_text("import helper\nx = 1\n")
    (tmp_path / "helper.py").write_text("x = 1\n")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"1")

    def key(program=None, **settings):
        case = dataclasses.replace(CASE, **settings)
        return record.key_of(case, program)

    def keys_of_files():
        return key(model_preset=str(folder)), key(model_preset="written:build")

    assert key() == key(seq_len=99, train_learning_rate=1.0, data_seed=7, launch_bind=False)
    others = {"world_size": 4, "schedule": "zbv", "model_seed": 1, "train_recompute": True}
    others |= {"model_partition": (1, 7), "runtime": "torch", "train_clip_norm": 1.0}
    others |= {"replicas": 2, "sharding_policy": "zero3", "train_autocast": "bfloat16"}
    found = [build_program(name, 2, 4) for name in ("1f1b", "afab")]  # by the solver
    keys = [key(), *map(key, found), *(key(**{name: value}) for name, value in others.items())]
    assert len(set(keys)) == len(keys)
    before = keys_of_files()
    (tmp_path / "helper.py").write_text("x = 2\n")
    (folder / "model.safetensors").write_bytes(b"2")
    assert all(now != then for now, then in zip(keys_of_files(), before, strict=True))


ODD = """\
name = "odd"
num_microbatches = 4
seq_len = 16
measure = {warmup_steps = 1, max_warmup_steps = 1, steps = 8}
train.learning_rate = 1e-2

[grid]
model.preset = [
    "authors:viewing", "authors:drifting", "authors:growing", "authors:differentiating",
    "authors:swapping", "authors:fixed", "authors:single", "authors:Redrawing",
]

[[override]]
where = {model.preset = ["authors:fixed", "authors:single", "authors:Redrawing"]}
set = {seq_len = 24}

[[override]]
where = {model.preset = "authors:Redrawing"}
set = {world_size = 2, model = {split = "trace", split_points = ["drop"]}}

[[override]]
where = {model.preset = ["authors:viewing", "authors:drifting"]}
set = {world_size = 1, replicas = 2, sharding.policy = "zero3"}

[[override]]
where = {model.preset = ["authors:differentiating", "authors:swapping"]}
set = {schedule = "zb_h1"}

[[override]]
where = {model.preset = "authors:differentiating"}
set = {train.autocast = "bfloat16"}
"""
SAID = {
    "viewing": r"Viewing keeps a view of 2\.layer\.weight in its attribute top",
    "drifting": "the loss in step 0 is .*, the author's module .*; gradient of .* is .* away",
    "growing": r"layers 0 to .: the forward gives a message of shapes \[\[1, 22, 16\]\]",
    "differentiating": r"1\.inner\.weight: a gradient is taken through it within the forward",
}


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """The runs of odd models of an author, by their names."""
    folder = tmp_path_factory.mktemp("odd")
    shutil.copy(HERE / "authors.py", folder)
    (folder / "a.toml").write_text(ODD)
    ppbench("sweep", "a.toml", "--no-report", folder=folder)
    return Store(folder / "results").last_sweep().runs.set_index("model_preset")


def test_what_used_to_train_wrong_in_silence_is_exact_or_says_what_is_wrong(odd):
    """Views that sharding leaves behind, weights that a forward changes, messages that grow, and
    under a split backward layers that differentiate themselves or swap their weights."""
    for name, words in SAID.items():
        run = odd.loc[f"authors:{name}"]
        assert run["status"] == "invalid", name
        assert re.search(words, run["error"]), run["error"]
    swapping = odd.loc["authors:swapping"]
    assert swapping["status"] == "ok"
    assert swapping["verified"].startswith("against the factory's module")


def test_a_model_that_takes_one_length_or_one_precision_is_compared_as_it_can_be(odd):
    """One that runs in single precision alone, and cannot be compared in it, is ok."""
    for name, words in (
        ("fixed", "24 tokens in float64"),
        ("single", "16 tokens in float32"),
        ("Redrawing", "no: the model draws random numbers, and drop, where a stage"),
    ):
        run = odd.loc[f"authors:{name}"]
        assert run["status"] == "ok", run["error"]
        assert words in run["verified"]
    assert odd.loc["authors:Redrawing", "verified"].startswith("no: ")


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
    how = "against the factory's module, unsplit: weights, loss and 28 gradients of 4 steps"
    assert all(run["verified"].startswith(how) for run in both)
    assert sorted("(before, on this machine)" in run["verified"] for run in both) == [False, True]
    assert all(0 <= run["verified_difference"] < 1e-9 for run in both)
    folder, _ = swept
    kept = [path.name for path in (folder / "results" / "verified").iterdir()]
    assert len([name for name in kept if "-" not in name]) == 1  # others are losses


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


def test_an_authors_module_that_fails_alone_makes_its_run_invalid_and_says_why(runs):
    failing = runs["authors:failing", 12]
    assert failing["status"] == "invalid"
    assert "itself fails when it is called unsplit: RuntimeError: the author's" in failing["error"]
    assert failing["verified"] == "no: the run failed"


def test_a_verification_that_runs_out_of_memory_costs_itself_alone(runs):
    run = runs["authors:too_large", 12]
    assert run["status"] == "ok"
    assert run["verified"] == "no: the unsplit module ran out of memory"


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
