"""Models that fail on a GPU in the second stage of two, and sound ones that are run after each.

Run in the workers of a sweep: `benchmarks.gpu.faulty:out_of_memory`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

AT = 6  # of the forwards so far


class Faulty(nn.Module):
    """Passes its input on, and acts once."""

    def __init__(self, act: Callable[[torch.device], object]) -> None:
        super().__init__()
        self._act, self._num_calls = act, 0

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor):
            if self._num_calls == AT:
                self._act(x.device)
            self._num_calls += 1
        return x


def _model(act: Callable[[torch.device], object]) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 8), Faulty(act), nn.Linear(8, 256))


def sound() -> nn.Sequential:
    return _model(lambda _: None)


def out_of_memory() -> nn.Sequential:
    """Ask for more than any device has."""
    return _model(lambda device: torch.empty(2**50, dtype=torch.uint8, device=device))


def asserts() -> nn.Sequential:
    """Read beyond the end of a table, which a GPU notices in a kernel."""
    return _model(lambda device: torch.arange(4, device=device)[far_on(device)].tolist())


def far_on(device: torch.device) -> Tensor:
    return torch.tensor([10**6], device=device)


def is_killed() -> nn.Sequential:
    return _model(lambda _: os.kill(os.getpid(), signal.SIGKILL))


def stops() -> nn.Sequential:
    return _model(lambda _: os.kill(os.getpid(), signal.SIGSTOP))


after_out_of_memory = after_asserts = after_is_killed = after_stops = sound
"""Other names make other cases."""
