"""Collects the files of a node's ranks that died, and diagnoses the failure.

Every rank writes into its node's folder: its flight record as it goes, the exception that ended
it, the stack at which it crashed. The watchdog adds the states in which it saw the ranks. After a
restart the first rank of each node collects all this, and rank 0 diagnoses it: status, error, rank,
actions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import platform
import shutil
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
    ALIVE,
    DEAD,
    STEPS,
    PostMortem,
    RankState,
    action_text,
    name_of,
    post_mortem,
)
from ppbench.run.failures.watchdog import WatchdogReport, read_report
from ppbench.run.launch.local import Exit, last_words, read_ends, signal_name
from ppbench.run.machine.node_folder import collected_path

PEER_LOST = "crash"
"""Status of a rank that failed because another had died. If no rank reports more, one crashed."""
INTERRUPTED = "interrupted"
OPTIMIZER = Action(NO_INDEX, Op.OPT, NO_INDEX)
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
    """The records, errors and exits that one node's ranks left.

    The times in its records and in `report` are of its own clock.
    """

    hostname: str
    to_epoch_ns: int  # added to its monotonic clock, gives the time since the epoch
    records: list[Record] = field(default_factory=list)
    errors: list[RankError] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)  # rank -> where it crashed
    report: WatchdogReport | None = None  # of its watchdog
    exits: dict[int, Exit] = field(default_factory=dict)  # rank -> how its process ended
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
    aside = path.with_suffix(".partial")  # the agent may end this process at any moment
    aside.write_text(json.dumps(dataclasses.asdict(record)))
    aside.replace(path)


def _read_error(path: Path) -> RankError | None:
    """Return None for a file of another version, or one that is not whole."""
    try:
        return RankError(**json.loads(path.read_text()))
    except (TypeError, ValueError, OSError):
        return None


def collect(folder: Path, launch: Path) -> CrashReport:
    """Read a node's folder, and the exits that the agent noted in the launch's.

    The folder is moved aside, so that it is not mistaken for the next one.
    """
    # It is aside already if the process that collected it was killed.
    source = folder if folder.exists() else collected_path(folder)
    errors = [_read_error(path) for path in source.glob("error-rank*.json")]
    records = [read_record(path) for path in sorted(source.glob("flight-rank*"))]
    faults = {
        int(path.name.removeprefix("fault-rank")): readable(text, MOST_OF_TRACE)
        for path in source.glob("fault-rank*")
        if (text := path.read_text(errors="replace").strip())
    }
    pids = {record.pid for record in records if record is not None}
    # The agent notes no worker that it ended itself. The first end of a rank counts.
    exits = {ended.rank: ended for ended in reversed(read_ends(launch)) if ended.pid in pids}
    crash = CrashReport(
        platform.node(),
        time.time_ns() - time.monotonic_ns(),
        sorted((r for r in records if r is not None), key=lambda record: record.rank),
        sort_errors([error for error in errors if error is not None]),
        faults,
        read_report(source),
        exits,
        {rank: readable(last_words(launch, ended)) for rank, ended in exits.items()},
    )
    if source == folder:
        shutil.rmtree(collected_path(folder), ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rename(collected_path(folder))
    return crash


STORE_FAILED = "store"
"""Status of a rank that could not write to the store: the sweep cannot go on."""


def store_error(folder: Path) -> str | None:
    """Return why the launch's results cannot be stored; None if no rank has failed to."""
    for path in folder.glob("error-rank*.json"):
        error = _read_error(path)
        if error is not None and error.status == STORE_FAILED:
            return error.message
    return None


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
    """Return when the node's ranks ended: as the watchdog saw it, else now."""
    if node.report is not None:
        return node.report.at_ns + node.to_epoch_ns
    ends = [error.at_ns + node.to_epoch_ns for error in node.errors]
    return max(ends, default=time.time_ns())


