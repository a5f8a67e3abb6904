"""Partitions in the forms of other trainers, and the readers of those forms."""

import json
import random

import pytest

from engine.plan.program import Placement, loop_placement, v_placement
from ppbench.planning.grammars import GrammarError, layers_in_layout, layers_in_modules
from ppbench.planning.partition_text import (
    HandoverError,
    megatron_layout,
    torchtitan_modules,
    torchtitan_schedule,
)

DOCUMENTED = [
    # the examples of Megatron-LM's and Megatron-Bridge's pages that have no m
    ("Et*2|(t*2|)*34,t*3|(t*2|)*3,tL", 8, (2, *(2,) * 34, 3, *(2,) * 3, 1)),
    ("Et|t|tL", 3, (1, 1, 1)),
    ("E|t|t|L", 2, (0, 1, 1, 0)),
    ("Et||tL", 3, (1, 0, 1)),
    ("(Et)*1|(|tt)*2,tL", 2, (1, 0, 2, 3)),
]


@pytest.mark.parametrize(("text", "ranks", "layers"), DOCUMENTED)
def test_a_layout_is_read_as_its_grammar_says(text, ranks, layers):
    assert layers_in_layout(text, ranks) == layers


@pytest.mark.parametrize(
    ("text", "ranks", "words"),
    [
        ("Et|tL", 3, "2 stages cannot be shared evenly by 3 ranks"),
        ("Ettt|(tt|)*29,m|L", 4, "has m"),
        ("t|EtL", 2, "expected one E"),
        ("Et|t", 2, "one L"),
        ("Et|EtL", 2, "one E"),
        ("Et|Lt", 2, "then one L"),
        ("", 1, "expected one E"),
        ("Et|(t|tL", 3, "not closed"),
        ("Et|((t|)*2)*2,tL", 6, "holds another"),
        ("Et|(t|)tL", 3, "need a content and a number"),
        ("Et|()*2tL", 2, "need a content"),
        ("Et*|tL", 2, "\\* needs a number"),
        ("Et*2*3|tL", 2, "'\\*' is none of"),
        ("Et |tL", 2, "' ' is none of"),
        ("Et|tL)", 2, "'\\)' is none of"),
        ("Et*-2|tL", 2, "needs a number"),
    ],
)
def test_what_megatron_refuses_is_no_layout(text, ranks, words):
    with pytest.raises(GrammarError, match=words):
        layers_in_layout(text, ranks)


@pytest.mark.parametrize(
    ("layers", "ranks", "text"),
    [
        ((2, *(2,) * 34, 3, *(2,) * 3, 1), 8, "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL"),
        ((8,), 1, "Et*8L"),
        ((3, 5), 2, "Et*3|t*5L"),
        ((0, 1, 0, 2), 2, "E|t||t*2L"),
        ((1, *(3, 2) * 6, 0), 2, "Et|(t*3|t*2|)*6,L"),
        ((0, *(0,) * 10, 4), 4, "E|(|)*10,t*4L"),
    ],
)
def test_a_layout_says_what_repeats_once(layers, ranks, text):
    assert megatron_layout(layers, loop_placement(ranks, len(layers) // ranks)) == text


@pytest.mark.parametrize(
    ("placement", "where"),
    [
        (v_placement(4), "stage 4 of 8 belongs to rank 0 .* here to rank 3"),
        (Placement((0, 0, 1, 1), 2), "stage 1 of 4 belongs to rank 1"),
        (Placement((0, 1, 0), 2), "stage 2 of 3 belongs to rank 0"),
    ],
    ids=["V", "blocks", "uneven"],
)
def test_other_placements_than_loops_are_no_layout(placement, where):
    with pytest.raises(HandoverError, match=where):
        megatron_layout((1,) * placement.num_stages, placement)


def drawn_layers(rng, num_stages):
    """Runs of a few counts, empty stages among them: what repeats, and what nearly does."""
    layers = []
    while len(layers) < num_stages:
        pattern = [rng.choice([0, 0, 1, 2, 3, 12]) for _ in range(rng.randint(1, 3))]
        layers += pattern * rng.randint(1, 12)
    return tuple(layers[:num_stages])


def test_every_layout_is_read_back_and_none_is_longer_than_it_need_be(is_thorough):
    rng = random.Random(23)
    for _ in range(20_000 if is_thorough else 300):
        ranks, v = rng.randint(1, 16), rng.randint(1, 4)
        layers = drawn_layers(rng, ranks * v)
        text = megatron_layout(layers, loop_placement(ranks, v))
        assert layers_in_layout(text, ranks) == layers
        plain = "|".join("t" * count if count < 2 else f"t*{count}" for count in layers)
        assert len(text) <= len(plain) + len("EL")
        assert "((" not in text


def test_every_list_of_modules_is_read_back(is_thorough):
    rng = random.Random(5)
    for _ in range(20_000 if is_thorough else 300):
        layers, head = drawn_layers(rng, rng.randint(1, 40)), rng.choice(["output", "lm_head"])
        assert layers_in_modules(torchtitan_modules(layers, head), head) == layers


def test_modules_are_named_as_torchtitan_has_them():
    assert json.loads(torchtitan_modules((1, 2, 0))) == [
        ["tok_embeddings", "layers.0"],
        ["layers.1", "layers.2"],
        ["norm", "output"],
    ]
    assert json.loads(torchtitan_modules((1,), "lm_head")) == [
        ["tok_embeddings", "layers.0", "norm", "lm_head"]
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tok_embeddings", "is no list"),
        ('["tok_embeddings"]', "a list with a list"),
        ("[[1]]", "a list of names"),
        ("[]", "missing"),
        ('[["tok_embeddings", "layers.1"], ["layers.0", "norm", "output"]]', "at layers.1"),
        ('[["tok_embeddings", "layers.0"], ["layers.0", "norm", "output"]]', "at layers.0"),
        ('[["tok_embeddings", "layers.00"], ["norm", "output"]]', "at layers.00"),
        ('[["tok_embeddings", "layers.0"], ["norm"]]', "missing"),
        ('[["layers.0"], ["tok_embeddings", "norm", "output"]]', "at layers.0"),
        ('[["tok_embeddings", "norm", "output"], []]', "the head to the last"),
        ('[[], ["tok_embeddings", "norm", "output"]]', "to the first stage"),
    ],
)
def test_what_is_not_the_model_is_refused(text, words):
    with pytest.raises(GrammarError, match=words):
        layers_in_modules(text, "output")


def test_torchtitan_places_stages_by_a_schedule():
    assert torchtitan_schedule(loop_placement(4)) == "1F1B"
    assert torchtitan_schedule(loop_placement(4, 3)) == "Interleaved1F1B"
    assert torchtitan_schedule(v_placement(4)) == "ZBVZeroBubble"
    with pytest.raises(HandoverError, match="on ranks 0, 0, 1, 1"):
        torchtitan_schedule(Placement((0, 0, 1, 1), 2))
