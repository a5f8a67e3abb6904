"""The environment variables of a device's libraries that bend timings or can hang a rank.

They are read when the device starts, once in a process, so they are set before: by every process
that starts ranks, and by every rank itself, whoever started it. A variable that is absent gets its
value; one that the user has set otherwise is refused, because a run under it is no measurement.

    prepare(os.environ)      sets what is absent
    refused(os.environ)      says which variable is set otherwise, why that is wrong, and the remedy
    recorded(os.environ)     all of them, for the row of the run
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass


class DeviceVariableError(RuntimeError):
    """A variable is set to a value under which nothing can be measured."""


@dataclass(frozen=True)
class DeviceVariable:
    """A variable, the value that a rank needs, and the reason."""

    name: str
    value: str | None  # set where it is absent; None: it is to stay absent
    equal: tuple[str, ...]  # other values that mean the same
    reason: str


_OFF = ("0", "f", "false", "n", "no")

DEVICE_VARIABLES = (
    DeviceVariable(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "32",
        (),
        "with fewer hardware queues than streams, a receive that waits blocks the computation that "
        "its peer waits for",
    ),
    DeviceVariable(
        "CUDA_MODULE_LOADING",
        "EAGER",
        (),
        "a kernel that is loaded at its first launch may synchronise the device, which hangs while "
        "a receive is open",
    ),
    DeviceVariable(
        "CUDA_LAUNCH_BLOCKING",
        "0",
        ("",),
        "the host waits for each kernel, so nothing overlaps",
    ),
    DeviceVariable(
        "TORCH_NCCL_BLOCKING_WAIT",
        "0",
        _OFF,
        "the host waits for each message, so nothing overlaps",
    ),
    DeviceVariable(
        "NCCL_BLOCKING_WAIT",
        None,
        _OFF,
        "it is torch's older name for TORCH_NCCL_BLOCKING_WAIT: the host waits for each message",
    ),
    DeviceVariable(
        "NVIDIA_TF32_OVERRIDE",
        None,
        ("0",),
        "NVIDIA's libraries then choose the precision of float32 products, not the run",
    ),
    DeviceVariable(
        "HIP_LAUNCH_BLOCKING",
        None,
        ("0", ""),
        "the host waits for each kernel, so nothing overlaps",
    ),
    DeviceVariable(
        "AMD_SERIALIZE_KERNEL",
        None,
        ("0", ""),
        "kernels run one after the other, so nothing overlaps",
    ),
)
"""All of them; each is set, checked and recorded in every way of starting ranks."""


def prepare(environ: MutableMapping[str, str]) -> None:
    """Set the variables that are absent; call it before the device is used for the first time."""
    for variable in DEVICE_VARIABLES:
        if variable.value is not None:
            environ.setdefault(variable.name, variable.value)


def refused(environ: Mapping[str, str]) -> str | None:
    """Say which variable is set to a value that a rank cannot have; None if none is."""
    for variable in DEVICE_VARIABLES:
        found = environ.get(variable.name)
        accepted = variable.equal if variable.value is None else (variable.value, *variable.equal)
        if found is None or found.lower() in map(str.lower, accepted):
            continue
        remedy = "" if variable.value is None else f", or set it to {variable.value}"
        return f'{variable.name} is "{found}": {variable.reason}; unset it{remedy}'
    return None


def check(environ: Mapping[str, str]) -> None:
    """Raise DeviceVariableError where a variable is refused."""
    if (problem := refused(environ)) is not None:
        raise DeviceVariableError(problem)


def recorded(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are set, with their values."""
    names = (variable.name for variable in DEVICE_VARIABLES)
    return {name: environ[name] for name in names if name in environ}
