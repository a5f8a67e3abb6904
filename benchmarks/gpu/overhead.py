"""The overhead of spans on a GPU: steps with and without, in turn."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.findings import Bound, Finding
from benchmarks.outcome import Ratio
from benchmarks.overhead import measure_overhead
from ppbench.config.reader import read_sweep

NUM_ROUNDS = 24
SWEEP = """\
name = "overhead"
device = "{device}"
world_size = 1

[model]
preset = "{preset}"
dtype = "{dtype}"

[train]
microbatch_size = {microbatch_size}

[measure]
warmup_steps = 3

[grid]
schedule = ["1f1b"]
num_microbatches = [8]
seq_len = [{seq_len}]
"""
MODELS = {"cuda": ("llama-160m", "bfloat16", 512, 16), "cpu": ("llama-tiny", "float32", 32, 1)}


@dataclass(frozen=True)
class Measurements:
    """Nanoseconds of a step with and without spans, round by round."""

    with_spans_ns: tuple[int, ...]
    bare_ns: tuple[int, ...]


def judge(measured: Measurements) -> list[Finding]:
    ratio = Ratio.of("", measured.with_spans_ns, measured.bare_ns)
    low, high = ratio.interval or (min(ratio.values), max(ratio.values))
    return [
        Finding.of(
            "overhead",
            "a step with spans over a bare one",
            ratio.median,
            Bound(at_most=1.01),
            error=(high - low) / 2,
            note=f"the median of {len(ratio.values)} rounds, within half its 95 % interval",
        )
    ]


def measure(device: torch.device, num_rounds: int = NUM_ROUNDS) -> Measurements:
    preset, dtype, seq_len, size = MODELS[device.type]
    with tempfile.TemporaryDirectory(prefix="ppbench-gpu-") as folder:
        path = Path(folder) / "overhead.toml"
        model = {"device": device.type, "preset": preset, "dtype": dtype}
        path.write_text(SWEEP.format(**model, seq_len=seq_len, microbatch_size=size))
        sweep = read_sweep(path, [], device.type)
        (rounds,) = measure_overhead(sweep, num_rounds)
    return Measurements(tuple(rounds.on_ns), tuple(rounds.off_ns))
