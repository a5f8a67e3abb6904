"""What the ranks of a node left behind when they died, and what it says of their case.

Every rank writes into its node's folder: its flight record as it goes, the exception that ended
it, the stack at which it crashed. The watchdog adds who died first. After a restart the first
rank of each node collects all this, and rank 0 judges it: status, error, rank, last actions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import platform
import shutil
import signal
import time
import traceback
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from engine.flight import RECORD_BYTES, Entry, Phase, Record, read_record
from engine.plan.action import NO_INDEX, Action, Op
from engine.plan.program import Program
from engine.plan.spans import COLUMNS, Span, lane_of
from ppbench.analysis.post_mortem import LastSeen, PostMortem, action_text, post_mortem
from ppbench.run.launch.exits import read_exits
from ppbench.run.private_folder import (
    SHARED_MEMORY,
    Choice,
    Claim,
    bases,
    choose,
    kept_folders,
    lock_path,
    remove_folder,
)
from ppbench.run.watchdog import Sighting, read_sighting

PEER_LOST = "crash"
"""Status of a rank that failed because another one had died. If no rank tells more, one crashed."""
INTERRUPTED = "interrupted"
OPTIMIZER = Action(NO_INDEX, Op.OPT, NO_INDEX)
_WAITING = (Op.F, Op.B, Op.I)


@dataclass(frozen=True)
class RankError:
    """The exception that ended a rank."""

    rank: int
    at: float  # seconds since the epoch
    status: str
    message: str
    traceback: str


@dataclass(frozen=True)
class Evidence:
    """What one node's ranks left. Its records' times and `sighting`'s are of its own clock."""

    hostname: str
    to_epoch_ns: int  # what makes its monotonic clock the time since the epoch
    records: list[Record] = field(default_factory=list)
    errors: list[RankError] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)  # rank -> where it crashed
    sighting: Sighting | None = None
    signals: dict[int, int] = field(default_factory=dict)  # rank -> what killed it, of the first


@dataclass(frozen=True)
class Judgement:
    """What became of a run whose ranks died."""

    status: str
    error: str
    rank: int | None
    last_actions: list[str | None]
    found: PostMortem | None  # None if no rank left a record
    at_ns: int  # when, as spans tell time
    spans: pd.DataFrame  # what the ranks had finished of their last steps


def node_folder(launch_id: str, node: int = 0) -> Path:
    """A launch's folder on this machine: in memory, where that can be had. It may not exist.

    `node` counts agents, of which a machine may have several.
    """
    name = f"{launch_id}-{node}"
    folders = [base / name for base in bases()] or [SHARED_MEMORY / name]
    return next((folder for folder in folders if _is_there(folder)), folders[0])


def _is_there(folder: Path) -> bool:
    """Its lock is there from before it is made until it is forgotten."""
    return any(path.exists() for path in (lock_path(folder), folder, _aside(folder)))


def node_folders(launch_id: str, launch: Path) -> list[Path]:
    """Those that there are on this machine, also if they have been collected.

    `launch` is the launch's folder in the store: what was found there by a sweep into another one.
    """
    kept = kept_folders(launch)
    names = {path.name for path in kept}
    found = [
        path.with_name(path.name.removeprefix("."))
        for base in bases()
        for pattern in (f"{launch_id}-*", f".{launch_id}-*")
        for path in base.glob(pattern)
        if path.is_dir()
    ]
    return sorted({*kept, *(path for path in found if path.name not in names)})


SAMPLES_BYTES = 8 * 2**20
"""Room for a node's samples, which lie in its folder."""

_RANK_BYTES = RECORD_BYTES + 64 * 1024  # its record, its error, where it crashed


@contextlib.contextmanager
def claimed_node_folder(
    launch_id: str, num_ranks: int, marker: Path | None = None
) -> Iterator[Path]:
    """A launch's folder on this machine, held by this process meanwhile; the ranks make it.

    `marker`: see Claim. Raises StoreError if there is no place.
    """
    folder = place_for(num_ranks).base / f"{launch_id}-0"
    claim = Claim(folder, marker)
    try:
        yield folder
    finally:
        if not folder.exists() and not _aside(folder).exists():
            forget(folder)  # its lock
        claim.release()


