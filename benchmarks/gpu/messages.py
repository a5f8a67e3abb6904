"""Ranks with a GPU each: NCCL's messages are exact, and each edge has a stream of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.gpu import exactness
from benchmarks.gpu.exactness import settings_of
from benchmarks.gpu.findings import Bound, Finding
from benchmarks.gpu.ranks import on_ranks
from engine.run.p2p.fabric import Fabric
from engine.trainer import Trainer, agree

CASES = (("afab", 2), ("1f1b", 2), ("interleaved_1f1b", 2), ("zbv", 2))
NUM_CASES_IN_A_LAUNCH = 12


@dataclass(frozen=True)
class Measurements:
    exact: exactness.Measurements
    num_edges: int
    num_streams: int  # of the edges' channels, the fewest of any case in one launch


def judge(measured: Measurements) -> list[Finding]:
    over_nccl = all(transport == "nccl" for transport in measured.exact.transports.values())
    return [
        *exactness.judge(measured.exact),
        Finding.of("messages", "cases over nccl", int(over_nccl), Bound(at_least=1)),
        Finding.of(
            "messages",
            f"streams of {measured.num_edges} edges of a rank, the fewest of "
            f"{NUM_CASES_IN_A_LAUNCH} cases in one launch",
            measured.num_streams,
            Bound(at_least=measured.num_edges),
            note="edges that share a stream serialise, or hang",
        ),
    ]


def measure(device: torch.device) -> Measurements:
    exact = exactness.compared(device, CASES, is_shared=False, check="messages")
    counts = on_ranks(2, device.type, count_streams, is_shared=False)
    edges, streams = zip(*counts, strict=True)
    return Measurements(exact, max(edges), min(streams))


def count_streams(fabric: Fabric) -> tuple[int, int]:
    """The edges of this rank, and the fewest streams that their channels had in a launch."""
    fewest, num_edges = 10**6, 0
    for _ in range(NUM_CASES_IN_A_LAUNCH):
        trainer = Trainer(agree(settings_of("interleaved_1f1b", 2), fabric), fabric)
        trainer.step(0)
        channels = list(trainer.runner._opened.values())  # type: ignore[attr-defined]  # the engine's runner
        streams = {getattr(channel, "_stream", id(channel)) for channel in channels}
        fewest, num_edges = min(fewest, len(streams)), len(channels)
        trainer.close()
    return num_edges, fewest
