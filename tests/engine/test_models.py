"""Exactness for architectures of transformers."""

import pytest
from models import configuration_folder
from pipeline import assert_exact, config

ARCHITECTURES = ("qwen2", "qwen3", "gemma2", "gpt_neox", "phi3", "olmo2")
HEADS = {"gpt_neox": {"lm_head.weight": "gpt_neox.embed_in.weight"}}
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
FOUR = pytest.param(4, marks=pytest.mark.thorough)  # what two ranks show as well: equal layers


@pytest.mark.parametrize("world_size", [2, FOUR])
@pytest.mark.parametrize(
    ("architecture", "tied"),
    [(name, False) for name in ARCHITECTURES]
    + [
        (name, True) if name in HEADS else pytest.param(name, True, marks=pytest.mark.thorough)
        for name in ARCHITECTURES
    ],
)
def test_an_architecture_is_exact(ranks, tmp_path, architecture, tied, world_size):
    """The names of what is tied are those of llama, of which other tests are, but for one."""
    folder = configuration_folder(tmp_path, architecture, tied=tied)
    shared = HEADS.get(architecture, TIED) if tied else None
    assert_exact(ranks, config("1f1b", world_size, 3, preset=folder), shared=shared)


@pytest.mark.parametrize("world_size", [2, FOUR])
@pytest.mark.parametrize(
    "tied", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["untied", "tied"]
)
def test_a_mixture_of_experts_is_exact(ranks, tmp_path, tied, world_size):
    folder = configuration_folder(tmp_path, "mixtral", tied=tied)
    settings = config("1f1b", world_size, 3, preset=folder, dtype="float32")
    assert_exact(ranks, settings, shared=TIED if tied else None, tolerance=1e-5)


def test_sliding_windows_are_kept_where_sequences_are_longer(ranks, tmp_path):
    folder = configuration_folder(tmp_path, "gemma2")
    assert_exact(ranks, config("1f1b", 3, 2, preset=folder, seq_len=40), shared=TIED)
