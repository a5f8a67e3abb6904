"""FLOPs by formula against those that torch counts while the unsplit model runs."""

import pytest
import torch
from models import configuration_folder
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from engine.model.descriptions import Attention
from engine.model.flops import RECORDING, flop_facts
from engine.model.spec import ModelSpec
from engine.model.split import open_model
from ppbench.analysis.mfu import model_flops

CPU = torch.device("cpu")
BATCH, SEQ_LEN = 2, 96


def opened(name, **settings):
    return open_model(ModelSpec(name, **settings), (BATCH, SEQ_LEN), CPU)


def counted_per_token(stage):
    """FLOPs per token, with attention as plain products: torch counts no fused ones on the CPU."""
    ids = torch.zeros(BATCH, SEQ_LEN, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        (logits,) = stage(ids)
        logits.sum().backward()
    return counter.get_total_flops() / (BATCH * SEQ_LEN)


def num_elementwise(stage):
    """Weights of norms, and biases: they belong to N, and torch counts matrix products only."""
    return sum(p.numel() for p in stage.own_parameters().values() if p.dim() == 1)


@pytest.mark.parametrize("name", ["llama-tiny", "llama-tiny-tied"])
def test_the_formula_is_what_torch_counts_plus_six_for_each_weight_of_a_norm(name):
    """Exactly: torch, too, counts attention in full, masked half included.

    Per layer and token, scores and their product with the values are 2 h s FLOPs each, and their
    gradients twice that: 12 h s. Tied embeddings multiply once, in the head.
    """
    model = opened(name)
    stage = model.build_stage([range(model.num_layers)], 0, CPU)
    flops = model_flops(flop_facts(model), SEQ_LEN)
    assert flops.formula == "6N+12Lhs (PaLM)"
    assert flops.per_token == counted_per_token(stage) + 6 * num_elementwise(stage)
    assert flops.per_token == pytest.approx(counted_per_token(stage), rel=0.004)


def test_keys_wider_than_values_and_windows_are_found_by_running(tmp_path):
    narrow = configuration_folder(tmp_path, "minicpm3", v_head_dim=8)
    facts = flop_facts(opened(narrow))
    assert facts.attentions == (Attention(width=4 * (16 + 8) / 2),) * 4
    mixed = flop_facts(opened(configuration_folder(tmp_path, "gemma3_text"))).attentions
    assert {attention.window for attention in mixed} == {8, None}


def test_layers_without_attention_count_as_their_weights(tmp_path):
    facts = flop_facts(opened(configuration_folder(tmp_path, "qwen3_5_text")))
    assert len(facts.attentions) == 2
    assert facts.note == "L are the layers with attention"


def test_experts_have_no_formula(tmp_path):
    facts = flop_facts(opened(configuration_folder(tmp_path, "mixtral")))
    assert (facts.num_multiplying, facts.attentions) == (None, None)
    assert facts.note == "not given: mixture of experts"


@pytest.mark.parametrize("name", ["sequential", "tied_sequential"])
def test_a_sequential_has_its_weights_without_what_is_looked_up(name):
    model = opened(f"models:{name}")
    looked_up = 256 * 32 if name == "sequential" else 0
    facts = flop_facts(model)
    assert facts.num_multiplying == model.num_parameters - looked_up
    assert (facts.attentions, facts.note) == (None, "attention is not known")


def test_a_factorys_model_is_looked_at_and_left_as_it_is():
    model = opened("models:small_llama")
    facts = flop_facts(model)
    assert facts.attentions == (Attention(width=32.0),) * 4
    assert model.skeleton().config._attn_implementation != RECORDING
    stage = model.build_stage([range(4)], 0, CPU)
    expected = counted_per_token(stage) + 6 * num_elementwise(stage)
    assert model_flops(facts, SEQ_LEN).per_token == expected
