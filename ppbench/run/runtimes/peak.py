"""What a rank's device could compute: by its datasheet, else measured."""

from __future__ import annotations

import functools

import torch

from engine.model.spec import DTYPES
from engine.run.peak import measured_peak_flops
from ppbench.analysis.mfu import Peak, datasheet_peak


def peak_of(device: torch.device, dtype: str, num_ranks: int) -> Peak:
    """Of products in `dtype`: float32, float64 or bfloat16. So many ranks call it at the same time.

    Measured once in a launch for as many ranks and threads: it is the device's, not the case's.
    """
    return _peak_of(device, dtype, num_ranks, torch.get_num_threads())


@functools.cache
def _peak_of(device: torch.device, dtype: str, _num_ranks: int, _num_threads: int) -> Peak:
    if device.type == "cuda":
        known = datasheet_peak(torch.cuda.get_device_name(device), dtype)
        if known is not None:
            return known
    return Peak(measured_peak_flops(device, DTYPES[dtype]), f"measured matmul {dtype}")
