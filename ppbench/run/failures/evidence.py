"""Collects the files of a node's ranks that died, and diagnoses the failure.

Every rank writes into its node's folder: its flight record as it goes, the exception that ended
it, the stack at which it crashed. The supervisor adds which ranks ended by themselves, and in which
states it ended the others. After a restart the first rank of each node collects all this, and rank
0 diagnoses it: status, error, rank, actions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import platform
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from engine.flight import Entry, Phase, Record, read_record
from engine.plan.action import NO_INDEX, Action, Op
from engine.plan.program import Program
from engine.plan.spans import COLUMNS, Span, lane_of
from ppbench.errors import (
    MOST_OF_TRACE,
    describe,
    first_line,
    readable,
)
from ppbench.run.failures.post_mortem import (
    STEPS,
    PostMortem,
    RankState,
    action_text,
    name_of,
    post_mortem,
)
from ppbench.run.machine.node_folder import (
    ALIVE,
    DEAD,
    Ending,
    Exit,
    last_start,
    number_of,
    read_events,
    signal_name,
)

PEER_LOST = "crash"
"""Status of a rank that failed because another had died. If no rank reports more, one crashed."""
INTERRUPTED = "interrupted"
OPTIMIZER = Action(NO_INDEX, Op.OPT, NO_INDEX)
MOST_WORDS = 2_000
"""Bytes read from the end of a rank's log, for the cause of its death."""
_WAITING = (Op.F, Op.B, Op.I)


@dataclass(frozen=True)
class RankError:
    """The exception that ended a rank."""

    rank: int
    at_ns: int  # on the node's monotonic clock, when it was raised
    status: str
    message: str  # bounded and printable, as is the traceback; the rank's log holds the whole
    traceback: str


@dataclass(frozen=True)
class CrashReport:
    """What one node's ranks left in their last start, and its supervisor saw.

    All times in it are of the node's own clock.
    """

    hostname: str
    to_epoch_ns: int  # added to its monotonic clock, gives the time since the epoch
    records: list[Record] = field(default_factory=list)
    errors: list[RankError] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)  # rank -> where it crashed
    ending: Ending | None = None  # None: the supervisor was gone before it could note it
    exits: dict[int, Exit] = field(default_factory=dict)  # rank -> how it ended by itself
    log_ends: dict[int, str] = field(default_factory=dict)  # rank of these -> end of its log


@dataclass(frozen=True)
class Diagnosis:
    """The status and the cause of a run whose ranks died."""

    status: str
    error: str
    rank: int | None
    last_actions: list[str | None]
    post_mortem: PostMortem | None  # None if no rank left a record
    at_ns: int  # on the clock of the spans
    spans: pd.DataFrame  # computations that the ranks had finished in their last steps


def fault_path(folder: Path, rank: int) -> Path:
    """Return the file for the stack that Python's fault handler writes in a crash."""
    return folder / f"fault-rank{rank}"


def write_rank_error(
    folder: Path,
    rank: int,
    error: BaseException,
    status_of: Callable[[BaseException, str], str],
    log: str,
) -> None:
    """Write the exception that ended a rank; `status_of` takes it and its message.

    `log` names the place of the whole message, should it be too long.
    """
    message = describe(error, log)
    trace = readable("".join(traceback.format_exception(error)), MOST_OF_TRACE, log)
    record = RankError(rank, time.monotonic_ns(), status_of(error, message), message, trace)
    path = folder / f"error-rank{rank}.json"
    aside = path.with_suffix(".partial")  # this process may be killed at any moment
    aside.write_text(json.dumps(dataclasses.asdict(record)))
    aside.replace(path)


def collect(node: Path, before: int | None = None) -> CrashReport:
    """Read what the last ranks of a node left that came so far; with `before`, of earlier starts.

    `node` is the node's folder. It stays as it is.
    """
    clock_ns = time.time_ns() - time.monotonic_ns()
    start = last_start(node, before)
    if start is None:
        return CrashReport(platform.node(), clock_ns)
    number, events = number_of(start), read_events(node)
    errors = [RankError(**json.loads(p.read_text())) for p in start.glob("error-rank*.json")]
    records = [read_record(path) for path in start.glob("flight-rank*")]
    faults = {
        int(path.name.removeprefix("fault-rank")): readable(text, MOST_OF_TRACE)
        for path in start.glob("fault-rank*")
        if (text := path.read_text(errors="replace").strip())
    }
    exits = {ended.rank: ended for ended in events.exits if ended.start == number}
    return CrashReport(
        platform.node(),
        clock_ns,
        sorted((r for r in records if r is not None), key=lambda record: record.rank),
        sort_errors(errors),
        faults,
        next((ending for ending in events.endings if ending.start == number), None),
        exits,
        {rank: readable(_last_words(ended)) for rank, ended in exits.items()},
    )


