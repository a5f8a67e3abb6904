"""A command as a process: its standard streams, its signals, its exit code. All commands run in it.

closed streams     are opened on /dev/null, before another file can take their number
a closed pipe      swallows what is still printed: the work goes on, to its own exit code
an odd encoding    gets escapes for what it cannot write
Ctrl-C, SIGTERM    unwind the command, then exit code 130
the system's no    one line that says what, where and the fix, then exit code 2
"""

from __future__ import annotations

import _thread
import errno
import gc
import io
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, NoReturn, TextIO

from ppbench.errors import (
    ExitCode,
    PpbenchError,
    UsageError,
    encodable,
    fix_of,
    printable,
    system_problem,
)

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

RARELY = 50_000
"""What a command imports stays; to look through all of it anew takes a tenth of its time."""
_PATIENCE = 3
"""How often a command that is being stopped may be told to stop before it ends at once."""
_LEAST_COLUMNS = 20
_LEAST_BYTES = 256 * 2**20
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CLOSED = (errno.EPIPE, errno.ECONNRESET, errno.ESHUTDOWN)
_NUMBERS = {"stdin": 0, "stdout": 1, "stderr": 2}


def run(command: Callable[[], int]) -> NoReturn:
    """Run a command, which returns its exit code or raises SystemExit, and end the process."""
    gc.set_threshold(RARELY)
    interrupts = _Interrupts()
    code: int = ExitCode.interrupted
    try:
        interrupts.raise_from_now_on()
        _open_closed_descriptors()
        _forget_odd_sizes()
        sys.stdout = _forgiving(sys.stdout, "stdout")
        sys.stderr = _forgiving(sys.stderr, "stderr")
        code = _exit_code_of(command, interrupts)
        interrupts.end_from_now_on()
    except KeyboardInterrupt:  # once more, while the first was dealt with
        interrupts.end_from_now_on()
    sys.exit(ExitCode.interrupted if interrupts.num_come else code)


def _exit_code_of(command: Callable[[], int], interrupts: _Interrupts) -> int:
    try:
        _check_working_directory()
        _check_memory_limit()
        try:
            code = command()
        except SystemExit as end:  # of the library that reads arguments
            if isinstance(end.code, str):
                _say(end.code)
            elif end.code == ExitCode.interrupted:  # what it makes of a KeyboardInterrupt
                _say("stopped")
            code = end.code if isinstance(end.code, int) else ExitCode.usage if end.code else 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        _say("stopped")
        return ExitCode.interrupted
    except PpbenchError as error:
        _say(f"error: {printable(str(error))}{_fix_for(error)}")
        return error.exit_code
    except Exception as error:
        if interrupts.num_come:  # a library made something else of it
            _say("stopped")
            return ExitCode.interrupted
        problem = system_problem(error) or _odd_argument()
        if problem is None:  # a fault of the program
            sys.__excepthook__(type(error), error, error.__traceback__)
        else:
            _say(f"error: {printable(problem)}")
        return ExitCode.usage
    return code


def _odd_argument() -> str | None:
    """Of an argument that is not UTF-8: as a path it is one, but libraries refuse it elsewhere."""
    odd = next((word for word in sys.argv[1:] if encodable(word) != word), None)
    return None if odd is None else f'argument "{encodable(odd)}": is not UTF-8'


def _fix_for(error: PpbenchError) -> str:
    """What to do about a limit of the system, where the message does not say."""
    cause = error.__cause__
    if not isinstance(cause, OSError) or "; " in str(error):
        return ""
    return fix_of(cause.errno)


def _check_working_directory() -> None:
    """Raises UsageError where the folder that relative paths begin in is gone."""
    try:
        Path.cwd()
    except OSError as error:
        raise UsageError("the working directory was deleted; change into another one") from error


