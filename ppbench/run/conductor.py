"""Turns between sets of processes: one set works at a time, and the others sleep.

    set 0   opens its cases | waits ........ | round 0 | waits . | waits . | round 1 | ... closes
    set 1   waits ......... | opens its own  | waits . | round 0 | round 1 | waits . | ...

Commits, and packages of other versions, cannot share processes. Each has a set of its own, whose
rank 0 asks the conductor before it opens its cases, before each round, and before it closes them.
A round begins when every set has asked for it. A set that has made the rounds that were planned
asks for more, which there are while the budget allows. Whoever waits sleeps in a read of its
socket. The sets may make several launches, one after the other: the first launch of one is paired
with the first of another, whatever their numbers.

Requests and answers are lines of JSON over a socket of this machine:

    {"set": 0, "wants": "round"}    ->    {"round": 3}
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import socket
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Self

from ppbench.run.rounds import is_time_left, order_of

NO_MORE = -1
"""The answer to a set that asks for more rounds, where there are none."""
VARIABLE = "PPBENCH_CONDUCTOR"
"""Environment variable of a set: its number, the id of its rounds, the conductor's socket and the
number of its first launch."""


def first_launch() -> int:
    """The number of the first launch that this set makes; 0 without a conductor."""
    text = os.environ.get(VARIABLE)
    return 0 if text is None else int(json.loads(text)[-1])


class Conductor:
    """Gives the sets of a launch their turns, in a thread, until it is left."""

    def __init__(
        self, name: str, num_sets: int, budget_s: float = 0.0, *, is_later: bool = False
    ) -> None:
        """`name` identifies the rounds: what was measured under it is paired.

        With a budget of the command, launches have more rounds than planned as far as
        `ppbench.run.rounds.is_time_left`, which `is_later` is for.
        """
        self._name, self._expected = name, set(range(num_sets))
        self._budget_s, self._is_later = budget_s, is_later
        self._opened_s = self._began_s = 0.0  # when a launch's cases, and its rounds, began
        self._num_rounds = 0  # of a launch
        self._folder = Path(tempfile.mkdtemp(prefix="ppbench-turns-"))
        self._path = self._folder / "socket"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wakes, self._wake = socket.socketpair()
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._wanting: dict[int, tuple[str, socket.socket]] = {}  # by set, as long as it waits
        self._set_of: dict[socket.socket, int] = {}
        self._active: int | None = None
        self._round = -1
        self._queue: deque[int] = deque()  # sets whose turn of this round is to come
        self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_over = True
        self._wake.send(b".")
        self._thread.join()
        for connection in (*self._set_of, self._listener, self._wakes, self._wake):
            connection.close()
        self._selector.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def variables(self, number: int, first_launch: int = 0) -> dict[str, str]:
        """The environment variables of a set."""
        return {VARIABLE: json.dumps([number, self._name, str(self._path), first_launch])}

    def leave_out(self, number: int) -> None:
        """Wait no longer for a set: its processes have ended."""
        self._expected = self._expected - {number}
        self._wake.send(b".")

    def _run(self) -> None:
        while not self._is_over:
            for key, _ in self._selector.select():
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is self._listener:
                    asking, _ = self._listener.accept()
                    self._selector.register(asking, selectors.EVENT_READ)
                elif connection is self._wakes:
                    self._wakes.recv(100)
                else:
                    self._hear(connection)
            self._go_on()

    def _hear(self, connection: socket.socket) -> None:
        """Take the request of a set, or that it has gone."""
        data = b""
        with contextlib.suppress(OSError):
            data = connection.recv(10_000)
        number = self._set_of.get(connection)
        if data:
            asked = json.loads(data)
            number = self._set_of[connection] = int(asked["set"])
            self._wanting[number] = asked["wants"], connection
        else:
            self._selector.unregister(connection)
            self._set_of.pop(connection, None)
            connection.close()
            if number is not None:
                _, asking = self._wanting.get(number, ("", None))
                if asking is connection:  # and not that of the next launch
                    self._wanting.pop(number)
        if number is not None and self._active == number:
            self._active = None

    def _go_on(self) -> None:
        """Let the next set work, if none does and it is known which."""
        if self._active is not None:
            return
        for number, (wants, _) in sorted(self._wanting.items()):
            if wants in {"open", "close"}:
                if wants == "open" and (self._num_rounds or not self._opened_s):
                    self._opened_s, self._num_rounds = time.monotonic(), 0
                self._answer(number)
                return
        expected = sorted(self._expected)
        if not self._queue and expected and set(self._wanting) >= set(expected):
            if all(self._wanting[number][0] == "more" for number in expected):
                times = time.monotonic() - self._began_s, self._began_s - self._opened_s
                known = self._num_rounds, *times, self._budget_s
                if not (self._num_rounds and is_time_left(*known, is_later=self._is_later)):
                    for number in expected:
                        self._tell(number, NO_MORE)
                    return
            if not self._num_rounds:
                self._began_s = time.monotonic()
            self._round, self._num_rounds = self._round + 1, self._num_rounds + 1
            self._queue += [expected[at] for at in order_of(len(expected), self._round)]
        while self._queue:
            number = self._queue.popleft()
            if number in self._wanting:
                self._answer(number)
                return

    def _answer(self, number: int) -> None:
        """Let a set work."""
        self._active = number
        self._tell(number, self._round)

    def _tell(self, number: int, answer: int) -> None:
        _, connection = self._wanting.pop(number)
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps({"round": answer}).encode() + b"\n")


class Conducted:
    """A set's end of the conductor, held by its rank 0."""

    def __init__(self, number: int, name: str, path: str, first_launch: int) -> None:
        self._name, self._number, self._first_launch = name, number, first_launch
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._answers = self._socket.makefile("r")

    @classmethod
    def from_environment(cls) -> Conducted | None:
        """The conductor of this process; None if it has none."""
        text = os.environ.get(VARIABLE)
        return None if text is None else cls(*json.loads(text))

    def start_of(self, launch: int) -> str:
        """The id of the rounds of a launch, which is the same in all sets."""
        return f"{self._name}-{launch - self._first_launch}"

    def ask(self, wants: str) -> int:
        """End this set's turn, and wait for the next; returns the number of its round.

        `wants` is "open", "round", "more" or "close"; `NO_MORE` is an answer to "more", and no turn
        begins with it. Raises ConnectionError if the conductor has gone.
        """
        self._socket.sendall(json.dumps({"set": self._number, "wants": wants}).encode() + b"\n")
        answer = self._answers.readline()
        if not answer:
            raise ConnectionError("the command that gives the turns has ended")
        return int(json.loads(answer)["round"])

    def close(self) -> None:
        """Leave: other sets go on without this one."""
        self._answers.close()
        self._socket.close()