@dataclass(frozen=True)
class _End:
    """The end of a rank, by its own error, by its agent, or as the watchdog saw it."""

    node: CrashReport
    rank: int
    error: RankError | None
    exit: Exit | None

    @property
    def at_ns(self) -> int:
        """Return when its process was gone, else when it failed or was seen dead.

        The time counts from the epoch. The other ranks lose a process that is gone, so their errors
        come after its end.
        """
        if self.exit is not None:
            at_ns = self.exit.at_ns or int(self.exit.at * 1e9) - self.node.to_epoch_ns
        elif self.error is not None:
            at_ns = self.error.at_ns
        else:
            report = self.node.report
            at_ns = time.monotonic_ns() if report is None else report.at_ns
        return at_ns + self.node.to_epoch_ns


def _first_end(nodes: Sequence[CrashReport]) -> _End | None:
    """Return the earliest end that is no consequence of another one.

    A rank that reports a lost peer does not count, nor one that the watchdog or the agent has
    ended. A rank that is not among its agent's exits was still alive when the agent ended the rest.
    """
    ends = []
    for node in nodes:
        errors = {error.rank: error for error in node.errors}
        states = {} if node.report is None else node.report.processes
        dead = {rank for rank, state in states.items() if state == DEAD}
        ranks = sorted({*errors, *node.exits, *node.faults, *dead})
        ends += [_End(node, rank, errors.get(rank), node.exits.get(rank)) for rank in ranks]
    ends.sort(key=lambda end: (bool(end.node.exits) and end.exit is None, end.at_ns))
    for place, end in enumerate(ends):
        if end.error is not None:
            if end.error.status != PEER_LOST:
                return end
            continue
        report = end.node.report
        # It was still alive when the watchdog saw a rank dead, or the time up.
        is_by_watchdog = report is not None and report.processes.get(end.rank, DEAD) != DEAD
        # The agent ends the other ranks so; or someone outside ended it.
        is_by_sigterm = end.exit is not None and end.exit.exitcode == -signal.SIGTERM
        if not is_by_watchdog and (place == 0 or not is_by_sigterm):
            return end
    return None


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
    if first is not None and (error := first.error) is not None:
        if error.status == STORE_FAILED:
            return INTERRUPTED, f"it could not be stored: {error.message}", error.rank
        text = f"{name(error.rank)}: {error.message}\n{states}\n{error.traceback}"
        return error.status, text, error.rank
    timeouts = [node for node in nodes if node.report is not None and node.report.has_timed_out]
    if timeouts and (first is None or first.at_ns >= min(map(_ended_ns, timeouts))):
        words = f"not over after measure.timeout_s = {timeout_s:g} s"
        return "timeout", f"{words}: {states}", None if finding is None else finding.rank
    # No rank has an error of its own: the one that died first tells how.
    status, rank, trace = PEER_LOST, None if first is None else first.rank, ""
    words = "a worker died without a Python error: it was killed, or crashed"
    if first is not None:
        code = None if first.exit is None else first.exit.exitcode
        by_signal = "" if code is None or code >= 0 else signal_name(-code)
        report, fault = first.node.report, first.node.faults.get(first.rank, "")
        if fault:
            how = f"crashed: {first_line(fault)}{f' ({by_signal})' if by_signal else ''}"
        elif code in (None, -signal.SIGKILL) and report is not None and report.oom_kills > 0:
            status, how = "oom", "was killed by the kernel, which had run out of memory"
        elif by_signal:
            how = f"was killed by {by_signal}"
        elif code is None:
            how = "died without a Python error: it was killed, or left by os._exit"
        else:
            how = f"exited with code {code} in the middle of the case, without a Python error"
        words = f"{name(first.rank)} {how}"
        # Its stack at the crash, and the end of its log, where C++ libraries say why.
        log = first.node.log_ends.get(first.rank, "")
        trace = "\n".join(text for text in (fault, log and f"the end of its log:\n{log}") if text)
    if gone and (first is None or (first.exit is None and first.rank not in first.node.faults)):
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
    if node.report is not None:  # else the rank or the agent says whether it is dead
        process = node.report.processes.get(record.rank, ALIVE)
    else:
        has_error = record.rank in [error.rank for error in node.errors[:1]]
        process = DEAD if record.rank in node.exits or has_error else ALIVE
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