def claim_node_folder(launch_id: str, node: int, num_ranks: int) -> list[str]:
    """Find a place for an agent's ranks, by the first of them; what to say about it.

    The agent is this process's parent. What it has begun to use stays. Raises StoreError.
    """
    folder, notes = node_folder(launch_id, node), []
    if not _is_there(folder):
        place = place_for(num_ranks)
        folder, notes = place.base / folder.name, notes_on(place)
    Claim(folder, agent_pid=os.getppid())  # until this process ends
    return notes


def place_for(num_ranks: int) -> Choice:
    """Where this many ranks' folder goes. Raises StoreError if there is no place."""
    return choose(SAMPLES_BYTES + num_ranks * _RANK_BYTES)


def notes_on(place: Choice) -> list[str]:
    """Why the folder is not in shared memory, for the user; nothing if it is."""
    if not place.problems:
        return []
    return [f"{'; '.join(place.problems)}; flight records go to {place.base} instead"]


def fault_path(folder: Path, rank: int) -> Path:
    """Where Python's fault handler writes what a crashing rank was at."""
    return folder / f"fault-rank{rank}"


def write_rank_error(folder: Path, rank: int, status: str, error: BaseException) -> None:
    trace = "".join(traceback.format_exception(error))
    record = RankError(rank, time.time(), status, f"{type(error).__name__}: {error}", trace)
    path = folder / f"error-rank{rank}.json"
    aside = path.with_suffix(".partial")  # the agent may end this process at any moment
    aside.write_text(json.dumps(dataclasses.asdict(record)))
    aside.replace(path)


def collect(folder: Path, launch: Path) -> Evidence:
    """What lies in a node's folder, and what the agent noted in the launch's.

    The folder is moved aside, so that what comes next is not taken for it; see `forget`.
    """
    source = folder if folder.exists() else _aside(folder)  # whoever collected it was killed
    errors = [RankError(**json.loads(p.read_text())) for p in source.glob("error-rank*.json")]
    records = [read_record(path) for path in sorted(source.glob("flight-rank*"))]
    faults = {
        int(path.name.removeprefix("fault-rank")): text
        for path in source.glob("fault-rank*")
        if (text := path.read_text(errors="replace").strip())
    }
    found = Evidence(
        platform.node(),
        time.time_ns() - time.monotonic_ns(),
        sorted((r for r in records if r is not None), key=lambda record: record.rank),
        sort_errors(errors),
        faults,
        read_sighting(source),
        _signals(launch, {record.pid for record in records if record is not None}),
    )
    if source == folder:
        shutil.rmtree(_aside(folder), ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rename(_aside(folder))
    return found


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}")


def forget(folder: Path) -> None:
    """Remove what was collected of a node's folder, and what is in it."""
    remove_folder(folder)


def _signals(launch: Path, pids: Container[int]) -> dict[int, int]:
    """What killed those of these processes that the agent saw die: rank -> signal.

    Not those of SIGTERM, by which it ends the others itself.
    """
    ended = [one for one in read_exits(launch) if one.pid in pids and one.exitcode < 0]
    return {e.rank: -e.exitcode for e in ended if e.exitcode != -signal.SIGTERM}


STORE_FAILED = "store"
"""Status of a rank that could not write to the store: the sweep cannot go on."""


def store_error(folder: Path) -> str | None:
    """Why the launch's results cannot be stored, if that is so."""
    for path in folder.glob("error-rank*.json"):
        with contextlib.suppress(OSError):
            error = RankError(**json.loads(path.read_text()))
            if error.status == STORE_FAILED:
                return error.message
    return None


def sort_errors(errors: Sequence[RankError]) -> list[RankError]:
    """The cause first: the earliest that does not merely tell that another rank is gone."""
    return sorted(errors, key=lambda error: (error.status == PEER_LOST, error.at))


