"""Every registered schedule over a grid of shapes: rules, deadlock proof, closed forms."""

from fractions import Fraction

import pytest
from schedule_grid import (
    RANKS,
    families,
    numbers_of_microbatches,
    peak_in_rank_shares,
    programs_of,
    stages_per_rank,
)

from engine.plan.check import check
from engine.plan.lower import Policy, lower
from engine.plan.predict import predict, uniform
from engine.plan.program import to_csv
from engine.plan.rules import peak_activations
from engine.plan.schedules.formulae import Times
from engine.plan.schedules.registry import (
    ALIASES,
    SCHEDULES,
    ShapeError,
    UnknownScheduleError,
    build_program,
    find_schedule,
    known_names,
    shape_of,
)

COSTS = [(12, 12, 12), (12, 14, 10), (10, 20, 10), (12, 12, 0)]
POLICIES = [(Policy.JUST_IN_TIME, 0), (Policy.EARLY, 1), (Policy.EARLY, 3)]
AT_MOST = {"zbv", "v_half", "v_min"}  # some of their ranks may hold less than the stated peak


@pytest.fixture(scope="module", params=families(), ids=lambda family: "{}-p{}-v{}".format(*family))
def programs(request, is_thorough):
    """Build the programs of a schedule by shape; thorough runs add the longest ones of 16 ranks."""
    name, p, v = request.param
    numbers = [m for m in numbers_of_microbatches(p) if is_thorough or p < 16 or m <= p + 1]
    return name, programs_of(name, p, v, numbers)


def idle_ns(program, costs):
    """The idle time of a rank in a step, and the costs, scaled so that stages divide them."""
    scaled = tuple(cost * program.num_stages for cost in costs)
    simulation = predict(program, uniform(program.placement, *scaled))
    return simulation.makespan_ns - program.num_microbatches * sum(scaled), scaled


def test_a_schedule_obeys_the_rules(programs):
    for program in programs[1].values():
        check(program)


@pytest.mark.parametrize(("policy", "look_ahead"), POLICIES)
def test_it_cannot_hang_and_keeps_its_order_under_either_policy(programs, policy, look_ahead):
    for program in programs[1].values():
        assert lower(program, policy, look_ahead).compute_only().actions == program.actions


def test_its_simulated_idle_time_is_the_closed_form(programs):
    name, by_shape = programs
    wrong = []
    for shape, program in by_shape.items():
        for costs in COSTS:
            idle, scaled = idle_ns(program, costs)
            stated = SCHEDULES[name].bubble_time(shape, Times(*map(Fraction, scaled)))
            if stated is not None and stated != idle:
                wrong.append((shape, costs, stated, idle))
    assert wrong == []


def test_its_idle_time_is_stated_where_all_times_are_equal_and_microbatches_many(programs):
    name, by_shape = programs
    for shape in by_shape:
        if shape.num_microbatches >= 2 * shape.world_size:
            times = Times(Fraction(1), Fraction(1), Fraction(1))
            assert SCHEDULES[name].bubble_time(shape, times) is not None, shape


def test_no_rank_holds_more_than_the_stated_peak_and_it_is_reached(programs):
    name, by_shape = programs
    for shape, program in by_shape.items():
        stated = [SCHEDULES[name].peak(shape, rank) for rank in range(shape.world_size)]
        held = peak_in_rank_shares(program)
        if name in AT_MOST:
            assert all(one <= limit for one, limit in zip(held, stated, strict=True)), shape
            assert max(held) == max(stated), shape
        else:
            in_stages = [peak * shape.stages_per_rank for peak in stated]
            assert peak_activations(program) == in_stages, shape


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
ONLY_EQUAL_TIMES = {"zbv"}


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("name", "v"), [(name, v) for name in TABLE for v in stages_per_rank(name)]
)
def test_the_table_of_the_literature_holds(name, v, p):
    bubble, peak = TABLE[name]
    for m in (2 * p, 3 * p, 4 * p):
        program = build_program(name, p, m, v)
        for costs in COSTS[:1] if name in ONLY_EQUAL_TIMES else COSTS:
            idle, scaled = idle_ns(program, costs)
            assert idle == bubble(p, v, *scaled)
        held = [Fraction(count, v) for count in peak_activations(program)]
        assert held == [peak(p, v, m, rank) for rank in range(p)]


