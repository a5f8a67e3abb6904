"""What the ranks of a local sweep are doing, by name, from rank 0's flight record.

The record lies in memory that the ranks share with this process, so that looking at it tells them
nothing and costs them nothing.
"""

from __future__ import annotations

from pathlib import Path

from engine.flight import Phase, map_record, phases_since
from ppbench.run.failures.watchdog import flight_path

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
        self._path = flight_path(folder, 0)
        self._file: int | None = None
        self._record: memoryview | None = None
        self._num_seen = 0

    def new_phases(self) -> list[Phase]:
        """Return the phases of `WORDS` that rank 0 has come to since the last call."""
        try:  # it may be another than before
            file = self._path.stat().st_ino
            if self._file != file:
                self._record, self._num_seen = map_record(self._path), 0
                self._file = file
        except (OSError, ValueError):  # not there yet, or not whole
            self._file = self._record = None
        if self._record is None:
            return []
        phases, self._num_seen = phases_since(self._record, self._num_seen)
        return [phase for phase in phases if phase in WORDS]
