"""What a rank does now, written where it outlives the rank: the flight record.

One small file per rank, mapped into memory that all processes of the node share. The rank notes
each action as it comes to it; whoever asks why a step hangs, or what a killed rank did last, reads
the file. Pure standard library, so that readers load no torch.

    header | entry 0 | entry 1 | ...   a ring: the oldest entries are overwritten
    entry    step, what, when it came to it, since when it works on it

Times are `time.monotonic_ns`. An entry ends when the next one begins. A collective is done beside
them, on a lane of its own: the header has the one that the rank is in.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol, Self

from engine.plan.action import NO_INDEX, Action, Op


class Phase(IntEnum):
    """A phase of a rank's work outside the actions of its program."""

    words: str

    def __new__(cls, number: int, words: str = "") -> Self:
        phase = int.__new__(cls, number)
        phase._value_, phase.words = number, words
        return phase

    WAITS = 0, "waits for the other ranks"
    CONNECTS = 1, "connects"
    BUILDS = 2, "builds the model"
    VERIFIES = 3, "verifies the first step"
    SUMS = 4, "sums shared gradients"
    UPDATES = 5, "runs the optimizer"
    DRAINS = 6, "drains its transfers"
    ALIGNS = 7, "aligns the clocks"
    MEMORY = 8, "measures memory"
    PROFILES = 9, "profiles"
    GATHERS = 10, "gathers the results"
    STORES = 11, "stores the run"
    PEAK = 12, "measures its device's peak"
    RUNS = 13, "runs a step"
    REFERENCE = 14, "runs the reference"
    REFERENCE_AGAIN = 15, "runs the reference again"


VERSION = 2
CAPACITY = 4096
_VERSION, _PID, _RANK, _NUMBER, _BEGAN, _DEADLINE, _COUNT, _JOINED, _SINCE = range(9)  # the header
_FIRST = 9
_ENTRY = 4  # step, what, came to it, works on it since
RECORD_BYTES = 8 * (_FIRST + CAPACITY * _ENTRY)
_NONE = -1
_COLLECTIVES = (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD)  # noted as stage x 3 + place here
_BLOCK_BYTES = 1 << 20


def reserve(descriptor: int, num_bytes: int) -> None:
    """Give an open, empty file this size, its memory or its place on the disk included.

    Raises OSError where there is no room: at a store into mapped memory it would be SIGBUS.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
        return
    left = num_bytes
    while left:
        left -= os.write(descriptor, bytes(min(left, _BLOCK_BYTES)))


class Flight(Protocol):
    """Takes the notes of whatever runs a step."""

    def begin_step(self, step: int) -> None:
        """Note that a step begins."""

    def come_to(self, index: int) -> None:
        """Note that the rank has come to the action at this index of its lowered row."""

    def work(self) -> None:
        """Note that this action has its input and is worked on."""

    def enter(self, phase: Phase) -> None:
        """Note that the rank has come to a phase outside its actions."""

    def join(self, collective: Action | None) -> None:
        """Note which collective the rank's lane is in; None: in none. From any thread."""


class NoFlight:
    """Notes nothing."""

    def begin_step(self, step: int) -> None: ...
    def come_to(self, index: int) -> None: ...
    def work(self) -> None: ...
    def enter(self, phase: Phase) -> None: ...
    def join(self, collective: Action | None) -> None: ...


NO_FLIGHT = NoFlight()


