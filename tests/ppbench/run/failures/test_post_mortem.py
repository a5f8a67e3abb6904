import functools
import random
from dataclasses import replace

import pytest

from engine.plan.action import COMPUTE_OPS, SEND_OPS, Action, Op, parse_action
from engine.plan.collectives import DataParallel, add_collectives
from engine.plan.lower import lower
from engine.plan.messages import counterpart, edge_of, incoming
from engine.plan.program import Program, loop_placement
from engine.plan.schedules.registry import SCHEDULES, build_program
from ppbench.run.failures.post_mortem import RankState, flight_rows, post_mortem
from ppbench.store import Store
from ppbench.store.columns import FLIGHT
from tests.engine.plan.drawn_programs import FAMILIES, programs_of

S = 1_000_000_000
AT_NS = 100 * S
OPT = Action(-1, Op.OPT, -1)
DRAINS, BARRIER = "drains its transfers", "waits for the other ranks"


class Execution:
    """A step that goes on until nothing moves, one rank at random after the other.

    After its row a rank does OPT, drains, which needs the other end of each of its messages, and
    waits for the others. `frozen` is a rank and the position at which it does nothing any more;
    what is `lost` never arrives. With `in_order` a message is taken for the next one that its
    channel's receiver has posted, as gloo does, so that a lost one leaves the last one missing.
    """

    def __init__(self, lowered, chance, *, frozen=None, lost=None, in_order=False):
        self.lowered, self.chance = lowered, chance
        self.frozen, self.lost, self.in_order = frozen, lost, in_order
        self.position = [0] * lowered.world_size
        self.since = [0] * lowered.world_size
        self.done, self.now = set(), 0

    def run(self):
        while movable := [r for r in range(self.lowered.world_size) if self.can_move(r)]:
            rank = self.chance.choice(movable)
            row = self.lowered.actions[rank]
            if self.position[rank] < len(row):
                self.done.add(row[self.position[rank]])
            self.now += self.chance.randint(1, 1000)
            self.position[rank] += 1
            self.since[rank] = self.now
        return self

    def can_move(self, rank):
        row, position = self.lowered.actions[rank], self.position[rank]
        if self.frozen == (rank, position) or position == len(row) + 2:
            return False
        if position == len(row) + 1:
            return all(counterpart(a) in self.done for a in row if a.op in SEND_OPS)
        return position == len(row) or self.has_input(row[position])

    def has_input(self, action):
        receive = incoming(action, self.lowered) if action.op in COMPUTE_OPS else None
        if receive is None:
            return True
        send = counterpart(receive)
        if not self.in_order:
            return send in self.done and send != self.lost
        mine = [a for row in self.lowered.actions for a in row if self.is_beside(a, send)]
        there = [a for a in mine if a in self.done and a != self.lost]
        return mine.index(send) < len(there)

    def is_beside(self, action, send):
        return action.op in SEND_OPS and edge_of(action) == edge_of(send)

    def seen(self, process="stopped", *, is_waiting=False, step=4):
        """The states of the ranks when last seen; `process` is that of the frozen rank."""
        return [self._seen(rank, process, is_waiting, step) for rank in range(len(self.position))]

    def _seen(self, rank, process, is_waiting, step):
        row, position = self.lowered.actions[rank], self.position[rank]
        is_frozen = self.frozen is not None and rank == self.frozen[0]
        one = RankState(
            rank,
            "node",
            process if is_frozen else "alive",
            "steps",
            step,
            None,
            False,
            self.since[rank],
        )
        if position > len(row):
            phase = DRAINS if position == len(row) + 1 else BARRIER
            return replace(one, phase=phase, is_waiting=phase == BARRIER)
        action = [*row, OPT][position]
        waits = (is_waiting and self.could_wait(action)) if is_frozen else True
        return replace(one, action=action, is_waiting=waits)

    def could_wait(self, action):
        return action.op in COMPUTE_OPS and incoming(action, self.lowered) is not None


@functools.cache
def shapes(name):
    """Small ones with everything: several stages per rank, few and many microbatches."""
    grid = [(p, v) for name_, v in FAMILIES if name_ == name for p in (1, 2, 3, 4)]
    return [one for p, v in grid for one in programs_of(name, p, v, (1, 2, 3, 4, 6, 8))]


