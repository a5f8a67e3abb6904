"""The registry: every part of every benchmark, with its claim, its goal and its time."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Standing(StrEnum):
    """Whether a goal is reached, as far as the interval says."""

    held = "held"
    missed = "missed"
    undecided = "not decided"


@dataclass(frozen=True)
class Goal:
    """Bounds of the true value."""

    at_least: float | None = None
    at_most: float | None = None

    def standing(self, low: float, high: float) -> Standing:
        """Whether the whole interval keeps the bounds, or lies beyond one of them."""
        least = low if self.at_least is None else self.at_least
        most = high if self.at_most is None else self.at_most
        if high < least or low > most:
            return Standing.missed
        return Standing.held if low >= least and high <= most else Standing.undecided

    def __str__(self) -> str:
        bounds = (("≥", self.at_least), ("≤", self.at_most))
        return ", ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


@dataclass(frozen=True)
class Claim:
    """A part of a benchmark. The first row that it measures is held to the goal."""

    module: str
    part: str
    seconds: float  # for what is measured; what has begun is ended
    words: str
    goal: Goal | None = None

    @property
    def name(self) -> str:
        """Names the file of its results."""
        return f"{self.module}.{self.part}"

    @property
    def command(self) -> str:
        return f"python -m benchmarks.{self.module} {self.part}"


CLAIMS = (
    Claim("overhead", "spans", 150, "Step with spans over a bare one", Goal(None, 1.01)),
    Claim("against_torch", "overhead_bound", 240, "Speed over torch's, small layers", Goal(1.3)),
    Claim("against_torch", "demo", 300, "Speed over torch's, demo model", Goal(1.0)),
    Claim("against_torch", "running", 240, "Step in a sweep over one in a loop", Goal(0.98, 1.02)),
    Claim("accuracy", "attribution", 120, "Injected idle time, found off by", Goal(None, 0.1)),
    Claim("accuracy", "memory", 80, "Peak memory, off the prediction by", Goal(None, 0.01)),
    Claim("accuracy", "prediction", 100, "Emulated step, off the prediction by", Goal(None, 0.03)),
    Claim("accuracy", "stragglers", 120, "Made-up stragglers named", Goal(0.99)),
    Claim("verdicts", "answers", 240, "Time until schedules are ranked", Goal(None, 70)),
    Claim("verdicts", "false_claims", 240, "False claims of equal sides", Goal(None, 0.01)),
    Claim("faults", "kills", 180, "Losses after killed processes", Goal(None, 0)),
    Claim("commands", "start", 40, "`ppbench --help` over `import torch`", Goal(None, 0.3)),
    Claim("commands", "store", 120, "`ls` of 100,000 runs over pandas", Goal(None, 1)),
    Claim("commands", "report", 50, "Opening a report over plotly.js", Goal(None, 2)),
    Claim("commands", "simulate", 60, "Simulated actions/s over torch's", Goal(300)),
    Claim("planning", "solver", 120, "Planned step over its lower bound", Goal(None, 1.05)),
)
"""The rows of the page, in their order."""
OTHERS = (
    Claim("against_torch", "limit", 200, "Speed over what a schedule allows", Goal(0.95)),
    Claim("accuracy", "replicas", 80, "Idle time of slow replicas, off by", Goal(None, 0.1)),
    Claim("verdicts", "disturbed", 120, "False claims beside another job"),
    Claim("verdicts", "agreement", 60, "Pairs on which commands disagree", Goal(None, 0)),
    Claim("verdicts", "history", 60, "False alarms of histories", Goal(None, 0.04)),
    Claim("commands", "case_cost", 90, "Case of a sweep over one alone", Goal(None, 0.1)),
    Claim("planning", "memory_limits", 90, "Bubble with memory for 2.25 p", Goal(None, 0.01)),
)
"""These are measured too, for those who work on it; the page lists their misses."""
GPU_CHECKS = (
    Claim("gpu.clock", "marks", 60, "The clock of events"),
    Claim("gpu.clock", "synchronisation", 90, "What makes the host wait"),
    Claim("gpu.product", "identity", 30, "One name for one device"),
    Claim("gpu.clock", "streams", 30, "Streams beside each other"),
    Claim("gpu.clock", "ahead", 60, "How far the host runs ahead"),
    Claim("gpu.clock", "spans", 60, "Spans, wall time and kernels"),
    Claim("gpu.clock", "turns", 90, "Steps in a row"),
    Claim("gpu.training", "exactness", 90, "Ranks on one GPU"),
    Claim("gpu.training", "memory", 90, "Peak memory"),
    Claim("gpu.clock", "overhead", 120, "Overhead of spans"),
    Claim("gpu.product", "attached", 60, "Attached trainings"),
    Claim("gpu.product", "energy", 40, "Energy and power"),
    Claim("gpu.product", "products", 30, "Speed of products"),
    Claim("gpu.product", "failures", 200, "Failed ranks"),
    Claim("gpu.training", "messages", 120, "Messages of NCCL"),
    Claim("gpu.training", "receives", 120, "Open receives of NCCL"),
    Claim("gpu.training", "memory_full", 180, "GPUs that are almost full"),
)
"""Only a GPU can prove these; they run in this order."""
