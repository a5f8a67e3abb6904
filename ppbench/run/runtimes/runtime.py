"""What the worker asks of whatever runs a case."""

from __future__ import annotations

from typing import Protocol

from engine.run.memory import MemoryPeaks
from engine.trainer import StepResult


class Runtime(Protocol):
    """One rank's part of a case. All ranks make the same calls with the same numbers."""

    @property
    def peak_held(self) -> int:
        """The most microbatches that this rank has held at once, over its stages."""

    def verify(self) -> None:
        """Compare the first step with the unsplit model. Raises VerificationError."""

    def step(self, step: int) -> StepResult:
        """One step of training; returns when this rank's part of it is over."""

    def measure_memory(self, step: int) -> MemoryPeaks | None:
        """One more step, under memory accounting; None where there is nothing to account for."""

    def close(self) -> None:
        """Give back what it holds; it is not used again."""

    def run_facts(self) -> dict[str, object]:
        """Columns of `runs` that are the same on every rank; asked of rank 0."""

    def rank_facts(self) -> dict[str, object]:
        """Columns of `ranks` that are known without running."""