def judge(
    nodes: Sequence[Evidence],
    lowered: Program | None,
    number: int,
    timeout_s: float,
    *,
    is_interrupted: bool = False,
) -> Judgement:
    """What became of the run of this number. `lowered` is None if it cannot be built.

    `is_interrupted`: its ranks were ended from outside, if nothing tells of a fault of theirs.
    """
    located = [(node, record) for node in nodes for record in node.records]
    running = [(node, record) for node, record in located if record.number == number]
    spans = [span for node, record in running for span in _spans(node, record, lowered)]
    at_ns = max([_ended_ns(node) for node in nodes], default=time.time_ns())
    seen = [_last_seen(node, record, lowered, number) for node, record in located]
    world_size = len(seen) if lowered is None else lowered.world_size
    seen = sorted((one for one in seen if one.rank < world_size), key=lambda one: one.rank)
    origin_ns = min([*(s.start_ns for s in spans), *(one.since_ns for one in seen)], default=at_ns)
    at_ns -= origin_ns
    seen = [dataclasses.replace(one, since_ns=one.since_ns - origin_ns) for one in seen]
    found = post_mortem(seen, lowered, at_ns) if lowered is not None and seen else None
    gone = sorted(set(range(world_size)) - {one.rank for one in seen})
    status, error, rank = _cause(nodes, found, timeout_s, gone)
    is_killed = not any(node.errors or node.faults for node in nodes) and status != "timeout"
    if is_interrupted and (is_killed or status == PEER_LOST):
        status, error, rank = INTERRUPTED, "the sweep was stopped, or killed, before its end", None
    frame = pd.DataFrame(spans, columns=list(COLUMNS))
    frame[["start_ns", "end_ns"]] -= origin_ns
    return Judgement(status, error, rank, _last_actions(seen, world_size), found, at_ns, frame)


def _ended_ns(node: Evidence) -> int:
    """When the node's ranks ended: as the watchdog saw it, else now."""
    if node.sighting is not None:
        return node.sighting.at_ns + node.to_epoch_ns
    return max((int(error.at * 1e9) for error in node.errors), default=time.time_ns())


def _cause(
    nodes: Sequence[Evidence], found: PostMortem | None, timeout_s: float, gone: Sequence[int]
) -> tuple[str, str, int | None]:
    """Status, what went wrong, and on which rank: what is told most clearly comes first.

    `gone` are the ranks of which nothing is left, as on a machine that was lost.
    """
    verdict = "" if found is None else found.verdict
    accounts = [] if found is None else [account.account for account in found.ranks]
    told = "\n".join(line for line in (verdict, *accounts) if line)
    errors = sort_errors([error for node in nodes for error in node.errors])
    if errors and errors[0].status == STORE_FAILED:
        return INTERRUPTED, f"it could not be stored: {errors[0].message}", errors[0].rank
    if errors and errors[0].status != PEER_LOST:
        text = f"rank {errors[0].rank}: {errors[0].message}\n{told}\n{errors[0].traceback}"
        return errors[0].status, text, errors[0].rank
    if any(node.sighting is not None and node.sighting.has_timed_out for node in nodes):
        words = f"not over after measure.timeout_s = {timeout_s:g} s"
        return "timeout", f"{words}: {told}", None if found is None else found.rank
    status, words, rank = _death(nodes, gone, {error.rank for error in errors})
    trace = "" if rank is None else next((n.faults[rank] for n in nodes if rank in n.faults), "")
    complaints = [f"rank {one.rank}: {one.message}\n{one.traceback}" for one in errors[:1]]
    texts = [words, told, trace, *complaints]
    return status, "\n".join(text for text in texts if text), rank


