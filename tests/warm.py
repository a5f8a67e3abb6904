"""Python processes that begin with everything imported: forks of a server, a test's own children.

    pytestmark = pytest.mark.usefixtures("warm_starts")  # see conftest.py

A fresh interpreter spends five seconds on importing torch and transformers before it does what a
test is about. In such a module, `subprocess` starts this interpreter with `-m`, `-c` or a script
as a fork of a server instead; what such a process starts in turn is one as well. It is as much a
process as a fresh one: a child of its starter with a session, signals, streams, folder,
environment, command line and exit code of its own. What it does not show is how a fresh
interpreter begins and ends, and what is imported when: tests of that start the usual way.

    starter -- server -- (a process that ends at once) -- the new one

Its parent gone, the new process becomes the child of the nearest ancestor that reaps orphans, for
which the starter volunteers at that moment. For that, the server has to be the starter's child.

A command that prepares namespaces and then becomes Python is given as `inside(setup, command)`:
a small process prepares them, and the fork enters those of that process.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import dataclasses
import fcntl
import gc
import importlib
import io
import itertools
import os
import pickle
import platform
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = (
    "ppbench.cli.sweep",
    "ppbench.cli.app",
    "ppbench.run.sweep.control",
    "ppbench.store",
    "torch._dynamo",
    "engine.model.pretrained",
    "transformers.models.llama.modeling_llama",
    "ppbench.run.worker.rank",
    "ppbench.run.launch.supervisor",
)
_START_NOTHING = {
    "engine.train",
    "ppbench.run.launch.supervisor",
}
_ROOM_FOR_COMMAND = 2000
_NUMBER = struct.Struct("I")
_SET_DEATH_SIGNAL, _REAP_ORPHANS = 1, 36
_MOUNTS, _HOST_NAME, _NETWORK = 0x20000, 0x4000000, 0x40000000
_NAMESPACES = _MOUNTS | _HOST_NAME | _NETWORK
_FRESH = subprocess.Popen
_PYTHONS_OWN = {signal.SIGPIPE, signal.SIGXFSZ}
"""An interpreter that begins ignores these, whatever its starter does."""

_CHANGEABLE = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP} - _PYTHONS_OWN
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Task:
    """A process to be."""

    words: list[str]
    folder: str
    environment: dict[str, str]
    passed: tuple[int, ...]  # descriptors kept under their numbers; after those of 0, 1 and 2
    has_new_session: bool
    umask: int
    blocked: list[int]  # signals
    ignored: list[int]
    setup: list[str] = dataclasses.field(default_factory=list)
    """A command that prepares its namespaces and executes the words that follow."""

    @property
    def is_starter(self) -> bool:
        """Whether it starts processes that are worth a server, as a command does."""
        return not _START_NOTHING.intersection(self.words[:4])


class Server:
    """The starter's end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lock, self._owner = connection, threading.Lock(), os.getpid()

    @property
    def is_ours(self) -> bool:
        """A fork of its owner cannot have children of it."""
        return os.getpid() == self._owner

    def start(self, task: Task, descriptors: Sequence[int]) -> int:
        """The id of the new process."""
        with self._lock:
            _libc.prctl(_REAP_ORPHANS, 1, 0, 0, 0)
            try:
                data = pickle.dumps(dataclasses.asdict(task))
                socket.send_fds(self._connection, [_NUMBER.pack(len(data))], list(descriptors))
                self._connection.sendall(data)
                answer = self._connection.recv(_NUMBER.size, socket.MSG_WAITALL)
                return int(_NUMBER.unpack(answer)[0])
            finally:
                _libc.prctl(_REAP_ORPHANS, 0, 0, 0, 0)


_server: Server | None = None


class Inside(list[str]):
    """A command whose first words prepare namespaces in which the others are executed."""

    def __init__(self, setup: Sequence[str], command: Sequence[str]) -> None:
        super().__init__([*setup, *command])
        self.setup, self.command = list(setup), list(command)


def inside(setup: Sequence[str], command: Sequence[str]) -> list[str]:
    """The command run in namespaces of network, mounts and host name that `setup` prepares.

    `setup` executes the words that follow it in its own process, as `ip netns exec NAME`,
    `unshare --mount` and `sh -c '...; exec "$@"' sh` do. What forks, as a namespace of processes
    asks for, cannot be entered so.
    """
    return Inside(setup, command)