def _last_words(ended: Exit) -> str:
    """Return the end of a rank's standard error; empty if there is no such log."""
    with contextlib.suppress(OSError), Path(ended.log).open("rb") as file:
        file.seek(-min(os.fstat(file.fileno()).st_size, MOST_WORDS), os.SEEK_END)
        return file.read().decode(errors="replace").strip()
    return ""


STORE_FAILED = "store"
"""Status of a rank that could not write to the store: the sweep cannot go on."""


def store_error(node: Path) -> str | None:
    """Return why the launch's results cannot be stored; None if no rank has failed to."""
    errors = collect(node).errors
    return next((error.message for error in errors if error.status == STORE_FAILED), None)


def sort_errors(errors: Sequence[RankError]) -> list[RankError]:
    """Put the cause first: the earliest error that does not merely report a lost rank."""
    return sorted(errors, key=lambda error: (error.status == PEER_LOST, error.at_ns))


def diagnose(
    nodes: Sequence[CrashReport],
    lowered: Program | None,
    number: int,
    timeout_s: float,
    *,
    replicas: int = 1,
    is_interrupted: bool = False,
) -> Diagnosis:
    """Find the status and the cause of the run of this number.

    `lowered` is None if the program cannot be built. `is_interrupted`: its ranks were ended from
    outside, unless something shows a fault of theirs.
    """
    located = [(node, record) for node in nodes for record in node.records]
    running = [(node, record) for node, record in located if record.number == number]
    spans = [span for node, record in running for span in _spans(node, record, lowered)]
    at_ns = max([_ended_ns(node) for node in nodes], default=time.time_ns())
    seen = [_last_seen(node, record, lowered, number) for node, record in located]
    world_size = len(seen) if lowered is None else lowered.world_size
    replicas = 1 if lowered is None else replicas
    num_ranks = world_size * replicas
    seen = sorted((s for s in seen if s.rank < num_ranks), key=lambda state: state.rank)
    starts_ns = [*(span.start_ns for span in spans), *(state.since_ns for state in seen)]
    origin_ns = min(starts_ns, default=at_ns)
    at_ns -= origin_ns
    seen = [dataclasses.replace(s, since_ns=s.since_ns - origin_ns) for s in seen]
    finding = post_mortem(seen, lowered, at_ns, replicas) if lowered is not None and seen else None
    gone = sorted(set(range(num_ranks)) - {state.rank for state in seen})
    name = functools.partial(name_of, world_size=world_size, replicas=replicas)
    status, error, rank = _cause(nodes, finding, timeout_s, gone, name)
    is_killed = not any(node.errors or node.faults for node in nodes) and status != "timeout"
    if is_interrupted and (is_killed or status == PEER_LOST):
        status, error, rank = INTERRUPTED, "the sweep was stopped, or killed, before its end", None
    frame = pd.DataFrame(spans, columns=list(COLUMNS))
    frame[["start_ns", "end_ns"]] -= origin_ns
    words = {s.rank: s.phase if s.action is None else action_text(s.action) for s in seen}
    last_actions = [words.get(number) for number in range(num_ranks)]  # None: it left no record
    return Diagnosis(status, error, rank, last_actions, finding, at_ns, frame)


def _ended_ns(node: CrashReport) -> int:
    """Return when the node's ranks ended: as the supervisor saw it, else now."""
    if node.ending is not None:
        return node.ending.at_ns + node.to_epoch_ns
    ends = [error.at_ns + node.to_epoch_ns for error in node.errors]
    return max(ends, default=time.time_ns())


def _first_end(nodes: Sequence[CrashReport]) -> tuple[CrashReport, int, int] | None:
    """Return the earliest end that is no consequence of another: its node, its rank, and when.

    A rank that reports a lost peer does not count. A rank that is not among its node's exits was
    still alive when the supervisor ended the rest. Else the process's end counts, not its error:
    the others lose a process that is gone, so their errors come after its end.
    """
    ends = []
    for node in nodes:
        errors = {error.rank: error for error in node.errors}
        for rank in {*errors, *node.exits, *node.faults}:
            at_ns = _ended_ns(node) - node.to_epoch_ns
            if rank in node.exits or rank in errors:
                at_ns = node.exits[rank].at_ns if rank in node.exits else errors[rank].at_ns
            if rank not in errors or errors[rank].status != PEER_LOST:
                is_late = bool(node.exits) and rank not in node.exits
                ends.append((is_late, at_ns + node.to_epoch_ns, rank, node))
    if not ends:
        return None
    _, at_ns, rank, node = min(ends, key=lambda end: end[:3])
    return node, rank, at_ns


