"""Peaks to the byte, split by what they are for; the peaks of real ranks, and as predicted."""

import pytest
import torch
from pipeline import config, lone_trainer, memory_of, over_gloo, with_trainer
from ranks import Ranks

from engine.plan.action import Op
from engine.plan.collectives import DataParallel, NoCollectives, TorchWindow, Zero1, Zero2, Zero3
from engine.run.allocations import MemoryChange, changes_of_trace, record
from engine.run.memory import (
    Level,
    MemorySplit,
    Owned,
    envelope,
    measure_memory,
    own_changes,
    process_peak_bytes,
    reset_process_peak,
    storages,
    use_of,
)

CPU = torch.device("cpu")
MIB = 2**20
THOROUGH = pytest.mark.thorough
STEP_BYTES = 4  # AdamW counts its steps in a float32 for each parameter


def bytes_of(num_mib):
    return torch.empty(num_mib * MIB, dtype=torch.uint8)


def use(step, **owned):
    def spanless():
        step()
        return []

    return measure_memory(CPU, spanless, lambda: Owned(**owned))


def test_the_peak_is_the_most_that_is_alive_at_once():
    def step():
        first = bytes_of(3)
        del first
        second, third = bytes_of(2), bytes_of(2)
        del second, third

    memory = use(step)
    assert memory.peak_bytes == 4 * MIB
    assert [level.num_bytes // MIB for level in memory.timeline] == [0, 3, 0, 2, 4, 2, 0]


def test_what_was_alive_before_counts():
    alive = bytes_of(5)
    memory = use(lambda: bytes_of(1), buffers=[alive])
    assert memory.peak_bytes == 6 * MIB
    assert memory.at_peak == MemorySplit(0, 0, 0, 5 * MIB, 1 * MIB)


def test_a_gradient_counts_from_when_its_memory_was_last_made():
    gradients = []

    def step():
        early = bytes_of(1)
        peak = bytes_of(6)
        del peak
        gradients.extend([early, bytes_of(2)])

    memory = measure_memory(CPU, lambda: step() or [], lambda: Owned(gradients=gradients))
    assert memory.at_peak == MemorySplit(0, 1 * MIB, 0, 0, 6 * MIB)


def test_views_of_one_storage_count_once():
    whole = bytes_of(2)
    assert sum(storages([whole, whole[:100], whole.view(2, -1)], CPU).values()) == 2 * MIB


def test_each_forward_has_its_own_allocations_within_its_span():
    trainer = lone_trainer(config("1f1b", 1, 6, seq_len=32))
    trainer.step(0)
    spans, recording = record(CPU, lambda: trainer.step(1).spans)
    within = [
        [
            change.num_bytes
            for change in recording.changes
            if s.start_ns <= change.time_ns <= s.end_ns
        ]
        for s in spans
        if s.op is Op.F
    ]
    logits_bytes = 8 * 32 * trainer.model.task.vocab_size
    assert all(logits_bytes in sizes for sizes in within)
    made = [sum(size for size in sizes if size > 0) for sizes in within]
    assert made == made[:1] * 6


@pytest.mark.parametrize("schedule", ["afab", "1f1b"])
def test_the_split_of_a_step_is_its_closed_forms(schedule):
    trainer = lone_trainer(config(schedule, 1, 4, seq_len=128))
    trainer.step(0)
    memory = trainer.measure_memory(1)
    split, parameters = memory.at_peak, list(trainer.parameters().values())
    parameter_bytes = sum(8 * p.numel() for p in parameters)
    assert split.parameter_bytes == parameter_bytes
    assert split.optimizer_bytes == 2 * parameter_bytes + STEP_BYTES * len(parameters)
    buffers = {b for module in trainer.modules.values() for b in module.buffers()}
    assert split.buffer_bytes == sum(b.nbytes for b in buffers)
    assert split.activation_bytes > 0
    assert sum(vars(split).values()) == memory.peak_bytes
    if schedule == "1f1b":  # peaks in a later backward
        assert split.gradient_bytes == parameter_bytes
    else:  # in the first, before all of its gradients are made
        assert 0 <= split.gradient_bytes < parameter_bytes
    assert max(level.num_bytes for level in memory.timeline) == memory.peak_bytes
    assert (
        memory.timeline[0].num_bytes
        == memory.peak_bytes - split.activation_bytes - split.gradient_bytes
    )


def test_optimizer_state_that_the_step_makes_counts_when_it_is_there():
    trainer = lone_trainer(config("afab", 1, 2, seq_len=32))
    memory = trainer.measure_memory(0)
    assert memory.at_peak.optimizer_bytes in (
        0,
        2 * memory.at_peak.parameter_bytes + STEP_BYTES * len(trainer.parameters()),
    )
    before, after = memory.timeline[0].num_bytes, memory.timeline[-1].num_bytes
    assert after - before > 3 * memory.at_peak.parameter_bytes  # gradients and state


def test_steps_of_varying_shapes_are_measured_but_not_predicted():
    settings = config("1f1b", 1, 2, seq_len="variable", max_seq_len=64, source="stdlib")
    memory = lone_trainer(settings).measure_memory(0)
    assert memory.peak_bytes > memory.at_peak.parameter_bytes
    assert memory.predicted_peak_bytes is None


def test_without_a_history_only_the_peak_and_what_is_owned_is_known():
    parameter, gradient = bytes_of(3), bytes_of(2)
    owned = Owned([parameter], [gradient])
    memory = use_of(Level(0, 3 * MIB), None, 9 * MIB, [], owned, CPU, None)
    assert (memory.timeline, memory.predicted_peak_bytes) == ((), None)
    assert memory.at_peak == MemorySplit(3 * MIB, 2 * MIB, 0, 0, 4 * MIB)


def test_the_cuda_allocators_trace_counts_in_its_units_what_is_asked_for_and_given_back():
    trace = [
        {"action": "segment_alloc", "addr": 512, "size": 2 * MIB, "time_us": 1},
        {"action": "alloc", "addr": 512, "size": 513, "time_us": 2},
        {"action": "free_requested", "addr": 512, "size": 513, "time_us": 3},
        {"action": "free_completed", "addr": 512, "size": 513, "time_us": 4},
    ]
    assert list(changes_of_trace(trace)) == [
        MemoryChange(2000, 512, 1024),
        MemoryChange(3000, 512, -1024),
    ]


def test_only_what_the_step_has_allocated_is_freed_by_it():
    changes = [
        MemoryChange(1, 0xA, 5),
        MemoryChange(2, 0xB, -7),
        MemoryChange(3, 0xA, -5),
        MemoryChange(4, 0xA, -9),
    ]
    assert own_changes(changes) == [changes[0], changes[2]]


def test_an_envelope_keeps_the_peak_and_the_order():
    levels = [Level(at, (at * 7919) % 1000 + (9000 if at == 4321 else 0)) for at in range(10_000)]
    kept = envelope(levels, 200)
    assert len(kept) <= 200
    assert list(kept) == sorted(kept)
    assert set(kept) <= set(levels)
    assert max(kept, key=lambda level: level.num_bytes) == levels[4321]
    assert kept[0] == levels[0]
    assert envelope(levels, 10_000) == tuple(levels)


@pytest.fixture(scope="module")
def peaks(ranks: Ranks):
    """By schedule and number of microbatches, the memory of two ranks."""
    return {
        (name, m): ranks.run(2, with_trainer, config(name, 2, m, seq_len=64), memory_of)
        for name in ("afab", "1f1b")
        for m in (4, 16)
    }


def test_afab_grows_with_the_microbatches_and_1f1b_does_not(peaks):
    peak = {key: [memory.peak_bytes for memory in memories] for key, memories in peaks.items()}
    for rank in (0, 1):
        assert peak["afab", 16][rank] > 1.4**2 * peak["afab", 4][rank]
        # from 3 on, gradients are there while a warm pipeline holds p - r
        assert peak["1f1b", 16][rank] < 1.02 * peak["1f1b", 4][rank]
        assert peak["1f1b", 16][rank] < 0.3 * peak["afab", 16][rank]


def test_the_program_predicts_the_peak(peaks):
    for key, memories in peaks.items():
        for rank, memory in enumerate(memories):
            ratio = memory.predicted_peak_bytes / memory.peak_bytes
            assert abs(ratio - 1) <= 0.10, (key, rank, ratio)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, [with_trainer]) for name in ("zb_h1", "interleaved_1f1b")),
        pytest.param("afab", [over_gloo, with_trainer], marks=THOROUGH),
        *((name, [over_gloo, with_trainer]) for name in ("1f1b", "zbv")),
    ],
)
def test_the_program_predicts_the_peak_whatever_its_stages_and_transport(ranks: Ranks, name, way):
    for memory in ranks.run(2, *way, config(name, 2, 4, seq_len=64), memory_of):
        assert abs(memory.predicted_peak_bytes / memory.peak_bytes - 1) <= 0.10


POLICIES = (
    *(pytest.param(policy, marks=THOROUGH) for policy in (NoCollectives(), DataParallel())),
    *(Zero1(), Zero2(), Zero3(1, 0), TorchWindow()),
)


@pytest.mark.parametrize("preset", [pytest.param("llama-8m", marks=THOROUGH), "llama-tiny"])
@pytest.mark.parametrize(
    ("name", "p", "v"), [pytest.param("1f1b", 1, 1, marks=THOROUGH), ("zbv", 2, 2)]
)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_program_predicts_the_peak_of_replicas(ranks: Ranks, policy, name, p, v, preset):
    settings = config(
        name, p, 4, preset=preset, seq_len=64, stages_per_rank=v, replicas=2, sharding=policy
    )
    for memory in ranks.run(2 * p, with_trainer, settings, memory_of):
        assert abs(memory.predicted_peak_bytes / memory.peak_bytes - 1) <= 0.03


def test_the_process_peak_starts_again_when_reset():
    high = torch.ones(200 * MIB, dtype=torch.uint8)
    before = process_peak_bytes()
    del high
    reset_process_peak()
    assert process_peak_bytes() < before - 150 * MIB
