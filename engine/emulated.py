"""A pipeline whose stages only take time: a trainer without a model.

Rank 0 looks at the model to know the size of every message; no rank holds weights.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from engine.configuration import edges_of, lowered_of
from engine.connection import Agreement
from engine.flight import NO_FLIGHT, Flight
from engine.model.data import StepBatch
from engine.run.emulation import EmulatedStage, Emulation, wake_on_time
from engine.run.executor import Executor
from engine.run.p2p.fabric import Fabric
from engine.run.recording import Recording
from engine.trainer import StepResult


class EmulatedTrainer:
    """This rank's part of an emulated pipeline.

    The first `config.world_size` ranks of the default process group build one each, with the
    agreement that `engine.connection.agree` returned, and call `step` with the same numbers. Raises
    what building the program raises.
    """

    def __init__(
        self,
        agreement: Agreement,
        emulation: Emulation,
        fabric: Fabric,
        flight: Flight = NO_FLIGHT,
    ) -> None:
        self.config = agreement.config
        self.rank = dist.get_rank() if self.config.world_size > 1 else 0
        self.program = lowered_of(self.config)
        ranks = self.program.placement.ranks
        edges = edges_of(self.program)
        wake_on_time()  # before the channels' threads, which inherit it
        delays_ns = emulation.delays_ns(edges)
        self.transport = fabric.transport_with(delays_ns)
        self._channels = fabric.open_channels(
            edges,
            ranks,
            agreement.messages,
            self.config.data.num_microbatches,
            with_shapes=self.config.data.is_variable,
            delays_ns=delays_ns,
        )
        messages = agreement.messages
        self.stages = {
            stage: EmulatedStage(
                stage,
                messages[stage - 1] if stage else (),
                messages[stage] if stage < len(messages) else None,
                emulation,
            )
            for stage in self.program.placement.stages_of(self.rank)
        }
        self._executor = Executor(
            self.program,
            self.rank,
            self.stages,
            self._channels,
            fabric.clock,
            messages,
            flight,
        )
        self._batch = self._nominal_batch()

    def step(self, step: int, recording: Recording = Recording.spans) -> StepResult:
        """One step; returns when this rank's part of it is over. There is no loss."""
        for stage in self.stages.values():
            stage.step = step
        self._executor.run(step, self._batch, recording)
        spans = self._executor.collect_spans(step)
        return StepResult(None, self._batch.num_tokens, 0.0, None, spans)

    @property
    def peak_held(self) -> int:
        """The most microbatches that this rank has held at once, over its stages, in any step."""
        return self._executor.peak_held

    def close(self) -> None:
        """Give back the channels; the trainer is not used again."""
        for channel in self._channels.values():
            channel.close()

    def _nominal_batch(self) -> StepBatch:
        """Return a batch of the right size; its token ids are never read."""
        data = self.config.data
        microbatch = torch.zeros(data.microbatch_size, data.longest, dtype=torch.int64)
        microbatches = (microbatch,) * data.num_microbatches
        return StepBatch(microbatches, microbatches, microbatch.numel() * data.num_microbatches)
