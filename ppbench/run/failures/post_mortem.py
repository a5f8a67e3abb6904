"""Finds the rank at fault from the last known state of each rank.

    rank 0   waits in 0B0    for 1B0 of rank 1        the program shows which rank waits for which;
    rank 1   waits in 1F3    for 0SEND_F3 of rank 0   only F, B, I and collective phases
    rank 0   has 0SEND_F3 behind it                   can wait

With replicas, the rank of a process is counted over all of them, and its words have both: `rank 1
of replica 0`. A collective waits for that rank of every replica that has not come to it.

The chain of waits ends in a rank that is gone, in one that is at work, in a message that its sender
has behind it, or in itself: a deadlock. A record shows the place of its rank in its row: all that
is before it is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import pandas as pd

from engine.flight import Phase
from engine.plan.action import COLLECTIVE_OPS, COMPUTE_OPS, NO_INDEX, SEND_OPS, Action, Op
from engine.plan.messages import counterpart, incoming, outgoing
from engine.plan.program import Program
from ppbench.run.machine.node_folder import ALIVE, DEAD, STOPPED
from ppbench.store.columns import FLIGHT

STEPS = "steps"
DRAINS = Phase.DRAINS.words
_IN_STEP = tuple(phase.words for phase in (Phase.SUMS, Phase.UPDATES, Phase.DRAINS))
_ORDER = (
    Phase.CONNECTS,
    Phase.BUILDS,
    Phase.VERIFIES,
    Phase.PEAK,
    Phase.SUMS,
    Phase.UPDATES,
    Phase.DRAINS,
    Phase.REFERENCE,
    Phase.ALIGNS,
    Phase.MEMORY,
    Phase.REFERENCE_AGAIN,
    Phase.PROFILES,
    Phase.GATHERS,
    Phase.STORES,
    Phase.WAITS,
)
"""The order in which ranks come to phases after a step, or before the first. A rank may wait for
the others at several of these places; the others wait for it while it is in any other phase."""
_AFTER_ROW = {phase.words: number for number, phase in enumerate(_ORDER)}
_COLLECTIVE = (
    *(Phase.CONNECTS, Phase.SUMS, Phase.UPDATES, Phase.REFERENCE, Phase.ALIGNS),
    *(Phase.REFERENCE_AGAIN, Phase.GATHERS, Phase.WAITS),
)
"""Phases that a rank does not leave before the others have come to them."""
COLLECTIVE = tuple(phase.words for phase in _COLLECTIVE)
MOVED_LATELY_NS = 1_000_000_000
"""When a rank has begun something later than this before the end, nothing shows a hang."""
_BEFORE_FIRST = -1
_UNSHARD = (Op.UNSHARD, NO_INDEX)  # what follows the stage in such an action
_MOST_NAMED = 3
_FLIGHT_COLUMNS = [column.name for column in FLIGHT][1:]  # the store adds the run

_Place = tuple[int, int]
"""A step, and a position in a rank's row of it; phases come after the longest of the rows."""


@dataclass(frozen=True)
class RankState:
    """State of a rank when it was last looked at."""

    rank: int  # over all replicas: replica x world size + rank
    hostname: str
    process: str  # `alive`, `stopped` (SIGSTOP, a debugger) or `dead`
    phase: str  # in words that follow "rank 0": `builds the model`, `drains its transfers`, ...
    step: int | None  # the current or the last one; None before the first
    action: Action | None  # of the lowered program's row, or OPT; None outside steps
    is_waiting: bool  # for the action's input, or for other ranks; else it is at work
    since_ns: int  # on one clock for all ranks
    position: int | None = None  # of the action in the rank's row
    collective: Action | None = None  # that its lane is in, beside the action


@dataclass(frozen=True)
class RankAccount:
    """State of a rank, and the rank and action that it waited for."""

    seen: RankState
    waits_for_rank: int | None
    waits_for_action: Action | None
    account: str  # "rank 0 waits in 0B0 of step 4 for 1B0 of rank 1, since 9.8 s"


@dataclass(frozen=True)
class PostMortem:
    """The rank and action at which a run went wrong, as far as the records show."""

    rank: int | None  # at fault; None if unknown
    verdict: str  # one sentence
    ranks: tuple[RankAccount, ...]  # in order of rank; those that left a record
    action: Action | None = None  # at fault: a SEND if its message was lost
    world_size: int | None = None  # of a replica, by which the ranks are counted; None: of all


