"""A model of an architecture that declares no plan, from its folder to runs and a plan."""

import json

import pytest
from command import ppbench, printed
from transformers import GPT2Config, GPT2LMHeadModel

pytestmark = pytest.mark.usefixtures("warm_starts")

SWEEP = """
world_size = 2
num_microbatches = 4
seq_len = 16
[model]
preset = "./gpt2"
layers = "transformer.h"
[data]
source = "synthetic"
[measure]
warmup_steps = 1
max_warmup_steps = 1
steps = 1
launches = 1
[plan]
schedules = ["1f1b", "zb_h1"]
stages_per_rank = 1
microbatch_sizes = [1]
recompute = "none"
[grid]
schedule = ["zb_h1"]
"""


def test_a_gpt_2_is_swept_and_planned(tmp_path, monkeypatch):
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(n_layer=4, n_embd=32, n_head=4, n_positions=32, vocab_size=256, **ids)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    (tmp_path / "mine.toml").write_text(SWEEP)
    done = ppbench("sweep", "mine.toml", "--format", "json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(done.stdout)["runs"]
    assert run["status"] == "ok"
    assert run["verified"].startswith("against transformers' module, unsplit")
    monkeypatch.chdir(tmp_path)
    done = printed("plan", "mine.toml", "--effort", "0.05", "--format", "json")
    assert {one["schedule"] for one in json.loads(done.text)["proposals"]} == {"1f1b", "zb_h1"}
