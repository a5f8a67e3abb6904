"""Replicas in time, against queues that are looked at again whenever anything ends."""

import random
from array import array

import pytest
from brute_force import SENDS, receive_of
from mutations import with_rows
from schedule_grid import POLICIES, stages_per_rank

from engine import arrays
from engine.plan.action import COMPUTE_OPS, JOINING_OPS, SEND_OPS, Action, Op
from engine.plan.collectives import (
    DataParallel,
    add_collectives,
)
from engine.plan.lower import Policy, lower
from engine.plan.period import with_end
from engine.plan.predict import timed
from engine.plan.schedules.registry import SCHEDULES, ShapeError, build_program
from engine.plan.spans import Lane, Span
from engine.plan.walk import TransferModel, walk


class Simulated:
    """Replicas as rows, lanes and channels; times[d] has the ns of actions and, by rank, lists."""

    def __init__(self, program, times):
        self.ranks, self.times, self.now = program.placement.ranks, times, 0
        self.rows = {
            (d, r): list(row) for d in range(len(times)) for r, row in enumerate(program.actions)
        }
        self.busy = dict.fromkeys(self.rows, 0)
        self.lanes = {walker: [] for walker in self.rows}  # [begun, ready, ended] of each
        self.awaits = {walker: {} for walker in self.rows}  # the lane's place of a stage's UNSHARD
        self.posted, self.queues = {}, {}
        self.computed, self.moved = {}, {}
        while self.advance():
            pass
        assert not any(self.rows.values())

    def advance(self):
        while any(map(self.step, self.rows)) or self.move() or self.join():
            pass
        ends = [end for times in (self.computed, self.moved) for _, end in times.values()]
        ends += [end for lane in self.lanes.values() for *_, end in lane if end is not None]
        self.now, before = min((end for end in ends if end > self.now), default=None), self.now
        return self.now is not None and self.now > before

    def step(self, walker):
        row, (d, _) = self.rows[walker], walker
        if not row or self.busy[walker] > self.now or not self.may_go(walker, row[0]):
            return False
        action = row.pop(0)
        if action.op in JOINING_OPS:
            if action.op is Op.UNSHARD:
                self.awaits[walker][action.stage] = len(self.lanes[walker])
            self.lanes[walker].append([None, None, None])
        elif action.op in (*COMPUTE_OPS, Op.OPT):
            self.busy[walker] = self.now + self.times[d][0][action]
            self.computed[d, action] = self.now, self.busy[walker]
        elif action.op is not Op.RESHARD:
            self.posted[d, action] = self.now
            if action.op in SENDS:
                self.queues.setdefault((d, action.stage, action.op), []).append(action)
        return True

    def may_go(self, walker, action):
        if action.op is Op.OPT:
            ends = [end for *_, end in self.lanes[walker]]
            return all(end is not None and end <= self.now for end in ends)
        if action.op not in COMPUTE_OPS:
            return True
        place = self.awaits[walker].get(action.stage)
        if place is not None:
            end = self.lanes[walker][place][2]
            if end is None or end > self.now:
                return False
        receive = receive_of(action, self.ranks)
        if receive is None:
            return True
        stage, way, m = receive
        send = (stage - 1 if way == "F" else stage + 1, f"SEND_{way}", m)
        return self.moved.get((walker[0], send), (0, self.now + 1))[1] <= self.now

    def move(self):
        for (d, *_), queue in self.queues.items():
            for at, send in enumerate(queue):
                if (d, send) in self.moved:
                    continue
                before = self.moved[d, queue[at - 1]][1] if at else 0
                hop = 1 if send.op is Op.SEND_F else -1
                receive = (send.stage + hop, f"RECV_{send.op[-1]}", send.microbatch)
                if before <= self.now and (d, receive) in self.posted:
                    self.moved[d, send] = self.now, self.now + self.times[d][0][send]
                    return True
                break
        return False

    def join(self):
        for (d, rank), lane in self.lanes.items():
            for at, one in enumerate(lane):
                if one[0] is None:
                    before = lane[at - 1][2] if at else 0
                    if before is not None and before <= self.now:
                        one[0] = self.now
                        return True
                    break
            for at in range(len(lane)):
                same = [self.lanes[e, rank][at : at + 1] for e in range(len(self.times))]
                if lane[at][2] is None and all(one and one[0][0] is not None for one in same):
                    lane[at][1:] = self.now, self.now + self.times[d][1][rank][at]
                    for e, (one,) in enumerate(same):
                        one[1:] = self.now, self.now + self.times[e][1][rank][at]
                    return True
        return False


