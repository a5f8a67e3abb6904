"""The overhead of measuring: steps that record more and more, in turns on one trainer.

    python -m benchmarks.overhead

Two CPU ranks train llama-8m, 1F1B with 8 microbatches of 128 tokens. A turn is three steps in a row
with nothing recorded, with the flight record that every run has, with the spans of all actions as
in a sweep, or under torch.profiler with its default settings. Two processes differ by more than
this, so that all arms share one; each launch has new processes.
"""

from __future__ import annotations

import argparse
import gc
import itertools
from collections.abc import Callable, Iterator, Mapping

import torch.distributed as dist

from benchmarks.loop import in_turns, seconds_of, sides, within
from benchmarks.ranks import on_ranks
from benchmarks.rows import Row, run
from engine.model.data import DataSpec
from engine.model.spec import ModelSpec
from engine.run.p2p.fabric import Fabric
from engine.run.recording import Recording
from engine.trainer import Trainer, TrainerConfig, agree
from ppbench.run.worker.measure import profiler_for

BARE = "bare"
RECORDINGS: Mapping[str, Recording] = {
    BARE: Recording.off,
    "flight record": Recording.flight_only,
    "spans": Recording.spans,
    "torch.profiler": Recording.profiler_ranges,
}
CONFIG = TrainerConfig(
    ModelSpec("llama-8m", weights="random"), DataSpec(seq_len=128, num_microbatches=8), "1f1b", 2
)
NUM_STEPS, NUM_ROUNDS, FEWEST_LAUNCHES = 3, 12, 3


def spans(asked: argparse.Namespace) -> Iterator[Row]:
    """Compare each kind of recording with bare steps."""
    heads = ["spans", "flight record", *["torch.profiler"] * bool(asked.seconds)]
    num_rounds = NUM_ROUNDS if asked.seconds else 1
    launches = [
        on_ranks(2, "cpu", steps_in_turns, CONFIG, [BARE, *heads], num_rounds, is_shared=False)[0]
        for _ in within(asked.seconds, itertools.count(), FEWEST_LAUNCHES)
    ]
    for name in heads:
        yield Row.ratio(
            f"step with {name} over a bare one", [sides(turns, BARE, name) for turns in launches]
        )


def steps_in_turns(
    fabric: Fabric, config: TrainerConfig, recordings: list[str], num_rounds: int
) -> dict[str, list[float]]:
    """Seconds of the steps of a turn with each recording, round by round, on the slowest rank."""
    trainer, numbers = Trainer(agree(config, fabric), fabric), itertools.count()
    device = fabric.device.type

    def turn(name: str) -> Callable[[], float]:
        def steps() -> None:
            first = next(numbers) * NUM_STEPS
            trainer.steps(range(first, first + NUM_STEPS), RECORDINGS[name])
            dist.barrier()

        def timed() -> float:
            dist.barrier()
            if name != "torch.profiler":
                return seconds_of(steps)
            with profiler_for(device):  # whose start takes long, and is not timed
                took = seconds_of(steps)
            gc.collect()  # its garbage, before another arm's turn
            return took

        return timed

    gc.freeze()
    turns = in_turns({name: turn(name) for name in recordings}, range(num_rounds))
    trainer.close()
    return turns


PARTS = {"spans": spans}

if __name__ == "__main__":
    run("overhead", __doc__, PARTS)
