"""The check of architectures, and the facts that a sweep asks for, as the processes they are."""

import json
import subprocess
import sys

import pytest
from models import configuration_folder
from pipeline import CPU, config

from engine.check import architectures, check_architectures
from engine.exactness import NoRoomError, try_author
from engine.trainer import Trainer

pytestmark = pytest.mark.usefixtures("warm_starts")


def test_every_causal_lm_with_a_plan_is_known():
    known = architectures()
    assert len(known) >= 75
    assert {"llama", "qwen3", "gemma2", "gpt_neox", "phi3", "olmo2", "mixtral"} <= set(known)


def test_an_architecture_is_exact_or_refused_with_its_own_reason():
    names = ["qwen3", "qwen3_moe", "gemma4_text", "gemma2"]
    results = {check.architecture: check for check in check_architectures(names)}
    assert [results[name].status for name in names] == ["exact", "exact", "refused", "exact"]
    assert results["qwen3"].dtype == "float64"
    assert results["qwen3"].largest_difference < 1e-10
    assert results["qwen3_moe"].largest_difference < 1e-5
    assert '"embed_tokens_per_layer" belongs, which has parameters' in results["gemma4_text"].reason


def test_an_architecture_that_fails_costs_itself_alone(monkeypatch):
    def broken(*_):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(Trainer, "step", broken)
    first, second = check_architectures(["llama", "nothing"])
    assert (first.status, first.reason) == ("error", "RuntimeError: no such luck")
    assert (second.status, second.has_failed) == ("error", True)


def test_a_comparison_for_which_there_is_no_room_is_not_begun():
    with pytest.raises(NoRoomError, match=r"it needs about 0\.0 GiB of memory, and 0\.0 are free"):
        try_author(config("1f1b", 1, 1), CPU, free_bytes=1000)
    try_author(config("1f1b", 1, 1), CPU, free_bytes=2**30)


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
        [sys.executable, "-m", "engine.describe", "facts"],
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
