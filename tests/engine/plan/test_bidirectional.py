"""Two pipelines in opposite directions: how long ranks idle, what is refused, and files of them."""

import itertools
from dataclasses import replace

import pytest

from engine.plan.action import Op, parse_action
from engine.plan.check import check
from engine.plan.lower import Policy, lower
from engine.plan.predict import predict, timed, took_by, uniform
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


# a forward and a backward that are one action

WITH_PAIRS = [(name, p) for name in ("dualpipe", "dualpipev") for p in (2, 4, 6)]


def with_pair_time(placement, f, i, w, pair):
    return replace(uniform(placement, f, i, w), pair_ns=(pair,) * placement.num_stages)


def pairs_of_ranks(program):
    """The places in its row of the forwards that each rank runs as one with a backward."""
    offset, mates = program.table.offset, program.mates
    return [
        [at - begin for at in range(begin, end) if mates[at] >= 0]
        for begin, end in itertools.pairwise(offset)
    ]


@pytest.mark.parametrize("p", EVEN)
@pytest.mark.parametrize("pair", [40, 48, 60])
def test_dualpipe_idles_as_its_paper_says(p, pair):
    """(p/2 - 1)(F&B + B - 3W), where F = I = W and a rank has the most pairs.

    Each pair less takes a rank F + B in place of F&B, while others do not wait for it.
    """
    f = i = w = 20
    for m in (2 * p, 2 * p + 2, 5 * p):
        program = build_program("dualpipe", p, m, has_pairs=True)
        step = predict(program, with_pair_time(program.placement, f, i, w, pair))
        nums = [len(own) for own in pairs_of_ranks(program)]
        longest = (p // 2 - 1) * (pair + (i + w) - 3 * w)
        assert list(step.idle_ns[0]) == [
            longest - (f + i + w - pair) * (max(nums) - num) for num in nums
        ]


@pytest.mark.parametrize("p", EVEN)
def test_dualpipe_is_its_own_mirror_image(p):
    """Rank r of one pipeline does what rank p-1-r of the other one does, pairs included."""
    for m in (2 * p, 2 * p + 2):
        program = build_program("dualpipe", p, m, has_pairs=True)
        rows = [[tuple(action) for action in row] for row in program.actions]
        assert rows == [
            [
                ((stage + p) % (2 * p), op, (microbatch + m // 2) % m)
                for stage, op, microbatch in row
            ]
            for row in reversed(program.actions)
        ]
        pairs = pairs_of_ranks(program)
        assert pairs == pairs[::-1]
        # As many as the paper's code runs as one: all but the first of the two middle ranks.
        for rank, own in enumerate(pairs[: p // 2]):
            turns, last = m // 2 - p + rank + 1, p // 2 - 1 - rank
            assert len(own) == 2 * turns + last - (rank == p // 2 - 1)


@pytest.mark.parametrize(("name", "p"), WITH_PAIRS)
def test_a_pair_waits_for_both_inputs_and_hands_on_both_results_at_its_end(name, p):
    program = build_program(name, p, 2 * p, has_pairs=True)
    durations = with_pair_time(program.placement, 40, 50, 30, 90)
    step = predict(program, durations)
    table, starts, ends = program.table, step.walk.starts_ns, step.walk.ends_ns
    moves = {send: start for send, start, _ in step.messages()}
    num_pairs = 0
    for at, mate in enumerate(program.mates):
        if mate < 0:
            continue
        num_pairs += 1
        assert mate == at + 1
        assert ends[at] == starts[mate]
        assert ends[mate] - starts[at] == 90
        for half, op in ((at, Op.SEND_F), (mate, Op.SEND_B)):
            assert moves.get(table.at(half)._replace(op=op), ends[mate]) >= ends[mate]
    assert num_pairs >= p
    for policy, ahead in ((Policy.EARLY, 1), (Policy.EARLY, 3), (Policy.JUST_IN_TIME, 0)):
        lowered = lower(program, policy, ahead)
        assert lowered.compute_only().mates == program.mates
        assert all(b - a == 1 for a, b in enumerate(lowered.mates) if b >= 0)
        again = timed(lowered, [took_by(lowered, durations)])
        assert again.makespan_ns == step.makespan_ns
    path = step.critical_path()
    took = dict(zip(table.those(range(len(starts))), map(int.__sub__, ends, starts), strict=True))
    assert sum(took[action] for action in path) == step.makespan_ns


@pytest.mark.parametrize(("name", "p"), WITH_PAIRS)
def test_pairs_without_a_time_are_two_actions_in_order(name, p):
    pairs, plain = (build_program(name, p, 2 * p, has_pairs=has) for has in (True, False))
    assert pairs.in_order() == plain != pairs
    durations = uniform(plain.placement, 40, 40, 40)
    assert predict(pairs, durations).makespan_ns == predict(plain, durations).makespan_ns
    for read in (from_csv(to_csv(pairs), pairs.schedule), from_json(to_json(pairs))):
        assert read == pairs


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ("(0F0;0B0)OVERLAP_F_B", "is paired with 0B0; expected the whole backward of another one"),
        (
            "(0F0;1B1)OVERLAP_F_B,0F1,1F1,0B0,1F0,1B0,0B1",
            "0F0 on rank 0 is one with 1B1; 1B1 on rank 0 needs 1F1, which comes only later",
        ),
    ],
)
def test_pairs_that_cannot_be_are_refused(rows, reason):
    with pytest.raises(ProgramError) as caught:
        check(from_csv(rows, "wrong"))
    assert reason in caught.value.reason


@pytest.mark.parametrize("actions", ["0F0;0W0", "0B0;0F1", "0F0"])
def test_other_pairs_are_no_cells(actions):
    with pytest.raises(ValueError, match=r"rank 0, column 0: .* pairs others than a forward"):
        from_csv(f"({actions})OVERLAP_F_B", "wrong")
