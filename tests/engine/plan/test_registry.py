"""Every registered schedule over a grid of shapes: rules, deadlock proof, closed forms."""

from fractions import Fraction

import pytest
from closed_forms import BUBBLE_TIME, PEAK, Times
from drawn_programs import FAMILIES, programs_of, stages_per_rank

from engine.plan.check import check
from engine.plan.lower import Policy, lower
from engine.plan.predict import predict, uniform
from engine.plan.program import to_csv
from engine.plan.rules import peak_activations
from engine.plan.schedules.registry import (
    SCHEDULES,
    ShapeError,
    UnknownScheduleError,
    build_program,
    find_schedule,
    known_names,
    shape_of,
)

RANKS = (1, 2, 3, 4, 8)
COSTS = [(12, 12, 12), (12, 14, 10), (10, 20, 10), (12, 12, 0)]
POSTINGS = [(Policy.JUST_IN_TIME, 0), (Policy.EARLY, 1), (Policy.EARLY, 3)]
AT_MOST = {"zbv", "v_half", "v_min"}  # some of their ranks may hold less than the stated peak


def idle_ns(program, costs):
    """The idle time of a rank in a step, and the costs, scaled so that stages divide them."""
    scaled = tuple(cost * program.placement.depth for cost in costs)
    step = predict(program, uniform(program.placement, *scaled))
    return step.makespan_ns - program.num_microbatches * sum(scaled), scaled


@pytest.mark.parametrize(("name", "v"), FAMILIES)
def test_a_schedule_is_legal_cannot_hang_and_idles_and_holds_as_stated(name, v, is_thorough):
    for p in (*RANKS, 16) if is_thorough else RANKS:
        for program in programs_of(name, p, v):
            m = program.num_microbatches
            shape = shape_of(name, p, m, v)
            check(program)
            for posting in POSTINGS:
                assert lower(program, *posting).compute_only().actions == program.actions
            for costs in COSTS:
                idle, scaled = idle_ns(program, costs)
                stated = BUBBLE_TIME[name](shape, Times(*map(Fraction, scaled)))
                assert stated in (None, idle), (shape, costs)
                is_even = len(set(costs)) == 1
                assert stated is not None or m < 2 * p or not is_even, shape
            stated = [PEAK[name](shape, rank) for rank in range(p)]
            parts = Fraction(program.placement.depth, p)  # of the model, that a microbatch passes
            held = [peak / parts for peak in peak_activations(program)]
            if name in AT_MOST:
                assert all(one <= limit for one, limit in zip(held, stated, strict=True)), shape
                assert max(held) == max(stated), shape
            else:
                assert held == stated, shape


# The table of the literature, said again without the package's own formulae:
# bubble of (p, v, F, I, W); peak of (p, v, m, rank), in microbatches of a rank's whole share.
TABLE = {
    "afab": (lambda p, v, f, i, w: (p - 1) * (f + i + w), lambda p, v, m, rank: m),
    "1f1b": (lambda p, v, f, i, w: (p - 1) * (f + i + w), lambda p, v, m, rank: p - rank),
    "interleaved_1f1b": (
        lambda p, v, f, i, w: Fraction((p - 1) * (f + i + w), v),
        lambda p, v, m, rank: Fraction((v - 1) * p + 2 * (p - 1 - rank) + 1, v),
    ),
    "looped_bfs": (
        lambda p, v, f, i, w: Fraction((p - 1) * (f + i + w), v),
        lambda p, v, m, rank: m,
    ),
    "zb_h1": (lambda p, v, f, i, w: (p - 1) * (f + i - w), lambda p, v, m, rank: p),
    "interleaved_zb": (
        lambda p, v, f, i, w: Fraction((p - 1) * (f + i - w), v),
        lambda p, v, m, rank: p,
    ),
    "zbv": (lambda p, v, f, i, w: Fraction((p - 1) * f, 2), lambda p, v, m, rank: p),
}


