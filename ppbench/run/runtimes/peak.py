"""What a rank's device could compute: by its datasheet, else measured."""

from __future__ import annotations

import torch

from engine.model.split import DTYPES
from engine.run.peak import measured_peak_flops
from ppbench.analysis.mfu import Peak, datasheet_peak


def peak_of(device: torch.device, dtype: str) -> Peak:
    """Of products in `dtype`: float32, float64 or bfloat16. Ranks call it at the same time."""
    if device.type == "cuda":
        known = datasheet_peak(torch.cuda.get_device_name(device), dtype)
        if known is not None:
            return known
    return Peak(measured_peak_flops(device, DTYPES[dtype]), f"measured matmul {dtype}")
