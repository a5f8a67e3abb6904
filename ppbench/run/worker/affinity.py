"""Binds each rank to cores of its own, where the machine has enough for all ranks of the case.

Otherwise the kernel moves a rank between cores now and then, or puts two on one core while another
idles; such a step is longer for a reason that is not the schedule's.

    cores of this process, topology --plan_cores--> cores of each rank --bind--> its threads

A rank on a GPU is bound to the cores near it, by the address of the GPU on the bus:

    addresses of this node's GPUs --cores_near--> the cores that /sys lists --share_cores--> bind

Ranks whose GPUs are near the same cores divide these, unless too few were left for the threads that
a device's libraries start. A rank whose threads wait (emulated) is left to the kernel.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from ppbench.config.case import Case
from ppbench.run.machine.environment import ON_GPUS, available_cores
from ppbench.run.machine.placement import Place

_CPUS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")
_THREADS = Path("/proc/self/task")
OF_LIBRARIES = 2
"""Threads of a rank on a GPU besides its own: autograd's, and NCCL's proxy."""


@dataclass(frozen=True)
class Cpu:
    """A processor that the kernel schedules on: a core, or one of the threads that share it."""

    number: int
    core: int  # the same for those that share one
    node: int = 0  # of memory


def plan_cores(
    cpus: Sequence[Cpu], num_ranks: int, num_per_rank: int
) -> tuple[tuple[int, ...], ...] | None:
    """Return the numbers of the CPUs of each rank, None where there are not enough.

    A CPU that shares its core with another is used only when whole cores do not suffice. Ranks are
    spread over the nodes of memory, neighbours beside each other; the CPUs of a rank are of one
    node where one has room for them.
    """
    num_wanted = num_ranks * num_per_rank
    if num_wanted > len(cpus):
        return None
    ordered = sorted(cpus, key=lambda cpu: cpu.number)
    firsts = {cpu.core: cpu for cpu in reversed(ordered)}
    others = [cpu for cpu in ordered if firsts[cpu.core] is not cpu]
    used = [*firsts.values(), *others[: max(0, num_wanted - len(firsts))]]
    used.sort(key=lambda cpu: (cpu.core, cpu.number))  # those of a core are beside each other
    free = [
        [cpu.number for cpu in used if cpu.node == node] for node in sorted({c.node for c in used})
    ]
    plan = []
    for rank in range(num_ranks):
        preferred = rank * len(free) // num_ranks
        nodes = sorted(range(len(free)), key=lambda node: abs(node - preferred))
        with_room = next((n for n in nodes if len(free[n]) >= num_per_rank), None)
        rooms = [free[with_room]] if with_room is not None else [free[n] for n in nodes]
        taken = tuple(chain.from_iterable(rooms))[:num_per_rank]
        free = [[number for number in node if number not in taken] for node in free]
        plan.append(tuple(sorted(taken)))
    return tuple(plan)


def share_cores(
    cpus: Sequence[Cpu], near: Sequence[Collection[int]], num_per_rank: int
) -> tuple[tuple[int, ...] | None, ...]:
    """Return the CPUs of each rank among those near its GPU; None where none is known or allowed.

    Ranks with the same CPUs near divide them, core by core, if each has `num_per_rank` then; else
    all of these ranks have all of these CPUs.
    """
    chosen = [tuple(cpu for cpu in cpus if cpu.number in numbers) for numbers in near]
    shares: list[tuple[int, ...] | None] = []
    for rank, own in enumerate(chosen):
        index, num_ranks = chosen[:rank].count(own), chosen.count(own)
        cores = sorted({cpu.core for cpu in own})
        begin, end = (len(cores) * place // num_ranks for place in (index, index + 1))
        mine = set(cores[begin:end])
        part = [cpu.number for cpu in own if cpu.core in mine]
        numbers = part if len(part) >= num_per_rank else [cpu.number for cpu in own]
        shares.append(tuple(sorted(numbers)) if own else None)
    return tuple(shares)


def cores_near(pci: str, root: Path = Path("/sys")) -> frozenset[int]:
    """Return the CPUs near the device at an address of the bus; none where that is not known.

    They are those of its node of memory; a machine that has one node only lists them with the
    device.
    """
    if not pci:
        return frozenset()
    folder = root / "bus/pci/devices" / pci
    try:
        node = int((folder / "numa_node").read_text())
    except (OSError, ValueError):
        node = -1
    listed = _numbers_in(root / f"devices/system/node/node{node}/cpulist") if node >= 0 else []
    return frozenset(listed or _numbers_in(folder / "local_cpulist"))


class Cores:
    """The cores of this process, noted before anything is bound, so that they can be restored."""

    def __init__(self) -> None:
        can_bind = hasattr(os, "sched_setaffinity") and _THREADS.is_dir()
        self._allowed = frozenset(os.sched_getaffinity(0)) if can_bind else frozenset()
        self._num_usable = min(len(self._allowed), available_cores())

    def of_rank(
        self, case: Case, local_rank: int, places: Sequence[Place]
    ) -> tuple[int, ...] | None:
        """Return cores for one of the case's ranks on this node, None if it is not to be bound.

        `places` are those of the case's ranks on this node, in their order. Data workers are a
        rank's own processes and share its cores, so they count.
        """
        num_per_rank = case.launch_threads_per_rank + case.data_num_workers
        if not case.launch_bind or not self._allowed:
            return None
        if case.device in ON_GPUS:
            near = [cores_near(place.pci) for place in places]
            return share_cores(read_cpus(self._allowed), near, num_per_rank + OF_LIBRARIES)[
                local_rank
            ]
        if case.device != "cpu" or len(places) * num_per_rank > self._num_usable:
            return None
        plan = plan_cores(read_cpus(self._allowed), len(places), num_per_rank)
        return None if plan is None else plan[local_rank]

    def bind(self, cores: Collection[int]) -> None:
        """Confine every thread of this process, and those that they start from now on."""
        seen: set[int] = set()
        while new := {int(path.name) for path in _THREADS.iterdir()} - seen:
            for thread in new:  # a thread that starts now has its starter's cores, old or new
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(thread, cores)
            seen |= new

    def release(self) -> None:
        """Give every thread the cores that the process began with."""
        if self._allowed:
            self.bind(self._allowed)


def read_cpus(numbers: Collection[int]) -> list[Cpu]:
    """Read the CPUs from the kernel; where it lists none, each is a core of one node."""
    node_of: dict[int, int] = {}
    for folder in _NODES.glob("node[0-9]*"):
        listed = _numbers_in(folder / "cpulist")
        node_of |= dict.fromkeys(listed, int(folder.name.removeprefix("node")))
    cpus = []
    for number in sorted(numbers):  # the first of the CPUs that share a core is its number
        siblings = _numbers_in(_CPUS / f"cpu{number}" / "topology" / "thread_siblings_list")
        cpus.append(Cpu(number, min(siblings, default=number), node_of.get(number, 0)))
    return cpus


def _numbers_in(path: Path) -> list[int]:
    """Read a list such as `0-3,8`; return nothing where there is no such file."""
    try:
        parts = path.read_text().strip().split(",")
        spans = [[int(end) for end in part.split("-")] for part in parts if part]
    except (OSError, ValueError):
        return []
    return [number for span in spans for number in range(span[0], span[-1] + 1)]
