"""The timelines of a report, drawn by other processes while this one makes the rest of it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection

import pandas as pd

from ppbench.display.cases import Axes
from ppbench.report.timeline.timelines import (
    Drawn,
    Rivals,
    Timelines,
    draw_rivals,
    joined,
    rivals_of,
    timelines,
)
from ppbench.store.once import ReadOnce

LEAST_RUNS = 16
"""Fewer runs are drawn in less time than a process takes to start and to answer."""
_MOST_PROCESSES = 4


@contextlib.contextmanager
def drawn_beside(
    store: ReadOnce, runs: pd.DataFrame, axes: Axes
) -> Iterator[Callable[[], Timelines]]:
    """Begin to draw the timelines; yields a function that waits for them.

    They are drawn in this process, when they are asked for, if copies of it would have no core of
    their own, or lacked its threads.
    """
    has_fork = "fork" in multiprocessing.get_all_start_methods()
    is_alone = threading.active_count() == 1 and (os.cpu_count() or 1) > 1
    if len(runs) < LEAST_RUNS or not has_fork or not is_alone:
        yield lambda: timelines(store, runs, axes)
        return
    for table in ("steps", "edges"):
        store.hold(table)
    rivals = rivals_of(runs, axes)
    num = min(_MOST_PROCESSES, os.cpu_count() or 1)

    def wait() -> Timelines:
        drawn: dict[int, Drawn] = {}
        for first, share in enumerate(shares):
            drawn |= zip(range(first, len(rivals), num), share(), strict=True)
        return joined(rivals, [drawn[place] for place in range(len(rivals))])

    with contextlib.ExitStack() as stack:
        shares = [
            stack.enter_context(_beside(store, rivals[first::num], axes)) for first in range(num)
        ]
        yield wait


@contextlib.contextmanager
def _beside(
    store: ReadOnce, rivals: Sequence[Rivals], axes: Axes
) -> Iterator[Callable[[], list[Drawn]]]:
    """Draw some of the timelines in a process of their own."""
    context = multiprocessing.get_context("fork")  # what is read already is there too
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_draw, args=(ours, theirs, store.aside(), rivals, axes))
    process.start()
    theirs.close()

    def wait() -> list[Drawn]:
        drawn: list[Drawn]
        try:
            drawn, damaged = ours.recv()
        except EOFError:  # it failed, or was killed, as where memory is short
            return [draw_rivals(store, own, axes) for own in rivals]
        store.report_damage(damaged)
        return drawn

    try:
        yield wait
    finally:
        ours.close()
        process.kill()
        process.join()


def _draw(
    ours: Connection, theirs: Connection, store: ReadOnce, rivals: Sequence[Rivals], axes: Axes
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits is interrupted
    ours.close()  # else it would wait for itself to read on, when the other is killed
    with contextlib.suppress(Exception):  # which the other meets as well, and tells
        drawn = [draw_rivals(store, own, axes) for own in rivals]
        theirs.send((drawn, store.damaged))
