"""A pipeline whose stages only take time: a trainer without a model.

Rank 0 looks at the model to know the size of every message; no rank holds weights.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from engine.configuration import edges_of
from engine.connection import Agreement, Place
from engine.flight import NO_FLIGHT, Flight
from engine.model.data import StepBatch
from engine.run.alignment import clock_identity, is_same
from engine.run.collective_lane import HostLane
from engine.run.emulation import EmulatedCollectives, EmulatedStage, Emulation, wake_on_time
from engine.run.p2p.fabric import Fabric
from engine.run.recording import Recording
from engine.trainer import Executing, StepResult


class EmulatedTrainer:
    """This rank's part of an emulated pipeline, or of one of its replicas.

    The first `config.num_processes` ranks of the default process group build one each, with what
    `engine.connection.agree` returned, and call `step` with the same numbers.
    """

    def __init__(
        self,
        agreement: Agreement,
        emulation: Emulation,
        fabric: Fabric,
        flight: Flight = NO_FLIGHT,
    ) -> None:
        self.agreement, config, place = agreement, agreement.config, Place.of(agreement.config)
        self.replica, self.rank, self.program = place.replica, place.rank, agreement.lowered
        self._clock, messages = fabric.clock, agreement.messages
        wake_on_time()  # before the channels' threads, which inherit it
        delays_ns = emulation.delays_ns(edges_of(self.program))
        self.transport = fabric.transport_with(delays_ns)
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
            group = fabric.group_of(place.same_rank)
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
        self._executor = Executing(
            agreement, fabric, self.stages, flight, self._collectives, delays_ns=delays_ns
        )
        # They are never read. As in training, the targets are those of all replicas.
        microbatches = (torch.empty(0),) * config.data.num_microbatches
        num_tokens = config.replicas * len(microbatches) * agreement.num_targets
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
        self._executor.close()
        if self._collectives is not None:
            self._collectives.close()
