"""How fast this device multiplies matrices: what a model's FLOP/s are held against where no
datasheet is known.

A measurement of a moment, so it must be quick: sizes double as long as the next still fits.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

BUDGET_NS = 150_000_000
SMALLEST = 128
LARGEST = {"cpu": 2048, "cuda": 4096}  # filling larger ones takes the CPU longer than is left
REPEATS = {"cpu": 1, "cuda": 10}
"""Products per timing: beside one on a GPU, launching it and waiting for it would show."""


def measured_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of several square products, with the number of threads as set.

    Takes at most about 0.15 s once for each device, dtype and number of threads. Ranks that share a
    processor should call it at the same time, as they share it in a step. Synchronises the device.
    """
    return _measured(device, dtype, torch.get_num_threads())


@functools.cache
def _measured(device: torch.device, dtype: torch.dtype, _num_threads: int) -> float:
    repeats = REPEATS[device.type]

    def prepare(size: int) -> Callable[[], None]:
        left, right = (torch.rand(size, size, dtype=dtype, device=device) for _ in range(2))
        product = torch.empty_like(left)

        def multiply() -> None:
            for _ in range(repeats):
                torch.mm(left, right, out=product)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        multiply()  # makes room, threads and handles
        return multiply

    with torch.no_grad():
        return repeats * best_rate(prepare, LARGEST[device.type], time.perf_counter_ns)


def best_rate(
    prepare: Callable[[int], Callable[[], None]], largest: int, now_ns: Callable[[], int]
) -> float:
    """The highest FLOP/s of a product, of sizes that double up to `largest` in `BUDGET_NS`.

    `prepare(size)` returns what multiplies once and returns when that is done.
    """
    deadline_ns = now_ns() + BUDGET_NS
    size, best = SMALLEST, 0.0
    multiply = prepare(size)
    while True:
        began_ns = now_ns()
        multiply()
        ended_ns = now_ns()
        took_ns, left_ns = max(1, ended_ns - began_ns), deadline_ns - ended_ns
        best = max(best, 2 * size**3 / (took_ns / 1e9))
        if size < largest and 4 * 8 * took_ns < left_ns:  # to prepare, to warm up, to time twice
            size *= 2
            multiply = prepare(size)
        elif took_ns > left_ns:
            return best
