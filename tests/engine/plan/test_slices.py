"""Microbatches in slices: how they are cut, Seq1F1B's closed forms, and orders that are illegal."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from engine.plan.check import check
from engine.plan.lower import lower
from engine.plan.predict import Durations, predict
from engine.plan.program import from_csv, from_json, to_csv, to_json
from engine.plan.rules import ProgramError, peak_activations
from engine.plan.schedules.registry import ShapeError, build_program
from engine.plan.slices import balanced_lengths, even_lengths, shares_of

SHAPES = [
    (p, m, k)
    for p in range(1, 17)
    for k in (1, 2, 3, 4, 7)
    for m in dict.fromkeys((1, 2, p, 2 * p))
]


def starts_by_hand(program, took):
    """When each action starts, by waiting for what the paper says: written without the walk."""
    rows, ends, at = list(map(list, program.actions)), {}, [0] * program.world_size
    clock, last, num = [0] * program.world_size, program.num_stages - 1, len(program.slices)
    while any(position < len(row) for position, row in zip(at, rows, strict=True)):
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                stage, op, number = row[at[rank]]
                needed = [(stage, "F", number)] if op == "B" else []
                if op == "F" and stage > 0:
                    needed.append((stage - 1, "F", number))
                if op == "F" and number % num:
                    needed.append((stage, "F", number - 1))
                if op == "B" and stage < last:
                    needed.append((stage + 1, "B", number))
                if op == "B" and number % num < num - 1:
                    needed.append((stage, "B", number + 1))
                if not all(one in ends for one in needed):
                    break
                begin = max([clock[rank], *(ends[one] for one in needed)])
                clock[rank] = ends[stage, str(op), number] = begin + took(op, stage, number)
                at[rank] += 1
    return ends


def test_slices_of_equal_time_wait_a_kth_of_what_microbatches_wait():
    """(p - 1)(F + B) / k in all, and p - r + k - 1 slices on rank r at most."""
    for p, m, k in SHAPES:
        program = build_program("seq1f1b", p, m, slices=(1 / k,) * k)
        check(program)
        step = predict(program, Durations((2,) * p, (3,) * p, (1,) * p))
        assert step.makespan_ns == m * k * 6 + (p - 1) * 6
        assert peak_activations(program) == [min(p - rank + k - 1, m * k) for rank in range(p)]


def test_one_slice_is_1f1b():
    for p, m in itertools.product((1, 2, 5), (1, 4, 9)):
        whole = build_program("seq1f1b", p, m)
        assert [*whole.actions] == [*build_program("1f1b", p, m).actions]


def test_slices_of_any_time_start_when_what_they_need_is_done():
    for seed in range(60):
        drawn = random.Random(seed)
        p, m, k = drawn.randint(1, 6), drawn.randint(1, 5), drawn.randint(1, 6)
        shares = shares_of([drawn.randint(1, 9) for _ in range(k)], drawn.random())
        program = build_program("seq1f1b", p, m, slices=shares)
        lower(program)
        means = [tuple(drawn.randint(1, 10**9) for _ in range(p)) for _ in range(3)]

        def took(op, stage, number, means=means, shares=shares):
            forward, first, second = (of_stage[stage] for of_stage in means)
            mean = forward if op == "F" else first + second
            return round(mean * shares[number % len(shares)] * len(shares))

        ends = starts_by_hand(program, took)
        walked = predict(program, Durations(*means))
        for rank, row in enumerate(program.actions):
            for position, (stage, op, number) in enumerate(row):
                assert walked.end_ns[rank][position] == ends[stage, str(op), number]


@pytest.mark.parametrize("attention", [0.0, 0.1, 0.5, 1.0])
def test_balanced_slices_take_as_long_as_each_other_to_a_token(attention):
    """No cut in tokens has a quicker slowest slice by more than what two tokens take."""
    for seq_len, k in itertools.product((8, 13, 20), (1, 2, 3, 4, 7, 8)):
        lengths = balanced_lengths(seq_len, k, attention)
        assert (sum(lengths), len(lengths)) == (seq_len, k)
        assert min(lengths) >= 1
        every = itertools.combinations(range(1, seq_len), k - 1)
        best = min(
            max(shares_of([b - a for a, b in itertools.pairwise([0, *cuts, seq_len])], attention))
            for cuts in every
        )
        a_token = max(shares_of([1] * seq_len, attention))
        assert max(shares_of(lengths, attention)) <= best + 2 * a_token


def test_shares_follow_tokens_and_pairs_of_tokens():
    assert even_lengths(10, 4) == (3, 3, 2, 2)
    assert shares_of((3, 1), 0.0) == (0.75, 0.25)
    assert shares_of((2, 2), 1.0) == (0.25, 0.75)
    for seed in range(50):
        drawn = random.Random(seed)
        lengths, attention = [drawn.randint(1, 30) for _ in range(6)], drawn.random()
        seen = itertools.accumulate(lengths, initial=0)
        pairs = [
            sum(x + n + 0.5 for n in range(length))
            for x, length in zip(seen, lengths, strict=False)
        ]
        expected = [
            (1 - attention) * length / sum(lengths) + attention * pair / sum(pairs)
            for length, pair in zip(lengths, pairs, strict=True)
        ]
        assert shares_of(lengths, attention) == pytest.approx(expected)
        assert sum(shares_of(lengths, attention)) == pytest.approx(1)


def test_programs_of_slices_are_written_and_read(tmp_path):
    slices = shares_of((5, 3), 0.2)
    program = build_program("seq1f1b", 3, 4, slices=slices)
    assert from_json(to_json(program)) == program
    assert from_json(to_json(lower(program))).slices == slices
    file = tmp_path / "program.csv"
    file.write_text(to_csv(program))
    again = build_program(f"csv:{file}", 3, 4, slices=slices)
    assert ([*again.actions], again.slices) == ([*program.actions], slices)
    whole = from_csv(to_csv(program), "whole")
    assert (whole.num_microbatches, whole.slices) == (8, ())
    for num_microbatches, num_slices, key, reason in (
        (4, 3, "slices.number", "has 8 microbatches, which is no multiple of 3 slices"),
        (8, 2, "num_microbatches", "is for num_microbatches 4, got 8"),
    ):
        with pytest.raises(ShapeError, match=reason) as caught:
            build_program(f"csv:{file}", 3, num_microbatches, slices=(1 / num_slices,) * num_slices)
        assert caught.value.key == key


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ("0F1,0F0,0B1,0B0", "rank 0, position 0, 0F1: needs the keys and values that slice 0 has"),
        ("0F0,0F1,0B0,0B1", "0B0: needs the gradients for its keys and values that slice 1 has"),
        (
            "0F0,0F1,0I0,0I1,0W0,0W1",
            "0I0: needs the gradients for its keys and values that slice 1",
        ),
    ],
)
def test_slices_out_of_order_are_illegal(tmp_path, rows, reason):
    file = tmp_path / "program.csv"
    file.write_text(rows)
    with pytest.raises(ProgramError, match=re.escape(reason)):
        check(build_program(f"csv:{file}", 1, 1, slices=(0.5, 0.5)))
    if "I" not in rows:
        check(build_program(f"csv:{file}", 1, 2))  # whole microbatches may come in any order


def test_schedules_of_whole_microbatches_are_refused():
    with pytest.raises(
        ShapeError, match=r"zbv takes whole microbatches, got 2 slices; .*: seq1f1b"
    ):
        build_program("zbv", 2, 4, slices=(0.5, 0.5))