def post_mortem(
    seen: Sequence[RankState], lowered: Program, at_ns: int, replicas: int = 1
) -> PostMortem:
    """Find the rank at fault from the last known states of all ranks.

    `at_ns` is when they were taken, on the same clock; `lowered` is the case's program with its
    transfers. Ranks without a record are left out of `seen`; ranks that take no part in the case
    may be in it.
    """
    waits = _Waits(seen, lowered, replicas)
    culprit, verdict, at_fault = _culprit(waits, at_ns)
    accounts = []
    for rank in waits.ranks:
        if rank not in waits.seen:
            continue
        wait = waits.by_rank[rank]
        peer: int | None = None
        action: Action | None = None
        if wait is not None and wait.ranks:
            peer = culprit if culprit in wait.ranks else wait.ranks[0]
            action = wait.action if peer == wait.ranks[0] else None
        state = _state(waits, rank, at_ns)
        accounts.append(RankAccount(waits.seen[rank], peer, action, state))
    return PostMortem(culprit, verdict, tuple(accounts), at_fault, lowered.world_size)


def name_of(rank: int, world_size: int, replicas: int) -> str:
    """Return what a rank, counted over all replicas, is called."""
    replica, own = divmod(rank, world_size)
    return f"rank {rank}" if replicas == 1 else f"rank {own} of replica {replica}"


def flight_rows(diagnosed: PostMortem, at_ns: int) -> pd.DataFrame:
    """Return the store's table `flight`: a row per rank, with the times as given."""
    size = diagnosed.world_size or 1 + max((one.seen.rank for one in diagnosed.ranks), default=0)
    rows = [
        {
            **vars(account.seen),
            "replica": account.seen.rank // size,
            "rank": account.seen.rank % size,
            "action": _text_or_none(account.seen.action),
            "until_ns": at_ns,
            "waits_for_rank": None
            if account.waits_for_rank is None
            else account.waits_for_rank % size,
            "waits_for_action": _text_or_none(account.waits_for_action),
            "account": account.account,
        }
        for account in diagnosed.ranks
    ]
    frame = pd.DataFrame(rows, columns=_FLIGHT_COLUMNS)
    return frame.astype({"step": "Int64", "waits_for_rank": "Int64"})


