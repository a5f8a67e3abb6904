"""The trial of architectures: what of transformers is cut exactly, what is refused, and why."""

import pytest
from pipeline import CPU, config, lone_trainer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.exactness import compare
from engine.model import probe
from engine.model.probe import EXACT, architectures, check_architectures
from engine.model.tiny import tiny_config

KINDS = {
    "qwen3": ("exact", "declared", "float64"),
    "qwen3_moe": ("exact", "declared", "float32"),
    "gemma2": ("exact", "declared", "float64"),
    "gpt2": ("exact", "found", "float64"),
    "bert": ("exact", "found", "float64"),  # with embeddings that take names alone
    "camembert": ("exact", "found", "float64"),  # whose head has the first name of the shared table
    "falcon": ("exact", "found", "float64"),  # whose layers return tuples
    "mamba": ("exact", "found", "float64"),
    "gemma3": ("exact", "found", "float64"),  # two lists, of which token ids reach one
}
REFUSED = {
    "gemma4_text": '"model.embed_tokens_per_layer.weight" belongs, which has parameters',
    "zaya": '"model.input_hidden_states_scale" belongs',
    "xlm": "its forward calls the modules of transformer.attentions, transformer.layer_norm1",
    "zamba": "gradient of model.layers.1.shared_transf.self_attn",
    "gemma4_assistant": "has no usual configuration",
}


def test_every_causal_lm_is_known():
    assert len(architectures()) >= 180
    assert {"llama", "gpt2", "gpt_neox", "opt", "bloom", "mixtral"} <= set(architectures())


def test_an_architecture_is_exact_or_refused_with_its_own_reason():
    checks = {check.architecture: check for check in check_architectures([*KINDS, *REFUSED])}
    found = {name: checks[name] for name in KINDS}
    assert {name: (c.status, c.plan, c.dtype) for name, c in found.items()} == KINDS
    assert all(c.largest_difference < EXACT[c.dtype] for c in found.values())
    assert {checks[name].status for name in REFUSED} == {"refused"}
    assert [name for name, why in REFUSED.items() if why not in checks[name].reason] == []


def test_an_architecture_that_fails_costs_itself_alone(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(probe, "initialise", broken)
    monkeypatch.setattr(probe, "found_plan", broken)
    first, second = check_architectures(["gpt2", "llama"])
    assert (first.status, first.reason) == ("error", "RuntimeError: no such luck")
    assert (second.status, "no such luck" in second.reason) == ("refused", True)


@pytest.mark.thorough
def test_what_the_trial_calls_exact_trains_exactly_in_steps_of_a_trainer(tmp_path):
    """Another comparison, of another schedule: none that is called exact is trained wrong.

    A model that computes parts in float32 differs by their rounding, with a cut as without.
    """
    exact = [check for check in check_architectures(architectures()) if check.status == "exact"]
    assert len(exact) > 140
    for check in exact:
        folder = tmp_path / check.architecture
        tiny_config(CONFIG_MAPPING[check.architecture]()).save_pretrained(folder)
        cut, uncut = (
            difference(str(folder), check.dtype, schedule, stages_per_rank)
            for schedule, stages_per_rank in (("interleaved_1f1b", 2), ("1f1b", 1))
        )
        assert cut < max(EXACT[check.dtype], 1.01 * uncut), check.architecture


def difference(preset, dtype, schedule, stages_per_rank):
    shape = {"microbatch_size": 2, "seq_len": 24, "stages_per_rank": stages_per_rank}
    settings = config(schedule, 1, 4, preset=preset, dtype=dtype, **shape)
    trainer = lone_trainer(settings)
    try:
        return compare(trainer, settings, CPU).difference
    finally:
        trainer.close()
