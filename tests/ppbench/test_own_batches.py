"""The classifier of the page on own models, with its own batches and loss, is swept and planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import recordings
from command import inside, ppbench
from pages import DOCS, File, steps_of

from ppbench.store import Store

pytestmark = pytest.mark.usefixtures("warm_starts")

SWEEP = """\
name = "vit"
train = {microbatch_size = 2}
measure = {warmup_steps = 1, max_warmup_steps = 1, steps = 1}
model.preset = "vit:build"
num_microbatches = 4

[grid]
schedule = ["1f1b", "interleaved_1f1b", "zb_h1"]

[[override]]
where = {schedule = "interleaved_1f1b"}
set = {runtime = "torch"}
[[override]]
where = {schedule = "zb_h1"}
set = {world_size = 3}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page's factory and a sweep of it are."""
    folder = tmp_path_factory.mktemp("vit")
    steps = steps_of(DOCS / "howto/own-model-and-data.md")
    (factory,) = [file for file in steps if isinstance(file, File) and file.name == "vit.py"]
    (folder / "vit.py").write_text(factory.text)
    (folder / "vit.toml").write_text(SWEEP)
    return folder


def test_a_classifier_with_its_own_batches_is_exact_in_a_sweep(folder: Path) -> None:
    """On the engine and on torch's runtime, in whose steps the same losses come out."""
    done = ppbench("sweep", "vit.toml", "--no-report", folder=folder)
    assert done.returncode == 0, done.stderr
    runs = Store(folder / "results").last_sweep().runs
    assert (runs["status"] == "ok").all(), runs["error"].tolist()
    assert set(zip(runs["schedule"], runs["world_size"], runs["runtime"], strict=True)) == {
        ("1f1b", 2, "engine"),
        ("interleaved_1f1b", 2, "torch"),
        ("zb_h1", 3, "engine"),
    }
    assert runs["verified"].str.contains("gradients of 4 steps of 4 x 2 samples in float64").all()
    assert runs["verified_difference"].max() < 1e-10
    assert runs["last_loss"].max() - runs["last_loss"].min() < 1e-5
    assert set(runs["tokens_per_step"]) == {8}  # samples
    assert runs["mfu"].isna().all()


def test_its_plan_counts_samples_and_is_of_its_own_inputs(folder: Path) -> None:
    """Its costs are measured in a process of their own, which finds the factory."""
    small = ("--set", "plan.microbatch_sizes=[2]", "--set", "plan.recompute=none")
    small += ("--set", "schedule=1f1b", "--set", "plan.ranks=[2]", "--effort", "0.05")
    planned = inside("plan", "vit.toml", *small, "--format", "json", folder=folder)
    (first, *_) = json.loads(planned)["proposals"]
    assert first["tokens_per_s"] == pytest.approx(8 / first["step_ns"] * 1e9, rel=1e-3)


def test_settings_of_texts_are_refused_with_their_place(folder: Path) -> None:
    (folder / "text.toml").write_text(SWEEP.replace("\n[grid]", "seq_len = 64\n\n[grid]"))
    done = recordings.ppbench(["sweep", "text.toml", "--dry-run"], folder)
    assert done.exit_code == 2
    words = "text.toml:6: seq_len: does nothing: vit:build brings its own batches; remove it"
    assert words in done.stderr
    (folder / "both.toml").write_text(
        'grid.model.preset = ["llama-tiny", "vit:build"]\n[[override]]\n'
        'where = {model.preset = "llama-tiny"}\nset = {seq_len = 64}\n'
    )
    assert recordings.ppbench(["sweep", "both.toml", "--dry-run"], folder).exit_code == 0
