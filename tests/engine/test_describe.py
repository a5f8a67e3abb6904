"""The facts that a sweep asks for, from the process that knows them."""

import json
import subprocess
import sys

import pytest
from models import configuration_folder

pytestmark = pytest.mark.usefixtures("warm_starts")


def request(model, **changes):
    default = {
        "name": model,
        "split": "auto",
        "split_points": [],
        "weights": "auto",
        "trust_remote_code": False,
        "dtype": "float32",
    }
    tokenizer = changes.pop("tokenizer", "auto")
    return {"spec": {**default, **changes}, "tokenizer": tokenizer}


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
    return ask("facts", requests)


def ask(question, asked):
    done = subprocess.run(
        [sys.executable, "-m", "engine.describe", question],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd="tests/engine",
        env={"PATH": "", "HF_HUB_OFFLINE": "1"},
    )
    return json.loads(done.stdout)


def test_architectures_are_checked_by_their_names():
    (check,) = ask("check", ["gpt2"])["checks"]
    assert (check["architecture"], check["status"], check["plan"]) == ("gpt2", "exact", "found")
    assert ask("check", ["gtp2"])["problem"].startswith('transformers has no causal LM "gtp2"')


def test_facts_of_models_that_can_be_used(facts):
    sizes = [(f["num_layers"], f["max_positions"], f["vocab_size"]) for f in facts[:4]]
    assert sizes == [(4, 1024, 256), (4, 128, 256), (8, None, 256), (2, None, 256)]
    assert all(f["problem"] is None for f in facts[:4])


def test_facts_of_models_that_cannot(facts):
    assert facts[4]["problem"]["key"] == "model.preset"
    assert "set split = " in facts[4]["problem"]["message"]
    assert facts[5]["problem"]["key"] == "data.tokenizer"
