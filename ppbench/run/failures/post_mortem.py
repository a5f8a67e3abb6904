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

import pandas as pd

from engine.flight import Phase
from engine.plan.action import COMPUTE_OPS, NO_INDEX, SEND_OPS, Action, Op
from engine.plan.messages import counterpart, incoming
from engine.plan.program import Program
from engine.plan.rules import fact_needed
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
_MOST_NAMED = 3
_FLIGHT_COLUMNS = [column.name for column in FLIGHT][1:]  # the store adds the run


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
    known = _Waits(seen, lowered, at_ns, replicas)
    culprit, verdict, at_fault = known.culprit()
    accounts = []
    for rank, state in sorted(known.seen.items()):
        peer, action, wait = None, None, known.of.get(rank)
        if wait is not None and wait.ranks:
            peer = culprit if culprit in wait.ranks else wait.ranks[0]
            action = wait.action if peer == wait.ranks[0] else None
        accounts.append(RankAccount(state, peer, action, known.state(rank)))
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

    def __init__(
        self, seen: Sequence[RankState], lowered: Program, at_ns: int, replicas: int
    ) -> None:
        self.seen = {state.rank: state for state in seen}
        self._program, self._at_ns, self._replicas = lowered, at_ns, replicas
        self._size = lowered.world_size
        self._ranks = sorted({*range(replicas * self._size), *self.seen})
        self._positions = [{a: n for n, a in enumerate(row)} for row in lowered.actions]
        self._last_step = max((s.step for s in seen if s.step is not None), default=0)
        self._places = {rank: self._place_of(state) for rank, state in self.seen.items()}
        waits = {rank: self._wait_of(state) for rank, state in self.seen.items()}
        self.of = {rank: wait for rank, wait in waits.items() if wait is not None}
        """What each rank waits for; one at work or without a record is not here."""
        self._reached = {rank: self._reached_from(rank) for rank in self._ranks}
        """The ranks that each one waits for, directly or not; itself in a circle."""

    def _reached_from(self, rank: int) -> set[int]:
        reached, pending = set[int](), [rank]
        while pending:
            wait = self.of.get(pending.pop())
            fresh = set(wait.ranks) - reached if wait is not None else set()
            reached |= fresh
            pending += fresh
        return reached

    def _row_of(self, rank: int) -> Sequence[Action]:
        """The actions of a rank; none if it takes no part."""
        takes_part = rank < self._replicas * self._size
        return self._program.actions[rank % self._size] if takes_part else ()

    def _is_gone(self, rank: int) -> bool:
        return rank in self.seen and self.seen[rank].process != ALIVE

    def _step_of(self, seen: RankState) -> int:
        return self._last_step if seen.step is None else seen.step

    def _place_of(self, seen: RankState) -> tuple[int, int] | None:
        """Where a rank is: its step and its position there, in which phases come after rows.

        None if that is unknown.
        """
        longest = max(map(len, self._program.actions))
        if seen.action is None:
            if seen.phase not in _AFTER_ROW:
                return None
            step = self._step_of(seen) if seen.phase in _IN_STEP else seen.step
            return -1 if step is None else step, longest + _AFTER_ROW[seen.phase]
        position = seen.position
        if seen.action.op is Op.OPT:
            position = longest + _AFTER_ROW[Phase.UPDATES.words]
        elif position is None and self._row_of(seen.rank):
            position = self._positions[seen.rank % self._size].get(seen.action)
        return None if position is None else (self._step_of(seen), position)

    def _is_past(self, rank: int, step: int, action: Action) -> bool:
        """Whether a rank has this action of its row behind it."""
        place = self._places.get(rank)
        after = step, self._positions[rank % self._size][action] + 1
        return place is not None and place >= after

    def _wait_of(self, seen: RankState) -> _Wait | None:
        """Return None for a rank at work."""
        first, step = seen.rank - seen.rank % self._size, self._step_of(seen)
        owner_of = self._program.placement.ranks
        if self._is_held(seen):
            fellows = range(seen.rank % self._size, self._replicas * self._size, self._size)
            absent = tuple(
                rank
                for rank in fellows
                if rank != seen.rank
                and (
                    rank not in self.seen
                    or self._is_gone(rank)
                    or self.seen[rank].collective != seen.collective
                )
            )
            return _Wait(absent, seen.collective) if absent else None
        if seen.action is None and seen.phase == DRAINS:
            # A message there moves when both of its ends are ready.
            awaited: dict[int, Action] = {}
            for receive in (counterpart(a) for a in self._row_of(seen.rank) if a.op in SEND_OPS):
                receiver = first + owner_of[receive.stage]
                if not self._is_past(receiver, step, receive):
                    awaited.setdefault(receiver, receive)
            return _Wait(tuple(awaited), next(iter(awaited.values()), None))
        if not seen.is_waiting and (seen.action is not None or seen.phase not in COLLECTIVE):
            return None
        if seen.action is None or seen.action.op is Op.OPT:  # for all that are not there
            place = self._places[seen.rank]
            here = {rank for rank, its in self._places.items() if its and place and its >= place}
            others = (rank for rank in self._ranks if rank != seen.rank)
            return _Wait(tuple(r for r in others if self._is_gone(r) or r not in here))
        is_of_row = seen.action.op in COMPUTE_OPS and self._row_of(seen.rank)
        receive_or_none = incoming(seen.action, self._program) if is_of_row else None
        needed = fact_needed(seen.action, self._program.placement) if is_of_row else None
        if receive_or_none is None or needed is None:
            return None
        # It waits for what the sender has yet to do, or for a message that should have arrived.
        send = counterpart(receive_or_none)
        sender = first + owner_of[send.stage]
        if not self._is_gone(sender) and self._is_past(sender, step, send):
            # For a rank that is gone it may well be there: nothing shows that it waited.
            return None if self._is_gone(seen.rank) else _Wait((sender,), send, is_lost=True)
        if needed not in self._positions[owner_of[send.stage]]:
            needed = needed._replace(op=Op.B)  # which is whole there
        return _Wait((sender,), send if self._is_past(sender, step, needed) else needed)

    def _is_held(self, seen: RankState) -> bool:
        """Whether a rank cannot go on before the collective on its lane is done."""
        if seen.collective is None or seen.action is None or seen.position is None:
            return False
        row = self._program.actions[seen.rank % self._size]
        if seen.action.op not in COMPUTE_OPS:  # none of these blocks, but the end of the row does
            return seen.position == len(row) - 1
        before = row[: seen.position]
        unshard = Action(seen.action.stage, Op.UNSHARD, NO_INDEX)
        gathered = [at for at, one in enumerate(before) if one == unshard]
        begun = [at for at, one in enumerate(before) if one == seen.collective]
        return seen.is_waiting and bool(gathered and begun) and begun[-1] <= gathered[-1]

    def culprit(self) -> tuple[int | None, str, Action | None]:
        """Return the rank and action at fault, None where unknown, and between them the sentence.

        A chain of waits ends in a lost message, in a rank without a record, in one at work, or in
        one that waits for nobody knows whom: the surest sign first.
        """
        if gone := {rank for rank in self._ranks if self._is_gone(rank)}:
            # The rank is blamed that waits for no other gone one: who loses a peer may end too.
            alone = [rank for rank in sorted(gone) if not self._reached[rank] & gone - {rank}]
            if len(alone) != 1:
                states = "; ".join(map(self.state, sorted(gone)))
                return None, f"the rank that died first is unknown: {states}", None
            return alone[0], self._blamed(alone[0]), self.seen[alone[0]].action
        lost, ends = list[_End](), list[_End]()
        for rank in self._ranks:
            seen, wait = self.seen.get(rank), self.of.get(rank)
            num_waiting = len(self._waiting_for(rank))
            if seen is None:
                ends.append((-num_waiting, _UNSEEN, 0, rank))
            elif wait is not None and wait.is_lost:
                num_waiting = len({rank, *self._waiting_for(rank)})
                lost.append((-num_waiting, _UNSEEN, seen.since_ns, rank))
            elif wait is None or not wait.ranks:
                cause = _AT_WORK if wait is None else _UNKNOWN
                ends.append((-num_waiting, cause, seen.since_ns, rank))
        if not (lost or ends):  # each rank waits for another, so every chain comes back to itself
            chain = [self._ranks[0]]
            while (rank := self.of[chain[-1]].ranks[0]) not in chain:
                chain.append(rank)
            words = "; ".join(self._doing(one) for one in chain[chain.index(rank) :])
            return None, f"deadlock: {words}", None
        first = min(lost or ends)
        rank = first[-1]
        if lost:
            culprit, action = self.of[rank].ranks[0], self.of[rank].action
            verdict = self._lost(rank)
        else:
            action = None if rank not in self.seen else self.seen[rank].action
            culprit, verdict = rank, self._blamed(rank)
        since_ns = max((state.since_ns for state in self.seen.values()), default=0)
        if self._at_ns - since_ns < MOVED_LATELY_NS and (lost or rank in self.seen):
            last = f"the last sign of life is {_seconds(self._at_ns - since_ns)} old"
            return None, f"no rank is seen to hang: {last}; {verdict}", None
        alike = [end[-1] for end in ends if end[:2] == first[:2]]
        if not lost and len(alike) > 1:
            states = "; ".join(map(self.state, alike[:_MOST_NAMED]))
            return None, f"the rank at fault is unknown: {states}", None
        return culprit, verdict, action

    def _waiting_for(self, rank: int) -> list[int]:
        """Return the living ranks that wait for this one, directly or not."""
        others = (other for other in self._ranks if other != rank and not self._is_gone(other))
        return [other for other in others if rank in self._reached[other]]

    def _blamed(self, rank: int) -> str:
        """Describe the rank at fault, and who waits for it."""
        waiting = self._waiting_for(rank)
        wait = "waits" if len(waiting) == 1 else "wait"
        return self.state(rank) + (f"; {self._named(waiting)} {wait} for it" if waiting else "")

    def _lost(self, receiver: int) -> str:
        """Describe the message that a rank waits for in vain."""
        wait = self.of[receiver]
        where, since = self._where(self.seen[receiver]), self._since(self.seen[receiver])
        return (
            f"the message of {wait.action} was lost or never sent, or one before it on its "
            f"channel: {self._name(wait.ranks[0])} has it behind it, and {self._name(receiver)} "
            f"waits for it in {where}, since {since}"
        )

    def state(self, rank: int) -> str:
        """Describe the state of a rank, also of one that is gone."""
        seen, name = self.seen.get(rank), self._name(rank)
        if seen is None:
            return f"{name} left no record"
        where = f"where it {_phase(seen)}" if seen.action is None else f"in {self._where(seen)}"
        if seen.process == STOPPED:
            return f"{name} is stopped (SIGSTOP or a debugger) {where}, since {self._since(seen)}"
        if seen.process == DEAD:
            return f"{name} died {where}, begun {self._since(seen)} before"
        return self._doing(rank, f", since {self._since(seen)}")

    def _doing(self, rank: int, since: str = "") -> str:
        """Describe what a living rank does, or waits for."""
        seen, wait, name = self.seen[rank], self.of.get(rank), self._name(rank)
        doing = _phase(seen)
        if seen.action is not None:
            doing = f"{'is in the work of' if wait is None else 'waits in'} {self._where(seen)}"
        if wait is None or not wait.ranks:
            return f"{name} {doing}{since}"
        peer = self._name(wait.ranks[0])
        if seen.phase == DRAINS and seen.action is None:
            return f"{name} {doing}{since}: {peer} has not posted {wait.action}"
        if wait.action is None or wait.action == seen.collective:
            is_not = "is" if len(wait.ranks) == 1 else "are"
            return f"{name} {doing}{since}: {self._named(wait.ranks)} {is_not} not there"
        if wait.is_lost:
            return f"{name} {doing} for {wait.action}, which {peer} has behind it{since}"
        return f"{name} {doing} for {wait.action} of {peer}{since}"

    def _where(self, seen: RankState) -> str:
        """Name the action that a rank is in, and the collective, which comes first if it holds."""
        assert seen.action is not None
        step = "" if seen.step is None else f" of step {seen.step}"
        action = action_text(seen.action)
        if seen.collective is None:
            return f"{action}{step}"
        beside = "" if self._is_held(seen) else f", beside {action}"
        return f"{seen.collective}{step}{beside}"

    def _name(self, rank: int) -> str:
        return name_of(rank, self._size, self._replicas)

    def _named(self, ranks: Sequence[int]) -> str:
        """Name ranks as `rank 1`, `ranks 0, 2 and 3` or `ranks 0, 1, 2 and 5 more`."""
        if len(ranks) == 1:
            return self._name(ranks[0])
        names = [self._name(rank).removeprefix("rank ") for rank in ranks]
        if more := len(names) - _MOST_NAMED:
            names = [*names[:_MOST_NAMED], f"{more} more"] if more > 0 else names
        return f"ranks {', '.join(names[:-1])} and {names[-1]}"

    def _since(self, seen: RankState) -> str:
        return _seconds(self._at_ns - seen.since_ns)


_End = tuple[int, int, int, int]
"""An end of chains of waits, the likeliest cause first: how many ranks wait for it, times −1; the
cause; since when; and the rank."""
_UNSEEN, _AT_WORK, _UNKNOWN = range(3)


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


def _seconds(ns: int) -> str:
    seconds = max(0, ns) / 1e9
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.3f} s"
