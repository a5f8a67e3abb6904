"""What a forward and a backward side by side took, beside alone: planted in a simulated step."""

from dataclasses import replace

import pandas as pd
import pytest

from engine.plan.predict import predict, uniform
from engine.plan.schedules.registry import build_program
from engine.plan.spans import COLUMNS
from ppbench.analysis.pairs import contention_of, words_of


@pytest.mark.parametrize("name", ["dualpipe", "dualpipev"])
@pytest.mark.parametrize("pair", [80, 100, 120])
def test_contention_is_what_was_planted(name, pair):
    program = build_program(name, 4, 12, has_pairs=True)
    v = program.placement.depth // 4
    durations = uniform(program.placement, 40 * v, 60 * v, 20 * v)
    step = predict(program, replace(durations, pair_ns=(pair,) * program.num_stages))
    spans = pd.DataFrame(step.spans(), columns=COLUMNS)
    found = contention_of(spans, program)
    num_pairs = sum(mate >= 0 for mate in program.mates)
    assert found == (num_pairs, pair, 80, 120)
    assert f"{num_pairs} in a step: one took {pair / 80:.2f} of its longer" in words_of(found)


def test_without_pairs_there_is_none():
    program = build_program("dualpipe", 4, 12)
    spans = pd.DataFrame(
        predict(program, uniform(program.placement, 1, 1, 1)).spans(), columns=COLUMNS
    )
    assert contention_of(spans, program) is None
