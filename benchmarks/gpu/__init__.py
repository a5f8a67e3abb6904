"""Proves on a GPU what no machine without one can: `python -m benchmarks.gpu`, or `make gpu`.

    NAME.py --measure, in a process of its own--> measurements --judge--> findings
                                                        gpu.json --page.py--> gpu.md

Each check is a module: measurements as a frozen dataclass, `measure(device)`, which is all that
needs the device, and `judge(measurements)`, a pure function. A check that hangs or dies is ended,
and its findings are `not run`; the next one begins in a new process.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """A module of this package, and what it needs."""

    name: str
    limit_s: int  # of a process that takes longer, nothing is learnt
    num_gpus: int = 1


CHECKS = (
    Check("clock", 60),
    Check("synchronisation", 90),
    Check("identity", 30),
    Check("streams", 30),
    Check("ahead", 60),
    Check("spans", 60),
    Check("turns", 90),
    Check("exactness", 90),
    Check("memory", 90),
    Check("overhead", 90),
    Check("attached", 60),
    Check("energy", 40),
    Check("products", 30),
    Check("failures", 200),
    Check("messages", 120),  # over NCCL also on one GPU, as the next: the ranks are hosts to it
    Check("receives", 120),
    Check("memory_full", 180, num_gpus=2),
)
"""The checks in the order in which they run."""

TIME_LIMIT_S = 600
"""A check that would begin later is not run."""
