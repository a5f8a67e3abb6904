"""Measures how fast this device multiplies matrices, for devices without a known datasheet.

It is the mean over a window, not the best product: ranks that share cores take turns, and the best
of many short products would be one that had a core to itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from engine.run import device as devices

SEARCH_NS = 50_000_000
WINDOW_NS = 100_000_000
SMALLEST = 128
LARGEST = 2048  # filling larger ones takes the CPU longer than is left
LARGE = 8192
"""Of an accelerator's products: smaller ones do not fill it. It is halved where memory lacks."""
REPEATS = 4
"""Products per timing on an accelerator: beside one, waiting for it would show."""

Prepare = Callable[[int], Callable[[], None]]
"""From a size to what multiplies square matrices of it once, and returns when that is done."""


def measured_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of square products, with the number of threads as set: on the CPU of the fastest size.

    Takes about 0.15 s on the CPU, and on an accelerator as long as it needs for a few products of
    `LARGE`. Ranks that share a processor call it at the same time, as they share it in a step.
    Synchronises the device.
    """
    now_ns = time.perf_counter_ns
    repeats = REPEATS if devices.is_accelerator(device) else 1

    def prepare(size: int) -> Callable[[], None]:
        left, right = (torch.rand(size, size, dtype=dtype, device=device) for _ in range(2))
        product = torch.empty_like(left)

        def multiply() -> None:
            for _ in range(repeats):
                torch.mm(left, right, out=product)
            if devices.is_accelerator(device):
                devices.wait_for_all(device)

        multiply()  # makes room, threads and handles, and brings clocks up
        return multiply

    with torch.no_grad():
        if devices.is_accelerator(device):
            size = largest_with_room(prepare, LARGE)
            return repeats * rate_of_size(prepare, size, now_ns)
        return sustained_rate(prepare, LARGEST, now_ns)


def largest_with_room(prepare: Prepare, largest: int) -> int:
    """The largest size, halved as often as memory lacks for it; raises when it lacks for any."""
    size = largest
    while size > SMALLEST:
        try:
            prepare(size)
        except torch.OutOfMemoryError:
            size //= 2
        else:
            break
    return size


def sustained_rate(prepare: Prepare, largest: int, now_ns: Callable[[], int]) -> float:
    """FLOP/s of products of the fastest size up to `largest`, over `WINDOW_NS` or one product."""
    return rate_of_size(prepare, fastest_size(prepare, largest, now_ns), now_ns)


def rate_of_size(prepare: Prepare, size: int, now_ns: Callable[[], int]) -> float:
    """FLOP/s of products of a size, over `WINDOW_NS` or one product."""
    multiply = prepare(size)
    began_ns, num_products, elapsed_ns = now_ns(), 0, 0
    while elapsed_ns < WINDOW_NS:
        multiply()
        num_products, elapsed_ns = num_products + 1, now_ns() - began_ns
    return num_products * 2 * size**3 / (elapsed_ns / 1e9)


def fastest_size(prepare: Prepare, largest: int, now_ns: Callable[[], int]) -> int:
    """Sizes double as long as the next still fits in `SEARCH_NS`; the one of the highest rate."""
    deadline_ns = now_ns() + SEARCH_NS
    size, rates = SMALLEST, dict[int, float]()
    while True:
        multiply = prepare(size)
        began_ns = now_ns()
        multiply()
        ended_ns = now_ns()
        took_ns = max(1, ended_ns - began_ns)
        rates[size] = size**3 / took_ns
        if size >= largest or 3 * 8 * took_ns > deadline_ns - ended_ns:  # prepare, warm up, time
            return max(rates, key=lambda one: rates[one])
        size *= 2
