"""Exactness for every kind of model: transformers' architectures, a Sequential, a traced module."""

import functools

import models
import pytest
import traced_models
from models import configuration_folder
from pipeline import assert_exact, config

from engine.run.optimizer import OptimizerSpec

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gpt_neox", "phi3", "olmo2")
HEADS = {"gpt_neox": {"lm_head.weight": "gpt_neox.embed_in.weight"}}
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
ONE = pytest.param(1, marks=pytest.mark.thorough)
TWO = pytest.param(2, marks=pytest.mark.thorough)  # what four ranks show as well
FOUR = pytest.param(4, marks=pytest.mark.thorough)  # what two ranks show as well: equal layers
SGD = OptimizerSpec("sgd", 1e-2, momentum=0.9)
"""For attention with biases: that of the keys has no gradient but rounding, of which AdamW makes
steps as large as any."""


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


@functools.cache
def build(factory):
    def unsplit(settings, initial):
        model = factory().to(settings.model.torch_dtype)
        missing, unexpected = model.load_state_dict(initial, strict=False)
        names = {id(p): name for name, p in model.named_parameters()}
        aliases = {
            n for n, p in model.named_parameters(remove_duplicate=False) if names[id(p)] != n
        }
        assert not unexpected
        assert set(missing) <= aliases
        return model.train()

    return unsplit


@pytest.mark.parametrize("schedule", [pytest.param("afab", marks=pytest.mark.thorough), "1f1b"])
@pytest.mark.parametrize("world_size", [ONE, TWO, 4])
@pytest.mark.parametrize("name", ["sequential", "tied_sequential"])
def test_a_sequential_is_exact(ranks, name, world_size, schedule):
    settings = config(schedule, world_size, 3, preset=f"models:{name}", optimizer=SGD)
    shared = {"0.weight": "0.weight"} if name.startswith("tied") else None
    assert_exact(ranks, settings, shared=shared, build=build(getattr(models, name)))


def test_a_sequential_with_empty_stages_is_exact(ranks):
    settings = config(
        "1f1b", 4, 3, preset="models:sequential", partition=(0, 5, 0, 3), optimizer=SGD
    )
    assert_exact(ranks, settings, build=build(models.sequential))


def test_a_sequential_with_variable_lengths_is_exact(ranks):
    settings = config(
        "1f1b",
        3,
        4,
        preset="models:sequential",
        seq_len="variable",
        max_seq_len=40,
        microbatch_size=2,
        optimizer=SGD,
    )
    assert_exact(ranks, settings, build=build(models.sequential))


SPLITS = {2: ("layers.2",), 3: ("layers.1", "layers.3"), 4: ("layers.1", "layers.2", "norm")}


@pytest.mark.parametrize(
    ("name", "world_size", "schedule"),
    [
        pytest.param("Tutorial", 2, "afab", marks=pytest.mark.thorough),
        pytest.param("Tutorial", 3, "1f1b", marks=pytest.mark.thorough),
        pytest.param("Tutorial", 4, "1f1b", marks=pytest.mark.thorough),
        ("TiedTutorial", 2, "1f1b"),
        pytest.param("TiedTutorial", 4, "afab", marks=pytest.mark.thorough),
    ],
)
def test_a_traced_module_is_exact(ranks, name, world_size, schedule):
    settings = config(
        schedule,
        world_size,
        3,
        preset=f"models:{name}",
        split="trace",
        split_points=SPLITS[world_size],
        microbatch_size=2,
        optimizer=SGD,
    )
    shared = dict.fromkeys(("output.weight",), "tok_embeddings.weight")
    shared = shared if name == "TiedTutorial" else None
    assert_exact(ranks, settings, shared=shared, build=build(getattr(models, name)))


def test_a_traced_module_with_an_empty_stage_is_exact(ranks):
    settings = config(
        "1f1b",
        3,
        3,
        preset="traced_models:Frame",
        split="trace",
        split_points=("second",),
        optimizer=SGD,
    )
    outcomes = assert_exact(ranks, settings, build=build(traced_models.Frame))
    assert 0 in outcomes[0].layers
