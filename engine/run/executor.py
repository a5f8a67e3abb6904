"""Runs one rank's row of a lowered program: one function per op, one loop, one span per action.

    for action in row:            F   take input, run the stage, hand on the output
        operation[action.op]      B   take output gradient, run backward, hand on the input gradient
                                  I   the same, the weight gradients put off
                                  W   the weight gradients that were put off
                                  SEND_*  hand what was kept to the channel
                                  RECV_*  post a buffer on the channel
                                  UNSHARD, RESHARD, REDUCE_GRAD  begin it on its lane; of one
                                  replica, sum a stage's gradients with its copy's

The halves of a pair run in order, once both have their input. What they make is sent when both are
over.

What F, B or I hands on is kept until its SEND, or until the next stage takes it where that is on
this rank. Only a computation ever waits, before it begins: F, B and I for their input, and each of
them and W for parameters that are sharded. On an accelerator the compute stream waits and the host
goes on. That time is in no span and in no range of a profile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from engine.flight import NO_FLIGHT, Flight
from engine.model.data import StepBatch
from engine.model.stage_module import Message, gradient_message
from engine.plan.action import COLLECTIVE_OPS, COMPUTE_OPS, Action, Op
from engine.plan.messages import Edge, edge_of, incoming, outgoing
from engine.plan.program import Program
from engine.run.clock import Clock
from engine.run.collective_lane import Collectives
from engine.run.issue_limit import IssueLimit
from engine.run.p2p.channel import Channel, Transfer
from engine.run.recording import Recording
from engine.run.runner import Runner, StepMarks
from engine.run.stage import Tensors


class StageRunner(Protocol):
    """The interface of a stage: `engine.run.stage.Stage`, or one that only takes time."""

    @property
    def is_first(self) -> bool:
        """Whether it takes token ids rather than a message."""

    @property
    def is_last(self) -> bool:
        """Whether it takes targets and returns the loss."""

    @property
    def num_held(self) -> int:
        """Microbatches between their forward and the end of their backward."""

    def begin_step(self, step: int, num_tokens: int) -> None:
        """`num_tokens`: targets that count over the whole step."""

    def forward(self, microbatch: int, inputs: Tensors, targets: Tensor | None) -> Tensors:
        """The next message; on the last stage the loss, or nothing where none is computed."""

    def backward(self, microbatch: int, output_gradients: Tensors | None) -> Tensors:
        """All gradients; returns those of the inputs."""

    def backward_input(self, microbatch: int, output_gradients: Tensors | None) -> Tensors:
        """The gradients of the inputs."""

    def backward_weight(self, microbatch: int) -> None:
        """The gradients that `backward_input` left."""


class Executor(Runner):
    """Executes the same row step after step.

    `messages[stage]` is what a stage sends to the next. Where shapes vary, the channels know.
    """

    def __init__(
        self,
        lowered: Program,
        rank: int,
        stages: Mapping[int, StageRunner],
        channels: dict[Edge, Channel],
        clock: Clock,
        messages: list[Message],
        flight: Flight = NO_FLIGHT,
        collectives: Collectives | None = None,
        replica: int = 0,
        issue_limit: IssueLimit | None = None,
        sum_copies: Callable[[int], None] | None = None,
    ) -> None:
        """`collectives` does those of the program, where it has any.

        `sum_copies` sums a stage's gradients with those of its copy, where one replica has two;
        it blocks until the other is there. `issue_limit` bounds how far the host runs
        ahead of a device; None: not at all.
        """
        super().__init__(rank, replica, clock, flight)
        self._lowered, self._row = lowered, lowered.actions[rank]
        self._has_backward = lowered.has_backward
        self._stages, self._channels = stages, channels
        computations = [action for action in self._row if action.op in COMPUTE_OPS]
        receives = {action: incoming(action, lowered) for action in computations}
        sends = {action: outgoing(action, lowered) for action in computations}
        # Looked up once rather than in each step: a computation's messages, their channels.
        self._receives = {action: r for action, r in receives.items() if r is not None}
        self._sends = {action: s for action, s in sends.items() if s is not None}
        transfers = (a for a in self._row if a.op not in COMPUTE_OPS | COLLECTIVE_OPS)
        self._channel_of = {transfer: channels[edge_of(transfer)] for transfer in transfers}
        self._messages = messages
        self._operations: dict[Op, Callable[[Action], None]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward,
            Op.W: self._weight_gradients,
            Op.SEND_F: self._send,
            Op.SEND_B: self._send,
            Op.RECV_F: self._receive,
            Op.RECV_B: self._receive,
        }
        if sum_copies is not None:
            add: Callable[[int], None] = sum_copies
            self._operations[Op.REDUCE_GRAD] = lambda action: self.perform(
                action, add, action.stage
            )
        self._collectives = collectives
        if collectives is not None:
            begin: Callable[[Action], None] = collectives.begin
            self._operations |= dict.fromkeys(COLLECTIVE_OPS, begin)
            if any(action.op is Op.UNSHARD for action in self._row):

                def unsharded(compute: Callable[[Action], None], action: Action) -> None:
                    collectives.wait_for(action.stage)
                    compute(action)

                for op in COMPUTE_OPS:
                    self._operations[op] = functools.partial(unsharded, self._operations[op])
        if issue_limit is not None:
            for op in COMPUTE_OPS:
                self._operations[op] = issue_limit.bounded(self._operations[op])
        first, table = lowered.table.offset[rank], lowered.table
        own = enumerate(lowered.mates[first : first + len(self._row)], first)
        self._mates = {table.at(at): table.at(mate) for at, mate in own if mate >= 0}
        self._taken: dict[Action, Tensors] = {}  # the gradients that backwards of pairs will take
        self._handed_on: dict[Action, Tensors] = {}  # by the action that takes it: a SEND, F or B
        self._losses: list[Tensor] = []
        self._joined: list[Transfer] = []  # the collectives of the step that were timed
        self._batch: StepBatch | None = None

    @property
    def lowered(self) -> Program:
        return self._lowered

    def run(self, step: int, batch: StepBatch, recording: Recording) -> Tensor | None:
        """Execute one step's actions."""
        self._batch = batch
        self._losses.clear()
        for channel in self._channels.values():
            channel.is_timed = recording.has_spans
        if self._collectives is not None:
            self._collectives.lane.is_timed = recording.has_spans
        if recording.has_spans:
            self.clock.begin()  # ties its marks, which the first time synchronises the device
        self.begin(step, recording)
        for stage in self._stages.values():
            stage.begin_step(step, batch.num_tokens)
        for index, action in enumerate(self._row):
            self._flight.come_to(index)
            self._operations[action.op](action)
        if self._collectives is not None:
            self._joined = self._collectives.finish_step()
        return torch.stack(self._losses).sum() if self._losses else None

    def end_step(self, step: int) -> StepMarks:
        """Hand over what was timed of the step that just ran, where anything was.

        Blocks until its transfers through the host are done; does not wait for the device.
        """
        marks = super().end_step(step)
        transfers = [t for channel in self._channels.values() for t in channel.finish_step()]
        transfers += self._joined
        marks.actions.extend(
            (t.action, t.start, t.end, t.num_bytes) for t in transfers if t.end is not None
        )
        return marks

    def _forward(self, action: Action) -> None:
        """Effect: the stage holds the microbatch. Blocks until its input is there."""
        stage, _, microbatch = action
        assert self._batch is not None
        runner = self._stages[stage]
        inputs = (self._batch.inputs[microbatch],) if runner.is_first else self._take(action)
        targets = self._batch.targets[microbatch] if runner.is_last else None
        mate = self._mates.get(action)
        if mate is not None and not self._stages[mate.stage].is_last:
            self._taken[mate] = self._take(mate)
        outputs = self.perform(action, runner.forward, microbatch, inputs, targets)
        if runner.is_last:
            self._losses += outputs
        else:
            self._hand_on(action, Action(stage + 1, Op.F, microbatch), outputs)
        num_held = sum(s.num_held for s in self._stages.values()) if self._has_backward else 1
        self.peak_held = max(self.peak_held, num_held)

    def _backward(self, action: Action) -> None:
        """Effect: the input gradient is made. Blocks until the output gradient is there.

        B also adds all weight gradients and releases the microbatch.
        """
        stage, op, microbatch = action
        runner = self._stages[stage]
        gradients = self._taken.pop(action, None)
        if gradients is None and not runner.is_last:
            gradients = self._take(action)
        backward = runner.backward if op is Op.B else runner.backward_input
        input_gradients = self.perform(action, backward, microbatch, gradients)
        if not runner.is_first:
            self._hand_on(action, Action(stage - 1, Op.B, microbatch), input_gradients)

    def _weight_gradients(self, action: Action) -> None:
        """Effect: gradients added, the microbatch released. Never blocks."""
        self.perform(action, self._stages[action.stage].backward_weight, action.microbatch)

    def _send(self, action: Action) -> None:
        """Effect: the message is queued. Never blocks; done when the peer has received it."""
        channel = self._channel_of[action]
        self._in_range(action, channel.send, action, self._handed_on.pop(action))

    def _receive(self, action: Action) -> None:
        """Effect: buffers are posted. Never blocks; done when the message is in them."""
        if action.op is Op.RECV_F:
            message = self._messages[action.stage - 1]
        else:
            message = gradient_message(self._messages[action.stage])
        self._in_range(action, self._channel_of[action].post, action, message)

    def _hand_on(self, producer: Action, neighbour: Action, tensors: Tensors) -> None:
        """Hand on to the SEND that follows, or to this rank's next stage (I takes what B would)."""
        self._handed_on[self._sends.get(producer, neighbour)] = tensors

    def _take(self, action: Action) -> Tensors:
        receive = self._receives.get(action)
        if receive is not None:
            return self._channel_of[receive].take(receive)
        return self._handed_on.pop(action._replace(op=Op.B) if action.op is Op.I else action)
