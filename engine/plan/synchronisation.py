"""Finds where a device-wide synchronisation would hang a program that cannot hang otherwise.

An allocator that frees its cache and tries again, a kernel that is loaded at its first call and
autotuning make the host wait for everything that is queued on the device, open receives included.
Here rank 0 posts the receive of 0B0 early, so that the message can move while 0F1 runs:

    rank 0    0F0 0SEND_F0 0RECV_B0 | 0F1 0SEND_F1 0B0 ...
    rank 1    1RECV_F0 1F0 1RECV_F1   1F1 1B1 1SEND_B1 1B0 1SEND_B0 ...

If 0F1 synchronises, it waits for 0RECV_B0, whose message follows 1F1, which needs 0F1.

Each event carries a clock: by rank, the last position that has to be passed before it. A rank that
synchronises at position k waits for what it has posted before k. That hangs exactly if one of these
is done only after a later position of the same rank:

    posted at j  <  synchronises at k  <  clock[rank] of what was posted at j

So one walk answers it for every computation. Several synchronisations at once can hang where none
would alone; they are walked through with their waits. More of them never wait for less: if none
hangs where every computation synchronises, no choice of computations does.

As in `engine.plan.lower`, no buffering is assumed, nor that a host issues what is behind a
computation whose message is not there. So what is not found here hangs on no transport.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from engine.plan.action import COMPUTE_OPS, RECV_OPS, Action, Op
from engine.plan.lower import Sharing, edge_of, incoming, line_of
from engine.plan.program import Program


class Place(NamedTuple):
    """An action of a program: its rank, and its position in the rank's row of `Program.rows`."""

    rank: int
    position: int


_Walker = tuple[int, int]
"""A replica and a rank of it."""
_Spot = tuple[int, int, int]
"""A replica, a rank and a position."""


@dataclass(frozen=True)
class SynchronisationHang:
    """A device-wide synchronisation that never ends."""

    replicas: tuple[Program, ...] = field(repr=False)
    sharing: Sharing = field(repr=False)
    synchronising: frozenset[_Spot] = field(repr=False)  # all that do
    replica: int
    rank: int
    position: int  # of the computation that synchronises
    awaited: Action  # what was posted before, and is done only after it

    @property
    def action(self) -> Action:
        """The computation that synchronises."""
        return self.replicas[self.replica].rows[self.rank][self.position]

    @cached_property
    def circle(self) -> tuple[str, ...]:
        """The waits that lead back to their beginning, each a sentence."""
        walk = _Walk(self.replicas, self.sharing, self.synchronising)
        walk.run()
        return tuple(wait.text for wait in walk.circle((self.replica, self.rank)))

    def __str__(self) -> str:
        return (
            f"rank {self.rank}, position {self.position}, {self.action}: a device-wide "
            f"synchronisation waits for {self.awaited} and hangs: {'; '.join(self.circle)}"
        )


def synchronisation_hangs(
    *replicas: Program, sharing: Sharing = Sharing.STAGE_EDGE
) -> list[SynchronisationHang]:
    """The computations at which one synchronisation alone hangs, in order of rank and position.

    `replicas` have their transfers, and are proved not to hang without synchronisations; each is
    one copy of the pipeline, most often the only one.
    """
    walk = _Walk(replicas, sharing, frozenset())
    walk.run()
    return [
        SynchronisationHang(
            replicas, sharing, frozenset({(*walker, position)}), *walker, position, awaited
        )
        for walker in walk.walkers
        for position, awaited in walk.awaited_too_long(walker)
    ]


def joint_hang(
    *replicas: Program, at: Collection[Place], sharing: Sharing = Sharing.STAGE_EDGE
) -> SynchronisationHang | None:
    """Return the hang where all of these computations synchronise, on every replica; or None."""
    synchronising = frozenset((d, *place) for d in range(len(replicas)) for place in at)
    walk = _Walk(replicas, sharing, synchronising)
    walk.run()
    if (stuck := walk.unfinished()) is None:
        return None
    wait = next(wait for wait in walk.circle(stuck) if wait.is_synchronising)
    return SynchronisationHang(replicas, sharing, synchronising, *wait.place, wait.awaited)


def computations(program: Program) -> list[Place]:
    """The places of all computations."""
    return [
        Place(rank, position)
        for rank, row in enumerate(program.rows)
        for position, action in enumerate(row)
        if action.op in COMPUTE_OPS
    ]


def first_computations(program: Program) -> list[Place]:
    """The places of the first computation of each kind: each op of each stage.

    There kernels are loaded and tuned, unless that was done before the step.
    """
    first: dict[tuple[int, Op], Place] = {}
    for place in computations(program):
        action = program.rows[place.rank][place.position]
        first.setdefault((action.stage, action.op), place)
    return list(first.values())


