"""A pipeline whose stages only take time: a trainer without a model.

Rank 0 looks at the model to know the size of every message; no rank holds weights.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from engine.configuration import edges_of, lowered_of
from engine.connection import Agreement
from engine.flight import NO_FLIGHT, Flight
from engine.model.data import StepBatch
from engine.run.alignment import clock_identity, is_same
from engine.run.collective_lane import HostLane
from engine.run.emulation import EmulatedCollectives, EmulatedStage, Emulation, wake_on_time
from engine.run.executor import Executor
from engine.run.p2p.fabric import Fabric
from engine.run.recording import Recording
from engine.trainer import StepResult


class EmulatedTrainer:
    """This rank's part of an emulated pipeline, or of one of its replicas.

    The first `config.num_processes` ranks of the default process group build one each, with the
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
        config = self.config = agreement.config
        process = dist.get_rank() if config.num_processes > 1 else 0
        self.replica, self.rank = divmod(process, config.world_size)
        self.program = lowered_of(config)
        first = process - self.rank
        ranks = tuple(first + rank for rank in self.program.placement.ranks)
        edges = edges_of(self.program)
        self._clock = fabric.clock
        wake_on_time()  # before the channels' threads, which inherit it
        delays_ns = emulation.delays_ns(edges)
        self.transport = fabric.transport_with(delays_ns)
        self._channels = fabric.open_channels(
            edges,
            ranks,
            agreement.messages,
            config.data.num_microbatches,
            with_shapes=config.data.is_variable,
            delays_ns=delays_ns,
        )
        messages = agreement.messages
        self.stages = {
            stage: EmulatedStage(
                stage,
                messages[stage - 1] if stage else (),
                messages[stage] if stage < len(messages) else None,
                emulation,
                self.replica,
            )
            for stage in self.program.placement.stages_of(self.rank)
        }
        self._collectives: EmulatedCollectives | None = None
        if config.replicas > 1:  # this rank of the other replicas, which meet over gloo
            everyone = tuple(range(self.rank, config.num_processes, config.world_size))
            group = fabric.group_of(everyone)
            clocks: list[str | None] = [None] * config.replicas
            dist.all_gather_object(clocks, clock_identity(), group=group)
            is_one_clock = all(is_same(clocks[0], clock) for clock in clocks)

            def meet() -> int:
                """Block until all of them are here; returns since when they are, on our clock.

                What the message about it takes is no part of a collective's planned time. Where the
                ranks' clocks are not one, it is: then it is the time at which this rank knows.
                """
                latest = torch.tensor(time.monotonic_ns())
                dist.all_reduce(latest, dist.ReduceOp.MAX, group)
                known_ns = time.monotonic_ns()
                return min(int(latest), known_ns) if is_one_clock else known_ns

            lane = HostLane(self.rank, self.replica, flight)
            self._collectives = EmulatedCollectives(emulation, meet, lane)
        self._executor = Executor(
            self.program,
            self.rank,
            self.stages,
            self._channels,
            fabric.clock,
            messages,
            flight,
            self._collectives,
            self.replica,
        )
        # Of the right size; the token ids are never read. As in training, the tokens are those of
        # all replicas.
        data = config.data
        microbatch = torch.zeros(data.microbatch_size, data.longest, dtype=torch.int64)
        microbatches = (microbatch,) * data.num_microbatches
        num_tokens = config.replicas * data.num_microbatches * microbatch.numel()
        self._batch = StepBatch(microbatches, microbatches, num_tokens)

    def step(self, step: int, recording: Recording = Recording.spans) -> StepResult:
        """One step; returns when this rank's part of it is over. There is no loss."""
        for stage in self.stages.values():
            stage.step = step
        self._executor.run(step, self._batch, recording)
        timed = self._executor.end_step(step)
        self._clock.end()
        spans, early = timed.read(self._clock)
        return StepResult(None, self._batch.num_tokens, 0.0, None, spans, early)

    @property
    def peak_held(self) -> int:
        """The most microbatches that this rank has held at once, over its stages, in any step."""
        return self._executor.peak_held

    def close(self) -> None:
        """Give back the channels; the trainer is not used again."""
        for channel in self._channels.values():
            channel.close()
        if self._collectives is not None:
            self._collectives.close()
