"""Runs every command as a process: its streams, signals and exit code.

a closed pipe        drops what is still printed; the command runs on to its own exit code
Ctrl-C, SIGTERM      unwind the command; the exit code is 130
a system error       is one line with what, where and the fix; the exit code is 2
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn, cast

from ppbench.console import wrapped
from ppbench.errors import ExitCode, PpbenchError, fix_of, printable, system_problem

_received: list[int] = []  # signals; a library may swallow the exception that one raises


def run(command: Callable[[], int]) -> NoReturn:
    """Run a command, which returns its exit code or raises SystemExit, and end the process."""
    gc.set_threshold(50_000)  # to look through imported modules takes a tenth of a command's time
    _received.clear()
    caught = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    caught -= {one for one in caught if signal.getsignal(one) is signal.SIG_IGN}  # by nohup
    code, said = cast("object", ExitCode.usage), ""
    try:
        for number in caught:
            signal.signal(number, _interrupt)
        if sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__:  # not in a test
            sys.stdout, sys.stderr = _Stream(sys.stdout), _Stream(sys.stderr)
        try:
            code = command()
        except SystemExit as end:  # raised by the library that parses arguments
            code = end.code or ExitCode.ok
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = ExitCode.interrupted
    except PpbenchError as error:
        cause, code = error.__cause__, error.exit_code
        fix = fix_of(cause.errno) if isinstance(cause, OSError) and "; " not in str(error) else ""
        said = f"error: {printable(str(error))}{fix}"
    except Exception as error:
        code = ExitCode.usage
        if not _received and (problem := system_problem(error)) is not None:
            said = f"error: {printable(problem)}"
        elif not _received:  # a bug of ppbench
            sys.__excepthook__(type(error), error, error.__traceback__)
    for number in caught:
        signal.signal(number, lambda *_: os._exit(ExitCode.interrupted))
    if _received or code == ExitCode.interrupted:
        said, code = said or "stopped", ExitCode.interrupted
    sys.stdout.flush()
    if said:
        print(wrapped(said, sys.stderr), file=sys.stderr, flush=True)
    sys.exit(code if isinstance(code, int) else ExitCode.usage)


def _interrupt(number: int, _frame: object) -> None:
    _received.append(number)
    if len(_received) > 3:
        os._exit(ExitCode.interrupted)  # the processes that it has started end with it
    raise KeyboardInterrupt


class _Stream(io.TextIOWrapper):
    """A standard stream that encodes any text, and drops it once its reader has gone."""

    def __init__(self, own: Any) -> None:
        is_by_line = own is sys.__stderr__ or own.isatty()
        super().__init__(own.buffer, own.encoding, "backslashreplace", line_buffering=is_by_line)

    def write(self, text: str, /) -> int:
        return self._try(lambda: super(_Stream, self).write(text))

    def flush(self) -> None:
        self._try(super().flush)

    def _try(self, act: Callable[[], int | None]) -> int:
        try:
            return act() or 0
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if not isinstance(error, ConnectionError):
                raise OSError(error.errno, error.strerror, "standard output") from error
            return act() or 0
