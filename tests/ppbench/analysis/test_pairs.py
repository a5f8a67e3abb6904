"""What a forward and a backward side by side took, beside alone: planted in a simulated step."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from engine.plan.action import Op
from engine.plan.lower import lower
from engine.plan.predict import Durations, predict, took_by, uniform
from engine.plan.schedules.registry import build_program
from engine.plan.spans import COLUMNS
from ppbench.analysis.costs import costs_as_json, measured_costs, stored_costs, variation
from ppbench.analysis.pairs import contention_of, words_of
from ppbench.analysis.transfers import edges, messages
from ppbench.analysis.waits import Spans, moments, waits
from ppbench.report.timeline.timelines import with_pairs


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


def spans_of(program, pair_ns):
    durations = replace(uniform(program.placement, 40, 30, 30), pair_ns=pair_ns)
    return pd.DataFrame(predict(program, durations).spans())


def test_a_pair_waits_for_the_input_of_its_backward_as_for_that_of_its_forward():
    program = build_program("dualpipev", 4, 12, has_pairs=True)
    forward, pairs = (40, 90, 20, 70, 40, 55, 35, 80), (80, 140, 90, 100, 70, 160, 95, 130)
    durations = Durations(forward, (30,) * 8, (30,) * 8, pair_ns=pairs)
    spans = with_pairs(pd.DataFrame(predict(program, durations).spans()), program)
    without = waits(Spans.of(spans))
    waited = waits(Spans.of(spans), is_paired=spans["is_paired"].to_numpy())
    compute, (_, _, arrived, _, start) = waited.spans, moments(waited)
    assert (arrived == start)[compute.start_ns > 0].all()  # nothing else kept a rank
    own = [Op.F.value, Op.B.value]
    later = np.flatnonzero(waited.maker != without.maker)
    assert len(later)
    for at in later:
        forward, backward = compute.at(np.array([at])), compute.at(np.array([at + 1]))
        assert [list(Op)[one.op[0]].value for one in (forward, backward)] == own
        maker = compute.at(waited.maker[[at]])
        assert (maker.stage[0], maker.microbatch[0]) == (
            backward.stage[0] + 1,
            backward.microbatch[0],
        )
    assert (moments(without)[2] < moments(without)[4])[compute.start_ns > 0].any()


def test_the_cost_of_a_pair_is_apart_from_those_of_its_halves_alone():
    program = build_program("dualpipe", 4, 12, has_pairs=True)
    costs = measured_costs(
        spans := spans_of(program, (150,) * 8), messages(spans), 8, lower(program)
    )
    assert costs.of_pairs == (150,) * 8
    assert costs.by_stage[Op.F] == (40,) * 8
    assert variation(spans, costs, program) == 0
    assert costs.times(program) == took_by(
        program, replace(uniform(program.placement, 40, 30, 30), pair_ns=(150,) * 8)
    )
    stored = pd.Series({"op_costs_ns": costs_as_json(costs)})
    assert stored_costs(stored, edges(messages(spans))).of_pairs == costs.of_pairs
    assert costs.balanced().of_pairs == costs.of_pairs
    assert "FB" not in costs_as_json(replace(costs, of_pairs=()))
