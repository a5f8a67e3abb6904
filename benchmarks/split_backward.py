"""Whether a backward in two halves costs more than a whole one.

    python benchmarks/split_backward.py

For models of three sizes: a middle stage on one CPU thread, microbatch after microbatch, as it is
(F, B) and split (F, I, W) by turns. Shows how long the halves take over the whole, I + W and each,
as the median over pairs that ran next to each other, with the interval that holds the median with a
confidence of 95 %. A forward that prepares for being split takes longer by F / F.

Above 1 is what the halves cost: lines of Python, and memory that is read once more. Below 1 is what
they save: W adds to a gradient as it multiplies, and makes room for no product.
"""

from __future__ import annotations

import contextlib
import copy
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

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
    num_pairs: int

    def stages(self) -> tuple[Stage, Stage, tuple[int, ...]]:
        """Whole and split, of layers from the second on, and the shape that both take and give.

        With the same parameters, so that where these lie in memory makes no difference.
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
    Size("llama-tiny", num_layers=2, seq_len=128, num_pairs=1000),
    Size("llama-8m", num_layers=4, seq_len=128, num_pairs=200),
    Size("llama-160m", num_layers=2, seq_len=128, num_pairs=40),
)


@dataclass(frozen=True)
class Pair:
    """Seconds of a whole microbatch and of a split one, right after one another."""

    forward: float
    backward: float
    split_forward: float
    backward_input: float
    backward_weight: float


def main() -> None:
    torch.set_num_threads(1)
    print("| model | layers | tokens | B, ms | (I + W) / B | 95 % | I / B | W / B | F / F |")
    print("|---|---:|---:|---:|---:|---|---:|---:|---:|")
    for size in SIZES:
        print(row(size, measure(size)), flush=True)


def measure(size: Size) -> list[Pair]:
    whole, split, shape = size.stages()
    x, gradient = torch.randn(shape), torch.randn(shape)
    num_unmeasured = size.num_pairs // 10
    pairs = []
    for index in range(num_unmeasured + size.num_pairs):
        if index % 2:  # which of them comes first should not matter
            of_split, of_whole = run_split(split, x, gradient), run_whole(whole, x, gradient)
        else:
            of_whole, of_split = run_whole(whole, x, gradient), run_split(split, x, gradient)
        pairs.append(Pair(*of_whole, *of_split))
    return pairs[num_unmeasured:]


def run_whole(stage: Stage, x: Tensor, gradient: Tensor) -> tuple[float, float]:
    forward = seconds(lambda: stage.forward(0, (x.clone(),), None))
    return forward, seconds(lambda: stage.backward(0, (gradient,)))


def run_split(stage: Stage, x: Tensor, gradient: Tensor) -> tuple[float, float, float]:
    forward = seconds(lambda: stage.forward(0, (x.clone(),), None))
    backward_input = seconds(lambda: stage.backward_input(0, (gradient,)))
    return forward, backward_input, seconds(lambda: stage.backward_weight(0))


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def row(size: Size, pairs: list[Pair]) -> str:
    halves = [(p.backward_input + p.backward_weight) / p.backward for p in pairs]
    low, high = interval_of_median(halves)
    return (
        f"| {size.preset} | {size.num_layers} | {size.seq_len} "
        f"| {1e3 * statistics.median(p.backward for p in pairs):.2f} "
        f"| {statistics.median(halves):.3f} | {low:.3f} to {high:.3f} "
        f"| {statistics.median(p.backward_input / p.backward for p in pairs):.3f} "
        f"| {statistics.median(p.backward_weight / p.backward for p in pairs):.3f} "
        f"| {statistics.median(p.split_forward / p.forward for p in pairs):.3f} |"
    )


def interval_of_median(values: list[float]) -> tuple[float, float]:
    """Between the order statistics 1.96 standard deviations of the binomial from the middle."""
    reach = 1.96 * math.sqrt(len(values)) / 2
    first = max(0, math.floor(len(values) / 2 - reach))
    ordered = sorted(values)
    return ordered[first], ordered[-1 - first]


if __name__ == "__main__":
    main()
