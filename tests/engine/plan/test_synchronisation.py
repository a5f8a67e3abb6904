import contextlib
import random
from dataclasses import replace
from pathlib import Path

import pytest
from naive_synchronisation import JOINED, Attempt
from schedule_grid import families, programs_of
from shuffled_programs import shuffled_program

from engine.plan.action import NO_INDEX, Action, Op
from engine.plan.lower import Policy, lower
from engine.plan.replicas import prove_replicas_join
from engine.plan.rules import ProgramError
from engine.plan.schedules.registry import SCHEDULES, build_program
from engine.plan.synchronisation import (
    Place,
    computations,
    first_computations,
    joint_hang,
    synchronisation_hangs,
)

FEW = families((1, 2, 3, 4))


def few_programs(name, p, v):
    return programs_of(name, p, v, sorted({p, 2 * p, 2 * p + 1})).values()


def places(hangs):
    return [Place(hang.rank, hang.position) for hang in hangs]


def hanging(lowered):
    return [f"{hang.rank}:{hang.action}" for hang in synchronisation_hangs(lowered)]


def test_an_early_receive_is_open_while_the_last_forward_of_afab_synchronises():
    """The drawing in the module's docstring."""
    hangs = synchronisation_hangs(lower(build_program("afab", 2, 2)))
    (hang,) = hangs
    assert (hang.rank, str(hang.action), str(hang.awaited)) == (0, "0F1", "0RECV_B0")
    assert str(hang) == (
        "rank 0, position 3, 0F1: a device-wide synchronisation waits for 0RECV_B0 and hangs: "
        "0F1 on rank 0 synchronises and waits for 0RECV_B0, whose other end comes after 1F1 on "
        "rank 1; 1F1 on rank 1 waits for 1RECV_F1, whose other end comes after 0F1 on rank 0"
    )


@pytest.mark.parametrize("m", [1, 2, 4, 9])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_afab_hangs_at_the_last_forward_of_each_rank_but_the_last(p, m):
    assert hanging(lower(build_program("afab", p, m))) == [f"{r}:{r}F{m - 1}" for r in range(p - 1)]


def test_zbv_hangs_by_a_receive_that_is_open_or_by_a_send_whose_receive_comes_late():
    (hang,) = synchronisation_hangs(lower(build_program("zbv", 4, 4)))
    assert (hang.rank, str(hang.action), str(hang.awaited)) == (0, "0F3", "7RECV_F0")
    hangs = synchronisation_hangs(lower(build_program("zbv", 4, 8)))
    assert len(hangs) == 15
    assert {hang.awaited.op for hang in hangs} == {Op.SEND_F}


@pytest.mark.parametrize("m", [4, 5, 8, 16])
def test_1f1b_of_as_many_microbatches_as_ranks_hangs_nowhere_by_one_synchronisation(m):
    assert not synchronisation_hangs(lower(build_program("1f1b", 4, m)))


@pytest.mark.parametrize(("name", "p", "v"), FEW)
def test_one_synchronisation_hangs_where_walking_through_it_does(name, p, v):
    for program in few_programs(name, p, v):
        for ahead in (0, 1, 2):
            lowered = lower(program, Policy.EARLY, ahead)
            found = set(places(synchronisation_hangs(lowered)))
            some = random.Random(str(lowered)).sample(computations(lowered), 4 if p > 1 else 1)
            for place in {*some, *sorted(found)[:2]}:
                assert (joint_hang(lowered, at=[place]) is not None) == (place in found)


SAFE_WHEN_JUST_IN_TIME = ("afab", "1f1b", "zb_h1", "v_half", "v_min")


@pytest.mark.parametrize(("name", "p", "v"), [f for f in FEW if f[0] in SAFE_WHEN_JUST_IN_TIME])
def test_receives_posted_just_in_time_leave_these_schedules_free_of_hangs(name, p, v):
    for program in few_programs(name, p, v):
        lowered = lower(program, Policy.JUST_IN_TIME)
        assert joint_hang(lowered, at=computations(lowered)) is None


@pytest.mark.parametrize(
    ("name", "p", "v"), [f for f in FEW if f[0] in ("interleaved_1f1b", "looped_bfs", "zb_h2")]
)
def test_receives_posted_just_in_time_leave_these_free_of_hangs_by_one_synchronisation(name, p, v):
    for program in few_programs(name, p, v):
        assert not synchronisation_hangs(lower(program, Policy.JUST_IN_TIME))


@pytest.mark.parametrize("name", ["interleaved_zb", "zbv", "dualpipev"])
def test_these_hang_at_some_place_however_late_receives_are_posted(name):
    assert synchronisation_hangs(lower(build_program(name, 4, 8), Policy.JUST_IN_TIME))


def words_of(lowered):
    """As the table of the documentation says it."""
    first = set(first_computations(lowered))
    hangs = places(synchronisation_hangs(lowered))
    if hangs:
        return f"{len(hangs)}, {len(first.intersection(hangs))} of them first"
    joint = joint_hang(lowered, at=computations(lowered))
    return "none" if joint is None else "only several at once"


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_documentation_says_how_many_hang(name):
    program = build_program(name, 4, 8)
    early, late = (words_of(lower(program, policy)) for policy in Policy)
    row = f"| `{name}` | {program.num_computations} | {early} | {late} |"
    assert row in Path("docs/reference/schedules.md").read_text("utf-8")


