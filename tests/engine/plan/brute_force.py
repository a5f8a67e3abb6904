"""The rules, the deadlock proof and the times, computed again in the plainest way.

Nothing here is fast, and nothing is shared with what it judges but the types and the placement.
"""

import itertools
from collections import Counter

from engine.plan.walk import FREE_TRANSFERS, Sharing

SENDS, RECEIVES = ("SEND_F", "SEND_B"), ("RECV_F", "RECV_B")


def facts_made(action):
    """A full backward is both of its halves."""
    stage, op, m = action
    return [(stage, half, m) for half in ("IW" if op == "B" else op)]


def facts_needed(action, depth):
    """The forward before it, the backward behind it, and its own forward or I."""
    stage, op, m = action
    needed = {
        "F": [(stage - 1, "F", m)],
        "I": [(stage, "F", m), (stage + 1, "I", m)],
        "W": [(stage, "I", m)],
    }["I" if op == "B" else op]
    return [fact for fact in needed if fact[0] // depth == stage // depth]


def is_legal(program):
    """Run it: pass over the ranks until nothing moves, then see whether all is done once."""
    num_stages, num_microbatches = program.num_stages, program.num_microbatches
    depth, directions = program.placement.depth, program.placement.directions
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
                if any(done[fact] == 0 for fact in facts_needed(action, depth)):
                    break
                done.update(facts_made(action))
                positions[rank] += 1
                moves = True
    wanted = {
        (stage, op, m)
        for stage, op, m in itertools.product(range(num_stages), "FIW", range(num_microbatches))
        if stage // depth == m * directions // num_microbatches
    }
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
    """The SEND of an action's result to a stage on another rank."""
    stage, op, m = action
    way, target = ("F", stage + 1) if op == "F" else ("B", stage - 1)
    if op not in "FBI" or not 0 <= target < len(ranks) or ranks[target] == ranks[stage]:
        return None
    return (stage, f"SEND_{way}", m)


class PlainWalk:
    """When things happen in steps in a row of D replicas: start, moving and end of each.

    `took[d]` has the nanoseconds of a replica's actions, step by step, in the order of the rows.
    Ranks are passed over until all is done; what an action waits for is known before it is.
    """

    def __init__(self, program, took, transfers=FREE_TRANSFERS, steps=1):
        self.ranks, self.transfers, self.replicas = program.placement.ranks, transfers, len(took)
        self.has_transfers = program.has_transfers
        size, first = program.table.num_actions, program.table.offset
        self.todo = {
            (d, rank): [
                ((d, step, rank, at), action, took[d][step * size + first[rank] + at])
                for step in range(steps)
                for at, action in enumerate(row)
            ]
            for d in range(self.replicas)
            for rank, row in enumerate(program.actions)
        }
        self.free = dict.fromkeys(self.todo, 0)
        self.times = {}
        self.posted, self.queues, self.arrived = {}, {}, {}  # messages
        self.lanes = {walker: [] for walker in self.todo}  # keys of collectives and their ns
        self.gathers = {}  # the latest UNSHARD of a walker's stage
        depth, is_two_way = program.placement.depth, program.placement.directions > 1
        self.parts = {  # of sums of copies, which one replica has
            key: action.stage % depth
            for row in self.todo.values()
            for key, action, _ in row
            if is_two_way and self.replicas == 1 and action.op == "REDUCE_GRAD"
        }
        self.norms = {}  # when each walker has come to a step's NORM
        while any([*map(self.advance, self.todo), self.move(), self.join()]):
            pass
        assert not any(self.todo.values())

    def advance(self, walker):
        """Do a walker's next action if all that it waits for is known."""
        if not self.todo[walker]:
            return False
        (key, action, ns), d = self.todo[walker][0], walker[0]
        step = key[1]
        start = self.free[walker]
        if action.op in (*SENDS, *RECEIVES):
            self.posted[d, step, *action] = start
            if action.op in SENDS:
                self.queues.setdefault((d, *ends_of(action)), []).append((key, action, ns))
        elif action.op in ("UNSHARD", "REDUCE_GRAD"):
            self.lanes[walker].append((key, start, ns))
            if action.op == "UNSHARD":
                self.gathers[walker, action.stage] = key
        elif action.op == "NORM":
            waits = [self.times.get(one, (None,))[-1] for one, *_ in self.lanes[walker]]
            if None in waits:
                return False
            self.norms[step, *walker] = max([start, *waits])
            came = [self.norms.get((step, *one)) for one in self.todo]
            if None in came:
                return False
            self.free[walker] = max(came)
        elif action.op != "RESHARD":
            waits = [start]
            if action.op == "OPT":
                waits += [self.times.get(one, (None,))[-1] for one, *_ in self.lanes[walker]]
            elif (receive := receive_of(action, self.ranks)) is not None:
                waits.append(self.arrived.get((d, step, *receive)))
            if (walker, action.stage) in self.gathers and action.op != "OPT":
                waits.append(self.times.get(self.gathers[walker, action.stage], (None,))[-1])
            if None in waits:
                return False
            self.free[walker] = max(waits) + ns
            self.times[key] = max(waits), None, self.free[walker]
            send = None if self.has_transfers else goes_to(action, self.ranks)
            if send is not None:
                self.leave(walker, key, send)
        self.todo[walker].pop(0)
        return True

    def leave(self, walker, key, send):
        """Let a message that is no action of the program move once its channel is free."""
        channel, (start, _, end) = (walker[0], *ends_of(send)), self.times[key]
        moves = max(end, self.arrived.get(channel, 0))
        self.arrived[channel] = moves + self.transfers.duration_ns
        self.arrived[walker[0], key[1], ends_of(send)[1], send[1][-1], send[2]] = self.arrived[
            channel
        ]
        self.times[key] = start, moves, end
        if not self.transfers.overlaps:
            self.free[walker] = self.arrived[channel]

    def move(self):
        """Move the first message of each channel whose receive is posted."""
        is_moving = False
        for (d, source, target), queue in self.queues.items():
            while queue:
                key, (_, op, m), ns = queue[0]
                ready = self.posted.get((d, key[1], target, f"RECV_{op[-1]}", m))
                if ready is None:
                    break
                before = self.arrived.get((d, source, target), 0)
                moves = max(ready, self.posted[d, key[1], source, op, m], before)
                self.times[key] = None, moves, moves + ns
                self.arrived[d, source, target] = moves + ns
                self.arrived[d, key[1], target, op[-1], m] = moves + ns
                queue.pop(0)
                is_moving = True
        return is_moving

    def join_copies(self):
        """Do the next sum of each two copies of a stage, where one replica has two pipelines."""
        waiting = {}
        for lane in self.lanes.values():
            for at, (key, begin, ns) in enumerate(lane):
                over = self.times.get(lane[at - 1][0], (None,))[-1] if at else 0
                if key in self.parts and key not in self.times and over is not None:
                    ends = waiting.setdefault((key[1], self.parts[key]), [])
                    ends.append((key, max(begin, over), ns))
        both = [ends for ends in waiting.values() if len(ends) == 2]
        for ends in both:
            ready = max(begin for _, begin, _ in ends)
            for key, begin, ns in ends:
                self.times[key] = begin, ready, ready + ns
        return bool(both)

    def join(self):
        """Do the next collective of each rank that all replicas have come to."""
        is_moving = self.join_copies()
        for rank in {rank for _, rank in self.lanes}:
            lanes = [self.lanes[d, rank] for d in range(self.replicas)]
            for at in range(min(map(len, lanes))):
                if lanes[0][at][0] in self.times or lanes[0][at][0] in self.parts:
                    continue
                begins = [
                    max(lane[at][1], self.times[lane[at - 1][0]][2] if at else 0) for lane in lanes
                ]
                for lane, begin in zip(lanes, begins, strict=True):
                    key, _, ns = lane[at]
                    self.times[key] = begin, max(begins), max(begins) + ns
                is_moving = True
        return is_moving
