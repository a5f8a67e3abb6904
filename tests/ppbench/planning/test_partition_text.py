"""Partitions in the forms of other trainers, read back by those trainers' grammars."""

import itertools
import json
import random
import re

import pytest

from engine.plan.program import Placement, loop_placement, v_placement
from ppbench.planning.handover import (
    HandoverError,
    megatron_layout,
    torchtitan_modules,
    torchtitan_schedule,
)


def layers_in_layout(text):
    """The layers of each stage of a Megatron-LM layout: symbols and groups with `*` and a number.

    Groups are not nested, and commas mean nothing.
    """
    items = re.compile(r"(E|t|L|\|)(?:\*(\d+))?")

    def repeated(match):
        return match[1] * int(match[2] or 1)

    groups = re.sub(
        r"\(((?:[EtL|](?:\*\d+)?)+)\)\*(\d+)",
        lambda match: items.sub(repeated, match[1]) * int(match[2]),
        text.replace(",", ""),
    )
    plain = items.sub(repeated, groups)
    assert re.fullmatch(r"E[t|]*L", plain)
    return tuple(stage.count("t") for stage in plain.split("|"))


@pytest.mark.parametrize(
    ("text", "layers"),
    [  # examples of Megatron-LM's and Megatron-Bridge's pages
        ("Et*2|(t*2|)*34,t*3|(t*2|)*3,tL", (2, *(2,) * 34, 3, *(2,) * 3, 1)),
        ("E|t|t|L", (0, 1, 1, 0)),
    ],
)
def test_a_layout_is_read_as_its_grammar_says(text, layers):
    assert layers_in_layout(text) == layers


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
    for _ in range(20_000 if is_thorough else 60):
        ranks, v = rng.randint(1, 16), rng.randint(1, 4)
        layers = drawn_layers(rng, ranks * v)
        text = megatron_layout(layers, loop_placement(ranks, v))
        assert layers_in_layout(text) == layers
        plain = "|".join("t" * count if count < 2 else f"t*{count}" for count in layers)
        assert len(text) <= len(plain) + len("EL")
        assert "((" not in text


def test_every_layer_is_in_one_list_of_modules(is_thorough):
    rng = random.Random(5)
    for _ in range(20_000 if is_thorough else 60):
        layers = drawn_layers(rng, rng.randint(1, 40))
        stages = json.loads(torchtitan_modules(layers))
        assert [sum("layers." in name for name in stage) for stage in stages] == list(layers)
        names = [f"layers.{layer}" for layer in range(sum(layers))]
        expected = ["tok_embeddings", *names, "norm", "output"]
        assert list(itertools.chain.from_iterable(stages)) == expected


def test_modules_are_named_as_torchtitan_has_them():
    assert json.loads(torchtitan_modules((1, 2, 0))) == [
        ["tok_embeddings", "layers.0"],
        ["layers.1", "layers.2"],
        ["norm", "output"],
    ]
    assert json.loads(torchtitan_modules((1,), "lm_head")) == [
        ["tok_embeddings", "layers.0", "norm", "lm_head"]
    ]


def test_torchtitan_places_stages_by_a_schedule():
    assert torchtitan_schedule(loop_placement(4)) == "1F1B"
    assert torchtitan_schedule(loop_placement(4, 3)) == "Interleaved1F1B"
    assert torchtitan_schedule(v_placement(4)) == "ZBVZeroBubble"
    assert torchtitan_schedule(Placement((0, 0, 1, 1), 2)) == ""
