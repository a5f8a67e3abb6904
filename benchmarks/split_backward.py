"""A backward in two halves over a whole backward.

    python -m benchmarks.split_backward [--part 1]

For models of three sizes, a middle stage runs on one CPU thread, microbatch after microbatch, whole
(F, B) and split (F, I, W) in turn. A ratio above 1 is the cost of two halves: Python code, and
memory that is read once more. A ratio below 1 is a saving: W adds to a gradient while it
multiplies, and allocates no product. The last ratio is the forward that prepares for the split over
the plain one.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.outcome import Figure, Ratio, parser, write
from benchmarks.surroundings import read_surroundings
from benchmarks.turns import results_in_turns, seconds_of
from engine.model.spec import ModelSpec
from engine.model.split import open_model
from engine.run.stage import Stage

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Size:
    """A model, and the stage of it that is measured."""

    preset: str
    num_layers: int  # of the stage
    seq_len: int
    num_rounds: int

    def stages(self) -> tuple[Stage, Stage, tuple[int, ...]]:
        """The stage whole and split, from the second layer on, and the shape of its messages.

        Both have the same parameters, so their place in memory makes no difference.
        """
        model = open_model(ModelSpec(self.preset), (1, self.seq_len), CPU)
        end = 1 + self.num_layers
        partition = [range(1), range(1, end), range(end, model.num_layers)]
        message = model.messages(partition, 1, self.seq_len)[1]
        module = model.build_stage(partition, 1, CPU)
        again = copy.deepcopy(module, {id(p): p for p in module.parameters()})
        whole = Stage(module, message, contextlib.nullcontext())
        split = Stage(again, message, contextlib.nullcontext(), is_split=True)
        return whole, split, message[0].shape


SIZES = (
    Size("llama-tiny", num_layers=2, seq_len=128, num_rounds=600),
    Size("llama-8m", num_layers=4, seq_len=128, num_rounds=200),
    Size("llama-160m", num_layers=2, seq_len=128, num_rounds=40),
)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--part", type=float, default=1, help="share of the usual rounds")
    settings, surroundings = options.parse_args(), read_surroundings()
    torch.set_num_threads(1)
    parts = [measure(size, round(settings.part * size.num_rounds)) for size in SIZES]
    ratios = [ratio for part, _ in parts for ratio in part]
    write("split_backward", settings, surroundings, ratios, [figure for _, figure in parts])


def measure(size: Size, num_rounds: int) -> tuple[list[Ratio], Figure]:
    whole, split, shape = size.stages()
    x, gradient = torch.randn(shape), torch.randn(shape)
    gc.collect()
    gc.freeze()  # garbage is collected before each action, which would take longer than the action
    arms = {
        "whole": lambda: run_whole(whole, x, gradient),
        "split": lambda: run_split(split, x, gradient),
    }
    seconds = results_in_turns(arms, num_rounds, num_warmup=num_rounds // 10)
    f, b = zip(*seconds["whole"], strict=True)
    f_split, i, w = zip(*seconds["split"], strict=True)
    halves = [sum(both) for both in zip(i, w, strict=True)]
    pairs = {"(I + W) / B": (halves, b), "I / B": (i, b), "W / B": (w, b), "F / F": (f_split, f)}
    ratios = [Ratio.of(f"{size.preset}, {name}", *sides) for name, sides in pairs.items()]
    return ratios, Figure(f"{size.preset}, B", tuple(1e3 * each for each in b), "ms")


def run_whole(stage: Stage, x: Tensor, gradient: Tensor) -> tuple[float, ...]:
    forward = seconds_of(lambda: stage.forward(0, (x.clone(),), None))
    return forward, seconds_of(lambda: stage.backward(0, (gradient,)))


def run_split(stage: Stage, x: Tensor, gradient: Tensor) -> tuple[float, ...]:
    forward = seconds_of(lambda: stage.forward(0, (x.clone(),), None))
    backward_input = seconds_of(lambda: stage.backward_input(0, (gradient,)))
    return forward, backward_input, seconds_of(lambda: stage.backward_weight(0))


if __name__ == "__main__":
    main()
