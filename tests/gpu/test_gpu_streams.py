"""Ranks on a GPU rest on streams, NCCL's options, and one name for one device."""

import pytest
import torch

from benchmarks.claims import Standing
from benchmarks.gpu import clock, product
from benchmarks.gpu.device import Check
from engine.run import device as devices
from engine.run.p2p.nccl import MOST_CTAS, NCCL, options_of
from engine.run.streams import MOST_EDGES, Streams, TooManyEdgesError


@pytest.mark.parametrize("check", [product.identity, clock.streams, clock.ahead])
def test_a_check_misses_no_bound(gpu: torch.device, check: Check) -> None:
    assert not [row for row in check(gpu) if row.standing is Standing.missed]


def test_each_edge_of_a_rank_has_another_stream_and_no_more_are_lent(gpu: torch.device) -> None:
    streams = Streams(gpu)
    drawn = [streams.of_lane(), *(streams.of_edge(n) for n in range(MOST_EDGES))]
    assert len(set(drawn)) == MOST_EDGES + 1
    assert devices.current_stream(gpu) not in drawn
    with pytest.raises(TooManyEdgesError):
        streams.of_edge(MOST_EDGES)


def test_nccl_has_streams_of_high_priority_and_few_blocks(gpu: torch.device) -> None:
    options = options_of(NCCL, is_edge=True)
    assert getattr(options, "is_high_priority_stream", False)
    assert getattr(options, "config").max_ctas == MOST_CTAS  # noqa: B009  # of torch, untyped
