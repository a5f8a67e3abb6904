"""The command-line trainer as people start it: processes, their words, files and exit codes.

A start costs seconds of imports on each rank, so few runs serve many tests.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import models
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, load
from transformers import Qwen2ForCausalLM

from engine.train import prepare
from engine.train_options import OptionError, configuration, read_options

pytestmark = pytest.mark.usefixtures("warm_starts")

ALONE = [sys.executable, "-m", "engine.train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TWO_RANKS = [*TORCHRUN, "-m", "engine.train"]
TINY = ["--model", "llama-tiny", "--seq-len", "32", "--global-batch-size", "4", "--threads", "1"]
STEPS = [*TINY, "--max-steps", "6", "--learning-rate", "1e-3", "--clip-norm", "1"]
STEPS += ["--lr-schedule", "cosine", "--lr-warmup-steps", "1", "--device", "cpu"]
PATIENCE_S = 120
LINE = re.compile(r"step (\d+) \| loss (\d+\.\d{4}) \| ([\d,]+) tokens \| ([\d,]+) tokens/s")


def start(command: list[str], *options: str | Path) -> subprocess.Popen[str]:
    ours = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [*command, *map(str, options)],
        env=ours | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@dataclass
class Done:
    stdout: str
    stderr: str
    code: int

    @property
    def losses(self) -> dict[int, float]:
        """By step, as printed; there is nothing else on standard output."""
        matches = [LINE.fullmatch(line) for line in self.stdout.splitlines()]
        return {int(match[1]): float(match[2]) for match in matches}

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("error: ")]


def finish(process: subprocess.Popen[str]) -> Done:
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    return Done(stdout, stderr, process.returncode)


@dataclass
class Runs:
    folder: Path
    whole: Done  # two ranks, six steps, saved at 4 and 6
    alone: Done  # one rank, from 4
    replicated: Done  # two replicas of one rank, sharded, from 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    saving = ["--save", folder / "whole", "--save-every", "4", "--log-file", folder / "log.jsonl"]
    whole = finish(start(TWO_RANKS, *STEPS, *saving))
    (folder / "alone").mkdir()
    shutil.copytree(folder / "whole" / "step-000004", folder / "alone" / "step-000004")
    from_latest = ["--resume", "latest", "--save", folder / "alone"]
    from_latest += ["--log-file", folder / "log.jsonl"]
    sharded = ["--replicas", "2", "--sharding", "zero3", "--save", folder / "replicated"]
    from_4 = ["--resume", folder / "whole" / "step-000004"]
    both = start(ALONE, *STEPS, *from_latest), start(TWO_RANKS, *STEPS, *sharded, *from_4)
    alone, replicated = map(finish, both)
    for run in (whole, alone, replicated):
        assert run.code == 0, run.stderr
    return Runs(folder, whole, alone, replicated)


def tensors_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The model's tensors, and the optimizer's put together by torch, as `parameter/entry`."""
    tensors = {}
    for folder in (checkpoint, checkpoint / "optimizer"):
        reader = HuggingFaceStorageReader(str(folder))
        saved = reader.read_metadata().state_dict_metadata.items()
        found = {name: torch.empty(t.size, dtype=t.properties.dtype) for name, t in saved}
        load(found, storage_reader=reader, no_dist=True)
        tensors |= found
    return tensors


def test_each_step_is_a_line_and_losses_fall(runs):
    assert list(runs.whole.losses) == [1, 2, 3, 4, 5, 6]
    assert runs.whole.losses[6] < runs.whole.losses[1] - 0.2
    assert "| 768 tokens |" in runs.whole.stdout


@pytest.mark.parametrize("name", ["alone", "replicated"])
def test_what_two_ranks_saved_one_rank_and_replicas_resume_to_the_same_end(runs, name):
    resumed = getattr(runs, name)
    assert resumed.losses == {step: loss for step, loss in runs.whole.losses.items() if step > 4}
    assert "| 640 tokens |" in resumed.stdout
    assert "after step 4" in resumed.stderr
    assert ("2 replicas (zero3), 2 x cpu" in resumed.stderr) == (name == "replicated")
    ours = tensors_in(runs.folder / name / "step-000006")
    theirs = tensors_in(runs.folder / "whole" / "step-000006")
    assert ours.keys() == theirs.keys()
    assert any(name.endswith("/exp_avg_sq") for name in ours)
    for name, tensor in ours.items():
        assert torch.allclose(tensor, theirs[name], rtol=1e-3, atol=1e-6), name


