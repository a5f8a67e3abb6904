"""The reference beside the steps: how often it repeats, and what it leaves behind."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engine.run.memory import process_peak_bytes, reset_process_peak
from ppbench.config.case import Case
from ppbench.run.worker import fixed_work
from ppbench.run.worker.fixed_work import MOST, SHARE, Reference, sleep_ms, work_of

CPU = torch.device("cpu")
MS = 1_000_000
TRAINS = Case(device="cpu", world_size=2)


def sleeping(*forwards_ms: float) -> Case:
    """An emulated case whose forwards take these times, by rank or on all."""
    times = {f"emulated_{op}_ms": forwards_ms for op in ("F", "I", "W")}
    return Case(device="emulated", world_size=2, **times)


SLEEPS = sleeping(5.0, 9.0)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """The group of one rank."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.new_group()
    dist.destroy_process_group()


class Script:
    """A clock that only the work moves: by the next of these times, then by the last for ever."""

    def __init__(self, *times_ms: float) -> None:
        self.now_ns = 0
        self._times_ms = itertools.chain(times_ms, itertools.repeat(times_ms[-1]))

    def __call__(self) -> int:
        return self.now_ns

    def work(self, _case: Case, _device: torch.device) -> object:
        def work() -> None:
            self.now_ns += round(next(self._times_ms) * MS)

        return work


def scripted(
    monkeypatch: pytest.MonkeyPatch,
    group: dist.ProcessGroup,
    *times_ms: float,
    case: Case = TRAINS,
) -> Reference:
    script = Script(*times_ms)
    monkeypatch.setattr(fixed_work, "work_of", script.work)
    return Reference(case, CPU, group, script)


def test_it_repeats_until_its_share_of_the_steps_is_spent(monkeypatch, group):
    reference = scripted(monkeypatch, group, 2)
    reference.run(4000 * MS)
    reference.run(4000 * MS)
    before, after = reference.times().times_ns
    assert len(before) == pytest.approx(SHARE / 2 * 4000 / 2 - 1, abs=1)
    assert len(after) == pytest.approx(len(before), abs=2)
    assert reference.times().share <= SHARE < 0.03


def test_a_disturbance_makes_it_repeat_less_and_cost_no_more(monkeypatch, group):
    reference = scripted(monkeypatch, group, 2, *[10] * 1000)
    reference.run(4000 * MS)
    reference.run(4000 * MS)
    assert reference.times().share <= SHARE
    assert {time for place in reference.times().times_ns for time in place} == {10 * MS}


def test_one_repetition_that_took_long_is_expected_again(monkeypatch, group):
    """A core that is taken away now and then would else make the last one overrun."""
    reference = scripted(monkeypatch, group, 2, 2, 30, *[2] * 1000)
    reference.run(4000 * MS)  # 40 ms of its own
    assert reference.times().times_ns[0] == (2 * MS, 30 * MS)


@pytest.mark.parametrize(
    ("case", "works_ms", "num_kept", "share"),
    [
        (SLEEPS, [2], 2, 0.8),  # all are kept
        (TRAINS, [3, 2, 3, 2], 1, 1),  # 10 ms of 10 ms: stated, not hidden
    ],
)
def test_very_short_steps_have_few_repetitions_at_each_place(
    monkeypatch, group, case, works_ms, num_kept, share
):
    reference = scripted(monkeypatch, group, *works_ms, case=case)
    reference.run(0)
    reference.run(10 * MS)
    assert reference.times().times_ns == ((2 * MS,) * num_kept,) * 2
    assert (reference.times().share, reference.times().sleeps) == (share, case is SLEEPS)


def test_it_is_short_beside_hours(monkeypatch, group):
    reference = scripted(monkeypatch, group, 1)
    reference.run(3_600_000 * MS)
    assert len(reference.times().times_ns[0]) == MOST


def test_a_gpu_without_room_has_no_reference(monkeypatch, group):
    def work_of(_case: Case, _device: torch.device) -> object:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(fixed_work, "work_of", work_of)
    reference = Reference(TRAINS, CPU, group)
    reference.run(MS)
    reference.run(MS)
    assert reference.times().times_ns == ((), ())


@pytest.mark.parametrize("case", [TRAINS, SLEEPS])
def test_it_takes_time_and_no_random_number(case, group):
    torch.manual_seed(7)
    state = torch.get_rng_state()
    reference = Reference(case, CPU, group)
    reference.run(MS)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
    assert min(reference.times().times_ns[0]) > 0


def test_what_is_computed_stays_finite_and_the_same(monkeypatch):
    rooms = []
    make_room = torch.frombuffer
    monkeypatch.setattr(
        torch,
        "frombuffer",
        lambda *args, **named: rooms.append(make_room(*args, **named)) or rooms[0],
    )
    work = work_of(TRAINS, CPU)
    (room,) = rooms
    work()
    first = room.clone()
    assert not torch.equal(first, torch.full_like(first, 0.01))
    for _ in range(50):
        work()
    assert room.isfinite().all()
    assert torch.allclose(first, room)


@pytest.mark.skipif(process_peak_bytes() is None, reason="the system has no high-water mark")
def test_its_memory_is_gone_afterwards(group):
    work_of(TRAINS, CPU)()  # the libraries' own buffers are there from a model's first step
    gc.collect()
    reset_process_peak()
    unused = process_peak_bytes()
    reference = Reference(TRAINS, CPU, group)
    reference.run(MS)
    reference.run(MS)
    reset_process_peak()
    assert process_peak_bytes() - unused < fixed_work.BYTES / 4


@pytest.mark.parametrize(
    ("forward_ms", "slept_ms"), [(0.1, 1), (1, 1), (4.9, 2), (7, 5), (19, 10), (500, 20)]
)
def test_an_emulated_rank_sleeps_about_as_long_as_its_actions(forward_ms, slept_ms):
    assert sleep_ms(sleeping(forward_ms)) == slept_ms
