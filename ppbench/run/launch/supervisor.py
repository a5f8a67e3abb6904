"""The one process of a node that starts its ranks, watches them, and says what happened to them.

    python -m ppbench.run.launch.supervisor serve PID MODULES        by a controller (local.py)
    python -m ppbench.run.launch.supervisor [OPTIONS] -m MODULE ...  the same on every node, by hand

    import what is heavy | fork ranks | watch | they end -> note, restart all | watch | over

Ranks are forked once the modules that they need are imported, unless one of these imports has used
an accelerator, which no fork can use then. One loop waits for their ends, for other nodes
(meeting.py) and for a rank that asks for a sample. It looks at the deadlines in the ranks'
flight records, and takes the node's samples. When a rank ends with a failure, or its case takes
too long, the states of all ranks are noted, and all are killed, also those that are stopped or wait
for ever: their files are whole at any moment. Then all nodes start theirs anew, with a new store.
All that happened is in one file (machine/node_folder.py), written here alone.

A controller's launches are lines of JSON on standard input, one after the other; each is answered
by a line with its exit code. Their ranks' output goes to `FOLDER/logs/start-<n>/rank-<rank>.err`.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import importlib
import json
import os
import platform
import runpy
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ppbench.run.launch.lifetime import die_with_parent

if __name__ == "__main__":
    gc.disable()  # imported objects stay, and collections take a fifth of the time
    if sys.argv[1:2] == ["serve"]:  # now, as what is imported next takes long
        die_with_parent(int(sys.argv[2]))

import torch

from engine import device_variables
from engine.flight import map_record, read_deadline
from engine.interfaces import (
    InterfaceError,
    is_this_machine,
    keep_to,
    keep_to_loopback,
    listen,
    place_to_listen,
    place_towards,
    refuse_unspecified,
)
from ppbench.config.case import Supervision, settings_in
from ppbench.errors import ExitCode, StoreError
from ppbench.run.launch.local import GAVE_UP, LOG, WORKER, Begin, preloaded_for
from ppbench.run.launch.meeting import End, Leader, Leave, Member, Start
from ppbench.run.machine.node_folder import (
    ALIVE,
    ASKS,
    DEAD,
    START_FOLDER,
    STOPPED,
    Ending,
    Exit,
    Started,
    flight_path,
    last_start,
    make_node_folder,
    note,
    number_of,
    remove_node_folder,
    samples_path,
    start_folder,
)
from ppbench.run.machine.sampler import Sampler
from ppbench.signals import ENDING, held_back

LOOK_S = 0.5
"""Time between two looks at the ranks' deadlines."""
POLL_S = 0.05
"""Time between two looks at the ranks where the system does not report their ends."""
NUM_LOOKS = 10
"""A kill for memory counts if it was at most so many looks ago: its victim dies some time later."""
KILL_TIMEOUT_S = 30.0
"""A killed process that stays longer waits for a device; it is left to the kernel."""
DEFAULT_PORT = 29400


