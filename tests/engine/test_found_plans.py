"""Architectures that declare no plan: cut by the one that is found, exact from folder and factory.

The oracle is the author's module, with the ranks' weights: what `from_pretrained` reads, or what
the factory returns.
"""

import models
import pytest
from pipeline import CPU, assert_exact, config
from transformers import GPT2Model

from engine.model.author import author_module

TIED = {
    "gpt2": {"lm_head.weight": "transformer.wte.weight"},
    "opt": {"lm_head.weight": "model.decoder.embed_tokens.weight"},
    "bloom": {"lm_head.weight": "transformer.word_embeddings.weight"},
    "gptj": None,
    "two_lists": {"lm_head.weight": "transformer.wte.weight"},
}


def author(settings, initial):
    """The author's own module with these weights."""
    module, _ = author_module(settings.model, CPU)
    missing, unexpected = module.load_state_dict(initial, strict=False)
    assert not unexpected
    assert not set(missing) - set(module.all_tied_weights_keys)
    return module


@pytest.mark.parametrize("architecture", ["gpt2", "opt", "bloom", "gptj"])
@pytest.mark.parametrize(
    ("schedule", "world_size", "is_folder"),
    [("1f1b", 2, True), ("interleaved_1f1b", 2, False), ("zb_h1", 3, True)],
)
def test_an_architecture_without_a_plan_is_exact(
    ranks, tmp_path, architecture, schedule, world_size, is_folder
):
    preset = f"models:{architecture}"
    if is_folder:
        getattr(models, architecture)().save_pretrained(preset := str(tmp_path / architecture))
    settings = config(schedule, world_size, 4, preset=preset, microbatch_size=2)
    assert_exact(ranks, settings, shared=TIED[architecture], build=author)


def test_a_list_that_is_named_is_cut(ranks):
    keys = {"layers": "transformer.h", "after_layers": ("tail", "transformer.ln_f")}
    settings = config("1f1b", 2, 3, preset="models:two_lists", **keys)
    assert_exact(ranks, settings, shared=TIED["two_lists"], build=author)


def test_a_checkpoint_of_the_base_model_alone_is_read(ranks, tmp_path):
    """As the hub's gpt2 is: its names begin below the head's model."""
    GPT2Model(models.configuration("gpt2")).save_pretrained(tmp_path)
    settings = config("1f1b", 2, 3, preset=str(tmp_path))
    outcomes = assert_exact(ranks, settings, shared=TIED["gpt2"], build=author)
    read = author_module(settings.model, CPU)[0].state_dict()
    assert all(t.equal(read[name]) for one in outcomes for name, t in one.initial.items())