class Popen(_FRESH):  # type: ignore[type-arg, misc]
    """`subprocess.Popen`, but Python processes are forked from the server where possible."""

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: Sequence[int],
        cwd: Any,
        env: Any,
        *rest: Any,
    ) -> None:
        setup = getattr(args, "setup", [])
        words, settings = _without_env(_words_of(getattr(args, "command", args)))
        _, gid, gids, uid, umask, has_new_session, process_group = rest[9:]
        is_plain = (executable, preexec_fn, gid, gids, uid) == (None,) * 5 and not rest[2]
        is_plain &= (umask, process_group) == (-1, -1)
        if _server is None or not _server.is_ours or not is_plain or not _can_start(words):
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
            )
            return
        p2cread, _, _, c2pwrite, _, errwrite = rest[3:9]
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            umask = os.umask(0)
            os.umask(umask)
            task = Task(
                words,
                folder=str(Path(os.fsdecode(cwd or ".")).absolute()),
                environment={**(os.environ if env is None else env), **settings},
                passed=tuple(pass_fds),
                has_new_session=has_new_session,
                umask=umask,
                blocked=list(blocked),
                ignored=[n for n in _CHANGEABLE if signal.getsignal(n) == signal.SIG_IGN],
                setup=setup,
            )
            streams = [
                own if own >= 0 else usual
                for usual, own in enumerate((p2cread, c2pwrite, errwrite))
            ]
            self.pid = _server.start(task, [*streams, *pass_fds])
            self._child_created = True
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            self._close_pipe_fds(*rest[3:9])  # type: ignore[attr-defined]


def _words_of(args: Any) -> list[str]:
    is_one = isinstance(args, (str, bytes, os.PathLike))
    return [os.fsdecode(word) for word in ([args] if is_one else args)]


def _without_env(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """The command that `env NAME=VALUE ...` executes, and what it adds to the environment."""
    if words[0] != "env":
        return words, {}
    settings = list(itertools.takewhile(lambda word: "=" in word, words[1:]))
    return words[1 + len(settings) :], dict(setting.split("=", 1) for setting in settings)


def _can_start(words: Sequence[str]) -> bool:
    if words[0] != sys.executable or len(words) < 2:
        return False
    rest = words[2:] if words[1] == "-u" else words[1:]
    return rest[0] in ("-c", "-m") or not rest[0].startswith("-")


def serve(connection: socket.socket) -> tuple[Task, list[int]]:
    """Return in each new process, with what it is to be; the server itself ends in here."""
    while received := _receive(connection):
        task, descriptors = received
        told, tell = os.pipe()
        wait, go = os.pipe()
        middle = os.fork()
        if middle == 0:
            new = os.fork()
            if new != 0:
                os.write(tell, _NUMBER.pack(new))
                os._exit(0)
            os.close(go)
            os.read(wait, 1)  # until this is the starter's child
            for descriptor in (told, tell, wait):
                os.close(descriptor)
            connection.close()
            return task, descriptors
        os.waitpid(middle, 0)
        new_id = os.read(told, _NUMBER.size)
        for descriptor in (told, tell, wait, go, *descriptors):
            os.close(descriptor)
        connection.sendall(new_id)
    os._exit(0)


def _receive(connection: socket.socket) -> tuple[Task, list[int]] | None:
    header, descriptors, _, _ = socket.recv_fds(connection, _NUMBER.size, 64)
    if not header:
        return None
    data = bytearray()
    (size,) = _NUMBER.unpack(header)
    while len(data) < size:
        data += connection.recv(size - len(data))
    return Task(**pickle.loads(data)), list(descriptors)


def become(task: Task, descriptors: list[int]) -> Task:
    """Take over all that a new process has of its starter; what is returned is to be run."""
    highest = max([*descriptors, *task.passed, 2]) + 1
    safe = [fcntl.fcntl(one, fcntl.F_DUPFD, highest) for one in descriptors]
    for descriptor, number in zip(safe, (0, 1, 2, *task.passed), strict=True):
        os.dup2(descriptor, number)
    _let_go_of_descriptors({0, 1, 2, *task.passed})
    if task.has_new_session:
        os.setsid()
    os.umask(task.umask)
    os.environ.clear()
    os.environ.update(task.environment)
    os.chdir(task.folder)
    if task.setup:
        _enter_namespaces(task)
    tempfile.tempdir = None  # read from the environment when it is first asked for
    _name_process(task.words)
    _open_streams("PYTHONUNBUFFERED" in os.environ or task.words[1] == "-u")
    if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit():  # read at import else
        sys.modules["torch"].set_num_threads(int(threads))
    if task.is_starter and (other := _begin_server_of_own()):
        return become(*other)
    for number in _CHANGEABLE:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in task.ignored else usual)
    signal.pthread_sigmask(signal.SIG_SETMASK, task.blocked)
    return task