def in_words(flight: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the table `flight` for display, in order of rank.

    Columns: `replica` and `hostname` if there are several, `rank`, `process`, `phase`, `step`,
    `action`, `waits_for` (`1B0 of rank 1`, or null) and `since_s`, how long that had lasted.
    """
    rows = flight.sort_values(["replica", "rank"], ignore_index=True)
    where = ["hostname"] if len(rows["hostname"].unique()) > 1 else []
    which = ["replica"] if rows["replica"].any() else []
    shown = rows[[*which, "rank", *where, "process", "phase", "step", "action"]].astype(
        {"step": "Int64"}
    )
    waits_for: list[str | None] = []
    for _, row in rows.iterrows():
        rank = None if pd.isna(row["waits_for_rank"]) else f"rank {int(row['waits_for_rank'])}"
        if rank is not None and not pd.isna(row["waits_for_action"]):
            rank = f"{row['waits_for_action']} of {rank}"
        waits_for.append(rank)
    since_s = (rows["until_ns"] - rows["since_ns"]).clip(lower=0) / 1e9
    return shown.assign(waits_for=pd.Series(waits_for, dtype=object), since_s=since_s)


def _text_or_none(action: Action | None) -> str | None:
    return None if action is None else action_text(action)


def action_text(action: Action) -> str:
    """Return `1F3`, or `OPT` for the optimizer, which belongs to no stage."""
    return action.op.value if action.op is Op.OPT else str(action)


@dataclass(frozen=True)
class _Wait:
    """The ranks that a rank is blocked on, and the action awaited from the first."""

    ranks: tuple[int, ...]  # none if unknown
    action: Action | None = None
    is_lost: bool = False  # the action is a SEND that its living rank has behind it


class _Waits:
    """Which ranks wait for which, as far as the records show."""

    def __init__(self, seen: Sequence[RankState], lowered: Program, replicas: int) -> None:
        self.seen = {state.rank: state for state in seen}
        self._world_size, self._replicas = lowered.world_size, replicas
        self._num_ranks = replicas * lowered.world_size
        self.ranks = sorted({*range(self._num_ranks), *self.seen})
        self._program = lowered
        self._positions = [{a: n for n, a in enumerate(row)} for row in lowered.actions]
        self._longest = max(map(len, lowered.actions))
        self._last_step = max((s.step for s in seen if s.step is not None), default=0)
        self.by_rank = {rank: self._wait_of(state) for rank, state in self.seen.items()}
        # The ranks that each one waits for, directly or not; itself in a circle.
        self.reached = dict[int, set[int]]()
        for rank in self.ranks:
            reached, pending = set[int](), [rank]
            while pending:
                wait = self.by_rank.get(pending.pop())
                fresh = set(wait.ranks) - reached if wait is not None else set()
                reached |= fresh
                pending += fresh
            self.reached[rank] = reached

    def name(self, rank: int) -> str:
        return name_of(rank, self._world_size, self._replicas)

    def waiting_for(self, rank: int) -> list[int]:
        """Return the living ranks that wait for this one, directly or not."""
        others = [other for other in self.ranks if other != rank and not self.is_gone(other)]
        return [other for other in others if rank in self.reached[other]]

    def is_gone(self, rank: int) -> bool:
        return rank in self.seen and self.seen[rank].process != ALIVE

    def _wait_of(self, seen: RankState) -> _Wait | None:
        """Return None for a rank at work."""
        if self.is_in_collective(seen):
            fellows = range(seen.rank % self._world_size, self._num_ranks, self._world_size)
            there = {
                rank
                for rank, state in self.seen.items()
                if not self.is_gone(rank) and state.collective == seen.collective
            }
            absent = tuple(rank for rank in fellows if rank != seen.rank and rank not in there)
            return _Wait(absent, seen.collective) if absent else None
        if seen.action is None:
            if seen.phase == DRAINS:  # a message there moves when both of its ends are ready
                awaited: dict[int, Action] = {}
                own = seen.rank % self._world_size
                row = self._program.actions[own] if seen.rank < self._num_ranks else ()
                for end in [counterpart(action) for action in row if action.op in SEND_OPS]:
                    owner = self._program.placement.ranks[end.stage]
                    receiver = seen.rank - own + owner
                    place = self._step_of(seen), self._positions[owner][end] + 1
                    if not self._has_begun(receiver, place):
                        awaited.setdefault(receiver, end)
                return _Wait(tuple(awaited), next(iter(awaited.values()), None))
            is_waiting = seen.is_waiting or seen.phase in COLLECTIVE
            return _Wait(self._absent(seen.rank)) if is_waiting else None
        if not seen.is_waiting:
            return None
        if seen.action.op is Op.OPT:
            return _Wait(self._absent(seen.rank))
        if seen.action.op not in COMPUTE_OPS or seen.rank >= self._num_ranks:
            return None
        receive = incoming(seen.action, self._program)
        if receive is None:
            return None
        # It waits for what the sender has yet to do, or for a message that should have arrived.
        send = counterpart(receive)
        owner = self._program.placement.ranks[send.stage]
        sender = seen.rank - seen.rank % self._world_size + owner
        step, positions = self._step_of(seen), self._positions[owner]
        if not self.is_gone(sender) and self._has_begun(sender, (step, positions[send] + 1)):
            # For a rank that is gone it may well be there: nothing shows that it waited.
            return None if self.is_gone(seen.rank) else _Wait((sender,), send, is_lost=True)
        before = self._program.actions[owner][: positions[send]]
        made_by = next(
            action
            for action in reversed(before)
            if action.op not in COLLECTIVE_OPS and outgoing(action, self._program) == send
        )
        is_made = self._has_begun(sender, (step, positions[made_by] + 1))
        return _Wait((sender,), send if is_made else made_by)

    def is_in_collective(self, seen: RankState) -> bool:
        """Whether a rank cannot go on before the collective on its lane is done."""
        if seen.collective is None or seen.action is None or seen.position is None:
            return False
        row = self._program.actions[seen.rank % self._world_size]
        if seen.action.op not in COMPUTE_OPS:  # none of these blocks, but the end of the row does
            return seen.position == len(row) - 1
        before = row[: seen.position]
        gathered = [at for at, one in enumerate(before) if one == (seen.action.stage, *_UNSHARD)]
        begun = [at for at, one in enumerate(before) if one == seen.collective]
        return seen.is_waiting and bool(gathered and begun) and begun[-1] <= gathered[-1]

    def _absent(self, rank: int) -> tuple[int, ...]:
        """Return the others that have not come to where this rank is, or are gone."""
        place = self._place(rank)
        return tuple(
            other
            for other in self.ranks
            if other != rank and (self.is_gone(other) or not self._has_begun(other, place))
        )

    def _step_of(self, seen: RankState) -> int:
        return self._last_step if seen.step is None else seen.step

    def _has_begun(self, rank: int, place: _Place | None) -> bool:
        """Whether a rank has come to this place of its row, or past it."""
        own = self._place(rank)
        return own is not None and place is not None and own >= place

    def _place(self, rank: int) -> _Place | None:
        """Return where a rank is in its row; None if that is unknown."""
        seen = self.seen.get(rank)
        if seen is None:
            return None
        row = self._positions[rank % self._world_size] if rank < self._num_ranks else {}
        if seen.action is not None:
            is_update = seen.action.op is Op.OPT
            after = self._longest + _AFTER_ROW[Phase.UPDATES.words]
            known = row.get(seen.action) if seen.position is None else seen.position
            position = after if is_update else known
            return None if position is None else (self._step_of(seen), position)
        if seen.phase not in _AFTER_ROW:
            return None
        step = self._step_of(seen) if seen.phase in _IN_STEP else seen.step
        return (_BEFORE_FIRST if step is None else step, self._longest + _AFTER_ROW[seen.phase])


class _Cause(IntEnum):
    """Reason why a chain of waits ends, the surest sign first."""

    LOST = 0
    UNSEEN = 1
    AT_WORK = 2
    UNKNOWN = 3  # it waits, and no record shows for which rank


@dataclass(frozen=True)
class _End:
    """The rank where chains of waits end, and the ranks that wait for it."""

    cause: _Cause
    rank: int
    waiting: tuple[int, ...]
    action: Action | None
    since_ns: int


def _culprit(waits: _Waits, at_ns: int) -> tuple[int | None, str, Action | None]:
    """Return the rank and action at fault, None where unknown, and between them the sentence."""
    if gone := {rank for rank in waits.ranks if waits.is_gone(rank)}:
        # The rank is blamed that waits for no other gone rank: those that lose a peer may end too.
        alone = [rank for rank in sorted(gone) if not waits.reached[rank] & gone - {rank}]
        if len(alone) != 1:
            states = "; ".join(_state(waits, rank, at_ns) for rank in sorted(gone))
            return None, f"the rank that died first is unknown: {states}", None
        verdict = _state(waits, alone[0], at_ns) + _who_wait(waits, waits.waiting_for(alone[0]))
        return alone[0], verdict, waits.seen[alone[0]].action
    ends = []
    for rank in waits.ranks:
        seen, wait = waits.seen.get(rank), waits.by_rank.get(rank)
        others = tuple(waits.waiting_for(rank))
        if seen is None:
            ends.append(_End(_Cause.UNSEEN, rank, others, None, 0))
        elif wait is None:
            ends.append(_End(_Cause.AT_WORK, rank, others, seen.action, seen.since_ns))
        elif wait.is_lost:
            those = tuple(sorted({rank, *others}))
            ends.append(_End(_Cause.LOST, wait.ranks[0], those, wait.action, seen.since_ns))
        elif not wait.ranks:
            ends.append(_End(_Cause.UNKNOWN, rank, others, seen.action, seen.since_ns))
    if not ends:  # each rank waits for another, so every chain comes back to itself
        chain: list[int] = []
        rank = waits.ranks[0]
        while rank not in chain:
            chain.append(rank)
            wait = waits.by_rank[rank]
            assert wait is not None  # else it would be one of `ends`
            rank = wait.ranks[0]
        circle = chain[chain.index(rank) :]
        words = "; ".join(_waits_in_words(waits, rank, None) for rank in circle)
        return None, f"deadlock: {words}", None
    lost = [end for end in ends if end.cause is _Cause.LOST]
    most = max(len(end.waiting) for end in lost or ends)
    ends = [end for end in lost or ends if len(end.waiting) == most]
    first = min(ends, key=lambda end: (end.cause, end.since_ns))
    ends = [end for end in ends if end.cause is first.cause]
    idle_ns = at_ns - max(state.since_ns for state in waits.seen.values()) if waits.seen else at_ns
    if idle_ns < MOVED_LATELY_NS and first.cause is not _Cause.UNSEEN:
        last = f"the last sign of life is {_seconds(idle_ns)} old"
        return None, f"no rank is seen to hang: {last}; {_verdict(waits, first, at_ns)}", None
    if first.cause is not _Cause.LOST and len(ends) > 1:
        states = "; ".join(_state(waits, end.rank, at_ns) for end in ends[:_MOST_NAMED])
        return None, f"the rank at fault is unknown: {states}", None
    return first.rank, _verdict(waits, first, at_ns), first.action


def _verdict(waits: _Waits, end: _End, at_ns: int) -> str:
    if end.cause is not _Cause.LOST:
        return _state(waits, end.rank, at_ns) + _who_wait(waits, end.waiting)
    lost = _Wait((end.rank,), end.action, is_lost=True)
    receiver = waits.seen[next(rank for rank, wait in waits.by_rank.items() if wait == lost)]
    assert end.action is not None
    return (
        f"the message of {end.action} was lost or never sent, or one before it on its channel: "
        f"{waits.name(end.rank)} has it behind it, and {waits.name(receiver.rank)} waits for it in "
        f"{_where(waits, receiver)}, since {_age(receiver, at_ns)}"
    )


def _state(waits: _Waits, rank: int, at_ns: int) -> str:
    """Describe the state of a rank, also of one that is gone."""
    seen = waits.seen.get(rank)
    if seen is None:
        return f"{waits.name(rank)} left no record"
    where = f"in {_where(waits, seen)}" if seen.action is not None else f"where it {_phase(seen)}"
    if seen.process == STOPPED:
        stopped = f"{waits.name(rank)} is stopped (SIGSTOP or a debugger) {where}"
        return f"{stopped}, since {_age(seen, at_ns)}"
    if seen.process == DEAD:
        return f"{waits.name(rank)} died {where}, begun {_age(seen, at_ns)} before"
    return _waits_in_words(waits, rank, at_ns)


def _waits_in_words(waits: _Waits, rank: int, at_ns: int | None) -> str:
    """Describe the state of a living rank, and since when if `at_ns` is given."""
    seen, wait = waits.seen[rank], waits.by_rank[rank]
    since = "" if at_ns is None else f", since {_age(seen, at_ns)}"
    name, where = waits.name(rank), "" if seen.action is None else _where(waits, seen)
    if wait is None:
        doing = _phase(seen) if seen.action is None else f"is in the work of {where}"
        return f"{name} {doing}{since}"
    doing = _phase(seen) if seen.action is None else f"waits in {where}"
    if not wait.ranks:
        return f"{name} {doing}{since}"
    peer = waits.name(wait.ranks[0])
    if seen.phase == DRAINS and seen.action is None:
        return f"{name} {doing}{since}: {peer} has not posted {wait.action}"
    if wait.action is None or wait.action == seen.collective:
        is_not = "is" if len(wait.ranks) == 1 else "are"
        return f"{name} {doing}{since}: {_named(waits, wait.ranks)} {is_not} not there"
    if wait.is_lost:
        return f"{name} {doing} for {wait.action}, which {peer} has behind it{since}"
    return f"{name} {doing} for {wait.action} of {peer}{since}"


def _where(waits: _Waits, seen: RankState) -> str:
    """Name the action that a rank is in, and the collective, which comes first if it holds it."""
    assert seen.action is not None
    step = "" if seen.step is None else f" of step {seen.step}"
    action = action_text(seen.action)
    if seen.collective is None:
        return f"{action}{step}"
    is_held = waits.is_in_collective(seen)
    return f"{seen.collective}{step}" + ("" if is_held else f", beside {action}")


def _phase(seen: RankState) -> str:
    if seen.phase == STEPS:
        return (
            "is between steps" if seen.step is None else f"is between actions of step {seen.step}"
        )
    if seen.step is not None and seen.phase in _IN_STEP:
        return f"{seen.phase} in step {seen.step}"
    if seen.step is not None and seen.phase == Phase.WAITS.words:
        return f"{seen.phase} after step {seen.step}"
    return seen.phase


def _who_wait(waits: _Waits, ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    return f"; {_named(waits, ranks)} {'waits' if len(ranks) == 1 else 'wait'} for it"


def _named(waits: _Waits, ranks: Sequence[int]) -> str:
    """Name ranks as `rank 1`, `ranks 0, 2 and 3` or `ranks 0, 1, 2 and 5 more`."""
    if len(ranks) == 1:
        return waits.name(ranks[0])
    names = [waits.name(rank) for rank in ranks[: max(_MOST_NAMED, 2)]]
    shown = [
        "ranks " + names[0].removeprefix("rank "),
        *(n.removeprefix("rank ") for n in names[1:]),
    ]
    if more := len(ranks) - len(shown):
        return f"{', '.join(shown)} and {more} more"
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def _age(seen: RankState, at_ns: int) -> str:
    return _seconds(at_ns - seen.since_ns)


def _seconds(ns: int) -> str:
    seconds = max(0, ns) / 1e9
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.3f} s"
