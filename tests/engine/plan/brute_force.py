"""The rules, the deadlock proof and the simulator, computed again in the plainest way.

Nothing here is fast, and nothing is shared with what it judges but the types and the placement.
"""

import itertools
from collections import Counter

from engine.plan.walk import Sharing

SENDS, RECEIVES = ("SEND_F", "SEND_B"), ("RECV_F", "RECV_B")


def facts_made(action):
    """A full backward is both of its halves."""
    stage, op, m = action
    return [(stage, half, m) for half in ("IW" if op == "B" else op)]


def facts_needed(action, num_stages):
    """The forward before it, the backward behind it, and its own forward or I."""
    stage, op, m = action
    needed = {
        "F": [(stage - 1, "F", m)],
        "I": [(stage, "F", m), (stage + 1, "I", m)],
        "W": [(stage, "I", m)],
    }["I" if op == "B" else op]
    return [fact for fact in needed if 0 <= fact[0] < num_stages]


def is_legal(program):
    """Run it: pass over the ranks until nothing moves, then see whether all is done once."""
    num_stages, microbatches = program.num_stages, range(program.num_microbatches)
    done, positions, moves = Counter(), [0] * len(program.actions), True
    while moves:
        moves = False
        for rank, row in enumerate(program.actions):
            while positions[rank] < len(row):
                action = row[positions[rank]]
                is_placed = 0 <= action.stage < num_stages and (
                    program.placement.ranks[action.stage] == rank
                )
                if not is_placed:
                    return False
                if any(done[fact] == 0 for fact in facts_needed(action, num_stages)):
                    break
                done.update(facts_made(action))
                positions[rank] += 1
                moves = True
    wanted = set(itertools.product(range(num_stages), "FIW", microbatches))
    return (
        set(done) == wanted
        and set(done.values()) == {1}
        and positions == [len(row) for row in program.actions]
    )


def ends_of(transfer):
    """The sending and the receiving stage."""
    stage, op, _ = transfer
    hop = 1 if op in ("SEND_F", "RECV_B") else -1
    return (stage, stage + hop) if op in SENDS else (stage + hop, stage)


def receive_of(action, ranks):
    """(receiving stage, direction, microbatch) that a compute action needs from another rank."""
    stage, op, m = action
    if op == "F" and stage > 0 and ranks[stage - 1] != ranks[stage]:
        return (stage, "F", m)
    if op in "BI" and stage + 1 < len(ranks) and ranks[stage + 1] != ranks[stage]:
        return (stage, "B", m)
    return None


def producers_of(send):
    stage, op, m = send
    return [(stage, "F", m)] if op == "SEND_F" else [(stage, "B", m), (stage, "I", m)]


def do_share(one, other, ranks, sharing):
    """Whether two transfers of one rank have to complete in the order in which they are posted."""
    edges = [ends_of(transfer) for transfer in (one, other)]
    owners = dict(enumerate(ranks))  # a mutated transfer may lead nowhere
    edges_of_ranks = [tuple(owners.get(stage) for stage in edge) for edge in edges]
    return {
        Sharing.STAGE_EDGE: edges[0] == edges[1],
        Sharing.RANK_EDGE: edges_of_ranks[0] == edges_of_ranks[1],
        Sharing.RANK_PAIR: set(edges_of_ranks[0]) == set(edges_of_ranks[1]),
        Sharing.RANK: True,
    }[sharing]


class WrongMessage(Exception):
    """Something else than what the receiver takes it for."""


def delivers_all(lowered, sharing=Sharing.STAGE_EDGE):
    """Run ranks and channels to where nothing moves: nothing hangs, is left or goes wrong."""
    try:
        run = _Run(lowered, sharing)
        while run.walk() or run.match():
            pass
    except WrongMessage:
        return False
    wanted = Counter(
        receive
        for row in lowered.actions
        for action in row
        if action.op in "FBIW" and (receive := receive_of(action, lowered.placement.ranks))
    )
    is_over = run.positions == [len(row) for row in lowered.actions] and not any(run.posted)
    return is_over and run.received == wanted


class _Run:
    def __init__(self, lowered, sharing):
        self.rows, self.ranks, self.sharing = lowered.actions, lowered.placement.ranks, sharing
        self.positions = [0] * len(self.rows)
        self.posted = [[] for _ in self.rows]  # not complete
        self.done, self.received = set(), Counter()

    def walk(self):
        moves = False
        for rank, row in enumerate(self.rows):
            while self.positions[rank] < len(row):
                action = row[self.positions[rank]]
                if action.op in "FBIW":
                    receive = receive_of(action, self.ranks)
                    if receive is not None and not self.received[receive]:
                        break
                    self.done.add((rank, *action))
                else:
                    if action.op in SENDS and not any(
                        (rank, *producer) in self.done for producer in producers_of(action)
                    ):
                        raise WrongMessage
                    self.posted[rank].append(action)
                self.positions[rank] += 1
                moves = True
        return moves

    def front(self, rank, ops):
        """The posted transfers of these ops that need not wait for another one."""
        posted = self.posted[rank]
        return [
            one
            for index, one in enumerate(posted)
            if one.op in ops
            and not any(do_share(one, other, self.ranks, self.sharing) for other in posted[:index])
        ]

    def match(self):
        for sender in range(len(self.rows)):
            for send in self.front(sender, SENDS):
                target = ends_of(send)[1]
                if not 0 <= target < len(self.ranks):
                    continue
                owner = self.ranks[target]
                for receive in self.front(owner, RECEIVES):
                    if ends_of(receive) != ends_of(send):
                        continue
                    if receive.microbatch != send.microbatch:
                        raise WrongMessage
                    self.posted[sender].remove(send)
                    self.posted[owner].remove(receive)
                    self.received[target, receive.op[-1], receive.microbatch] += 1
                    return True
        return False


def goes_to(action, ranks):
    """The stage on another rank that an action's result goes to."""
    hop = {"F": 1, "I": -1, "B": -1}.get(action.op)
    if hop is None or not 0 <= action.stage + hop < len(ranks):
        return None
    return None if ranks[action.stage + hop] == ranks[action.stage] else action.stage + hop


def run_step(program, took_of, transfers, free, channels):
    """Run one step from when ranks and channels are free, and leave when they are free next.

    Returns the start and end of every action.
    """
    rows, ranks = program.actions, program.placement.ranks
    there, positions, times, is_moving = {}, [0] * len(rows), {}, True
    while is_moving:
        is_moving = False
        for rank, row in enumerate(rows):
            while positions[rank] < len(row):
                action = row[positions[rank]]
                needs = [(*fact, rank) for fact in facts_needed(action, len(ranks))]
                if not there.keys() >= set(needs):
                    break
                start = max([free[rank], *(there[need] for need in needs)])
                free[rank] = end = start + took_of(action)
                times[action] = start, end
                target = goes_to(action, ranks)
                if target is not None:
                    edge = action.stage, target
                    channels[edge] = max(end, channels.get(edge, 0)) + transfers.duration_ns
                    free[rank] = end if transfers.overlaps else channels[edge]
                for fact in facts_made(action):
                    there[(*fact, rank)] = end
                    if target is not None and fact[1] != "W":
                        there[(*fact, ranks[target])] = channels[edge]
                positions[rank] += 1
                is_moving = True
    return times


def naive_times(program, durations, transfers):
    """The start and end of every action of a step that starts alone."""
    by_op = durations.by_op()
    free = [0] * program.world_size
    return run_step(program, lambda one: by_op[one.op][one.stage], transfers, free, {})
