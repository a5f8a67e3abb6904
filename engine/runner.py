"""What runs a step's microbatches, and what comes of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar, TypeVarTuple

from torch import Tensor

from engine.flight import Phase
from engine.model.data import StepBatch
from engine.plan.action import Action
from engine.plan.footprint import Messages
from engine.plan.program import Program
from engine.plan.spans import Span
from engine.run.clock import Clock
from engine.run.recording import Recording

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True)
class StepResult:
    """One rank's results of a step; what is said of the step is of all replicas."""

    loss: float | None  # mean per token; on the rank of the last stage
    num_tokens: int  # targets that counted, over all microbatches
    learning_rate: float
    gradient_norm: float | None  # over all stages, before clipping; None where nothing is clipped
    spans: list[Span]  # empty where the step was run without
    early: frozenset[Action] = frozenset()  # receives that were there when the rank asked for them


class Runner(Protocol):
    """Runs a step's microbatches forward and backward on this rank: the executor, or others.

    It leaves the gradients of the step's mean loss per token in `.grad` of the trainer's modules.
    """

    @property
    def peak_held(self) -> int:
        """The most microbatches whose activations this rank has held at once, in any step."""

    @property
    def lowered(self) -> Program:
        """The program of all ranks, with transfers; known after the first step."""

    @property
    def messages(self) -> Messages | None:
        """What holds messages, and how long, for the prediction of memory; None: none is made."""

    def enter(self, phase: Phase) -> None:
        """Note what the rank comes to beside its actions."""

    def run(self, step: int, batch: StepBatch, recording: Recording) -> Tensor | None:
        """One step; returns its mean loss per token where the last stage is."""

    def perform(
        self, action: Action, work: Callable[[*Arguments], Result], *arguments: *Arguments
    ) -> Result:
        """Do work beside the microbatches as an action of the step that has just run."""

    def timed_by(self, clock: Clock) -> AbstractContextManager[None]:
        """Meanwhile this clock times the actions."""

    def collect_spans(self, step: int) -> list[Span]:
        """The spans of the step that has just run. Blocks until the device is done with it."""

    def held_tensors(self) -> Iterable[Tensor]:
        """What it keeps from step to step and may let go of within one."""

    def close(self) -> None:
        """Give back what it holds; it is not used again."""
