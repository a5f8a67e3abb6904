"""Runs every command of the command line as a process: its streams, signals and exit code.

a closed stream      is opened on /dev/null, before another file can take its number
a closed pipe        drops what is still printed; the command runs on to its own exit code
a narrow encoding    gets escapes for what it cannot encode
Ctrl-C, SIGTERM      unwind the command; the exit code is 130
a system error       is one line with what, where and the fix; the exit code is 2
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

from ppbench.console import wrapped
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
"""Threshold of the garbage collector: imported modules are not garbage, and looking through them
again and again takes a tenth of a command's time."""
_PATIENCE = 3
"""Signals while a command unwinds, after which it ends at once."""
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
    except KeyboardInterrupt:  # a second one, while the first was handled
        interrupts.end_from_now_on()
    sys.exit(ExitCode.interrupted if interrupts.num_received else code)


def _exit_code_of(command: Callable[[], int], interrupts: _Interrupts) -> int:
    try:
        _check_working_directory()
        _check_memory_limit()
        try:
            code = command()
        except SystemExit as end:  # raised by the library that parses arguments
            if isinstance(end.code, str):
                _say(end.code)
            code = end.code if isinstance(end.code, int) else ExitCode.usage if end.code else 0
        if code == ExitCode.interrupted:  # the library's code for KeyboardInterrupt
            _say("stopped")
        sys.stdout.flush()
    except KeyboardInterrupt:
        _say("stopped")
        return ExitCode.interrupted
    except PpbenchError as error:
        _say(f"error: {printable(str(error))}{_fix_for(error)}")
        return error.exit_code
    except Exception as error:
        if interrupts.num_received:  # a library turned KeyboardInterrupt into another exception
            _say("stopped")
            return ExitCode.interrupted
        problem = system_problem(error) or _odd_argument()
        if problem is None:  # a bug of ppbench
            sys.__excepthook__(type(error), error, error.__traceback__)
        else:
            _say(f"error: {printable(problem)}")
        return ExitCode.usage
    return code


def _odd_argument() -> str | None:
    """The message for an argument that is not UTF-8, which only paths may be."""
    odd = next((word for word in sys.argv[1:] if encodable(word) != word), None)
    return None if odd is None else f'argument "{encodable(odd)}": is not UTF-8'


def _fix_for(error: PpbenchError) -> str:
    """The fix for a limit of the system, if the message has none."""
    cause = error.__cause__
    if not isinstance(cause, OSError) or "; " in str(error):
        return ""
    return fix_of(cause.errno)


def _check_working_directory() -> None:
    """Raises UsageError if the working directory was deleted."""
    try:
        Path.cwd()
    except OSError as error:
        raise UsageError("the working directory was deleted; change into another one") from error


def _check_memory_limit() -> None:
    """Raises UsageError for a limit so low that a library would end the process unexplained."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < _LEAST_BYTES:
        raise UsageError(
            f"a process may have {limit / 2**20:,.0f} MiB of memory here, and ppbench needs "
            f"{_LEAST_BYTES / 2**20:,.0f} at least; raise the limit with: ulimit -v unlimited"
        )


def _say(text: str) -> None:
    """Print a line on standard error, after what standard output still holds."""
    try:
        sys.stdout.flush()
    except OSError:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  # to the end
    print(wrapped(text, sys.stderr), file=sys.stderr, flush=True)


class _Interrupts:
    """Turns Ctrl-C, SIGTERM and SIGHUP into KeyboardInterrupt: no worker outlives the command.

    A library may swallow or print the exception, or raise another; so the signals are counted.
    """

    def __init__(self) -> None:
        """Until `raise_from_now_on`, a signal ends the process at once: nothing needs unwinding."""
        self.num_received = 0
        self._caught = [n for n in _SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
        self.end_from_now_on()
        self._print_unraisable, sys.unraisablehook = sys.unraisablehook, self._unraisable
        sys.excepthook = self._uncaught

    def raise_from_now_on(self) -> None:
        for number in self._caught:  # the others are ignored already, as under nohup
            signal.signal(number, self._interrupt)

    def end_from_now_on(self) -> None:
        for number in self._caught:
            signal.signal(number, _leave)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        self.num_received += 1
        if self.num_received > _PATIENCE:
            os._exit(ExitCode.interrupted)  # the processes that it has started end with it
        raise KeyboardInterrupt

    def _unraisable(self, what: sys.UnraisableHookArgs) -> None:
        """Repeat an interrupt that came where nothing can be raised, as in a destructor."""
        if isinstance(what.exc_value, KeyboardInterrupt):
            self.num_received -= 1
            _thread.interrupt_main()
        else:
            self._print_unraisable(what)

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Print no traceback after an interrupt, even one that a library prints."""
        if not self.num_received:
            sys.__excepthook__(kind, error, trace)


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(ExitCode.interrupted)


def _open_closed_descriptors() -> None:
    """Open closed standard streams: else the next opened file would take the place of one."""
    for number in sorted(_NUMBERS.values()):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


def _forget_odd_sizes() -> None:
    """Drop COLUMNS and LINES from the environment if nothing can be drawn in that size."""
    for name, least in (("COLUMNS", _LEAST_COLUMNS), ("LINES", 1)):
        value = os.environ.get(name, str(least))
        if not value.isdecimal() or int(value[:_LEAST_COLUMNS]) < least:
            del os.environ[name]


class _Stream(io.BufferedWriter):
    """A standard stream that drops what is written once its reader has gone.

    It overrides the buffer and leaves the raw file alone: a signal that arrived inside a Python
    method of the raw file would hide that bytes were written, and they would be written twice.
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
        """Redirect the stream to /dev/null if its reader has gone; else raise the error."""
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
    """A stream that encodes any text and outlives its reader, in place of a standard one."""
    number = _NUMBERS[name]
    if stream is not None and not _is_plain(stream, number):
        return stream  # of a test or a notebook
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