_JOINED = (Op.UNSHARD, Op.REDUCE_GRAD)


class _Wait(NamedTuple):
    """A reason why a rank does not go on."""

    place: _Spot
    is_synchronising: bool  # whether it would go on without a synchronisation
    awaited: Action
    text: str


class _Post(NamedTuple):
    """One end of a meeting."""

    position: int
    line: tuple[object, ...]
    clock: list[int]


@dataclass
class _Meeting:
    """A message, or a collective of all replicas: done once all its ends are first in line."""

    num_ends: int
    posts: dict[_Walker, _Post] = field(default_factory=dict)
    done: list[int] | None = None  # its clock


class _Walk:
    """All ranks of all replicas, each taken as far as it can go."""

    def __init__(
        self,
        replicas: Sequence[Program],
        sharing: Sharing,
        synchronising: frozenset[_Spot],
    ) -> None:
        self._replicas, self._sharing, self.synchronising = replicas, sharing, synchronising
        self.walkers = [(d, r) for d, one in enumerate(replicas) for r in range(one.world_size)]
        self._index = {walker: index for index, walker in enumerate(self.walkers)}
        self._rows = {(d, r): replicas[d].rows[r] for d, r in self.walkers}
        self._position = dict.fromkeys(self.walkers, 0)
        self._clock = {walker: [-1] * len(self.walkers) for walker in self.walkers}
        self._posted: dict[_Walker, list[_Meeting]] = {walker: [] for walker in self.walkers}
        self._open: dict[_Walker, dict[int, _Meeting]] = {walker: {} for walker in self.walkers}
        self._meetings: dict[tuple[object, ...], _Meeting] = {}
        self._of_action: dict[tuple[_Walker, Action], _Meeting] = {}
        self._unshard: dict[tuple[_Walker, int], _Meeting] = {}
        self._num_on_lane = dict.fromkeys(self.walkers, 0)
        self._lines: dict[tuple[object, ...], deque[_Meeting]] = {}
        self._last_done: dict[tuple[object, ...], list[int]] = {}
        self._todo = list(self.walkers)

    def run(self) -> None:
        """Go on until nothing moves."""
        while self._todo:
            walker = self._todo.pop()
            row = self._rows[walker]
            while self._position[walker] < len(row):
                action = row[self._position[walker]]
                if any(meeting.done is None for meeting in self._needed(walker, action)):
                    break
                self._pass(walker, action)

    def _needed(self, walker: _Walker, action: Action) -> Iterator[_Meeting]:
        """The meetings that an action waits for."""
        if action.op not in COMPUTE_OPS:
            return
        yield from self._own(walker, action)
        if (*walker, self._position[walker]) in self.synchronising:
            yield from self._open[walker].values()

    def _own(self, walker: _Walker, action: Action) -> Iterator[_Meeting]:
        """Those that a computation waits for in any case: its message and its parameters."""
        if (receive := incoming(action, self._replicas[walker[0]])) is not None:
            yield self._of_action[walker, receive]
        if (unshard := self._unshard.get((walker, action.stage))) is not None:
            yield unshard

    def _pass(self, walker: _Walker, action: Action) -> None:
        clock, position = self._clock[walker], self._position[walker]
        for meeting in self._needed(walker, action):
            assert meeting.done is not None
            clock[:] = map(max, clock, meeting.done)
        clock[self._index[walker]] = position
        self._position[walker] += 1
        if action.op not in COMPUTE_OPS and action.op is not Op.RESHARD:
            self._post(walker, action, position)

    def _post(self, walker: _Walker, action: Action, position: int) -> None:
        name, line, num_ends = self._name(walker, action)
        meeting = self._meetings.setdefault(name, _Meeting(num_ends))
        meeting.posts[walker] = _Post(position, line, [*self._clock[walker]])
        self._of_action[walker, action] = meeting
        self._posted[walker].append(meeting)
        self._open[walker][id(meeting)] = meeting
        if action.op is Op.UNSHARD:
            self._unshard[walker, action.stage] = meeting
        self._lines.setdefault(line, deque()).append(meeting)
        self._settle([line])

    def _name(
        self, walker: _Walker, action: Action
    ) -> tuple[tuple[object, ...], tuple[object, ...], int]:
        """The name of an end's meeting, the end's line, and the number of ends."""
        replica, rank = walker
        if action.op in _JOINED:
            turn = self._num_on_lane[walker]
            self._num_on_lane[walker] += 1
            return ("lane", rank, turn), ("lane", *walker), len(self._replicas)
        line = line_of(self._replicas[replica], self._sharing, action)
        return (replica, edge_of(action), action.microbatch), (replica, rank, line), 2

    def _settle(self, lines: list[tuple[object, ...]]) -> None:
        """Let the meetings happen that are first in all of their lines."""
        while lines:
            queue = self._lines[lines.pop()]
            if not queue or len(queue[0].posts) < queue[0].num_ends:
                continue
            posts = queue[0].posts.values()
            if all(self._lines[post.line][0] is queue[0] for post in posts):
                lines += self._complete(queue[0])

    def _complete(self, meeting: _Meeting) -> list[tuple[object, ...]]:
        lines = [post.line for post in meeting.posts.values()]
        clocks = [post.clock for post in meeting.posts.values()]
        clocks += [self._last_done[line] for line in lines if line in self._last_done]
        meeting.done = list(map(max, *clocks))
        for line in lines:
            self._lines[line].popleft()
            self._last_done[line] = meeting.done
        for walker in meeting.posts:
            del self._open[walker][id(meeting)]
        self._todo += meeting.posts
        return lines

    # what the walk found

    def awaited_too_long(self, walker: _Walker) -> Iterator[tuple[int, Action]]:
        """The computations that something posted before them waits for, and which: receives first.

        For a walk without synchronisations that has come to its end.
        """
        index, row = self._index[walker], self._rows[walker]
        open_: list[tuple[bool, int, int]] = []  # whether it is no receive, where posted, until
        posted = iter(self._posted[walker])
        for position, action in enumerate(row):
            if action.op in COMPUTE_OPS:
                open_ = [one for one in open_ if one[2] > position]
                if open_:
                    yield position, row[min(open_)[1]]
            elif action.op is not Op.RESHARD:
                done = next(posted).done
                assert done is not None  # else the program hangs by itself
                open_.append((action.op not in RECV_OPS, position, done[index]))

    def unfinished(self) -> _Walker | None:
        """A rank that is not at its end."""
        places = self._position.items()
        return next((walker for walker, at in places if at < len(self._rows[walker])), None)

    def circle(self, walker: _Walker) -> list[_Wait]:
        """Follow the waits from a rank until one comes up again: that is the circle."""
        waits: dict[_Walker, _Wait] = {}
        while walker not in waits:
            waits[walker], walker = self._wait_of(walker)
        walkers = list(waits)
        return [waits[one] for one in walkers[walkers.index(walker) :]]

    def _wait_of(self, walker: _Walker) -> tuple[_Wait, _Walker]:
        """The wait of a rank's next action, and the rank that keeps it waiting."""
        position = self._position[walker]
        action = self._rows[walker][position]
        meeting, is_synchronising = self._first_needed(walker, action)
        awaited = self._end(meeting, walker)
        what = "synchronises and waits for" if is_synchronising else "waits for"
        text = f"{self._named(action, walker)} {what} {awaited}"
        while len(meeting.posts) == meeting.num_ends:  # all are posted: it is behind another one
            posts = meeting.posts.items()
            owner, line = next(
                (w, post.line) for w, post in posts if self._lines[post.line][0] is not meeting
            )
            meeting = self._lines[line][0]
            text += f", which is behind {self._named(self._end(meeting, owner), owner)}"
        other = next(w for w in self._ends_of(meeting) if w not in meeting.posts)
        blocked = self._rows[other][self._position[other]]
        text += f", whose other end comes after {self._named(blocked, other)}"
        return _Wait((*walker, position), is_synchronising, awaited, text), other

    def _first_needed(self, walker: _Walker, action: Action) -> tuple[_Meeting, bool]:
        """The meeting that an action waits for, receives first; and whether only to synchronise."""
        needed = [meeting for meeting in self._needed(walker, action) if meeting.done is None]
        own = [meeting for meeting in self._own(walker, action) if meeting.done is None]
        if own:
            return own[0], False
        return min(needed, key=lambda m: self._end(m, walker).op not in RECV_OPS), True

    def _end(self, meeting: _Meeting, walker: _Walker) -> Action:
        post = meeting.posts.get(walker)
        if post is None:
            walker, post = next(iter(meeting.posts.items()))
        return self._rows[walker][post.position]

    def _ends_of(self, meeting: _Meeting) -> list[_Walker]:
        """The ranks that a meeting is between."""
        (replica, rank), post = next(iter(meeting.posts.items()))
        action = self._rows[replica, rank][post.position]
        if action.op in _JOINED:
            return [(d, rank) for d in range(len(self._replicas))]
        ranks = self._replicas[replica].placement.ranks
        return [(replica, ranks[stage]) for stage in edge_of(action)]

    def _named(self, action: Action, walker: _Walker) -> str:
        replica = f" of replica {walker[0]}" if len(self._replicas) > 1 else ""
        return f"{action} on rank {walker[1]}{replica}"