@dataclass
class Rank:
    """A rank of the present start."""

    number: int
    pid: int
    log: str
    record: memoryview | None = None  # its flight record, once it has made one
    is_over: bool = False

    def __post_init__(self) -> None:
        """Hold a descriptor by which its end is waited for, where the system has them."""
        self.pidfd: int | None = None
        with contextlib.suppress(AttributeError, OSError):
            self.pidfd = os.pidfd_open(self.pid)

    def exit_code(self) -> int | None:
        """End all that it has started, if it has ended itself; return its exit code, or None."""
        seen = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if seen is None:
            return None
        self._kill_session()  # no other process can have this id yet
        os.waitpid(self.pid, 0)
        if self.pidfd is not None:
            os.close(self.pidfd)
        self.is_over = True
        return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status

    def state(self) -> str:
        if self.is_over:
            return DEAD
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return ALIVE
        return STOPPED if stat.rpartition(")")[2].split()[0] in "Tt" else ALIVE

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._kill_session()

    def _kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class Launch:
    """A launch's ranks on this node, from the first start to the last."""

    def __init__(self, begin: Begin, meeting: Leader | Member, kept: Sequence[int] = ()) -> None:
        """`kept` are descriptors of this process's own, which ranks do not have."""
        self._begin, self._meeting, self._kept = begin, meeting, kept
        self._node = Path(begin.node_folder)
        self._ranks: list[Rank] = []  # of the present start, those that have ended too
        self._start_number = -1
        self._asks: socket.socket | None = None  # of the node's first rank, for samples
        self._sampler: Sampler | None = None
        self._devices: list[str] | None = None  # accelerators to sample; None: none is wanted now
        self._oom_kills: deque[int] = deque(maxlen=NUM_LOOKS)  # so far, at the last looks
        # A fork has no connection to an accelerator that its parent has used: every call there
        # fails. An imported package may have, such as one that registers itself with torch.
        kinds = (torch.cuda, torch.xpu)
        self._is_forking = not any(kind.is_initialized() for kind in kinds)
        if not self._is_forking:
            print("workers are spawned: an imported package has used the accelerator", flush=True)

    def run(self) -> Leave:
        """Run the ranks until the launch is over. Raises SystemExit when a signal ends it."""
        try:
            while True:
                while self._meeting.orders:
                    order = self._meeting.orders.popleft()
                    match order:
                        case Start():
                            self._start(order)
                        case End() if self._ranks:
                            self._end("elsewhere")
                        case Leave():
                            return order
                self._look()
        finally:
            if self._ranks:
                self._end("stopped")
            self._meeting.close()
            if self._sampler is not None:
                self._sampler.close()

    def _start(self, order: Start) -> None:
        """Start this node's ranks, each in a session of its own."""
        begin, node = self._begin, self._node
        self._start_number += 1
        if (last := last_start(node)) is not None:  # whose files the new ranks read
            for number in range(number_of(last)):
                remove_node_folder(start_folder(node, number))
        folder = start_folder(node, self._start_number)
        folder.mkdir(mode=0o700, parents=True)
        note(node, Started(self._start_number))
        self._oom_kills.clear()
        self._asks, theirs = socket.socketpair()
        theirs.set_inheritable(True)
        variables = {
            **begin.variables,
            START_FOLDER: str(folder),
            ASKS: str(theirs.fileno()),
            "MASTER_ADDR": order.host,
            "MASTER_PORT": str(order.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's: no rank has to serve it
            "WORLD_SIZE": str(order.num_nodes * begin.num_ranks),
            "LOCAL_WORLD_SIZE": str(begin.num_ranks),
            "GROUP_RANK": str(order.node),
        }
        with held_back():  # in a fork, the exception of a handler is lost
            for local_rank in range(begin.num_ranks):
                number, log = order.node * begin.num_ranks + local_rank, ""
                if begin.folder:
                    logs = Path(begin.folder) / "logs" / folder.name
                    logs.mkdir(parents=True, exist_ok=True)
                    log = str(logs / f"rank-{number}.err")
                own = {**variables, "RANK": str(number), "LOCAL_RANK": str(local_rank)}
                self._ranks.append(Rank(number, self._fork(own, log), log))
        theirs.close()

    def _fork(self, variables: dict[str, str], log: str) -> int:
        """Start a rank; return its process id. The child does not return."""
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid != 0:
            return pid
        try:
            for ending in ENDING:  # a rank that is ended has no error of its own
                if callable(signal.getsignal(ending)):
                    signal.signal(ending, signal.SIG_DFL)
            for descriptor in self._kept:
                os.close(descriptor)
            for one in (*self._meeting.sockets, self._asks):
                if one is not None:
                    one.close()
            os.setsid()
            die_with_parent(parent)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            if log:
                for number, path in ((1, Path(log).with_suffix(".out")), (2, Path(log))):
                    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
                    os.dup2(file, number)
                    os.close(file)
            os.environ.update(variables)
            if not self._is_forking:
                words = [sys.executable, "-m", self._begin.module, *self._begin.arguments]
                os.execv(sys.executable, words)  # noqa: S606
            sys.argv[1:] = self._begin.arguments
            runpy.run_module(self._begin.module, run_name="__main__", alter_sys=True)
            _leave(0)
        except SystemExit as end:
            _leave(end.code)
        except BaseException:  # as Python does
            traceback.print_exc()
            _leave(1)

    def _look(self) -> None:
        """Wait until something happens, or it is time to look, and do what follows from it."""
        now_s = time.monotonic()
        waits_s = [LOOK_S]
        alive = [rank for rank in self._ranks if not rank.is_over]
        pidfds = [rank.pidfd for rank in alive]
        if self._sampler is not None and self._devices is not None:
            waits_s.append(self._sampler.due_s - now_s)
        waits_s += [end_ns / 1e9 - now_s for rank in alive if (end_ns := self._deadline_ns(rank))]
        if None in pidfds:
            waits_s.append(POLL_S)
        sockets = [one.fileno() for one in (*self._meeting.sockets, self._asks) if one is not None]
        poll = select.poll()
        for descriptor in (*pidfds, *sockets):
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, min(waits_s)) * 1000)}
        if self._asks is not None and self._asks.fileno() in ready:
            self._answer(self._asks)
        if self._sampler is not None and self._devices is not None:
            with contextlib.suppress(OSError):  # there is no room
                self._sampler.sample_if_due(self._devices)
        self._count_oom_kills()
        self._see_exits()
        now_ns = time.monotonic_ns()
        if any(0 < self._deadline_ns(rank) < now_ns for rank in self._ranks if not rank.is_over):
            self._end("timeout")
        self._meeting.hear(ready)

    def _see_exits(self) -> None:
        """Note the ranks that have ended; end the others if one has failed."""
        ended = [
            (code, rank)
            for rank in self._ranks
            if not rank.is_over and (code := rank.exit_code()) is not None
        ]
        # Of those that are seen at once, one that was killed is not the consequence of another.
        for code, rank in sorted(ended, key=lambda one: one[0] >= 0):
            own = self._start_number, rank.number, rank.pid
            note(self._node, Exit(*own, code, time.monotonic_ns(), rank.log))
        codes = [code for code, _ in ended]
        if any(codes):
            self._end("exit", GAVE_UP if GAVE_UP in codes else 1)
        elif ended and all(rank.is_over for rank in self._ranks):
            self._forget_ranks()
            self._meeting.report(0)

    def _end(self, cause: str, code: int = 1) -> None:
        """Note why and in which states the ranks are ended, and end them."""
        states = {rank.number: rank.state() for rank in self._ranks}
        now_ns, num_killed = time.monotonic_ns(), self._count_oom_kills()
        note(self._node, Ending(self._start_number, cause, now_ns, states, num_killed))
        left = [rank for rank in self._ranks if not rank.is_over]
        for rank in left:
            rank.kill()
        self._forget_ranks()
        until_s = time.monotonic() + KILL_TIMEOUT_S
        while left and time.monotonic() < until_s:
            left = [rank for rank in left if rank.exit_code() is None]
            time.sleep(0.005 if left else 0.0)
        self._meeting.report(code)

    def _forget_ranks(self) -> None:
        self._ranks, self._devices = [], None
        if self._asks is not None:
            self._asks.close()
        self._asks = None

    def _deadline_ns(self, rank: Rank) -> int:
        """Return when the rank's case must be over; 0 if it has no limit, or no case."""
        if rank.record is None:
            folder = start_folder(self._node, self._start_number)
            with contextlib.suppress(OSError, ValueError):  # not there yet, or not whole
                rank.record = map_record(flight_path(folder, rank.number))
        return 0 if rank.record is None else read_deadline(rank.record)

    def _answer(self, asks: socket.socket) -> None:
        """Take the sample that the node's first rank asks for, or rest until it asks again.

        It asks by a line: the list of accelerators to sample from now on, or null.
        """
        with contextlib.suppress(OSError, ValueError):
            data = asks.recv(1 << 16)
            if not data:
                self._asks = None
                asks.close()
                return
            self._devices = json.loads(data)
            if self._devices is not None:
                with contextlib.suppress(OSError):  # there is no room
                    if self._sampler is None:
                        self._sampler = Sampler(samples_path(self._node), os.getpid())
                    self._sampler.sample(self._devices)
            asks.sendall(b".")

    def _count_oom_kills(self) -> int:
        """Return how many processes the kernel has killed for memory of late."""
        counts = [0]
        for path in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
            with contextlib.suppress(OSError, ValueError):
                lines = Path(path).read_text().splitlines()
                counts += [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
        self._oom_kills.append(max(counts))
        return max(counts) - self._oom_kills[0]


def _stop(number: int, _frame: object) -> NoReturn:
    """End this process, and its ranks first."""
    raise SystemExit(128 + number)


def _leave(code: object) -> NoReturn:
    """End like Python does for this code, but here: taking torch down takes half a second."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def serve_controller(preloaded: str) -> NoReturn:
    """Run the launches that a controller asks for, until it closes standard input."""
    for library in ("GLOO", "NCCL", "TP"):  # whatever the machine's settings are
        os.environ.pop(f"{library}_SOCKET_IFNAME", None)
    keep_to_loopback(os.environ)
    answers, is_ready = os.dup(1), False
    for line in sys.stdin:
        begin = Begin(**json.loads(line))
        log = os.open(Path(begin.folder) / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.environ.update(begin.variables)
        if not is_ready:  # here, so that what fails is in a log
            preload(preloaded)
            is_ready = True
        leave = Launch(begin, Leader(1, begin.max_restarts), [answers]).run()
        os.write(answers, f"{leave.code}\n".encode())
    _leave(0)


def preload(modules: str) -> None:
    """Import what the ranks need before there are any, so that they share its memory."""
    for name in filter(None, modules.split(",")):
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


def run_on_node(arguments: Sequence[str]) -> int:
    """Run this node's part of one launch; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ppbench.run.launch.supervisor",
        description="Start the ranks of one launch on this node; the same command on every node.",
        allow_abbrev=False,
    )
    option = parser.add_argument
    option("--nodes", type=int, default=1, metavar="N", help="nodes of the launch [1]")
    option("--ranks-per-node", type=int, default=1, metavar="N", help="ranks on each node [1]")
    option("--max-restarts", type=int, default=0, metavar="N", help="restarts after failures [0]")
    option("--rendezvous", default="", metavar="HOST[:PORT]", help="where nodes meet; one of them")
    for declared in settings_in(Supervision):
        usual, words = declared.default, f"{declared.meaning} [{declared.default}]"
        option(f"--{declared.field.replace('_', '-')}", type=type(usual), default=usual,
               metavar=declared.metavar, help=words)  # fmt: skip
    option("-m", dest="program", nargs=argparse.REMAINDER, required=True, metavar="MODULE ...",
           help="what each rank runs, as with python -m")  # fmt: skip
    given = parser.parse_args(arguments)
    if not given.program:
        parser.error("-m: expected the module that each rank runs")
    if given.nodes > 1 and not given.rendezvous:
        parser.error(f"--rendezvous: not set, and {given.nodes} nodes must meet; give HOST:PORT")
    chosen = {one.field: getattr(given, one.field) for one in settings_in(Supervision)}
    os.environ.update(Supervision(**chosen).variables())  # for the ranks too
    try:
        meeting = _meeting(given.rendezvous, given.nodes, given.max_restarts)
    except (InterfaceError, ValueError) as error:
        print(f"error: --rendezvous {given.rendezvous}: {error}", file=sys.stderr, flush=True)
        return ExitCode.usage
    try:
        node = make_node_folder()
    except StoreError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    module, *words = given.program
    preload(preloaded_for(["llama-tiny"]) if module == WORKER else "")
    begin = Begin("", str(node), given.ranks_per_node, given.max_restarts, module, words, {})
    leave = Leave(1)
    unstored: str | None = None
    try:
        leave = Launch(begin, meeting).run()
        if leave.code == GAVE_UP:
            from ppbench.run.failures.evidence import store_error

            unstored = store_error(node)
    finally:
        # What ranks that failed have left is read by the next sweep, if they have noted it.
        is_over = leave.code == 0 or (leave.code == GAVE_UP and unstored is None)
        if is_over or last_start(node) is None:
            remove_node_folder(node)
    if why := leave.why or unstored:
        print(f"error: {why}", file=sys.stderr, flush=True)
    if unstored is not None:
        return StoreError.exit_code
    return ExitCode.usage if leave.code == GAVE_UP else leave.code


