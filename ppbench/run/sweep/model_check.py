"""Checks architectures: each is trained split over two ranks and unsplit, and compared.

    names --engine.check on two ranks--> a file of JSON lines --followed--> checks

A line says that an architecture is `planned` (all of them, first), that it has been `started`, or
its result. An architecture that ends the ranks is an `error`, and new ranks go on with the others.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.model.descriptions import Check
from ppbench.errors import LaunchError, UsageError
from ppbench.run.job import Journal
from ppbench.run.launch.local import PRETRAINED, LocalLaunch

POLL_S = 0.1
NUM_RANKS = 2
MODULE = "engine.check"
_USAGE_EXIT_CODE = 2
_NOT_RESULTS = ("planned", "started")


@dataclass(frozen=True)
class CheckProgress:
    """The latest result, and how many results there are."""

    check: Check
    num_done: int
    num_planned: int

    @property
    def text(self) -> str:
        return (
            f"{self.num_done} of {self.num_planned}: {self.check.architecture} {self.check.status}"
        )


class _Record:
    """The results that the ranks have reported so far, over all their starts."""

    def __init__(self, names: Sequence[str]) -> None:
        self.planned = dict.fromkeys(names)
        self.checks: list[Check] = []
        self._current: str | None = None

    @property
    def remaining(self) -> list[str]:
        done = {check.architecture for check in self.checks}
        return [name for name in self.planned if name not in done]

    def read(self, lines: Journal) -> None:
        """Add the lines since the last call."""
        for line in lines.new_events():
            name = str(line["architecture"])
            self.planned.setdefault(name)
            if line["status"] not in _NOT_RESULTS:
                self.checks.append(Check(**line))  # type: ignore[arg-type]  # our ranks wrote it
            self._current = name if line["status"] == "started" else None

    def close_current(self) -> None:
        """Record an error for the architecture that the ranks were at when they died, if any."""
        if self._current is not None:
            self.checks.append(Check(self._current, "error", reason="the ranks died"))
            self._current = None


def check_architectures(
    names: Sequence[str],
    on_check: Callable[[CheckProgress], None],
    module: str = MODULE,
) -> list[Check]:
    """Check the named architectures, or all known ones, in order.

    Raises UsageError for unknown names, LaunchError if the ranks cannot be started.
    """
    record, wanted = _Record(names), list(names)
    with tempfile.TemporaryDirectory(prefix="ppbench-check-") as folder:
        while not _run_ranks(Path(tempfile.mkdtemp(dir=folder)), module, wanted, record, on_check):
            wanted = record.remaining
            if not wanted:
                break
    return record.checks


def _run_ranks(
    folder: Path,
    module: str,
    wanted: list[str],
    record: _Record,
    on_check: Callable[[CheckProgress], None],
) -> bool:
    """Start the ranks once and follow them to their end; return whether they checked everything."""
    path, num_before = folder / "checks.jsonl", len(record.checks)
    lines = Journal(folder, path.name)
    launch = LocalLaunch(
        folder,
        [module, str(path), *wanted],
        num_ranks=NUM_RANKS,
        threads_per_rank=1,
        max_restarts=0,
        preloaded=PRETRAINED,
    )
    try:
        exit_code = None
        while exit_code is None:
            time.sleep(POLL_S)
            exit_code = launch.poll()  # before the last look: nothing is written after it
            _pass_on(record, on_check, functools.partial(record.read, lines))
    finally:
        launch.stop()
    _pass_on(record, on_check, record.close_current)
    if exit_code != 0 and len(record.checks) == num_before:
        raise _cause_of_death(launch)
    return exit_code == 0


def _pass_on(
    record: _Record, on_check: Callable[[CheckProgress], None], change: Callable[[], None]
) -> None:
    """Change the record, and report every result that this adds."""
    num_known = len(record.checks)
    change()
    for num_done, check in enumerate(record.checks[num_known:], start=num_known + 1):
        on_check(CheckProgress(check, num_done, len(record.planned)))


def _cause_of_death(launch: LocalLaunch) -> UsageError | LaunchError:
    """Return why the ranks ended before they had started on any architecture."""
    lines = launch.last_lines()
    if launch.worker_exit_code() == _USAGE_EXIT_CODE and lines:
        return UsageError(lines[-1])
    return LaunchError("\n".join(["the ranks ended without checking anything.", *lines]))