@pytest.fixture
def num_cases(is_thorough):
    """So many of each schedule, each with a frozen rank and with a lost message."""
    return 100 if is_thorough else 12


def cases(name, num_cases, least_ranks=1):
    programs = [lower(program) for program in shapes(name) if program.world_size >= least_ranks]
    chance = random.Random(name)
    return [(chance.choice(programs), random.Random(n)) for n in range(num_cases)]


def follow(diagnosis, start):
    """The end of a rank's chain of waits."""
    by_rank = {one.seen.rank: one for one in diagnosis.ranks}
    rank = start
    for _ in by_rank:
        following = by_rank[rank].waits_for_rank
        if following is None:
            return rank
        rank = following
    return rank


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("process", ["stopped", "dead", "alive"])
def test_a_frozen_rank_is_named_with_its_action_and_all_waits_lead_to_it(name, process, num_cases):
    for lowered, chance in cases(name, num_cases):
        rank = chance.randrange(lowered.world_size)
        position = chance.randint(0, len(lowered.actions[rank]))
        action = [*lowered.actions[rank], OPT][position]
        execution = Execution(lowered, chance, frozen=(rank, position)).run()
        is_waiting = process != "alive" and chance.random() < 0.5
        seen = execution.seen(process, is_waiting=is_waiting)
        diagnosis = post_mortem(seen, lowered, execution.now + 10 * S)
        assert (diagnosis.rank, diagnosis.action) == (rank, action)
        assert diagnosis.verdict.startswith(f"rank {rank} ")
        assert [follow(diagnosis, one) for one in range(lowered.world_size)] == (
            [rank] * lowered.world_size
        )


def messages(lowered):
    return [(r, a) for r, row in enumerate(lowered.actions) for a in row if a.op in SEND_OPS]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_lost_message_is_named_with_its_sender_and_its_receiver(name, num_cases):
    for lowered, chance in cases(name, num_cases, least_ranks=2):
        sender, send = chance.choice(messages(lowered))
        execution = Execution(lowered, chance, lost=send).run()
        diagnosis = post_mortem(execution.seen(), lowered, execution.now + 10 * S)
        assert (diagnosis.rank, diagnosis.action) == (sender, send)
        assert f"the message of {send} was lost" in diagnosis.verdict
        account = diagnosis.ranks[lowered.placement.ranks[counterpart(send).stage]]
        assert (account.waits_for_rank, account.waits_for_action) == (sender, send)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("1f1b", "zbv") else pytest.param(name, marks=pytest.mark.thorough)
        for name in SCHEDULES
    ],
)
def test_where_others_move_up_for_a_lost_message_its_sender_and_channel_are_named(name, num_cases):
    for lowered, chance in cases(name, num_cases, least_ranks=2):
        sender, send = chance.choice(messages(lowered))
        execution = Execution(lowered, chance, lost=send, in_order=True).run()
        diagnosis = post_mortem(execution.seen(), lowered, execution.now + 10 * S)
        assert diagnosis.rank == sender
        assert edge_of(diagnosis.action) == edge_of(send)


def one_f_one_b(world_size=2, num_microbatches=4):
    return lower(build_program("1f1b", world_size, num_microbatches))


def in_step(rank, action, *, waits=False, since_s=10.0, step=4, process="alive"):
    action = OPT if action == "OPT" else parse_action(action)
    since_ns = AT_NS - int(since_s * S)
    return RankState(rank, "node", process, "steps", step, action, waits, since_ns)


def in_phase(rank, phase, *, since_s=10.0, waits=False, process="alive", step=None):
    since_ns = AT_NS - int(since_s * S)
    return RankState(rank, "node", process, phase, step, None, waits, since_ns)


def judged(*seen, lowered=None):
    return post_mortem(seen, lowered or one_f_one_b(), AT_NS)