def _meeting(rendezvous: str, num_nodes: int, max_restarts: int) -> Leader | Member:
    """Lead where the rendezvous is one of this machine's addresses, and nobody leads there yet.

    This machine's stores, gloo and NCCL listen on one interface alone: on that of the rendezvous,
    or on the one that leads to it. `GLOO_SOCKET_IFNAME` chooses another. Raises InterfaceError.
    """
    if not rendezvous:
        keep_to_loopback(os.environ)
        return Leader(num_nodes, max_restarts)
    host, colon, port_text = rendezvous.rpartition(":")
    if not colon or rendezvous.endswith("]"):
        host, port_text = rendezvous, str(DEFAULT_PORT)
    host, port = host.strip("[]"), int(port_text)
    refuse_unspecified(host)
    leads, listener = is_this_machine(host), None
    place = place_to_listen(host, is_far=num_nodes > 1) if leads else place_towards(host)
    if leads and num_nodes > 1:
        try:
            listener = listen(place.address, port)
        except OSError as error:
            where = f"{place.address}:{port}"
            if error.errno != errno.EADDRINUSE:
                raise InterfaceError(f"{where}: cannot be listened on: {error}") from error
            leads, host = False, place.address  # another supervisor of this machine does
    print(f"{platform.node()}: listens on {place.address} ({place.name}) alone", file=sys.stderr)
    keep_to(place.name, os.environ)
    if not leads:
        return Member(host, port)
    return Leader(num_nodes, max_restarts, place.address, listener)


def main() -> None:
    device_variables.prepare(os.environ)  # before anything that is preloaded may use a device
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _stop)
    code: object = 1
    try:
        if sys.argv[1:2] == ["serve"]:
            serve_controller(sys.argv[3])
        code = run_on_node(sys.argv[1:])
    except SystemExit as end:
        code = end.code
    except Exception:
        traceback.print_exc()
    _leave(code)


if __name__ == "__main__":
    main()