@pytest.mark.parametrize(
    ("name", "v"), [(name, v) for name in TABLE for v in stages_per_rank(name)]
)
def test_the_table_of_the_literature_holds(name, v):
    bubble, peak = TABLE[name]
    for p in (2, 3, 4, 8):
        for program in programs_of(name, p, v, (2 * p, 3 * p, 4 * p)):
            for costs in COSTS[:1] if name == "zbv" else COSTS:
                idle, scaled = idle_ns(program, costs)
                assert idle == bubble(p, v, *scaled)
            held = [Fraction(count, v) for count in peak_activations(program)]
            assert held == [peak(p, v, program.num_microbatches, rank) for rank in range(p)]


def test_the_three_bubbles_of_zbv_at_4_ranks_and_8_microbatches_are_the_published_ones():
    program = build_program("zbv", 4, 8)
    step = predict(program, uniform(program.placement, 2, 2, 2))
    assert step.makespan_ns == 25.5 * 2
    assert step.bubble_fraction == pytest.approx(1.5 / 25.5)
    assert step.bubble_idle_over_ideal == pytest.approx(0.0625)
    assert step.bubble_max_stage_span == 0


@pytest.mark.parametrize("p", [p for p in RANKS if p > 1])
@pytest.mark.parametrize("name", ["zb_h2", "zbv"])
def test_no_rank_waits_once_it_has_begun(name, p):
    for m in (2 * p - 1, 2 * p, 2 * p + 1, 3 * p):
        program = build_program(name, p, m)
        step = predict(program, uniform(program.placement, 2, 2, 2))
        for starts, ends in zip(step.start_ns, step.end_ns, strict=True):
            assert ends[-1] - starts[0] == 6 * m
        assert step.bubble_fraction > 0


FILE = "csv:"
"""Stands for the program file of 1F1B on two ranks with three microbatches."""


@pytest.mark.parametrize(
    ("name", "shape", "key", "message"),
    [
        ("interleaved_zb", (2, 5, 3), "num_microbatches", "must be a multiple of .*; got .* 5"),
        ("looped_bfs", (4, 8, 0), "stages_per_rank", "at least 1 stage per rank, got 0"),
        ("afab", (1, 0, None), "num_microbatches", "must be at least 1, got 0"),
        (FILE, (3, 3, 1), "world_size", "is for world_size 2, got 3"),
        (FILE, (2, 4, 1), "num_microbatches", "is for num_microbatches 3, got 4"),
        (FILE, (2, 3, 2), "stages_per_rank", "is for stages_per_rank 1, got 2"),
    ],
)
def test_a_shape_that_a_schedule_is_not_made_for_is_refused_by_its_key(
    tmp_path, name, shape, key, message
):
    if name == FILE:
        name = f"csv:{tmp_path}/program.csv"
        (tmp_path / "program.csv").write_text(to_csv(build_program("1f1b", 2, 3)))
    for build in (build_program, shape_of)[: 1 if name.startswith(FILE) else 2]:
        with pytest.raises(ShapeError, match=message) as caught:
            build(name, *shape)
        assert caught.value.key == key


def test_a_schedule_has_a_name_or_is_a_file_and_two_stages_where_nobody_says(tmp_path):
    assert build_program("looped_bfs", 2, 2).num_stages == 4
    assert build_program("afab", 2, 2).num_stages == 2
    assert build_program("gpipe", 2, 2) == build_program("afab", 2, 2)
    assert known_names() == [*SCHEDULES, "gpipe", "csv:PATH"]
    with pytest.raises(UnknownScheduleError, match='unknown schedule "1f1v"; known: afab, 1f1b'):
        find_schedule("1f1v")
    path, program = tmp_path / "zbv.csv", build_program("zbv", 3, 6)
    path.write_text(to_csv(program))
    read = build_program(f"csv:{path}", 3, 6, 2)
    assert read.schedule == f"csv:{path}"
    assert (read.placement, read.actions) == (program.placement, program.actions)
    assert build_program(f"csv:{path}", 3, 6) == read
