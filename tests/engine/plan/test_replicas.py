"""Replicas that join in collectives, against queues that are run in any order until none moves."""

import random
from collections import Counter
from copy import deepcopy

import pytest
from brute_force import delivers_all, is_legal, receive_of

from engine.plan.action import (
    COLLECTIVE_OPS,
    COMPUTE_OPS,
    NO_INDEX,
    RECV_OPS,
    SEND_OPS,
    Action,
    Op,
)
from engine.plan.collectives import DataParallel, TorchWindow, Zero2, Zero3, add_collectives
from engine.plan.lower import Policy, Sharing, lower, prove_no_deadlock
from engine.plan.program import from_csv
from engine.plan.replicas import prove_replicas_join
from engine.plan.rules import ProgramError, check
from engine.plan.schedules.registry import SCHEDULES, build_program

POLICIES = (DataParallel(), Zero2(), Zero3(1, 0), Zero3(2, 1), TorchWindow(2))


class Queues:
    """Rows, lanes and messages of all replicas, by replica and rank."""

    def __init__(self, replicas):
        self.ranks, self.num_replicas = replicas[0].placement.ranks, len(replicas)
        self.rows = {
            (d, rank): list(row)
            for d, one in enumerate(replicas)
            for rank, row in enumerate(one.rows)
        }
        self.lanes = {pair: [] for pair in self.rows}  # begun, not done
        self.posted = [set() for _ in replicas]

    def can_issue(self, pair):
        if not self.rows[pair]:
            return False
        action = self.rows[pair][0]
        if action.op not in "FBIW":
            return True
        if Action(action.stage, Op.UNSHARD, NO_INDEX) in self.lanes[pair]:
            return False
        receive = receive_of(action, self.ranks)
        if receive is None:
            return True
        stage, way, m = receive
        source = stage - 1 if way == "F" else stage + 1
        return {(source, f"SEND_{way}", m), (stage, f"RECV_{way}", m)} <= self.posted[pair[0]]

    def issue(self, pair):
        action = self.rows[pair].pop(0)
        if action.op in ("UNSHARD", "REDUCE_GRAD"):
            self.lanes[pair].append(action)
        self.posted[pair[0]].add(action)

    def can_complete(self, rank):
        first, *others = [self.lanes[d, rank][:1] for d in range(self.num_replicas)]
        return bool(first) and all(head == first for head in others)

    def complete(self, rank):
        for d in range(self.num_replicas):
            self.lanes[d, rank].pop(0)

    def moves(self):
        issues = [(self.issue, pair) for pair in self.rows if self.can_issue(pair)]
        ends = [(self.complete, rank) for rank in set(self.ranks) if self.can_complete(rank)]
        return issues + ends


def hangs(replicas, chance):
    """Issue and complete one thing after another, by chance, until nothing can move."""
    queues = Queues(replicas)
    while moves := queues.moves():
        move, where = chance.choice(moves)
        move(where)
    return any(queues.rows.values()) or any(queues.lanes.values())


def hangs_in_some_order(replicas):
    """Whether any order in which things are issued and done comes to a stop before the end."""
    first = Queues(replicas)
    todo, seen = [first], set()
    while todo:
        queues = todo.pop()
        state = str((queues.rows, queues.lanes))
        if state in seen:
            continue
        seen.add(state)
        moves = [(move.__name__, where) for move, where in queues.moves()]
        if not moves and (any(queues.rows.values()) or any(queues.lanes.values())):
            return True
        for name, where in moves:
            following = deepcopy(queues)
            getattr(following, name)(where)
            todo.append(following)
    return False


def verdict_on(replicas):
    try:
        for one in replicas:
            check(one)
            prove_no_deadlock(one)
    except ProgramError:
        return "alone"
    try:
        prove_replicas_join(replicas)
    except ProgramError as error:
        return "circle" if error.reason.startswith("hangs") else "lanes"
    return "proved"


def is_sound_alone(program):
    return is_legal(program.compute_only()) and delivers_all(program, Sharing.STAGE_EDGE)


def drawn(chance):
    """Replicas of a small program, each with collectives and with transfers of its own."""
    name = chance.choice(["1f1b", "interleaved_1f1b", "looped_bfs", "zbv", "zb_h1"])
    v = 1 if SCHEDULES[name].stages_per_rank.most == 1 else 2
    plain, policy = build_program(name, 2, chance.choice([2, 4]), v), chance.choice(POLICIES)
    lowered = [lower(plain, chance.choice(list(Policy)), chance.randint(0, 2)) for _ in range(3)]
    return [add_collectives(one, policy) for one in lowered[: chance.choice([2, 3])]]


KINDS = ("slide", "near", "far", "swap", "drop")
ANY = ("computation", "transfer", *KINDS)