def test_the_three_bubbles_of_zbv_at_4_ranks_and_8_microbatches_are_the_published_ones():
    program = build_program("zbv", 4, 8)
    simulation = predict(program, uniform(program.placement, 2, 2, 2))
    assert simulation.makespan_ns == 25.5 * 2
    assert simulation.bubble_fraction == pytest.approx(1.5 / 25.5)
    assert simulation.bubble_idle_over_ideal == pytest.approx(0.0625)
    assert simulation.bubble_max_stage_span == 0


@pytest.mark.parametrize("p", [p for p in RANKS if p > 1])
@pytest.mark.parametrize("name", ["zb_h2", "zbv"])
def test_no_rank_waits_once_it_has_begun(name, p):
    for m in (2 * p - 1, 2 * p, 2 * p + 1, 3 * p):
        program = build_program(name, p, m)
        simulation = predict(program, uniform(program.placement, 2, 2, 2))
        for starts, ends in zip(simulation.start_ns, simulation.end_ns, strict=True):
            assert ends[-1] - starts[0] == 6 * m
        assert simulation.bubble_fraction > 0


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "key", "message"),
    [
        ("interleaved_zb", 2, 5, 3, "num_microbatches", "must be a multiple of .*; got .* 5"),
        ("looped_bfs", 4, 8, 0, "stages_per_rank", "needs at least 1 stage per rank, got 0"),
        ("afab", 1, 0, None, "num_microbatches", "must be at least 1, got 0"),
    ],
)
def test_a_shape_that_a_schedule_is_not_made_for_is_refused_by_its_key(name, p, m, v, key, message):
    with pytest.raises(ShapeError, match=message) as caught:
        build_program(name, p, m, v)
    assert caught.value.key == key
    with pytest.raises(ShapeError, match=message):
        shape_of(name, p, m, v)


def test_a_schedule_of_any_number_of_stages_takes_two_where_nobody_says():
    assert build_program("looped_bfs", 2, 2).num_stages == 4
    assert build_program("afab", 2, 2).num_stages == 2


def test_schedules_have_names_and_an_unknown_one_is_told_them():
    assert ALIASES == {"gpipe": "afab"}
    assert build_program("gpipe", 2, 2) == build_program("afab", 2, 2)
    assert known_names() == [*SCHEDULES, "gpipe", "csv:PATH"]
    with pytest.raises(UnknownScheduleError, match='unknown schedule "1f1v"; known: afab, 1f1b'):
        find_schedule("1f1v")


def test_a_schedule_of_a_file_is_that_program(tmp_path):
    path, program = tmp_path / "zbv.csv", build_program("zbv", 3, 6)
    path.write_text(to_csv(program))
    read = build_program(f"csv:{path}", 3, 6, 2)
    assert read.schedule == f"csv:{path}"
    assert (read.placement, read.actions) == (program.placement, program.actions)
    assert build_program(f"csv:{path}", 3, 6) == read


@pytest.mark.parametrize(
    ("shape", "key", "message"),
    [
        ((3, 3, 1), "world_size", "is for world_size 2, got 3"),
        ((2, 4, 1), "num_microbatches", "is for num_microbatches 3, got 4"),
        ((2, 3, 2), "stages_per_rank", "is for stages_per_rank 1, got 2"),
    ],
)
def test_a_file_for_other_numbers_is_refused_by_the_key(tmp_path, shape, key, message):
    path = tmp_path / "program.csv"
    path.write_text(to_csv(build_program("1f1b", 2, 3)))
    with pytest.raises(ShapeError, match=message) as caught:
        build_program(f"csv:{path}", *shape)
    assert caught.value.key == key