STOPPED, DEAD = {"process": "stopped"}, {"process": "dead"}
THREE, FOUR = one_f_one_b(3), one_f_one_b(4)
CROSSED = Program(
    "hangs",
    loop_placement(2),
    2,
    tuple(
        tuple(map(parse_action, row.split()))
        for row in (
            "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1",
            "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
        )
    ),
)
JUDGED = {  # states, program if it is not that of two ranks, rank and action at fault, verdict
    "a stopped rank": (
        [in_step(0, "0B2", waits=True, since_s=9.5), in_step(1, "1F2", since_s=9.8, **STOPPED)],
        *(None, 1, "1F2"),
        (
            "rank 1 is stopped (SIGSTOP or a debugger) in 1F2 of step 4, since 9.8 s; rank 0 waits "
            "for it"
        ),
    ),
    "a rank at work": (
        [
            in_step(0, "0F0", since_s=12.3),
            *(in_step(rank, f"{rank}F0", waits=True) for rank in (1, 2, 3)),
        ],
        *(FOUR, 0, "0F0"),
        "rank 0 is in the work of 0F0 of step 4, since 12.3 s; ranks 1, 2 and 3 wait for it",
    ),
    "a message that its sender has behind it": (
        [in_step(0, "0B0", waits=True), in_step(1, "1F0", waits=True, since_s=11)],
        *(None, 0, "0SEND_F0"),
        (
            "the message of 0SEND_F0 was lost or never sent, or one before it on its channel: "
            "rank 0 has it behind it, and rank 1 waits for it in 1F0 of step 4, since 11.0 s"
        ),
    ),
    "a message of a step that its sender has left": (
        [in_step(0, "0F0", step=5), in_step(1, "1F3", waits=True)],
        *(None, 0, "0SEND_F3", "the message of 0SEND_F3 was lost"),
    ),
    "a message of a step to come": (
        [in_step(0, "OPT", step=4), in_step(1, "1F0", waits=True, step=5)],
        *(None, 0, str(OPT), "rank 0 is in the work of OPT of step 4"),
    ),
    "a message whose sender has come to the end of the step": (
        [in_phase(0, BARRIER, step=4), in_step(1, "1F3", waits=True)],
        *(None, 0, "0SEND_F3", "the message of 0SEND_F3 was lost"),
    ),
    "a circle": (
        [in_step(0, "0B0", waits=True), in_step(1, "1F1", waits=True)],
        *(CROSSED, None, None),
        (
            "deadlock: rank 0 waits in 0B0 of step 4 for 1B0 of rank 1; "
            "rank 1 waits in 1F1 of step 4 for 0F1 of rank 0"
        ),
    ),
    "a rank that is not at the barrier": (
        [in_phase(0, BARRIER), in_phase(1, "builds the model", since_s=20), in_phase(2, BARRIER)],
        *(THREE, 1, None, "rank 1 builds the model, since 20.0 s; ranks 0 and 2 wait for it"),
    ),
    "all at the barrier": (
        [in_phase(0, BARRIER), in_phase(1, BARRIER)],
        *(None, None, None, "the rank at fault is unknown: rank 0 waits for"),
    ),
    "no record": (
        [in_step(0, "0B0", waits=True)],
        *(None, 1, None, "rank 1 left no record; rank 0 waits for it"),
    ),
    "what all do together": (
        [in_phase(0, "sums shared gradients", step=4), in_phase(1, BARRIER, step=4)],
        *(None, 0, None),
        "rank 0 sums shared gradients in step 4, since 10.0 s; rank 1 waits for it",
    ),
    "deaths, of which one waited for no other": (
        [
            in_step(0, "0B0", waits=True, **DEAD),
            in_step(1, "1B0", **DEAD),
            in_step(2, "2F2", waits=True, **DEAD),
        ],
        *(THREE, 1, "1B0", "rank 1 died in 1B0 of step 4"),
    ),
    "deaths at work": (
        [in_step(rank, f"{rank}F0", **DEAD) for rank in (0, 1)],
        *(None, None, None, "the rank that died first is unknown: rank 0 died in 0F0"),
    ),
    "a rank that takes no part": (
        [in_step(0, "0B0", waits=True), in_step(1, "1B0"), in_phase(2, BARRIER, **STOPPED)],
        *(None, 2, None, "rank 2 is stopped"),
    ),
}