def test_a_resumed_log_has_each_step_once(runs):
    records = [json.loads(line) for line in (runs.folder / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["tokens"] for record in records] == [128 * step for step in range(1, 7)]
    assert [round(record["loss"], 4) for record in records] == list(runs.whole.losses.values())
    assert {record["num_tokens"] for record in records} == {128}
    assert records[-1]["gradient_norm"] > 0
    assert records[0]["learning_rate"] == 0 < records[-1]["learning_rate"]
    assert records[-1]["tokens_per_s"] > 0


ENOUGH = ["--max-steps", "1"]


def test_bad_input_is_one_line():
    done = finish(start(ALONE, *TINY, "--seq-len", "4096", *ENOUGH))
    assert done.code == 2
    assert done.stdout == ""
    assert "1024 positions" in done.stderr
    assert done.error_lines == done.stderr.splitlines()
    assert len(done.error_lines) == 1


def test_what_is_wrong_on_all_ranks_is_said_once():
    done = finish(start(TWO_RANKS, "--model", "./missing", *ENOUGH))
    assert done.code != 0
    assert len(done.error_lines) == 1
    assert 'no model "./missing"' in done.error_lines[0]
    assert "rank" not in done.error_lines[0]
    assert done.stderr.index("error: ") < done.stderr.index("Traceback")  # torchrun's own


def test_what_is_wrong_on_one_rank_alone_ends_all(tmp_path):
    model = Qwen2ForCausalLM._from_config(models.configuration("qwen2"))
    tensors = {n: t for n, t in model.state_dict().items() if "layers.3.mlp.up" not in n}
    model.config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    done = finish(start(TWO_RANKS, "--model", tmp_path, "--device", "cpu", *ENOUGH))
    assert done.code != 0
    assert len(done.error_lines) == 1
    assert "rank 1: " in done.error_lines[0]
    assert "has no tensor for model.layers.3.mlp.up_proj.weight" in done.error_lines[0]


def test_an_interrupted_run_says_how_to_go_on(tmp_path):
    """Stages without parameters are asked for, so nothing is said of them."""
    endless = [
        *TINY,
        *STAGES,
        "0,1,1,1,1,0,0",
        "--max-steps",
        "100000",
        "--save",
        tmp_path,
        "--save-every",
        "1",
    ]
    process = start(ALONE, *endless)
    for line in process.stdout:
        if line.startswith("step 3 "):
            break
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.code == 130
    assert re.search(r"stopped after step \d+; .*step-\d+ is saved: .*--resume latest", done.stderr)
    assert "Traceback" not in done.stderr
    assert "no parameters" not in done.stderr


STAGES = ["--schedule", "looped_bfs", "--stages-per-rank", "7", "--partition"]


@pytest.fixture(scope="module")
def broken_down() -> Done:
    """A run whose weights become infinite, and whose last stages have none by accident."""
    options = [*STAGES, "uniform", "--max-steps", "4", "--learning-rate", "1e30"]
    return finish(start(ALONE, *TINY, *options))


def test_a_run_that_breaks_down_says_so_at_once_with_step_and_rank(broken_down):
    assert broken_down.code == 0
    lines = broken_down.stderr.splitlines()
    [caution] = [line for line in lines if line.startswith("caution: ")]
    assert re.match(r"caution: step [23]: .* is not finite on rank 0 \(NaN or infinite\)", caution)


def test_a_stage_without_parameters_is_noted_unless_it_was_asked_for(broken_down):
    notes = [line for line in broken_down.stderr.splitlines() if "no parameters" in line]
    assert [note.partition(":")[0] for note in notes] == ["stage 5 has no parameters"]


RECOMPUTED = ["--max-steps", "1", "--schedule", "looped_bfs", "--recompute-stages"]


@pytest.mark.parametrize(
    ("words", "value"),
    [([*RECOMPUTED, "true, false"], (True, False)), (RECOMPUTED[:2], False)],
    ids=["some", "none"],
)
def test_stages_that_are_recomputed_are_listed(words, value):
    options = read_options(words)
    assert configuration(options, 1).recompute == value


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--global-batch-size", "4", "--microbatch-size", "3", *ENOUGH], "not a multiple of 3"),
        (["--global-batch-size", "4", "--replicas", "3", *ENOUGH], "not a multiple of 3"),
        ([*TINY, "--replicas", "2", *ENOUGH], "does not divide the 1 processes"),
        ([], "--max-tokens"),
        (["--seq-len", "long", *ENOUGH], '--seq-len is "long"; expected N.variable'),
        (["--max-steps", "0"], '--max-steps is "0"; expected N≥1'),
        (["--learning-rate", "fast", *ENOUGH], '--learning-rate is "fast"; expected X≥0'),
        (["--dtype", "float8", *ENOUGH], '--dtype is "float8"; expected float32.float64.bfloat16'),
        (["--steps", "3"], "--steps"),
        (["--resume", "latest", *ENOUGH], "--save"),
        ([*RECOMPUTED, "true,maybe"], '--recompute-stages is "true,maybe"; expected true.false'),
        ([*RECOMPUTED, "true,false", "--recompute"], "--recompute means all stages"),
    ],
)
def test_options_that_cannot_be_are_refused(words, problem):
    with pytest.raises(OptionError, match=problem):
        configuration(read_options(words), 1)


def test_a_cosine_over_tokens_needs_to_know_how_many_a_batch_has():
    words = ["--model", "own_models:vit", "--lr-schedule", "cosine", "--max-tokens", "1000"]
    launch = SimpleNamespace(world_size=1, local_rank=0)
    with pytest.raises(OptionError, match=r"tokens a batch of the factory has .* --lr-decay-steps"):
        prepare([*words, "--device", "cpu"], launch)
    prepare([*words, "--device", "cpu", "--lr-decay-steps", "5"], launch)


def test_help_names_its_groups():
    done = finish(start(ALONE, "--help"))
    assert done.code == 0
    for panel in ("Model", "Data", "Pipeline", "Optimizer", "Precision", "Checkpoints"):
        assert f"\n{panel}" in done.stdout
