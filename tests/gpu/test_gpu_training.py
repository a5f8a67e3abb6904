"""Ranks on one device, or on one each: exact, in the order of their messages, and their memory."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.clock import forbidden
from benchmarks.gpu.device import trainer_on
from benchmarks.gpu.training import (
    TOLERANCE,
    Trained,
    count_streams,
    difference,
    off_line,
    peaks,
    settings_of,
    train,
    train_all,
)
from benchmarks.ranks import RankError, on_ranks
from engine.plan.action import Op
from engine.run.clock import clock_for
from engine.run.p2p.fabric import Fabric

ALSO_THOROUGH = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.thorough), "cuda"], indirect=True
)
"""What other tests show of the CPU is tried there in thorough runs only."""
TRANSPORTS = {"cpu": "memory", "cuda": "gloo via host memory"}


def unsplit(device: torch.device) -> Trained:
    fabric = Fabric(device, clock_for(device), is_device_shared=False)
    return train(fabric, settings_of("afab", 1))


def assert_messages_follow_their_dependencies(parts: Sequence[Trained]) -> None:
    at = {(s.op, s.stage, s.microbatch): s for part in parts for s in part.spans}
    received = [key for key in at if key[0] is Op.RECV_F]
    assert received
    for _, stage, microbatch in received:
        receive, send = at[Op.RECV_F, stage, microbatch], at[Op.SEND_F, stage - 1, microbatch]
        assert receive.end_ns <= at[Op.F, stage, microbatch].start_ns
        assert at[Op.F, stage - 1, microbatch].end_ns <= send.end_ns


def last_first(folder: Path) -> str:
    """A program whose receivers take the last message first."""
    rows = [
        [f"0F{m}" for m in range(4)] + [f"0B{m}" for m in range(4)],
        [f"1{op}{m}" for m in range(3, -1, -1) for op in "FB"],
    ]
    path = folder / "last_first.csv"
    path.write_text("\n".join(",".join(row) for row in rows))
    return f"csv:{path}"


def assert_exact(device: torch.device, folder: Path, transport: str, *, is_shared: bool) -> None:
    every = [settings_of(schedule, 2) for schedule in ("afab", "1f1b", last_first(folder))]
    alone = unsplit(device)
    ranks = on_ranks(2, device.type, train_all, every, is_shared=is_shared)
    for parts in zip(*ranks, strict=True):
        assert {part.transport for part in parts} == {transport}
        assert difference(parts, alone) <= TOLERANCE
        assert_messages_follow_their_dependencies(parts)


@ALSO_THOROUGH
def test_ranks_that_share_a_device_are_exact(device: torch.device, tmp_path: Path) -> None:
    assert_exact(device, tmp_path, TRANSPORTS[device.type], is_shared=True)


def test_ranks_with_a_gpu_each_use_nccl_and_are_exact(
    two_gpus: torch.device, tmp_path: Path
) -> None:
    assert_exact(two_gpus, tmp_path, "nccl", is_shared=False)


def test_every_edge_of_a_rank_has_a_stream_of_its_own_in_case_after_case(
    two_gpus: torch.device,
) -> None:
    for num_edges, num_streams in on_ranks(2, two_gpus.type, count_streams, is_shared=False):
        assert num_streams == num_edges > 1


def fails(fabric: Fabric) -> None:
    raise ValueError(f"not today, {fabric.device}")


@pytest.mark.thorough
def test_a_rank_that_fails_is_named_with_its_words() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0: .*not today, cpu"):
        on_ranks(1, "cpu", fails, is_shared=True)


def test_no_step_waits_for_its_device_while_it_is_issued(device: torch.device) -> None:
    trainer = trainer_on(device, "zb_h1", 4)
    trainer.step(0)
    with forbidden(device) as errors:
        issued = [trainer.issue(step) for step in (1, 2)]
    results = trainer.read(issued)
    trainer.close()
    assert errors == []
    assert [{span.step for span in result.spans} for result in results] == [{1}, {2}]


@ALSO_THOROUGH
def test_peak_memory_is_linear_for_afab_and_flat_for_1f1b(device: torch.device) -> None:
    afab, one_f_one_b = peaks("afab", device), peaks("1f1b", device)
    assert off_line(afab) < 0.1
    flat = [peak.peak_bytes for peak in one_f_one_b]
    assert max(flat) < 1.05 * min(flat)
    assert flat[-1] < afab[-1].peak_bytes
    for peak in (*afab, *one_f_one_b):
        assert peak.predicted_bytes is not None
        assert abs(peak.predicted_bytes / peak.peak_bytes - 1) <= 0.1


def test_a_step_is_taken_apart_into_what_its_memory_is_for(device: torch.device) -> None:
    trainer = trainer_on(device, "1f1b", 2)
    trainer.step(0)
    use = trainer.measure_memory(1)
    trainer.close()
    assert use is not None
    assert sum(vars(use.at_peak).values()) == use.peak_bytes
    assert (use.reserved_bytes is None) == (device.type == "cpu")
    assert use.reserved_bytes is None or use.peak_bytes <= use.reserved_bytes
    highest = max(level.num_bytes for level in use.timeline)
    assert abs(highest / use.peak_bytes - 1) <= 0.05
