"""Runs every command of the command line as a process: its streams, signals and exit code.

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
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CLOSED = (errno.EPIPE, errno.ECONNRESET, errno.ESHUTDOWN)
_STDOUT, _STDERR = 1, 2


def run(command: Callable[[], int]) -> NoReturn:
    """Run a command, which returns its exit code or raises SystemExit, and end the process."""
    gc.set_threshold(RARELY)
    interrupts = _Interrupts()
    code: int = ExitCode.interrupted
    try:
        interrupts.raise_from_now_on()
        sys.stdout = _forgiving(sys.stdout, _STDOUT)
        sys.stderr = _forgiving(sys.stderr, _STDERR)
        code = _exit_code_of(command, interrupts)
        interrupts.end_from_now_on()
    except KeyboardInterrupt:  # a second one, while the first was handled
        interrupts.end_from_now_on()
    sys.exit(ExitCode.interrupted if interrupts.num_received else code)


def _exit_code_of(command: Callable[[], int], interrupts: _Interrupts) -> int:
    try:
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
        cause = error.__cause__
        lacks_fix = "; " not in str(error)
        fix = fix_of(cause.errno) if lacks_fix and isinstance(cause, OSError) else ""
        _say(f"error: {printable(str(error))}{fix}")
        return error.exit_code
    except Exception as error:
        if interrupts.num_received:  # a library turned KeyboardInterrupt into another exception
            _say("stopped")
            return ExitCode.interrupted
        problem = system_problem(error)
        if odd := [word for word in map(encodable, sys.argv[1:]) if word not in sys.argv]:
            problem = problem or f'argument "{odd[0]}": is not UTF-8'  # only paths may be so
        if problem is None:  # a bug of ppbench
            sys.__excepthook__(type(error), error, error.__traceback__)
        else:
            _say(f"error: {printable(problem)}")
        return ExitCode.usage
    return code


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
        has_hung_up = error.errno == errno.EIO and self.isatty()
        if error.errno not in _CLOSED and not has_hung_up:
            raise OSError(error.errno, error.strerror, "standard output") from error
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, self.fileno())
        os.close(sink)


def _forgiving(stream: TextIO, number: int) -> TextIO:
    """A stream that encodes any text and outlives its reader, in place of a standard one."""
    own = sys.__stdout__ if number == _STDOUT else sys.__stderr__
    if not isinstance(stream, io.TextIOWrapper) or stream is not own:
        return stream  # of a test or a notebook, and it may have no number
    stream.flush()
    buffer = _Stream(io.FileIO(number, "w", closefd=False))
    is_by_line = number == _STDERR or buffer.isatty()
    return io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", line_buffering=is_by_line)
