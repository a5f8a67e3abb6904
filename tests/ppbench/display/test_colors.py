"""Colours are distinct for every kind of colour vision."""

import itertools

import numpy as np
import pytest

from engine.plan.action import Op
from engine.plan.schedules.registry import SCHEDULES
from ppbench.display.colors import (
    GREY,
    OP_COLORS,
    PART_COLORS,
    SCHEDULE_CYCLE,
    schedule_colors,
    tinted,
)
from ppbench.display.explanation import PART_NAMES

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
VISIONS = {
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_XYZ = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
WHITE = [0.9505, 1.0, 1.089]


def lab(color, vision):
    srgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(VISIONS[vision]) @ linear, 0, 1)
    ratio = np.array(TO_XYZ) @ seen / WHITE
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISIONS)
def test_every_schedule_has_a_colour_of_its_own_that_any_eye_tells_from_the_others(vision):
    colors = [color for color in SCHEDULE_CYCLE if color != GREY]
    assert len(colors) > len(SCHEDULES)
    pairs = itertools.combinations([lab(color, vision) for color in colors], 2)
    assert min(np.linalg.norm(one - other) for one, other in pairs) > 12


def distance(one, other, vision):
    return np.linalg.norm(lab(one, vision) - lab(other, vision))


@pytest.mark.parametrize("vision", VISIONS)
def test_parts_of_the_bubble_are_told_from_each_other_from_work_and_from_either_paper(vision):
    assert list(PART_COLORS) == list(PART_NAMES)
    parts = list(PART_COLORS.values())
    work = [OP_COLORS[op] for op in (Op.F, Op.B, Op.I, Op.W, Op.OPT)]
    assert min(distance(*pair, vision) for pair in itertools.combinations(parts, 2)) > 25
    assert min(distance(part, color, vision) for part in parts for color in work) > 9
    papers = ["#ffffff", "#15171a"]
    assert min(distance(part, paper, vision) for part in parts for paper in papers) > 20


def test_schedules_keep_their_colours_beside_files():
    alone, beside = schedule_colors(SCHEDULES), schedule_colors([*SCHEDULES, "csv:a", "csv:b"])
    assert len(set(beside.values())) == len(SCHEDULES) + 2
    assert beside.items() >= alone.items()


def test_a_tint_is_between_the_colour_and_white():
    assert tinted("#0072B2", 0) == "#0072b2"
    assert tinted("#0072B2", 1) == "#ffffff"
    assert tinted("#000000", 0.5) == "#808080"
