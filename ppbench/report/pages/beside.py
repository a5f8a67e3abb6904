"""The timelines of a report, drawn by a second process while this one makes the rest of it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pandas as pd

from ppbench.display.cases import Axes
from ppbench.report.timeline.timelines import Timelines, timelines
from ppbench.store import DamagedFile, Store

LEAST_RUNS = 16
"""Fewer runs are drawn in less time than a process takes to start and to answer."""


@contextlib.contextmanager
def drawn_beside(store: Store, runs: pd.DataFrame, axes: Axes) -> Iterator[Callable[[], Timelines]]:
    """Begin to draw the timelines; yields a function that waits for them.

    They are drawn in this process, when they are asked for, if a copy of it would have no core of
    its own, or lacked its threads.
    """
    has_fork = "fork" in multiprocessing.get_all_start_methods()
    is_alone = threading.active_count() == 1 and (os.cpu_count() or 1) > 1
    if len(runs) < LEAST_RUNS or not has_fork or not is_alone:
        yield lambda: timelines(store, runs, axes)
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, context, initializer=_ignore_interrupts) as pool:
        drawing = pool.submit(_timelines_and_damage, store.folder, runs, axes)

        def wait() -> Timelines:
            try:
                drawn, damaged = drawing.result()
            except BrokenProcessPool:  # killed, as where memory is short
                return timelines(store, runs, axes)
            store.report_damage(damaged)
            return drawn

        yield wait


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits is interrupted


def _timelines_and_damage(
    folder: Path, runs: pd.DataFrame, axes: Axes
) -> tuple[Timelines, list[DamagedFile]]:
    store = Store(folder, on_skip=lambda _: None)
    return timelines(store, runs, axes), store.damaged