@pytest.mark.parametrize("what", JUDGED)
def test_the_rank_and_action_at_fault_are_named_in_a_sentence(what):
    seen, lowered, rank, action, verdict = JUDGED[what]
    diagnosis = judged(*seen, lowered=lowered)
    named = None if diagnosis.action is None else str(diagnosis.action)
    assert (diagnosis.rank, named) == (rank, action)
    assert diagnosis.verdict.startswith(verdict)
    assert len(diagnosis.ranks) == len(seen)


@pytest.mark.parametrize(
    ("waiting", "other", "account"),
    [
        (
            in_step(0, "0B2", waits=True, since_s=9.5),
            in_step(1, "1F2", **STOPPED),
            "rank 0 waits in 0B2 of step 4 for 1B2 of rank 1, since 9.5 s",
        ),
        (
            in_phase(0, BARRIER),
            in_phase(1, "builds the model"),
            "rank 0 waits for the other ranks, since 10.0 s: rank 1 is not there",
        ),
        (
            in_phase(0, BARRIER, step=4),
            in_phase(1, "stores the run", step=4),
            "rank 0 waits for the other ranks after step 4, since 10.0 s: rank 1 is not there",
        ),
        (
            in_phase(0, DRAINS),
            in_step(1, "1B1", since_s=11),
            "rank 0 drains its transfers, since 10.0 s: rank 1 has not posted 1RECV_F3",
        ),
        (
            in_step(0, "OPT", waits=True),
            in_step(1, "1B3"),
            "rank 0 waits in OPT of step 4, since 10.0 s: rank 1 is not there",
        ),
        (
            in_phase(0, "runs the optimizer", step=4),
            in_step(1, "1B3"),
            "rank 0 runs the optimizer in step 4, since 10.0 s: rank 1 is not there",
        ),
    ],
)
def test_what_a_rank_waits_for_is_told(waiting, other, account):
    diagnosis = judged(waiting, other)
    assert diagnosis.rank == diagnosis.ranks[0].waits_for_rank == 1
    assert diagnosis.ranks[0].account == account


def test_a_rank_waits_in_a_collective_for_its_fellow_of_the_other_replica():
    lowered = add_collectives(lower(build_program("1f1b", 2, 2)), DataParallel())
    seen = [in_step(2, "0F0", **STOPPED), in_step(3, "1F0", waits=True)]
    for rank, row in enumerate(lowered.actions):
        place = {"action": row[-1], "collective": row[-1], "position": len(row) - 1}
        seen.append(replace(in_step(rank, "OPT"), **place))
    diagnosis = post_mortem(seen, lowered, AT_NS, replicas=2)
    assert diagnosis.rank == 2
    assert diagnosis.verdict.startswith("rank 0 of replica 1 is stopped (SIGSTOP or a debugger)")
    assert diagnosis.ranks[0].account == (
        "rank 0 of replica 0 waits in 0REDUCE_GRAD of step 4, since 10.0 s: rank 0 of replica 1 is "
        "not there"
    )


def test_a_run_that_still_moved_is_slow_and_nobody_is_at_fault():
    diagnosis = judged(
        in_step(0, "0B0", waits=True, since_s=0.02), in_step(1, "1B0", since_s=0.015)
    )
    assert diagnosis.rank is None
    assert diagnosis.verdict.startswith(
        "no rank is seen to hang: the last sign of life is 0.015 s old"
    )


def test_rows_are_those_of_the_store(tmp_path):
    seen = [in_step(0, "OPT"), in_phase(1, BARRIER, step=4)]
    diagnosis = judged(*seen)
    rows = flight_rows(diagnosis, AT_NS)
    assert list(rows) == [column.name for column in FLIGHT][1:]
    store = Store(tmp_path)
    store.write_run({"run_id": "r", "status": "timeout"}, {"flight": rows})
    read = store.table("flight", ["r"])
    assert read["action"].fillna("").tolist() == ["OPT", ""]
    assert read["waits_for_rank"].fillna(-1).tolist() == [-1, 0]
    assert read["until_ns"].tolist() == [AT_NS, AT_NS]
    assert flight_rows(judged(), AT_NS).empty
