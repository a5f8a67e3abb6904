"""The CUDA path: exact as on the CPU, timed by events, staged through the host or over NCCL."""

import multiprocessing
import os
import socket
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from engine.model.data import DataSpec
from engine.model.spec import ModelSpec
from engine.plan.action import Op
from engine.plan.spans import Lane, Span
from engine.run.clock import DeviceClock, clock_for
from engine.run.memory import MemoryUse
from engine.run.p2p.fabric import Fabric
from engine.trainer import Trainer, TrainerConfig, connect

DEVICE = torch.device("cuda", 0)
PATIENCE_S = 300


def config(schedule, world_size, *, preset="llama-tiny", dtype="float64", seq_len=32, m=4):
    return TrainerConfig(
        ModelSpec(preset, dtype),
        DataSpec(seq_len=seq_len, num_microbatches=m),
        schedule,
        world_size,
    )


@dataclass
class Outcome:
    loss: float | None
    gradients: dict[str, torch.Tensor]
    spans: list[Span]
    wall_ns: int
    transport: str
    peaks: MemoryUse


def train(settings, device, is_shared):
    fabric = Fabric(device, clock_for(device), is_shared)
    settings = connect(settings, fabric)
    trainer = Trainer(settings, fabric)
    loss = trainer.compute_gradients(0)
    gradients = {name: p.grad.cpu() for name, p in trainer.parameters().items()}
    for step in range(2):
        trainer.step(step)
    started_ns = time.monotonic_ns()
    spans = trainer.step(2).spans
    wall_ns = time.monotonic_ns() - started_ns
    peaks = trainer.measure_memory(3)
    trainer.close()
    return Outcome(loss, gradients, spans, wall_ns, fabric.transport, peaks)


def rank_main(rank, settings, port, is_shared, pipe):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(settings.world_size))
    device = torch.device("cuda", 0 if is_shared else rank)
    torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    pipe.send(train(settings, device, is_shared))
    dist.barrier()
    dist.destroy_process_group()


def train_on_ranks(settings, *, is_shared):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(settings.world_size):
        ours, theirs = context.Pipe()
        arguments = (rank, settings, port, is_shared, theirs)
        processes.append(context.Process(target=rank_main, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    assert all(pipe.poll(PATIENCE_S) for pipe in pipes), "the pipeline hangs"
    outcomes = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join(PATIENCE_S)
    return outcomes


def assert_same_gradients(outcomes, settings):
    unsplit = train(config("afab", 1), DEVICE, is_shared=False)
    merged = {name: g for o in outcomes for name, g in o.gradients.items()}
    assert merged.keys() == unsplit.gradients.keys()
    for name, gradient in merged.items():
        theirs = unsplit.gradients[name]
        assert float((gradient - theirs).abs().max() / theirs.abs().max()) < 1e-10, name
    (loss,) = (o.loss for o in outcomes if o.loss is not None)
    assert loss == pytest.approx(unsplit.loss, rel=1e-10)


def assert_messages_follow_their_dependencies(outcomes):
    at = {(s.op, s.stage, s.microbatch): s for o in outcomes for s in o.spans}
    for op, stage, microbatch in list(at):
        if op is Op.F and stage > 0:
            assert at[Op.RECV_F, stage, microbatch].end_ns <= at[op, stage, microbatch].start_ns
            assert (
                at[op, stage - 1, microbatch].end_ns <= at[Op.SEND_F, stage - 1, microbatch].end_ns
            )


@pytest.fixture(params=["afab", "1f1b", "last first"])
def schedule(request, tmp_path):
    """Two registered ones; and a program whose receivers take the last message first."""
    if request.param != "last first":
        return request.param
    rows = [
        [f"0F{m}" for m in range(4)] + [f"0B{m}" for m in range(4)],
        [f"1{op}{m}" for m in range(3, -1, -1) for op in "FB"],
    ]
    path = tmp_path / "last_first.csv"
    path.write_text("\n".join(",".join(row) for row in rows))
    return f"csv:{path}"


def test_ranks_that_share_a_gpu_go_through_the_host_and_are_exact(schedule):
    settings = config(schedule, 2)
    outcomes = train_on_ranks(settings, is_shared=True)
    assert {o.transport for o in outcomes} == {"gloo via host memory"}
    assert_same_gradients(outcomes, settings)
    assert_messages_follow_their_dependencies(outcomes)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU per rank")
def test_ranks_with_a_gpu_each_use_nccl_and_are_exact(schedule):
    settings = config(schedule, 2)
    outcomes = train_on_ranks(settings, is_shared=False)
    assert {o.transport for o in outcomes} == {"nccl"}
    assert_same_gradients(outcomes, settings)
    assert_messages_follow_their_dependencies(outcomes)


def test_events_account_for_the_wall_time_of_a_step():
    settings = config("1f1b", 1, preset="llama-160m", dtype="float32", seq_len=512)
    outcome = train(settings, DEVICE, is_shared=False)
    compute_ns = sum(s.end_ns - s.start_ns for s in outcome.spans if s.lane is Lane.COMPUTE)
    assert 0.8 * outcome.wall_ns < compute_ns <= outcome.wall_ns


def test_marks_are_ordered_on_the_host_clock():
    clock = DeviceClock(DEVICE)
    before_ns = time.monotonic_ns()
    clock.begin_step()
    first = clock.mark()
    torch.mm(torch.ones(4096, 4096, device=DEVICE), torch.ones(4096, 4096, device=DEVICE))
    second = clock.mark()
    clock.end_step()
    after_ns = time.monotonic_ns()
    slack_ns = 1_000_000  # between the event and the host learning of it
    assert before_ns < clock.read_ns(first) < clock.read_ns(second) < after_ns + slack_ns


def test_peak_memory_is_the_allocators_and_1f1b_needs_less():
    peaks = {
        schedule: train(
            config(schedule, 1, preset="llama-160m", dtype="float32", seq_len=512, m=8),
            DEVICE,
            is_shared=False,
        ).peaks
        for schedule in ("afab", "1f1b")
    }
    assert peaks["1f1b"].peak_bytes < 0.7 * peaks["afab"].peak_bytes
    assert peaks["afab"].peak_bytes <= peaks["afab"].reserved_bytes
    for memory in peaks.values():
        assert sum(vars(memory.at_peak).values()) == memory.peak_bytes
        highest = max(level.num_bytes for level in memory.timeline)
        assert abs(highest / memory.peak_bytes - 1) <= 0.05
        assert abs(memory.predicted_peak_bytes / memory.peak_bytes - 1) <= 0.10
