"""The reference: a short fixed computation of a rank, timed beside a case's steps.

    warm-up | reference | measured steps | memory | reference

It shows whether the machine was disturbed: a launch whose reference took longer than is usual here
was slowed by something else than its code. All ranks of the case run it at once, as they train at
once. Nothing of it is inside a timed step or a measured peak, and it draws no random number.

A rank that trains repeats a small forward, backward and update in float32 on its own device. A rank
that is emulated sleeps for about as long as its actions do, and touches some memory: what disturbs
it is late waking. The tensors lie in a mapping of their own that ends with them, so that neither
the heap nor the process's high-water mark keeps anything; on an accelerator its allocator does.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from engine.plan.action import Op
from engine.run import device as devices
from ppbench.analysis.reference import ReferenceTimes
from ppbench.config.case import Case
from ppbench.config.programs import durations_of

VERSION = 2
"""Raised when the work changes: times of two versions do not compare."""
SHARE = 0.02
"""Share of the measured steps' time that the reference is planned to take."""
FEWEST, FEWEST_SLEEPS, MOST = 1, 2, 100
"""Bounds of the repetitions that are kept at each place."""
SLEEPS_MS = (1, 2, 5, 10, 20)
"""Lengths of an emulated rank's sleep: it takes the longest that its forwards reach."""
BYTES = 9_000_000
"""Room for the tensors of a rank that computes on the CPU."""


class Reference:
    """This rank's reference beside one case. All ranks of the case call it together."""

    def __init__(
        self,
        case: Case,
        device: torch.device,
        group: dist.ProcessGroup,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._case, self._device, self._group, self._clock_ns = case, device, group, clock_ns
        self._places: list[tuple[int, ...]] = []
        self._cost_ns, self._steps_ns = 0, 0.0

    def run(self, steps_ns: float) -> None:
        """Run it before or after the steps, which together take or took so long.

        Before them it may take half of its share, and after them what is left. Blocks until all
        ranks are here.
        """
        dist.barrier(self._group)
        began_ns = self._clock_ns()
        share = SHARE if self._places else SHARE / 2
        work = None
        with contextlib.suppress(torch.OutOfMemoryError):  # on a GPU without room there is none
            work = work_of(self._case, self._device)
        times_ns, budget_ns = list[int](), share * steps_ns - self._cost_ns
        # The first repetition that computes is not kept: it finds its memory and the caches cold.
        # The next one is expected to take as long as the longest so far.
        num_cold, fewest = (0, FEWEST_SLEEPS) if self._case.is_emulated else (1, FEWEST)
        while work is not None and (
            len(times_ns) < num_cold + fewest
            or (
                len(times_ns) < num_cold + MOST
                and self._clock_ns() - began_ns + max(times_ns) < budget_ns
            )
        ):
            start_ns = self._clock_ns()
            work()
            times_ns.append(self._clock_ns() - start_ns)
        del work  # with its tensors, which are no part of the next peak
        self._places.append(tuple(times_ns[num_cold:]))
        self._cost_ns += self._clock_ns() - began_ns
        self._steps_ns = steps_ns

    def times(self) -> ReferenceTimes:
        """The repetitions so far, and what they cost of the steps that the last run named."""
        share = self._cost_ns / self._steps_ns
        return ReferenceTimes(
            name_of(self._case), tuple(self._places), share, sleeps=self._case.is_emulated
        )


def name_of(case: Case) -> str:
    """The work, its version, and how many ranks and threads run it at once."""
    work = f"sleep {sleep_ms(case)} ms" if case.is_emulated else "train"
    return f"{work}, version {VERSION}, {case.num_processes} x {case.launch_threads_per_rank}"


def sleep_ms(case: Case) -> int:
    """The longest of `SLEEPS_MS` that the case's mean forward reaches, or the shortest."""
    forwards_ns = durations_of(case).by_op()[Op.F]
    mean_ms = sum(forwards_ns) / len(forwards_ns) / 1e6
    return max((ms for ms in SLEEPS_MS if ms <= mean_ms), default=SLEEPS_MS[0])


def work_of(case: Case, device: torch.device) -> Callable[[], None]:
    """One repetition as a function, which holds all its tensors."""
    if devices.is_accelerator(device):
        room = torch.full((10_500_000,), 0.01, device=device)
        return _training(room, num_rows=512, width=512, num_passes=12)
    room = torch.frombuffer(mmap.mmap(-1, BYTES), dtype=torch.float32).fill_(0.01)
    if case.is_emulated:
        touched, seconds = room[: 1 << 16], sleep_ms(case) / 1e3

        def sleep() -> None:
            time.sleep(seconds)
            touched.add_(1e-9)

        return sleep
    return _training(room, num_rows=64, width=256, num_passes=1)


def _training(room: Tensor, num_rows: int, width: int, num_passes: int) -> Callable[[], None]:
    """Two layers forward and backward, and a pass over the memory of as many parameters again."""
    wide = 4 * width
    sizes = [(num_rows, width)] * 3 + [(num_rows, wide)] + [(width, wide), (wide, width)] * 2
    ends = list(itertools.accumulate((rows * columns for rows, columns in sizes), initial=0))
    x, y, x_gradient, hidden, up, down, up_gradient, down_gradient = (
        room[start:end].view(size)
        for (start, end), size in zip(itertools.pairwise(ends), sizes, strict=True)
    )
    rest = room[ends[-1] :]

    @torch.no_grad()
    def work() -> None:
        for _ in range(num_passes):
            torch.mm(x, up, out=hidden)
            torch.tanh(hidden, out=hidden)
            torch.mm(hidden, down, out=y)
            torch.mm(hidden.t(), y, out=down_gradient)
            torch.mm(y, down.t(), out=hidden)
            torch.mm(x.t(), hidden, out=up_gradient)
            torch.mm(hidden, up.t(), out=x_gradient)
            rest.add_(1e-9)
        if devices.is_accelerator(room.device):
            devices.wait_for_all(room.device)

    return work
