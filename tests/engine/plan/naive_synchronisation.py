"""Synchronisations that hang, found again by trying: nothing is shared with what it judges."""

from brute_force import RECEIVES, SENDS, ends_of, receive_of

JOINED = ("UNSHARD", "REDUCE_GRAD")


class Attempt:
    """Replicas of which some places (replica, rank, position) synchronise.

    Channels belong to stage edges, lanes to ranks. A state is the positions of all ranks, and what
    has happened: messages (replica, source, target, microbatch), collectives (rank, turn).
    """

    def __init__(self, replicas, synchronising):
        self.ranks, self.num_replicas = replicas[0].placement.ranks, len(replicas)
        self.rows = [row for one in replicas for row in one.rows]
        self.owners = [(d, r) for d, one in enumerate(replicas) for r in range(len(one.rows))]
        self.synchronising = set(synchronising)
        self.names = [
            self._names(*owner, row) for owner, row in zip(self.owners, self.rows, strict=True)
        ]
        self.orders = {}  # what happens in the order of its channel or lane
        for names, row in zip(self.names, self.rows, strict=True):
            for name, action in zip(names, row, strict=True):
                if action.op in SENDS:
                    self.orders.setdefault(name[:3], []).append(name)
                elif action.op in JOINED and name not in self.orders.setdefault(name[0], []):
                    self.orders[name[0]].append(name)
        self.start = (0,) * len(self.rows), frozenset()

    def _names(self, replica, rank, row):
        names, turn = [], 0
        for action in row:
            if action.op in JOINED:
                names.append((rank, turn))
                turn += 1
            elif action.op in (*SENDS, *RECEIVES):
                names.append((replica, *ends_of(action), action.microbatch))
            else:
                names.append(None)
        return names

    def can_pass(self, index, at, happened):
        """Whether a rank can go past the action at a position."""
        if at == len(self.rows[index]):
            return False
        action, (replica, rank) = self.rows[index][at], self.owners[index]
        if action.op not in "FBIW":
            return True
        awaited = []
        if (replica, rank, at) in self.synchronising:
            awaited += [name for name in self.names[index][:at] if name is not None]
        if receive_of(action, self.ranks) is not None:
            source = action.stage + (-1 if action.op == "F" else 1)
            awaited.append((replica, source, action.stage, action.microbatch))
        gathered = [
            name
            for name, one in zip(self.names[index], self.rows[index][:at], strict=False)
            if one.op == "UNSHARD" and one.stage == action.stage
        ]
        return happened.issuperset(awaited + gathered[-1:])

    def can_happen(self, name, positions, happened):
        """Whether all ends are there, and what is before it on its channel or lane has happened."""
        order = self.orders[name[:3] if len(name) == 4 else name[0]]
        if not happened.issuperset(order[: order.index(name)]):
            return False
        ends = [
            at > names.index(name)
            for at, names in zip(positions, self.names, strict=True)
            if name in names
        ]
        return len(ends) == (2 if len(name) == 4 else self.num_replicas) and all(ends)

    def next_states(self, state):
        positions, happened = state
        for index, at in enumerate(positions):
            if self.can_pass(index, at, happened):
                yield (*positions[:index], at + 1, *positions[index + 1 :]), happened
        for order in self.orders.values():
            for name in order:
                if name not in happened and self.can_happen(name, positions, happened):
                    yield positions, happened | {name}

    def is_over(self, state):
        positions, happened = state
        num_happened = sum(map(len, self.orders.values()))
        return positions == tuple(map(len, self.rows)) and len(happened) == num_happened

    def hangs(self):
        """In one order: whatever can happen, does."""
        state = self.start
        while (following := next(self.next_states(state), None)) is not None:
            state = following
        return not self.is_over(state)

    def ends(self):
        """In every order: whether it came to its end, for each state in which nothing can move."""
        ends, seen, waiting = set(), {self.start}, [self.start]
        while waiting:
            state = waiting.pop()
            following = set(self.next_states(state))
            if not following:
                ends.add(self.is_over(state))
            waiting += following - seen
            seen |= following
        return ends
