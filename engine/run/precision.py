"""The precision of float32 products: IEEE's, whatever a library or the environment would choose.

TF32 multiplies with 10 bits of mantissa on tensor cores, several times as fast. Torch has it off
for products and on for convolutions, and a variable, an imported package or a model's own code may
change both. So a run sets it, and says at its end what was set then.
"""

from __future__ import annotations

from typing import Any

import torch

IEEE = "ieee"


def force_ieee() -> None:
    """Compute float32 products and convolutions in float32, from now on, on every device.

    By the older of torch's two interfaces, which sets the newer one as well: read after the newer
    one alone, the older raises errors, and other packages read it.
    """
    inherited: tuple[Any, ...] = (torch.backends, torch.backends.cudnn)
    for newer in inherited:
        if hasattr(newer, "fp32_precision"):
            newer.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def float32_precision() -> str:
    """The precision of float32 products that is set now: `ieee`, `tf32` or `bf16`."""
    newer: Any = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if newer is not None:
        return IEEE if newer == "none" else str(newer)
    return {"highest": IEEE, "high": "tf32"}.get(torch.get_float32_matmul_precision(), "bf16")