def _check_memory_limit() -> None:
    """Raises UsageError for one under which libraries end the process with words of their own."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < _LEAST_BYTES:
        raise UsageError(
            f"a process may have {limit / 2**20:,.0f} MiB of memory here, and ppbench needs "
            f"{_LEAST_BYTES / 2**20:,.0f} at least; raise the limit with: ulimit -v unlimited"
        )


def _say(text: str) -> None:
    """On standard error; if that takes nothing any more, nobody is there to be told."""
    try:
        sys.stdout.flush()
    except OSError:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  # to the end
    print(text, file=sys.stderr, flush=True)


class _Interrupts:
    """Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt, so that no worker outlives the command.

    A library may swallow that, print it, or make another exception of it; that one came is kept.
    """

    def __init__(self) -> None:
        """Until there is something to unwind, they end the process at once."""
        self.num_come = 0
        self._caught = [n for n in _SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
        self.end_from_now_on()
        self._print_unraisable, sys.unraisablehook = sys.unraisablehook, self._unraisable
        sys.excepthook = self._uncaught

    def raise_from_now_on(self) -> None:
        for number in self._caught:  # others are ignored, as under nohup
            signal.signal(number, self._interrupt)

    def end_from_now_on(self) -> None:
        for number in self._caught:
            signal.signal(number, _leave)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        self.num_come += 1
        if self.num_come > _PATIENCE:
            os._exit(ExitCode.interrupted)  # what it has started ends with it
        raise KeyboardInterrupt

    def _unraisable(self, what: sys.UnraisableHookArgs) -> None:
        """Raised where nothing can be, as in a destructor: it comes again."""
        if isinstance(what.exc_value, KeyboardInterrupt):
            self.num_come -= 1
            _thread.interrupt_main()
        else:
            self._print_unraisable(what)

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Also of what a library prints while it is imported."""
        if not self.num_come:
            sys.__excepthook__(kind, error, trace)


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(ExitCode.interrupted)


def _open_closed_descriptors() -> None:
    """Those of standard streams: else the next file that is opened would be taken for one."""
    for number in sorted(_NUMBERS.values()):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free


def _forget_odd_sizes() -> None:
    """Of the terminal, where the environment has one that nothing can be drawn in."""
    for name, least in (("COLUMNS", _LEAST_COLUMNS), ("LINES", 1)):
        value = os.environ.get(name, str(least))
        if not value.isdecimal() or int(value[:_LEAST_COLUMNS]) < least:
            del os.environ[name]


class _Stream(io.BufferedWriter):
    """A standard stream; when its reader has gone, what is written is dropped.

    The file below is a plain one: were a method of Python's between, a signal after its write would
    hide that anything was written, and the text would be written a second time.
    """

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self._drop_or_raise(error)
            return super().write(data)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._drop_or_raise(error)
            super().flush()

    def _drop_or_raise(self, error: OSError) -> None:
        """Let the stream lead to /dev/null if its reader has gone; else raises the error."""
        has_hung_up = error.errno == errno.EIO and self._is_error
        if error.errno not in _CLOSED and not has_hung_up:
            raise OSError(error.errno, error.strerror, "standard output") from error
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, self.fileno())
        os.close(sink)

    @property
    def _is_error(self) -> bool:
        return self.fileno() == _NUMBERS["stderr"] or self.isatty()


def _forgiving(stream: TextIO | None, name: str) -> TextIO:
    """The stream as it is, but that it takes all text and outlives its reader."""
    number = _NUMBERS[name]
    if stream is not None and not _is_plain(stream, number):
        return stream  # a test's or a notebook's
    encoding = "utf-8" if stream is None else stream.encoding
    if stream is not None:
        stream.flush()
    buffer = _Stream(io.FileIO(number, "w", closefd=False))
    is_by_line = name == "stderr" or buffer.isatty()
    return io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=is_by_line)


def _is_plain(stream: TextIO, number: int) -> bool:
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() == number
    except (OSError, ValueError):
        return False
