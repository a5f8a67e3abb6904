"""A stage that only takes time: so that many ranks behave on two cores as they would on devices.

Everything around it is real: processes, program, channels and the size of every message. Only the
computation is a sleep, during which the core is free for the other ranks.
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
from engine.plan.action import NO_INDEX, Action, Op
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
    """Times of halves of pairs and of slices, which are not those of their stage."""

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

    def reduce(self, stage: int, meet: Callable[[], int]) -> None:
        """Take the time of a stage's REDUCE_GRAD, since when all of its owners are there."""
        _sleep_until(meet() + self.collective_ns(Action(stage, Op.REDUCE_GRAD, NO_INDEX)))


class EmulatedStage:
    """Takes what a stage takes, returns tensors of the size that it returns, and sleeps."""

    def __init__(
        self, stage: int, takes: Message, sends: Message | None, plan: Emulation, replica: int = 0
    ) -> None:
        """`takes`: the message of the stage before, () on the first; `sends` None on the last."""
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
        began_ns = time.monotonic_ns()
        action = Action(self._stage, op, microbatch)
        _sleep_until(began_ns + self._plan.duration_ns(action, self._step, self._replica))


class EmulatedCollectives:
    """Does a rank's collectives with the same rank of the other replicas, by sleeping.

    Each begins when the last of the replicas is there on its lane, and then takes its time.
    """

    def __init__(self, plan: Emulation, meet: Callable[[], int], lane: CollectiveLane) -> None:
        """`meet` blocks the lane until the rank is there on all replicas, and returns since when.

        Its time is one of this process's monotonic clock, in nanoseconds.
        """
        self._plan, self._meet, self.lane = plan, meet, lane
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

    def finish_step(self) -> list[Transfer]:
        return self.lane.finish()

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