def joining(program):
    """By rank, its UNSHARDs and REDUCE_GRADs in the order of its row."""
    return [[a for a in row if a.op in JOINING_OPS] for row in program.actions]


def flat(program, times):
    """Times of actions and of lanes, as the replay takes them."""
    return [
        array(
            "q",
            [
                next(lane) if action.op in JOINING_OPS else took.get(action, 0)
                for row, lane in zip(program.actions, map(iter, moving), strict=True)
                for action in row
            ],
        )
        for took, moving in times
    ]


def drawn_times(program, chance, most=40):
    took = {a: chance.randint(0, most) for row in program.actions for a in row}
    return took, [[chance.randint(0, most) for _ in lane] for lane in joining(program)]


def drawn(chance, name):
    """A program of a schedule, in some shape, lowered in some way, with some collectives."""
    while True:
        p, m = chance.randint(1, 4), chance.randint(1, 8)
        try:
            program = build_program(name, p, m, chance.choice(stages_per_rank(name)))
        except ShapeError:
            continue
        lowered = lower(program, chance.choice(list(Policy)), chance.randint(0, 2))
        return add_collectives(lowered, chance.choice(POLICIES))


def with_early_and_late(program, chance):
    """The program with some REDUCE_GRADs issued later and some UNSHARDs earlier."""
    rows = [list(row) for row in program.actions]
    for row in rows:
        for at in range(len(row)):
            if row[at].op is Op.REDUCE_GRAD and chance.random() < 0.5:
                later = next((n for n in range(at + 1, len(row)) if row[n].op in JOINING_OPS), None)
                row.insert(chance.randint(at, (later or len(row)) - 1), row.pop(at))
            elif row[at].op is Op.UNSHARD and chance.random() < 0.5:
                least = max((n for n in range(at) if row[n].op not in COMPUTE_OPS), default=-1)
                row.insert(chance.randint(least + 1, at), row.pop(at))
    return with_rows(program, rows)


def times_of(walked, d, step=0):
    """When each action of a replica's step starts, moves and ends."""
    times = walked.starts_ns, walked.moves_ns, walked.ends_ns
    return zip(*(walked.of_step(of, d, step) for of in times), strict=True)


def facts(program, by_replica):
    """The times of a program's actions in each replica, as those of `Simulated`."""
    actions = [(rank, a) for rank, row in enumerate(program.actions) for a in row]
    computed, moved, lanes = {}, {}, {}
    for d, times in enumerate(by_replica):
        lanes |= {(d, rank): [] for rank in range(program.world_size)}
        for (rank, action), (start, ready, end) in zip(actions, times, strict=True):
            if action.op in (*COMPUTE_OPS, Op.OPT):
                computed[d, action] = start, end
            elif action.op in SEND_OPS:
                moved[d, action] = start, end
            elif action.op in JOINING_OPS:
                lanes[d, rank].append([start, ready, end])
    return computed, moved, lanes


def ready_of_unshards(program, lanes):
    actions = joining(program)
    for (_, rank), lane in lanes.items():
        for action, (_, ready, _) in zip(actions[rank], lane, strict=True):
            if action.op is Op.UNSHARD:
                yield ready