def _let_go_of_descriptors(kept: Container[int]) -> None:
    """Lead all others to nothing.

    Closed, their numbers would be used again, and what libraries close in each fork (Arrow its
    pipes) would be another's.
    """
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if number not in kept and number != nothing:
            with contextlib.suppress(OSError):  # the listing's own, which is closed by now
                os.fstat(number)
                os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


def _enter_namespaces(task: Task) -> None:
    """Join those of a process that the setup has become; end as the setup does where it fails."""
    waits = ["sh", "-c", "echo; read _"]
    with _FRESH([*task.setup, *waits], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as prepared:
        assert prepared.stdin is not None
        assert prepared.stdout is not None
        if not prepared.stdout.readline():
            os._exit(prepared.wait())
        process = os.pidfd_open(prepared.pid)
        if _libc.setns(process, _NAMESPACES) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"setns: {os.strerror(number)}")
        os.close(process)
        prepared.stdin.write(b"\n")
    os.chdir(task.folder)  # in the mounts that were entered
    platform._uname_cache = None  # type: ignore[attr-defined]  # it has the other host name


def run(task: Task) -> NoReturn:
    """Run and end as Python does, but that nothing is taken down, which takes half a second."""
    code = 1
    try:
        _run(task)
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        else:
            code = end.code or 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if not stream.closed:
                stream.flush()
        except OSError:
            code = 120
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _run(task: Task) -> None:
    how, *words = task.words[2:] if task.words[1] == "-u" else task.words[1:]
    sys.orig_argv, sys.argv = list(task.words), [how, *words[1:]]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    if how == "-c":
        sys.path[:0] = ["", *paths]
        exec(compile(words[0], "<string>", "exec"), vars(module))
    elif how == "-m":
        sys.path[:0] = [task.folder, *paths]
        if not hasattr(sys.modules.get(words[0]), "__path__"):
            sys.modules.pop(words[0], None)  # which runpy would warn of
        runpy._run_module_as_main(words[0])  # type: ignore[attr-defined]
    else:
        sys.argv = [how, *words]
        sys.path[:0] = [str(Path(how).absolute().parent), *paths]
        module.__dict__["__file__"] = how
        exec(compile(Path(how).read_bytes(), how, "exec"), vars(module))


def _begin_server_of_own() -> tuple[Task, list[int]] | None:
    """None in this process; what it is to be in a process that this one starts later."""
    global _server  # noqa: PLW0603
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    if os.fork() != 0:
        theirs.close()
        _server = Server(ours)
        return None
    _server = None
    ours.close()
    _libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):  # whoever reads these is to see their end
        os.dup2(nothing, number)
    os.close(nothing)
    _name_process(["warm", "server"])
    return serve(theirs)


def _name_process(words: Sequence[str]) -> None:
    """/proc/PID/cmdline, in the memory where it began."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    text = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def _open_streams(is_unbuffered: bool) -> None:
    """Open the standard streams as a new interpreter does."""
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = io.TextIOWrapper(
            io.BufferedWriter(io.FileIO(number, "w", closefd=False)),
            encoding=sys.__stdout__.encoding,
            errors="backslashreplace" if number == 2 else sys.__stdout__.errors,
            newline="\n",
            line_buffering=number == 2 or os.isatty(number),
            write_through=is_unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def main() -> Task:
    connection = socket.socket(fileno=int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    del sys.path[0]  # this file's folder
    subprocess.Popen = Popen  # type: ignore[misc]
    gc.disable()
    for name in PRELOADED:
        importlib.import_module(name)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # of torch's libraries: what no process needs before it ends
    gc.freeze()
    gc.enable()
    return become(*serve(connection))


@contextlib.contextmanager
def server() -> Iterator[Server]:
    """A server that is this process's child. It imports while this goes on."""
    ours, theirs = socket.socketpair()
    number = theirs.fileno()
    process = _FRESH(
        [sys.executable, __file__, str(number), " " * _ROOM_FOR_COMMAND], pass_fds=[number]
    )
    theirs.close()
    yield Server(ours)
    ours.close()
    process.wait()


@contextlib.contextmanager
def starts_from(server: Server | None) -> Iterator[None]:
    """Processes are the server's forks as long as this is entered; fresh ones without a server."""
    global _server
    before = _server, subprocess.Popen
    _server, subprocess.Popen = server, Popen  # type: ignore[misc]
    try:
        yield
    finally:
        _server, subprocess.Popen = before  # type: ignore[misc]


if __name__ == "__main__":
    sys.modules["warm"] = sys.modules["__main__"]  # whose classes a task is pickled by
    run(main())