def mutated(program, chance, kinds=KINDS):
    """The program with collectives of one rank moved, swapped or lost, or others of ANY kind."""
    rows = [list(row) for row in program.rows]
    row = chance.choice([row for row in rows if not COLLECTIVE_OPS.isdisjoint(a.op for a in row)])
    places = [at for at, action in enumerate(row) if action.op in COLLECTIVE_OPS]
    at, other = chance.choice(places), chance.choice(places)
    match kind := chance.choice(kinds):
        case "computation" | "transfer":
            ops = COMPUTE_OPS if kind == "computation" else SEND_OPS | RECV_OPS
            at = chance.choice([n for n, action in enumerate(row) if action.op in ops])
            row.insert(max(0, at + chance.choice([-4, -2, -1, 1, 2, 4])), row.pop(at))
        case "slide":  # as far as the order of collectives allows
            least = max((p for p in places if p < at), default=-1) + 1
            most = min((p for p in places if p > at), default=len(row)) - 1
            row.insert(chance.choice([least, most]), row.pop(at))
        case "near":
            row.insert(max(0, at + chance.choice([-3, -2, -1, 1, 2, 3])), row.pop(at))
        case "far":
            row.insert(chance.randrange(len(row)), row.pop(at))
        case "swap":
            row[at], row[other] = row[other], row[at]
        case "drop":
            del row[at]
    return type(program)(program.schedule, program.placement, program.num_microbatches, rows)


@pytest.mark.parametrize("name", SCHEDULES)
def test_equal_replicas_never_hang(name):
    v = 1 if SCHEDULES[name].stages_per_rank.most == 1 else 2
    for policy in POLICIES:
        program = add_collectives(lower(build_program(name, 3, 6, v)), policy)
        prove_replicas_join([program] * 3)


def test_mutants_are_refused_exactly_when_queues_run_by_chance_come_to_a_stop(is_thorough):
    chance, verdicts = random.Random(5), Counter()
    num_mutants = 1000 if is_thorough else 200
    for _ in range(num_mutants):
        replicas = drawn(chance)
        few = chance.choice([(1, KINDS), (2, KINDS), (16, ["slide"]), (1, ANY), (2, ANY)])
        for _ in range(few[0]):
            number = chance.randrange(len(replicas))
            replicas[number] = mutated(replicas[number], chance, few[1])
        verdict = verdict_on(replicas)
        assert (verdict == "alone") != all(map(is_sound_alone, replicas))
        assert verdict == "alone" or (verdict != "proved") == hangs(replicas, chance)
        verdicts[verdict] += 1
    assert verdicts["circle"] >= num_mutants / 100
    assert min(verdicts[one] for one in ("proved", "lanes", "alone")) > num_mutants / 20


def test_in_small_groups_all_orders_come_to_the_same_end(is_thorough):
    chance, verdicts = random.Random(7), Counter()
    for _ in range(40 if is_thorough else 8):
        program = add_collectives(lower(build_program("1f1b", 2, 1)), Zero3(1, 0))
        replicas = [mutated(program, chance, ["slide"]), mutated(program, chance)]
        verdict = verdict_on(replicas)
        assert (verdict != "proved") == hangs_in_some_order(replicas)
        verdicts[verdict] += 1
    assert len(verdicts) > 1


def test_lanes_of_one_order_can_hang_through_messages():
    lowered = lower(build_program("1f1b", 2, 1))
    rows = [
        [
            ["0UNSHARD", *lowered.actions[0]],
            [*lowered.actions[1][:2], "1UNSHARD", *lowered.actions[1][2:]],
        ],
        [[*lowered.actions[0], "0UNSHARD"], ["1UNSHARD", *lowered.actions[1]]],
    ]
    replicas = [from_csv("\n".join(",".join(map(str, row)) for row in one), "x") for one in rows]
    for replica in replicas:
        prove_replicas_join([replica])
        prove_replicas_join([replica] * 2)
    with pytest.raises(ProgramError) as caught:
        prove_replicas_join(replicas)
    assert caught.value.reason.startswith("hangs: ")
    waits = {
        "0F0 of replica 0 waits for 0UNSHARD of replica 1",
        "0B0 of replica 1 waits for 1SEND_B0 of replica 1",
        "1F0 of replica 1 waits for 1UNSHARD of replica 0",
        "1F0 of replica 0 waits for 0SEND_F0 of replica 0",
    }
    assert set(caught.value.reason.removeprefix("hangs: ").split("; ")) == waits


def test_lanes_that_do_not_agree_are_named_where_they_part():
    program = add_collectives(lower(build_program("zbv", 2, 4)), Zero3(2, 1))
    rows = [list(row) for row in program.rows]
    first, second = [at for at, action in enumerate(rows[0]) if action.op is Op.UNSHARD][:2]
    rows[0][first], rows[0][second] = rows[0][second], rows[0][first]
    other = type(program)("other", program.placement, program.num_microbatches, rows)
    with pytest.raises(ProgramError) as caught:
        prove_replicas_join([program, other])
    assert (caught.value.rank, caught.value.position) == (0, first)
    assert "replica 0 has 0UNSHARD at this place of the lane" in caught.value.reason
