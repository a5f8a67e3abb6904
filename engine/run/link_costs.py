"""Measures what a message between two ranks takes, over the engine's own channels.

Messages of several sizes go forth and back; a message takes half a round trip, from its SEND until
the other rank has it. Latency and bandwidth are those of the line through the medians:

    rank 0    SEND_F ----------.        ,--> RECV_B    one round trip
    rank 1               RECV_F `--> SEND_B
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls

from engine.model.stage_module import TensorSpec
from engine.plan.action import Action, Op
from engine.plan.messages import Edge
from engine.plan.model_costs import LinkCosts
from engine.run import device as devices
from engine.run.p2p.fabric import Fabric

SIZES_BYTES = (2**10, 2**14, 2**17, 2**20, 2**22)
NUM_ROUND_TRIPS = 40
_NUM_TO_WARM_UP = 10
_RANKS = (0, 1)
_FORTH, _BACK = Edge(0, 1), Edge(1, 0)


def measure_link(fabric: Fabric) -> LinkCosts | None:
    """What a message from one of the first two ranks to the other takes; None but on rank 0.

    Collective over the default process group. The others wait.
    """
    fabric.connect([_FORTH, _BACK], _RANKS, [])
    is_member = dist.get_rank() in _RANKS
    samples = {size: _one_way_ns(fabric, size) for size in SIZES_BYTES if is_member}
    return link_through(samples) if dist.get_rank() == 0 else None


def link_through(samples_ns: Mapping[int, Sequence[float]]) -> LinkCosts:
    """The line through the medians of messages of at least three sizes, in bytes.

    Each median counts by its relative distance from the line, whose root mean square is the error.
    Neither number is below zero; a link without a slope has no limit to its bandwidth.
    """
    sizes = np.array(list(samples_ns))
    medians = np.array([statistics.median(values) for values in samples_ns.values()])
    # Of each size, the two parts of its time over its median: their sum should be 1.
    parts = np.stack((1 / medians, sizes / medians), axis=1)
    (latency_ns, ns_per_byte), off = nnls(parts, np.ones(len(sizes)))
    error = float(off) / max(1, len(sizes) - 2) ** 0.5
    bytes_per_s = 1e9 / float(ns_per_byte) if ns_per_byte else float("inf")
    return LinkCosts(float(latency_ns), bytes_per_s, error)


def _one_way_ns(fabric: Fabric, num_bytes: int) -> list[float]:
    """Half of each round trip of a message of so many bytes; on rank 0."""
    message = (TensorSpec((num_bytes // 4,), torch.float32),)
    channels = fabric.open_channels(
        [_FORTH, _BACK], _RANKS, [message], NUM_ROUND_TRIPS, with_shapes=False
    )
    tensors = (torch.zeros(num_bytes // 4, device=fabric.device),)
    is_accelerator, took = devices.is_accelerator(fabric.device), []
    for microbatch in range(NUM_ROUND_TRIPS):
        if dist.get_rank() == 0:
            receive = Action(0, Op.RECV_B, microbatch)
            if is_accelerator:
                devices.wait_for_all(fabric.device)
            start_ns = time.monotonic_ns()
            channels[_BACK].post(receive, message)
            channels[_FORTH].send(Action(0, Op.SEND_F, microbatch), tensors)
            channels[_BACK].take(receive)
            if is_accelerator:
                devices.wait_for_all(fabric.device)
            took.append((time.monotonic_ns() - start_ns) / 2)
        else:
            receive = Action(1, Op.RECV_F, microbatch)
            channels[_FORTH].post(receive, message)
            received = channels[_FORTH].take(receive)
            channels[_BACK].send(Action(1, Op.SEND_B, microbatch), received)
    for channel in channels.values():
        channel.finish_step()
    fabric.gather_objects(None, _RANKS)  # the other has all of ours
    for channel in channels.values():
        channel.close()
    return took[_NUM_TO_WARM_UP:]