def _death(
    nodes: Sequence[Evidence], gone: Sequence[int], complained: Container[int]
) -> tuple[str, str, int | None]:
    """Which rank died first, and how. Those that `complained` of a lost peer did not."""
    faults = {rank: text for node in nodes for rank, text in node.faults.items()}
    killed = {rank: number for node in nodes for rank, number in node.signals.items()}
    sightings = [
        (node.sighting.at_ns + node.to_epoch_ns, node.sighting)
        for node in nodes
        if node.sighting is not None and node.sighting.first_dead not in complained
    ]
    seen = [s.first_dead for _, s in sorted(sightings, key=lambda one: one[0])]
    named = [rank for rank in (*killed, *faults, *seen) if rank is not None]
    rank = next((rank for rank in named if rank not in complained), None)
    if gone and rank not in killed and rank not in faults:
        return PEER_LOST, f"rank {gone[0]} left nothing behind: its machine is gone", gone[0]
    if rank is None:
        return PEER_LOST, "a worker died without a Python error: it was killed, or crashed", None
    if rank in faults:
        return PEER_LOST, f"rank {rank} crashed: {faults[rank].splitlines()[0]}", rank
    number = killed.get(rank, signal.SIGKILL)
    if number == signal.SIGKILL and any(sighting.oom_kills for _, sighting in sightings):
        return "oom", f"rank {rank} was killed by the kernel, which had run out of memory", rank
    if rank in killed:
        return PEER_LOST, f"rank {rank} was killed by {signal.Signals(number).name}", rank
    return PEER_LOST, f"rank {rank} died without a Python error: it was killed", rank


def _last_seen(node: Evidence, record: Record, lowered: Program | None, number: int) -> LastSeen:
    """Where a rank was, its time since the epoch."""
    last = record.entries[-1] if record.entries and record.number == number else None
    action = None if last is None else _action(last, record.rank, lowered)
    phase = Phase.WAITS if last is None else last.phase
    is_waiting = phase is Phase.WAITS
    if action is not None and last is not None:
        is_waiting = action.op in _WAITING and last.works_ns is None
    if last is None:
        since_ns = record.began_ns or time.monotonic_ns()
    else:
        since_ns = last.works_ns or last.began_ns
    return LastSeen(
        record.rank,
        node.hostname,
        _state(node, record.rank),
        "steps" if phase is None or action is not None else phase.words,
        None if last is None else last.step,
        action,
        is_waiting,
        since_ns + node.to_epoch_ns,
    )


def _state(node: Evidence, rank: int) -> str:
    """What the watchdog saw, else what the rank itself or the agent tells."""
    if node.sighting is not None:
        return node.sighting.processes.get(rank, "alive")
    is_dead = rank in node.signals or rank in [error.rank for error in node.errors[:1]]
    return "dead" if is_dead else "alive"


def _action(entry: Entry, rank: int, lowered: Program | None) -> Action | None:
    """The action that an entry is about; None in other phases."""
    if entry.phase is Phase.UPDATES and entry.works_ns is not None:
        return OPTIMIZER
    if entry.index is None or lowered is None:
        return None
    row = lowered.actions[rank]
    return row[entry.index] if entry.index < len(row) else None


def _last_actions(seen: Sequence[LastSeen], world_size: int) -> list[str | None]:
    """Of each rank in words: its action, else what else it did; None if it left no record."""
    words = {s.rank: s.phase if s.action is None else action_text(s.action) for s in seen}
    return [words.get(rank) for rank in range(world_size)]


def _spans(node: Evidence, record: Record, lowered: Program | None) -> list[Span]:
    """What a rank has computed in its last step and the one before, on the epoch's time."""
    spans = []
    last = record.entries[-1].step if record.entries else None
    for entry, after in itertools.pairwise(record.entries):
        action = _action(entry, record.rank, lowered)
        if action is None or entry.works_ns is None or entry.step is None or last is None:
            continue
        if entry.step >= last - 1:
            times = (entry.works_ns + node.to_epoch_ns, after.began_ns + node.to_epoch_ns)
            lane = lane_of(action.op)
            spans.append(Span(entry.step, record.rank, lane, *action, *times, 0))
    return spans
