"""On which machine each rank of a launch is, and on which of its devices.

Ranks share a device where two of them are on the same one, whatever the numbers: 16 ranks on two
machines of 8 GPUs have one each. Every rank says where it is, once in a launch, and all decide the
same from the same list.

    rank 0   Place("a", device="GPU-11..", ...)    rank 8    Place("b", device="GPU-91..", ...)
    rank 1   Place("a", device="GPU-12..", ...)    ...
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    machine: str  # the same for all processes of a machine, also in containers
    num_cores: int  # that the rank's processes may use
    device: str = ""  # id of the accelerator, unique among all machines; empty: none
    pci: str = ""  # its address, such as `0000:c1:00.0`; empty: not known


def machine_id(boot_id: Path = _BOOT_ID) -> str:
    """Return a name of this machine that containers on it share, and no other machine has.

    It is the number that the kernel draws when it starts; hosts' names are neither.
    """
    try:
        return boot_id.read_text().strip() or platform.node()
    except OSError:
        return platform.node()


def on_cores(places: Sequence[Place]) -> tuple[Place, ...]:
    """Return the places of ranks that leave their accelerators alone, as in a case on the CPU."""
    return tuple(Place(place.machine, place.num_cores) for place in places)


def shares_device(places: Sequence[Place]) -> bool:
    """Whether two of the ranks are on one accelerator, which then takes turns with them."""
    return max(ranks_on_devices(places).values(), default=1) > 1


def needs_host_memory(places: Sequence[Place]) -> bool:
    """Whether two ranks are on one accelerator or on parts of one, so that NCCL refuses them."""
    addresses = Counter((place.machine, place.pci) for place in places if place.pci)
    return shares_device(places) or max(addresses.values(), default=1) > 1


def ranks_on_devices(places: Sequence[Place]) -> Mapping[str, int]:
    """Return how many ranks are on each accelerator."""
    return Counter(place.device for place in places if place.device)


def has_too_few_cores(places: Sequence[Place], threads_per_rank: int) -> bool:
    """Whether ranks that compute on cores have more threads than those of their machine."""
    if any(place.device for place in places):
        return False
    ranks_on = Counter(place.machine for place in places)
    return any(ranks_on[p.machine] * threads_per_rank > p.num_cores for p in places)