class FlightRecord:
    """This rank's record. A few stores into memory for each action."""

    def __init__(self, path: Path, rank: int) -> None:
        """Makes the file anew. Raises OSError."""
        path.unlink(missing_ok=True)  # who has the old one mapped keeps it
        with path.open("x+b") as file:
            reserve(file.fileno(), RECORD_BYTES)
            self._slots = memoryview(mmap.mmap(file.fileno(), RECORD_BYTES)).cast("q")
        self._at = _FIRST
        self._count = 0
        self._step = _NONE
        for slot, value in ((_PID, os.getpid()), (_RANK, rank), (_NUMBER, _NONE), (_JOINED, _NONE)):
            self._slots[slot] = value
        self._slots[_VERSION] = VERSION

    def begin_case(self, number: int, timeout_s: float) -> None:
        """Forget what was before. It may take so long; 0: as long as it likes."""
        self._slots[_COUNT] = self._count = 0
        self._slots[_JOINED] = _NONE
        self._slots[_NUMBER], self._slots[_BEGAN] = number, time.monotonic_ns()
        self.limit(timeout_s)
        self._step = _NONE

    def limit(self, timeout_s: float) -> None:
        """The case may take so long from now; 0: as long as it likes."""
        ends_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        self._slots[_DEADLINE] = ends_ns if timeout_s else 0

    def end_case(self) -> None:
        self._slots[_DEADLINE], self._slots[_NUMBER] = 0, _NONE

    def begin_step(self, step: int) -> None:
        self._step = step

    def come_to(self, index: int) -> None:
        self._note(index)

    def enter(self, phase: Phase) -> None:
        self._note(-1 - phase)

    def work(self) -> None:
        self._slots[self._at + 3] = time.monotonic_ns()

    def join(self, collective: Action | None) -> None:
        self._slots[_SINCE] = time.monotonic_ns()
        number = _NONE
        if collective is not None:
            number = collective.stage * len(_COLLECTIVES) + _COLLECTIVES.index(collective.op)
        self._slots[_JOINED] = number

    def _note(self, what: int) -> None:
        slots, count = self._slots, self._count
        self._at = at = _FIRST + count % CAPACITY * _ENTRY
        slots[at], slots[at + 1], slots[at + 2] = self._step, what, time.monotonic_ns()
        slots[at + 3] = 0
        self._count = slots[_COUNT] = count + 1  # last: a reader sees whole entries


@dataclass(frozen=True)
class Entry:
    """One thing that a rank came to: an action of its row, or a phase."""

    step: int | None
    index: int | None  # of the action in the rank's lowered row; None in a phase
    phase: Phase | None
    began_ns: int
    works_ns: int | None  # since when it had what it needed; None if it never had


@dataclass(frozen=True)
class Record:
    """A rank's record: the last entry is where it is, or was when it died."""

    rank: int
    pid: int
    number: int | None  # of the case; None between cases
    began_ns: int
    deadline_ns: int | None
    entries: tuple[Entry, ...]  # of the case, oldest first
    collective: Action | None = None  # that its lane is in, beside what the last entry says
    collective_began_ns: int | None = None


def read_deadline(slots: memoryview) -> int:
    """The time when the case must be over; 0 if there is none."""
    return int(slots[_DEADLINE])


def map_record(path: Path) -> memoryview:
    """A record, for reading again and again. Raises OSError; ValueError for one cut short."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), RECORD_BYTES, access=mmap.ACCESS_READ)).cast("q")


def read_record(path: Path) -> Record | None:
    """None for a file that is none, or not a whole one."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != RECORD_BYTES:
        return None
    slots = struct.unpack(f"{RECORD_BYTES // 8}q", data)
    if slots[_VERSION] != VERSION:
        return None
    count, entries = slots[_COUNT], []
    for number in range(max(0, count - CAPACITY + 1), count):
        at = _FIRST + number % CAPACITY * _ENTRY
        step, what, began_ns, works_ns = slots[at : at + _ENTRY]
        index, phase = (what, None) if what >= 0 else (None, Phase(-1 - what))
        known_step = None if step == _NONE else step
        entries.append(Entry(known_step, index, phase, began_ns, works_ns or None))
    stage, place = divmod(slots[_JOINED], len(_COLLECTIVES))
    is_joined = slots[_JOINED] != _NONE
    return Record(
        rank=slots[_RANK],
        pid=slots[_PID],
        number=None if slots[_NUMBER] == _NONE else slots[_NUMBER],
        began_ns=slots[_BEGAN],
        deadline_ns=slots[_DEADLINE] or None,
        entries=tuple(entries),
        collective=Action(stage, _COLLECTIVES[place], NO_INDEX) if is_joined else None,
        collective_began_ns=slots[_SINCE] if is_joined else None,
    )
