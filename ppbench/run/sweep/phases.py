"""What the ranks of a local sweep are doing, by name, from rank 0's flight record.

The record lies in memory that the ranks share with this process, so that looking at it tells them
nothing and costs them nothing.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from engine.flight import Phase, map_record, phases_since
from ppbench.run.machine.node_folder import flight_path, last_start

WORDS = {
    Phase.CONNECTS: "connecting the ranks",
    Phase.BUILDS: "building",
    Phase.VERIFIES: "verifying",
    Phase.PEAK: "warm-up",
    Phase.MEMORY: "memory step",
    Phase.PROFILES: "profile",
    Phase.GATHERS: "storing",
    Phase.STORES: "storing",
}
"""The phases that are shown. Steps are not among them: they are events of their own."""


class PhaseWatch:
    """Follows rank 0, whose record may be replaced when the ranks are started anew."""

    def __init__(self, folder: Path) -> None:
        """`folder` is that of the node."""
        self._folder = folder
        self._path: Path | None = None  # of the record that is followed
        self._record: memoryview | None = None
        self._num_seen = 0

    def new_phases(self) -> list[Phase]:
        """Return the phases of `WORDS` that rank 0 has come to since the last call."""
        start = last_start(self._folder)  # it may be another than before
        if start is not None and self._path != flight_path(start, 0):
            self._path, self._record, self._num_seen = flight_path(start, 0), None, 0
        if self._path is not None and self._record is None:
            with contextlib.suppress(OSError, ValueError):  # not there yet, or not whole
                self._record = map_record(self._path)
        if self._record is None:
            return []
        phases, self._num_seen = phases_since(self._record, self._num_seen)
        return [phase for phase in phases if phase in WORDS]
