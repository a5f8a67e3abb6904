"""Two pipelines in opposite directions: how long ranks idle, what is refused, and files of them."""

import pytest

from engine.plan.action import parse_action
from engine.plan.check import check
from engine.plan.predict import predict, uniform
from engine.plan.program import from_csv, from_json, to_csv, to_json
from engine.plan.rules import ProgramError, fact_needed
from engine.plan.schedules.registry import ShapeError, build_program

EVEN = range(2, 17, 2)


@pytest.mark.parametrize("p", EVEN)
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 0), (2, 2, 1), (3, 1, 2), (1, 4, 1)])
def test_chimera_idles_as_its_paper_says(p, f, i, w):
    """Of its unit the longest path has p forwards and 2p - 2 backwards."""
    for units in (1, 2, 5):
        program = build_program("chimera", p, units * p)
        step = predict(program, uniform(program.placement, f, i, w))
        b = i + w
        path = p * f + (2 * p - 2) * b
        assert step.makespan_ns == path + (units - 1) * (p * 2 * b - 2 * (b - f))


def test_every_part_of_the_model_is_on_two_ranks_and_a_microbatch_passes_one_copy():
    placement = build_program("dualpipe", 4, 8).placement
    assert placement.ranks == (0, 1, 2, 3, 3, 2, 1, 0)
    assert (placement.depth, placement.num_stages) == (4, 8)
    assert list(placement.copies_of(1)) == [1, 5]
    assert [placement.direction_of(m, 8) for m in range(8)] == [0] * 4 + [1] * 4
    assert [s for s in range(8) if placement.is_last(s)] == [3, 7]
    needed = {text: fact_needed(parse_action(text), placement) for text in ("4F5", "7I5", "3I0")}
    assert {text: fact and str(fact) for text, fact in needed.items()} == {
        "4F5": None,
        "7I5": "7F5",
        "3I0": "3F0",
    }


@pytest.mark.parametrize(
    ("name", "p", "m", "key", "reason"),
    [
        ("chimera", 3, 6, "world_size", "world_size must be even"),
        ("chimera", 4, 6, "num_microbatches", "must be a multiple of world_size"),
        ("chimera", 4, 2, "num_microbatches", "must be a multiple of world_size"),
        ("dualpipe", 5, 10, "world_size", "world_size must be even"),
        ("dualpipe", 4, 9, "num_microbatches", "must be even"),
        ("dualpipe", 4, 6, "num_microbatches", "must be at least 2 x world_size"),
    ],
)
def test_other_shapes_are_refused(name, p, m, key, reason):
    with pytest.raises(ShapeError, match=f"{name}: .*{reason}; got") as caught:
        build_program(name, p, m)
    assert caught.value.key == key


@pytest.mark.parametrize("name", ["chimera", "dualpipe"])
def test_a_file_of_it_is_read_as_it_was_written(name):
    program = build_program(name, 4, 8)
    read = from_csv(to_csv(program), name)
    assert (read.placement, read.actions) == (program.placement, program.actions)
    assert from_json(to_json(program)) == program


def test_a_microbatch_of_the_other_direction_is_refused_with_its_place():
    rows = to_csv(build_program("chimera", 2, 4)).replace("3B3", "0B3").splitlines()
    with pytest.raises(ProgramError) as caught:
        check(from_csv("\n".join(rows), "wrong"))
    assert caught.value.reason == "microbatch 3 goes through stages 2 to 3"
    assert (caught.value.rank, caught.value.action) == (0, "0B3")
