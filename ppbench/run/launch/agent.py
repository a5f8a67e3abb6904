"""Starts a machine's workers and restarts them all when one fails, by torch's elastic agent.

    python -m ppbench.run.launch.agent PRELOADED

It runs launch after launch. Each is a line of JSON on its standard input (`local.Begin`), and is
answered by a line with its exit code. So modules are imported once for all launches of a command.

`torch.distributed.run` would do but for five things. Its store listens on every interface of the
machine; this one on loopback alone. It waits 30 s for a worker that cannot be ended gently, such
as one that is stopped. It does not report in what order workers died, or how. It leaves its workers
behind when it is killed. And each worker that it starts imports torch and the models anew, which
takes seconds; here workers are forked from the agent, which has imported them, unless one of these
imports has used an accelerator, which no fork can use then (forking.py).

    FOLDER/exits.jsonl                       who failed, how and when (local.py)
           agent.log                         standard output and error of the agent
           logs/*/attempt_<n>/<rank>/        those of each worker
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":
    gc.disable()  # imported objects stay, and collections take a fifth of the time

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    MultiprocessContext,
    SignalException,
    Std,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from engine import device_variables
from engine.interfaces import LOOPBACK, keep_to_loopback
from engine.rank_store import serve
from ppbench.run.launch import lifetime
from ppbench.run.launch.forking import FORK, start_method
from ppbench.run.launch.local import AGENT_LOG, Begin, Exit, note_exit

GRACE_S = 1.0
"""Workers have nothing to finish: their files are whole at any moment."""

KILL_TIMEOUT_S = 30.0
"""A killed process that stays longer waits for a device; it is left to the kernel."""

_STORE_TIMEOUT = timedelta(seconds=300)
_POLL_S = 0.05
_ROLE = "ppbench"
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals for which the agent, like torch's, raises an exception; its forks inherit that."""


class Loopback(RendezvousHandler):
    """A rendezvous of one node, whose store is reached from this machine alone."""

    def __init__(self) -> None:
        self._store = serve(LOOPBACK, 0, _STORE_TIMEOUT)
        self._address = RendezvousStoreInfo(LOOPBACK, self._store.port)

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, 0, 1, self._address)

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "loopback"

    def get_run_id(self) -> str:
        return _ROLE

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: no other node is there."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class Agent(LocalElasticAgent):
    """Torch's agent, but that it sees at once when a worker ends, and then ends the others."""

    def __init__(
        self, spec: WorkerSpec, logs: DefaultLogsSpecs, folder: Path, start_method: str
    ) -> None:
        super().__init__(spec, logs, start_method=start_method)
        self._folder = folder
        self._watch: _Watch | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        attempt = worker_group.spec.max_restarts - self._remaining_restarts
        self._watch = _Watch(self._folder, attempt, pids)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Ask torch only when a worker has failed, and then end the others first, or all are done.

        Where torch is the first to see a failure, it ends the other workers itself: it gives them
        30 s, and the watch takes them for workers that failed on their own.
        """
        if self._watch is not None and self._watch.has_failed:
            self._end_workers()
        elif self._watch is not None:
            assert isinstance(self._pcontext, MultiprocessContext)
            # A worker that has done its work waits for torch to read its result.
            if any(queue.empty() for queue in self._pcontext._ret_vals.values()):
                return RunResult(state=WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _shutdown(self, *arguments: Any, **named: Any) -> None:
        self._end_workers()
        super()._shutdown(*arguments, **named)

    def _end_workers(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()


class _Watch:
    """Waits for one start of the workers by a thread for each, and notes those that fail.

    The threads leave dead workers to be reaped by torch, so that no other process can get their
    ids.
    """

    def __init__(self, folder: Path, attempt: int, pids: Mapping[int, int]) -> None:
        self._folder, self._attempt, self._pids = folder, attempt, pids
        self._is_ending, self._lock = False, threading.Lock()
        self.has_failed = False
        self._threads = [
            threading.Thread(target=self._follow, args=worker, daemon=True)
            for worker in pids.items()
        ]
        for thread in self._threads:
            thread.start()

    def _follow(self, rank: int, pid: int) -> None:
        """Block until the worker has ended, and note it."""
        try:
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # reaped
            return
        assert status is not None  # it is without WNOHANG
        is_signal = status.si_code != os.CLD_EXITED
        exitcode = -status.si_status if is_signal else status.si_status
        at, at_ns = time.time(), time.monotonic_ns()
        # An end is noted even with code 0: the work may be unfinished.
        with self._lock:
            if self._is_ending:
                return
            self.has_failed = self.has_failed or exitcode != 0
            ended = Exit(self._attempt, rank, pid, exitcode, at, at_ns)
            if exitcode != 0:
                print(f"start {self._attempt}: {ended}", flush=True)
            try:
                note_exit(self._folder, ended)
            except OSError as error:  # no room, no descriptor left, or the folder is gone
                print(f"{self._folder}: cannot be written: {error}", flush=True)

    def end(self) -> None:
        """End the workers and all that they have started. Blocks until they are gone."""
        with self._lock:
            self._is_ending = True
        for number, timeout_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, KILL_TIMEOUT_S)):
            for pid in self._pids.values():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, number)  # each has a session of its own
            until = time.monotonic() + timeout_s
            for thread in self._threads:
                thread.join(max(0.0, until - time.monotonic()))


def run(begin: Begin) -> RunResult:
    """Run the workers to their end. Raises SignalException when the agent itself is to end."""
    method = start_method()
    if method != FORK:
        print("workers are spawned: an imported package has used the accelerator", flush=True)
    spec = WorkerSpec(
        role=_ROLE,
        local_world_size=begin.num_ranks,
        rdzv_handler=Loopback(),
        entrypoint=_work,
        args=(os.getpid(), begin.module, begin.arguments),
        max_restarts=begin.max_restarts,
        monitor_interval=_POLL_S,
    )
    folder = Path(begin.folder)
    logs = DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.ALL)
    result: RunResult = Agent(spec, logs, folder, start_method=method).run()
    return result


def _work(agent_pid: int, module: str, arguments: list[str]) -> None:
    """Run the module in a worker as `python -m` would."""
    for number in _HANDLED:  # a rank that is ended with the others has no error of its own
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    lifetime.die_with_parent(agent_pid)
    sys.argv[1:] = arguments
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            _end(end.code)
    except BaseException:  # as Python does; torch would not print the trace
        traceback.print_exc()
        _end(1)


def _end(code: int | str) -> NoReturn:
    """End like Python does for this code, but here, so that messages go to the worker's log."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def main() -> None:
    for library in ("GLOO", "NCCL", "TP"):  # whatever the machine's settings are
        os.environ.pop(f"{library}_SOCKET_IFNAME", None)
    keep_to_loopback(os.environ)
    device_variables.prepare(os.environ)  # before anything that is preloaded may use a device
    # It would report a worker that was ended because of another one as if it were the cause.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    answers, is_ready = os.dup(1), False
    try:
        for line in sys.stdin:
            begin = Begin(**json.loads(line))
            log = os.open(Path(begin.folder) / AGENT_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            os.environ.update(begin.variables)
            if not is_ready:  # here, so that what fails is in a log
                for name in sys.argv[1].split(","):
                    importlib.import_module(name)  # before torch starts threads: forks lack these
                gc.freeze()  # so that the workers share its memory
                gc.enable()
                is_ready = True
            os.write(answers, f"{int(run(begin).is_failed())}\n".encode())
    except SignalException as error:
        _end(128 + error.sigval)
    _end(0)  # taking torch down takes half a second, and there is nothing to close


if __name__ == "__main__":
    main()
