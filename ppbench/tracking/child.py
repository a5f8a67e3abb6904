"""A command that is run to its end and told to stop when we are.

Its own session: Ctrl-C reaches this process alone, which ends the command and waits for it, so that
it can put its runs in order before its work tree is removed. What it prints is kept for errors.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MOST_LINES = 30
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Ended:
    """How a command ended, and the last lines that it printed."""

    exit_code: int  # negative: killed by that signal
    lines: tuple[str, ...]

    def account(self) -> str:
        """What went wrong, in a line, then all that is known.

        An error of ours begins with `error: `; of a trace the last line tells most.
        """
        starts = [n for n, line in enumerate(self.lines) if line.startswith("error: ")]
        if starts:
            return "\n".join(self.lines[starts[-1] :]).removeprefix("error: ")
        return "\n".join([self._headline(), *self.lines])

    def _headline(self) -> str:
        how = f"ended with exit code {self.exit_code}"
        if self.exit_code < 0:
            how = f"was killed by signal {-self.exit_code}"
        last = next((line.strip() for line in reversed(self.lines) if line.strip()), "")
        return last or f"it {how}, and said nothing"


def run(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    on_line: Callable[[str], None],
) -> Ended:
    """Blocks until the command has ended. On KeyboardInterrupt it is ended first."""
    lines: collections.deque[str] = collections.deque(maxlen=MOST_LINES)
    child = subprocess.Popen(
        command,
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    assert child.stdout is not None
    try:
        for line in child.stdout:
            lines.append(line.rstrip("\n"))
            on_line(lines[-1])
        return Ended(child.wait(), tuple(lines))
    except BaseException:
        _end(child)
        raise
    finally:
        child.stdout.close()


def _end(child: subprocess.Popen[str]) -> None:
    """With all that it has started in its session: gently, then what is left."""
    _signal_all(child, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        child.wait(PATIENCE_S)
    _signal_all(child, signal.SIGKILL)
    child.wait()


def _signal_all(child: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)
