"""A stage that only takes time: so that many ranks behave on two cores as they would on devices.

Everything around it is real: processes, program, channels and the size of every message. Only the
computation is a sleep, during which the core is free for the other ranks.

A host runs ahead of its device, so that what it does between two actions takes no time of the
device. So does an emulated one: an action begins when the one before is over and its input is
there, though the host wakes up and comes to it later:

    device   |-- 0F0 --|-- 0F1 --|.... |-- 0B0 --|
    host      sleeps    * sleeps  *     waits for a message, then sleeps

Where the host is later than the whole action takes, the device has waited for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.model.stage_module import Message, gradient_message
from engine.plan.action import Action, Op
from engine.plan.messages import Edge
from engine.plan.predict import Durations
from engine.run.collective_lane import CollectiveLane, Job
from engine.run.p2p.channel import Transfer
from engine.run.stage import Tensors

_PR_SET_TIMERSLACK = 29  # in nanoseconds; see prctl(2)


@dataclass(frozen=True)
class Emulation:
    """The time that each stage takes, its variation, and the delay of messages.

    A duration is multiplied by 1 + `jitter` times a standard normal number, and by no less than 0.
    The numbers follow from `seed`, the step, the action and the replica, whose computations all
    take `factors[replica]` times as long.
    """

    durations: Durations
    jitter: float = 0.0
    seed: int = 0
    link_ns: tuple[int, ...] = ()  # of the link from each stage to the next, both ways
    gather_ns: tuple[int, ...] = ()  # of each stage's UNSHARD, once all replicas are there
    reduce_ns: tuple[int, ...] = ()  # of its REDUCE_GRAD
    factors: tuple[float, ...] = ()  # of each replica; none: all 1
    of_actions: Mapping[Action, int] = field(default_factory=dict)
    """Times of single actions, such as slices; of all others they are those of their stage."""

    def delays_ns(self, edges: Iterable[Edge]) -> dict[Edge, int]:
        """Return by how much the messages of an edge are delayed, where they are."""
        delays_ns = {edge: self.link_ns[min(edge)] for edge in edges} if self.link_ns else {}
        return {edge: delay_ns for edge, delay_ns in delays_ns.items() if delay_ns}

    @functools.cached_property
    def _by_op(self) -> dict[Op, tuple[int, ...]]:
        return self.durations.by_op()

    def duration_ns(self, action: Action, step: int, replica: int = 0) -> int:
        """Nanoseconds that a compute action takes in a step."""
        mean: float = self.of_actions.get(action, self._by_op[action.op][action.stage])
        if self.factors:
            mean = round(mean * self.factors[replica])
        if self.jitter == 0:
            return round(mean)
        seed = f"{self.seed}:{step}:{action}" + (f":{replica}" if replica else "")
        drawn = random.Random(seed).gauss(1, self.jitter)  # noqa: S311  # no secret
        return round(mean * max(0.0, drawn))

    def collective_ns(self, action: Action) -> int:
        """Nanoseconds that an UNSHARD or REDUCE_GRAD moves bytes."""
        times = self.gather_ns if action.op is Op.UNSHARD else self.reduce_ns
        return times[action.stage] if times else 0


class EmulatedDevice:
    """Does one action after another, in the order that they are given; times are of our clock."""

    def __init__(self) -> None:
        self.latest_ns = 0, 0
        """When the latest action began and ended."""
        self._ready_ns = 0

    def hold_until(self, ready_ns: int) -> None:
        """The next action cannot begin before."""
        self._ready_ns = max(self._ready_ns, ready_ns)

    def meet(self, meet: Callable[[int], int], duration_ns: int) -> None:
        """Do an action that begins when others have come to it. Blocks until it is over.

        `meet` takes the time at which this device came, and returns that at which the last one did.
        """
        came_ns = self._ready_ns
        self._ready_ns = max(came_ns, meet(came_ns)) + duration_ns
        self.latest_ns = came_ns, self._ready_ns
        _sleep_until(self._ready_ns)

    def run(self, duration_ns: int) -> None:
        """Do an action. Blocks until it is over."""
        now_ns = time.monotonic_ns()
        if now_ns > self._ready_ns + duration_ns:  # the host gave it too late
            self._ready_ns = now_ns
        self.latest_ns = self._ready_ns, self._ready_ns + duration_ns
        self._ready_ns += duration_ns
        _sleep_until(self._ready_ns)


class EmulatedStage:
    """Takes what a stage takes, returns tensors of the size that it returns, and sleeps."""

    def __init__(
        self,
        stage: int,
        takes: Message,
        sends: Message | None,
        plan: Emulation,
        device: EmulatedDevice,
        replica: int = 0,
    ) -> None:
        """`takes`: the message of the stage before, () on the first; `sends` None on the last.

        `device` is the rank's, whose stages all have it.
        """
        self._device = device
        self.is_first, self.is_last, self._replica = not takes, sends is None, replica
        self._stage, self._takes, self._sends, self._plan = stage, takes, sends or (), plan
        self._held: set[int] = set()
        self._step = 0  # decides the jitter

    @property
    def num_held(self) -> int:
        return len(self._held)

    def begin_step(self, step: int, num_tokens: int) -> None:  # noqa: ARG002
        self._step = step

    def forward(self, microbatch: int, inputs: Tensors, targets: Tensor | None) -> Tensors:  # noqa: ARG002
        """Blocks for the time of F. Returns the next message; on the last stage no loss."""
        self._held.add(microbatch)
        self._sleep(Op.F, microbatch)
        return _empty(self._sends)

    def backward(self, microbatch: int, output_gradients: Tensors | None) -> Tensors:  # noqa: ARG002
        """Blocks for the time of B."""
        self._sleep(Op.B, microbatch)
        self._held.remove(microbatch)
        return _empty(gradient_message(self._takes))

    def backward_input(self, microbatch: int, output_gradients: Tensors | None) -> Tensors:  # noqa: ARG002
        """Blocks for the time of I."""
        self._sleep(Op.I, microbatch)
        return _empty(gradient_message(self._takes))

    def backward_weight(self, microbatch: int) -> None:
        """Blocks for the time of W."""
        self._sleep(Op.W, microbatch)
        self._held.remove(microbatch)

    def _sleep(self, op: Op, microbatch: int) -> None:
        action = Action(self._stage, op, microbatch)
        self._device.run(self._plan.duration_ns(action, self._step, self._replica))


class EmulatedCollectives:
    """Does a rank's collectives with the same rank of the other replicas, by sleeping.

    Each begins when the last of the replicas is there on its lane, and then takes its time.
    """

    def __init__(
        self,
        plan: Emulation,
        meet: Callable[[], int],
        lane: CollectiveLane,
        device: EmulatedDevice,
    ) -> None:
        """`device` waits for the collectives that its computations need.

        `meet` blocks the lane until the rank is there on all replicas, and returns since when: a
        time of this process's monotonic clock, in nanoseconds.
        """
        self._plan, self._meet, self.lane, self._device = plan, meet, lane, device
        self._unsharding: dict[int, Job] = {}

    def begin(self, action: Action) -> None:
        if action.op is not Op.RESHARD:
            took_ns = self._plan.collective_ns(action)
            job = self.lane.issue(action, lambda: _sleep_until(self._meet() + took_ns))
            if action.op is Op.UNSHARD:
                self._unsharding[action.stage] = job

    def wait_for(self, stage: int) -> None:
        if stage in self._unsharding:
            self.lane.wait(self._unsharding.pop(stage))
            self._device.hold_until(time.monotonic_ns())

    def finish_step(self) -> list[Transfer]:
        transfers = self.lane.finish()
        self._device.hold_until(time.monotonic_ns())
        return transfers

    def close(self) -> None:
        self.lane.close()


def _sleep_until(end_ns: int) -> None:
    time.sleep(max(0, end_ns - time.monotonic_ns()) / 1e9)


def wake_on_time() -> None:
    """Ask Linux to end this thread's sleeps at once, where by default it may take 50 us more.

    It stays so for this thread. Elsewhere nothing is done, and actions take a little longer than
    planned.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


def _empty(message: Message) -> Tensors:
    return tuple(torch.empty(spec.shape, dtype=spec.dtype) for spec in message)
