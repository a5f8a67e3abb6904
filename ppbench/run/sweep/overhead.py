"""Measures the overhead of recording: starts the ranks, and follows their rounds.

    sweep file --> cases --job file--> ranks in turns --journal--> rounds --> ratios

Nothing goes into the store, which holds steps with spans: these rounds measure the cost of spans.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ppbench.config.case import Case, Measure
from ppbench.config.sweep import Sweep
from ppbench.errors import LaunchError, first_line
from ppbench.run.failures.evidence import claimed_node_folder, collect, diagnose
from ppbench.run.job import Event, Job, PlannedRun, write_job
from ppbench.run.launch.local import LocalLaunch
from ppbench.run.machine.private_folder import remove_folder
from ppbench.run.sweep.control import follow, num_ranks_of, start_workers
from ppbench.run.sweep.plan import check_devices
from ppbench.run.sweep.progress import describe
from ppbench.statistics.significance import Ratio, paired_ratio
from ppbench.store import new_run_id

MODULE = "ppbench.run.worker.overhead"


@dataclass
class Rounds:
    """The times of a step of a case in each round, on its slowest rank, in nanoseconds."""

    case: Case
    off_ns: list[int] = field(default_factory=list)  # nothing recorded
    flight_ns: list[int] = field(default_factory=list)  # the flight record alone
    on_ns: list[int] = field(default_factory=list)  # with spans as well, as in a sweep
    profiler_ns: list[int] = field(default_factory=list)  # under torch's profiler

    def row(self) -> dict[str, object]:
        """Return the case and its ratios, for a table."""
        return {
            "case_id": self.case.case_id,
            **self.case.settings(),
            "num_rounds": len(self.off_ns),
            "step_off_ns": statistics.median(self.off_ns),
            **_columns("flight_ratio", paired_ratio(self.flight_ns, self.off_ns)),
            **_columns("spans_ratio", paired_ratio(self.on_ns, self.off_ns)),
            **_columns("profiler_ratio", paired_ratio(self.profiler_ns, self.off_ns)),
        }


def _columns(name: str, ratio: Ratio) -> dict[str, object]:
    return {name: ratio.estimate, f"{name}_low": ratio.low, f"{name}_high": ratio.high}


OnProgress = Callable[[str, int], None]
"""Called with a description of the case being measured and its number of finished rounds."""


class _Followed:
    """The times that the ranks have reported so far."""

    def __init__(
        self,
        items: tuple[PlannedRun, ...],
        axes: tuple[str, ...],
        on_progress: OnProgress,
        on_case: Callable[[Rounds], None],
    ) -> None:
        self._items, self._axes = items, axes
        self._on_progress, self._on_case = on_progress, on_case
        self.place = "before the first case"

    def take(self, event: Event) -> None:
        if event["event"] == "case":
            index = int(event["index"] or 0)
            self._item = self._items[index]
            words = describe(self._item, self._axes)
            self.place = f"case {index + 1} of {len(self._items)}: {words}"
            self._rounds = Rounds(self._item.case)
        elif event["event"] == "round":
            self._add_round(event)
        else:
            return
        self._on_progress(self.place, len(self._rounds.off_ns))

    def _add_round(self, event: Event) -> None:
        rounds = self._rounds
        rounds.off_ns.append(int(event["off_ns"] or 0))
        rounds.flight_ns.append(int(event["flight_ns"] or 0))
        rounds.on_ns.append(int(event["on_ns"] or 0))
        rounds.profiler_ns.append(int(event["profiler_ns"] or 0))
        if len(rounds.off_ns) == self._item.measure.steps:
            self._on_case(rounds)


def measure_overhead(
    sweep: Sweep,
    num_rounds: int,
    on_progress: OnProgress,
    on_case: Callable[[Rounds], None],
) -> None:
    """Run every case of a sweep for this many rounds; pass the times of each to `on_case`.

    Of the settings of the measurement only `warmup_steps` counts. Raises LaunchError, with the
    place and the cause, if a rank dies. On KeyboardInterrupt the ranks are ended.
    """
    check_devices(sweep)
    items = tuple(
        PlannedRun(case, Measure(warmup_steps=measure.warmup_steps, steps=num_rounds), 0, "")
        for case, measure in sweep.cases
    )
    followed = _Followed(items, sweep.axes, on_progress, on_case)
    with (
        tempfile.TemporaryDirectory(prefix="ppbench-overhead-") as name,
        contextlib.ExitStack() as held,
    ):
        folder, launch_id = Path(name) / "launch", new_run_id()
        local = held.enter_context(claimed_node_folder(launch_id, num_ranks_of(items)))
        job = Job(launch_id, name, "", sweep.name, sweep.file, None, items)
        launch = start_workers(folder, [MODULE, str(write_job(folder, job))], items, max_restarts=0)
        try:
            if not follow(launch, folder, followed.take, local):
                raise LaunchError(f"{followed.place}: {_cause(launch, folder, local)}")
        finally:
            launch.stop()
            remove_folder(local)


def _cause(launch: LocalLaunch, folder: Path, local: Path) -> str:
    """Return why the ranks died: the error of the first, or the end of the log if none left one."""
    left = collect(local, folder)
    first = first_line(diagnose([left], None, 0, 0).error)
    return first if left.errors else "\n".join([first, *launch.last_lines()])