def _cause(
    nodes: Sequence[CrashReport],
    finding: PostMortem | None,
    timeout_s: float,
    gone: Sequence[int],
    name: Callable[[int], str],
) -> tuple[str, str, int | None]:
    """Return the status, the error and the rank that failed first.

    `gone` are the ranks of which nothing is left, as on a machine that was lost; `name` says what a
    rank is called.
    """
    lines = [] if finding is None else [finding.verdict, *(r.account for r in finding.ranks)]
    states = "\n".join(line for line in lines if line)
    first = _first_end(nodes)
    error = None
    if first is not None:
        error = next((error for error in first[0].errors if error.rank == first[1]), None)
    if error is not None:
        if error.status == STORE_FAILED:
            return INTERRUPTED, f"it could not be stored: {error.message}", error.rank
        text = f"{name(error.rank)}: {error.message}\n{states}\n{error.traceback}"
        return error.status, text, error.rank
    timeouts = [node for node in nodes if node.ending and node.ending.cause == "timeout"]
    if timeouts and (first is None or first[2] >= min(map(_ended_ns, timeouts))):
        words = f"not over after measure.timeout_s = {timeout_s:g} s"
        return "timeout", f"{words}: {states}", None if finding is None else finding.rank
    # No rank has an error of its own: the one that died first tells how.
    status, rank, trace, code, fault = PEER_LOST, None, "", None, ""
    unseen = [node.hostname for node in nodes if node.records and node.ending is None]
    words = "the ranks ended without an error of their own"
    if unseen:
        words = f"the supervisor of {unseen[0]} was killed, and its ranks ended with it"
    if first is not None:
        node, rank, _ = first
        code = node.exits[rank].exitcode if rank in node.exits else None
        by_signal = "" if code is None or code >= 0 else signal_name(-code)
        fault = node.faults.get(rank, "")
        if fault:
            how = f"crashed: {first_line(fault)}{f' ({by_signal})' if by_signal else ''}"
        elif code == -signal.SIGKILL and node.ending is not None and node.ending.oom_kills:
            status, how = "oom", "was killed by the kernel, which had run out of memory"
        elif by_signal:
            how = f"was killed by {by_signal}"
        else:
            how = f"exited with code {code} in the middle of the case, without a Python error"
        words = f"{name(rank)} {how}"
        # Its stack at the crash, and the end of its log, where C++ libraries say why.
        log = node.log_ends.get(rank, "")
        trace = "\n".join(text for text in (fault, log and f"the end of its log:\n{log}") if text)
    if gone and code is None and not fault:
        words, rank = f"{name(gone[0])} left nothing behind: its machine is gone", gone[0]
        status = PEER_LOST
    errors = sort_errors([error for node in nodes for error in node.errors])
    complaints = [f"{name(e.rank)}: {e.message}\n{e.traceback}" for e in errors[:1]]
    texts = [words, states, trace, *complaints]
    return status, "\n".join(text for text in texts if text), rank


def _last_seen(
    node: CrashReport, record: Record, lowered: Program | None, number: int
) -> RankState:
    """Return the last state of a rank; its times count from the epoch."""
    process = ALIVE if node.ending is None else node.ending.states.get(record.rank, ALIVE)
    # A rank that failed writes its error before it exits: the others may be seen to end first.
    failed = {error.rank for error in node.errors if error.status != PEER_LOST}
    if record.rank in failed or (node.ending is None and record.rank in node.exits):
        process = DEAD
    position = collective = None
    if record.entries and record.number == number:
        last = record.entries[-1]
        position, collective = last.index, record.collective
        phase, step, action = last.phase, last.step, _action(last, record.rank, lowered)
        since_ns = last.works_ns or last.began_ns
        is_waiting = phase is Phase.WAITS
        if action is not None:
            is_waiting = action.op in _WAITING and last.works_ns is None
    else:  # it is between cases
        phase, step, action, is_waiting = Phase.WAITS, None, None, True
        since_ns = record.began_ns or time.monotonic_ns()
    return RankState(
        record.rank,
        node.hostname,
        process,
        STEPS if phase is None or action is not None else phase.words,
        step,
        action,
        is_waiting,
        since_ns + node.to_epoch_ns,
        position,
        collective,
    )


def _action(entry: Entry, rank: int, lowered: Program | None) -> Action | None:
    """Return the action that an entry is about; None in other phases."""
    if entry.phase is Phase.UPDATES and entry.works_ns is not None:
        return OPTIMIZER
    if entry.index is None or lowered is None:
        return None
    row = lowered.actions[rank % lowered.world_size]
    return row[entry.index] if entry.index < len(row) else None


def _spans(node: CrashReport, record: Record, lowered: Program | None) -> list[Span]:
    """Return the computations of a rank in its last two steps; times count from the epoch."""
    spans = []
    last = record.entries[-1].step if record.entries else None
    for entry, after in itertools.pairwise(record.entries):
        action = _action(entry, record.rank, lowered)
        if action is None or entry.works_ns is None or entry.step is None or last is None:
            continue
        if entry.step >= last - 1:
            times = (entry.works_ns + node.to_epoch_ns, after.began_ns + node.to_epoch_ns)
            size = record.rank + 1 if lowered is None else lowered.world_size
            (replica, rank), lane = divmod(record.rank, size), lane_of(action.op)
            spans.append(Span(entry.step, rank, lane, *action, *times, 0, replica))
    return spans
