"""Ranks on a GPU rest on streams, NCCL's options, and one name for one device."""

import pytest
import torch

from benchmarks.gpu.__main__ import module_of
from benchmarks.gpu.findings import Verdict
from engine.run import device as devices
from engine.run.p2p.nccl import MOST_CTAS, NCCL, options_of
from engine.run.streams import MOST_EDGES, Streams, TooManyEdgesError


@pytest.mark.parametrize("name", ["identity", "streams", "ahead"])
def test_a_check_misses_no_bound(gpu: torch.device, name: str) -> None:
    module = module_of(name)
    findings = module.judge(module.measure(gpu))
    missed = [finding for finding in findings if finding.verdict is Verdict.MISSED]
    assert not missed


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