def small_program(seed):
    drawn = random.Random(seed)
    program = shuffled_program(seed, drawn.choice([2, 2, 3]), drawn.choice([1, 1, 2, 2, 3]))
    return lower(program, Policy.EARLY, drawn.randint(0, 3))


def test_trying_every_place_of_1000_programs_of_chance_finds_the_same_hangs():
    num_hangs = 0
    for seed in range(1000):
        lowered = small_program(seed)
        found = set(places(synchronisation_hangs(lowered)))
        some = set(random.Random(seed).sample(computations(lowered), 4)) | found
        for place in some:
            assert Attempt([lowered], [(0, *place)]).hangs() == (place in found), (seed, place)
        num_hangs += len(found)
    assert num_hangs > 1000


@pytest.mark.thorough
def test_trying_all_places_of_400_larger_programs_finds_the_same_hangs():
    for seed in range(400):
        lowered = lower(shuffled_program(seed), Policy.EARLY, seed % 4)
        found = set(places(synchronisation_hangs(lowered)))
        for place in computations(lowered):
            assert Attempt([lowered], [(0, *place)]).hangs() == (place in found), (seed, place)


def test_several_synchronisations_hang_together_as_trying_finds():
    num_hangs = 0
    for seed in range(300):
        lowered, drawn = small_program(seed), random.Random(seed)
        everything = computations(lowered)
        for at in (everything, first_computations(lowered), drawn.sample(everything, 2)):
            hang = joint_hang(lowered, at=at)
            assert Attempt([lowered], [(0, *place) for place in at]).hangs() == (
                hang is not None
            ), seed
            if hang is not None:
                num_hangs += 1
                assert Place(hang.rank, hang.position) in at
                assert str(hang.awaited) in str(hang)
    assert num_hangs > 100


def test_the_order_in_which_ranks_come_to_their_actions_does_not_matter():
    for seed in range(12):
        lowered = lower(shuffled_program(seed, 2, 1), Policy.EARLY, seed % 3)
        found = places(synchronisation_hangs(lowered))
        for place in computations(lowered)[:4]:
            assert Attempt([lowered], [(0, *place)]).ends() == {place not in found}


def test_each_wait_of_a_circle_leads_to_the_next_rank_and_back():
    for seed in range(200):
        for hang in synchronisation_hangs(small_program(seed))[:3]:
            begins = [text.split(" on rank ")[1].split()[0] for text in hang.circle]
            ends = [text.rsplit(" on rank ")[-1].split()[0] for text in hang.circle]
            assert ends == [*begins[1:], begins[0]]
            assert sum("synchronises" in text for text in hang.circle) == 1
            assert hang.circle[0].startswith(f"{hang.action} on rank {hang.rank} synchronises")


def test_the_first_computations_are_one_of_each_op_of_each_stage():
    lowered = lower(build_program("zb_h1", 2, 4))
    first = [str(lowered.rows[rank][at]) for rank, at in first_computations(lowered)]
    assert sorted(first) == ["0F0", "0I0", "0W0", "1F0", "1I0", "1W0"]


def with_scattered_collectives(drawn, lowered, lanes):
    rows = []
    for row, lane in zip(lowered.rows, lanes, strict=True):
        places = sorted(drawn.randint(0, len(row)) for _ in lane)
        new = list(row)
        for place, one in reversed(list(zip(places, lane, strict=True))):
            new.insert(place, one)
        rows.append(tuple(new))
    return replace(lowered, actions=tuple(rows))


def joined_replicas(seed):
    """Two replicas that cannot hang by themselves, with collectives anywhere in their rows."""
    drawn, lowered = random.Random(seed), small_program(seed)
    while True:
        lanes = [
            drawn.choices(
                [Action(stage, Op(op), NO_INDEX) for op in JOINED for stage in stages], k=2
            )
            for stages in map(lowered.placement.stages_of, range(lowered.world_size))
        ]
        replicas = [with_scattered_collectives(drawn, lowered, lanes) for _ in range(2)]
        with contextlib.suppress(ProgramError):
            prove_replicas_join(replicas)
            return replicas, lowered


def test_trying_finds_the_same_hangs_where_replicas_join():
    num_more = 0
    for seed in range(120):
        replicas, lowered = joined_replicas(seed)
        found = {(h.replica, h.rank, h.position) for h in synchronisation_hangs(*replicas)}
        some = random.Random(seed).sample(computations(replicas[seed % 2]), 4)
        for place in {(seed % 2, *one) for one in some} | found:
            assert Attempt(replicas, [place]).hangs() == (place in found), (seed, place)
        num_more += len(found) > 2 * len(synchronisation_hangs(lowered))
    assert num_more > 10


def test_one_place_on_all_replicas_has_its_circle_too():
    for seed in range(40):
        replicas, _ = joined_replicas(seed)
        for place in computations(replicas[0])[:4]:
            hang = joint_hang(*replicas, at=[place])
            spots = [(replica, *place) for replica in range(2)]
            assert Attempt(replicas, spots).hangs() == (hang is not None)
            assert hang is None or hang.circle


def test_a_hang_by_a_sum_names_the_replica_that_gives_its_own_later():
    for seed in range(120):
        for hang in synchronisation_hangs(*joined_replicas(seed)[0]):
            if hang.awaited.op is Op.REDUCE_GRAD:
                assert "of replica 0" in str(hang)
                assert "of replica 1" in str(hang)
                return
    raise AssertionError("no program of chance hangs so")