@pytest.mark.parametrize("name", SCHEDULES)
def test_joined_replicas_do_each_thing_when_queues_do(name, is_thorough, monkeypatch):
    chance = random.Random(name)
    for number in range(120 if is_thorough else 8):
        program = drawn(chance, name)
        if chance.random() < 0.5:
            program = with_early_and_late(program, chance)
        times = [drawn_times(program, chance) for _ in range(chance.randint(1, 4))]
        monkeypatch.setattr(arrays, "PAYS_FROM", 0 if number % 2 else 10**9)
        replayed = timed(program, flat(program, times))
        expected = Simulated(program, times)
        found = facts(program, [times_of(replayed.walk, d) for d in range(len(times))])
        assert found == (expected.computed, expected.moved, expected.lanes)
        ends = [end for _, end in expected.computed.values()]
        ends += [end for lane in expected.lanes.values() for *_, end in lane]
        begun = [start for start, _ in expected.computed.values()]
        begun += ready_of_unshards(program, expected.lanes)
        assert replayed.makespan_ns == max(ends) - min(begun)
        for d, idle in enumerate(replayed.idle_ns):
            for rank, row in enumerate(program.actions):
                busy = sum(times[d][0][action] for action in row if action.op in COMPUTE_OPS)
                assert idle[rank] == replayed.makespan_ns - busy


@pytest.mark.parametrize("name", SCHEDULES)
def test_steps_in_a_row_with_times_of_their_own_do_each_thing_when_queues_do(
    name, is_thorough, monkeypatch
):
    chance = random.Random(name)
    for number in range(60 if is_thorough else 6):
        program, steps = drawn(chance, name), range(chance.randint(1, 4))
        # The steps as one program of ever more microbatches.
        rows = [
            [
                action._replace(microbatch=action.microbatch + step * program.num_microbatches)
                for step in steps
                for action in (*row, Action(rank, Op.OPT, 0))
            ]
            for rank, row in enumerate(program.actions)
        ]
        whole = with_rows(program, rows)
        times = [drawn_times(whole, chance) for _ in range(chance.randint(1, 3))]
        expected = Simulated(whole, times)
        size = [len(row) // len(steps) for row in rows]
        places = [  # of the whole program, in the order of steps
            whole.table.offset[rank] + step * size[rank] + at
            for step in steps
            for rank in range(program.world_size)
            for at in range(size[rank])
        ]
        took = [array("q", map(of.__getitem__, places)) for of in flat(whole, times)]
        monkeypatch.setattr(arrays, "PAYS_FROM", 0 if number % 2 else 10**9)
        walked = walk(with_end(program, meets=False), took)
        by_replica = []
        for d in range(len(times)):
            in_order = zip(
                places, (one for k in steps for one in times_of(walked, d, k)), strict=True
            )
            by_replica.append([of for _, of in sorted(in_order)])
        assert facts(whole, by_replica) == (expected.computed, expected.moved, expected.lanes)


def test_a_message_moves_when_both_ends_are_ready_and_the_one_before_is_over():
    lowered = lower(build_program("afab", 2, 2))
    ns = {Action(0, Op.SEND_F, 0): 25, Action(0, Op.SEND_F, 1): 1, Action(1, Op.SEND_B, 0): 0}
    ns[Action(1, Op.SEND_B, 1)] = 0
    took = [ns.get(action, 10) for row in lowered.actions for action in row]
    replayed = timed(lowered, [took], TransferModel(message_bytes=3))
    spans = list(replayed.spans())
    assert Span(0, 0, Lane.SEND, 0, Op.SEND_F, 0, 10, 35, 3) in spans
    assert Span(0, 1, Lane.RECV, 1, Op.RECV_F, 0, 10, 35, 3) in spans
    assert Span(0, 0, Lane.SEND, 0, Op.SEND_F, 1, 35, 36, 3) in spans
    assert Span(0, 1, Lane.COMPUTE, 1, Op.F, 0, 35, 45, 0) in spans
    assert Span(0, 1, Lane.COMPUTE, 1, Op.F, 1, 45, 55, 0) in spans
    assert len(spans) == 8 + 2 * 4
    assert replayed.makespan_ns == 85
    assert replayed.idle_ns == [[85 - 40, 85 - 40]]


def test_times_that_do_not_fit_the_program_are_refused():
    program = add_collectives(lower(build_program("1f1b", 2, 2)), DataParallel())
    fits = array("q", [1]) * program.table.num_actions
    for times in ([], [fits, array("q")], [fits[1:]]):
        with pytest.raises(ValueError, match="the times of 18 actions"):
            timed(program, times)
