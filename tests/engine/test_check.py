"""The check of architectures, and the facts that a sweep asks for, as the processes they are."""

import json
import subprocess
import sys

import pytest
from models import configuration_folder

from engine.check import architectures

pytestmark = pytest.mark.usefixtures("warm_starts")


def check(tmp_path, *names, num_ranks=2):
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks), "-m", "engine.check", str(out), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return done, lines


def test_every_causal_lm_with_a_plan_is_known():
    known = architectures()
    assert len(known) >= 75
    assert {"llama", "qwen3", "gemma2", "gpt_neox", "phi3", "olmo2", "mixtral"} <= set(known)


def test_an_architecture_is_exact_or_refused_with_its_own_reason(tmp_path):
    done, lines = check(tmp_path, "qwen3", "qwen3_moe", "gemma4_text", "gemma2")
    assert done.returncode == 0, done.stderr
    results = {line["architecture"]: line for line in lines}
    assert [results[name]["status"] for name in results] == ["exact", "exact", "refused", "exact"]
    assert results["qwen3"]["dtype"] == "float64"
    assert results["qwen3"]["gradient_difference"] < 1e-10
    assert results["qwen3_moe"]["gradient_difference"] < 1e-5
    assert (
        '"embed_tokens_per_layer" belongs, which has parameters' in results["gemma4_text"]["reason"]
    )
    assert [line["status"] for line in lines[:5]] == ["planned"] * 4 + ["started"]


def test_an_unknown_architecture_is_refused(tmp_path):
    done, lines = check(tmp_path, "llamma", num_ranks=1)
    assert done.returncode != 0
    assert 'no architecture "llamma" with a plan' in done.stderr
    assert not lines


def request(model, **changes):
    default = {
        "model": model,
        "split": "auto",
        "split_points": [],
        "weights": "auto",
        "trust_remote_code": False,
        "dtype": "float32",
        "tokenizer": "auto",
    }
    return {**default, **changes}


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    folder = configuration_folder(tmp_path_factory.mktemp("facts"), "qwen2")
    requests = [
        request("llama-tiny"),
        request(folder),
        request("models:sequential"),
        request("models:Tutorial", split="trace", split_points=["layers.2"]),
        request("models:Tutorial"),
        request("llama-tiny", tokenizer="/no/such/folder"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "engine.model.facts"],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd="tests/engine",
        env={"PATH": "", "HF_HUB_OFFLINE": "1"},
    )
    return json.loads(done.stdout)


def test_facts_of_models_that_can_be_used(facts):
    sizes = [(f["num_layers"], f["max_positions"], f["vocab_size"]) for f in facts[:4]]
    assert sizes == [(4, 1024, 256), (4, 128, 256), (8, None, 256), (2, None, 256)]
    assert all(f["problem"] is None for f in facts[:4])


def test_facts_of_models_that_cannot(facts):
    assert facts[4]["problem"]["key"] == "model.preset"
    assert "set split = " in facts[4]["problem"]["message"]
    assert facts[5]["problem"]["key"] == "data.tokenizer"
