"""Where a launch runs, when that is not this machine: `[launch.torchrun]` and `[launch.slurm]`.

None of it is part of a case: where it was measured is told by each run's environment.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

_TIME = re.compile(r"(?:(\d{1,4})-)?(\d{1,6})(?::(\d{1,6}))?(?::(\d{1,6}))?", re.ASCII)


class Launcher(StrEnum):
    """Who starts the workers."""

    local = "local"
    torchrun = "torchrun"
    slurm = "slurm"


@dataclass(frozen=True)
class Torchrun:
    """Nodes on each of which someone starts the same command."""

    nodes: int = 1
    rendezvous: str = ""  # host:port of one of them


@dataclass(frozen=True)
class Slurm:
    """What a job asks for. What is empty or zero is left to the cluster, or follows from the cases.

    `extra` has further options of sbatch by name.
    """

    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    nodes: int = 1
    time: str = "1:00:00"  # for all launches together, as Slurm writes it
    gpus_per_node: int = 0
    cpus_per_node: int = 0
    memory_gb: float = 0.0  # per node
    extra: dict[str, str | int | bool] = field(default_factory=dict)

    @property
    def time_min(self) -> int:
        return minutes_of(self.time)


def minutes_of(time: str) -> int:
    """Of a time as Slurm writes it, begun minutes counted; 0 for what is none.

    `m`, `m:s`, `h:m:s`, `d-h`, `d-h:m` or `d-h:m:s`.
    """
    found = _TIME.fullmatch(time)
    if found is None:
        return 0
    days, *rest = found.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is not None:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return -(-(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds) // 60)
