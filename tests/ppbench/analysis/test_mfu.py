"""Exact figures of hand-written facts."""

import pytest

from engine.model.descriptions import Attention, FlopFacts
from ppbench.analysis.mfu import (
    Peak,
    datasheet_peak,
    mfu,
    mfu_figures,
    model_flops,
    total_peak,
)

FACTS = FlopFacts(1000, (Attention(16.0),) * 4)
CPU_PEAK = Peak(1e9, "measured matmul float32")


def test_palms_formula_is_6_n_and_12_l_h_s():
    flops = model_flops(FACTS, 100)
    assert (flops.per_token, flops.formula) == (6000 + 12 * 4 * 16 * 100, "6N+12Lhs (PaLM)")


def test_palms_own_model_comes_out_as_in_the_paper():
    """540.35 B parameters, 118 layers of 48 heads of 256, 2048 tokens, 238.3 K tokens/s on 6144
    chips of 275 TFLOP/s: "46.2 %" (section 4.1 and table 3)."""
    facts = FlopFacts(540_350_000_000, (Attention(48.0 * 256),) * 118)
    flops = model_flops(facts, 2048).per_token
    assert mfu(flops, 238_300, 6144 * 275e12) == pytest.approx(0.462, abs=0.001)


def test_a_window_bounds_what_its_layer_looks_back_at():
    facts = FlopFacts(10, (Attention(2.0, window=8), Attention(2.0)))
    assert model_flops(facts, 8).formula == "6N+12Lhs (PaLM)"
    longer = model_flops(facts, 20)
    assert longer.per_token == 60 + 12 * 2 * (8 + 20)
    assert longer.formula == "6N+12Lhs (PaLM); s is a layer's window where that is shorter"


def test_without_attention_or_length_it_is_6_n_and_says_so():
    assert model_flops(FACTS, "variable").per_token == 6000
    assert model_flops(FACTS, "variable").formula == "6N (sequence lengths vary)"
    unknown = model_flops(FlopFacts(7, note="attention is not known"), 5)
    assert (unknown.per_token, unknown.formula) == (42, "6N (attention is not known)")


def test_what_has_no_formula_has_no_mfu_but_a_reason():
    facts = FlopFacts(None, note="not given: mixture of experts")
    figures = mfu_figures(facts, 5, 100.0, [("cpu", CPU_PEAK)])
    assert figures == {
        "mfu": None,
        "mfu_formula": "not given: mixture of experts",
        "mfu_peak": "measured matmul float32",
        "model_flops_per_token": None,
        "peak_flops_per_s": CPU_PEAK.flops_per_s,
    }


def test_emulated_ranks_have_no_mfu():
    assert set(mfu_figures(None, 5, 100.0, []).values()) == {None}


def test_mfu_is_of_all_devices_and_a_shared_one_counts_once():
    peaks = [
        ("a cuda:0", Peak(2e6, "x")),
        ("a cuda:0", Peak(2e6, "x")),
        ("b cuda:0", Peak(3e6, "y")),
    ]
    assert total_peak(peaks) == Peak(5e6, "x + y")
    figures = mfu_figures(FlopFacts(1000, ()), 100, 50.0, peaks)
    assert figures["mfu"] == 6000 * 50 / 5e6


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H200", "bfloat16", 989.4),
        ("NVIDIA H100 NVL", "float32", 60),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5),
        ("A100-PCIE-40GB", "float64", 19.5),
        ("AMD Instinct MI250X", "bfloat16", 191.5),  # of one of its two dies
        ("Tesla V100-SXM2-16GB", "float64", 7.8),
        ("NVIDIA GeForce RTX 4090", "float32", 82.6),
    ],
)
def test_devices_are_known_by_the_names_their_drivers_give(name, dtype, tflops):
    assert datasheet_peak(name, dtype) == Peak(tflops * 1e12, f"datasheet {name} {dtype}")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("NVIDIA A10G", "float32"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "float32"),
        ("NVIDIA H100 80GB HBM2e", "bfloat16"),
        ("Tesla T4", "bfloat16"),
        ("AMD Instinct MI250X/MI250", "bfloat16"),  # a driver that does not tell which
        ("NVIDIA H20-3e", "bfloat16"),
    ],
)
def test_what_only_resembles_a_known_device_is_left_to_be_measured(name, dtype):
    assert datasheet_peak(name, dtype) is None
