"""Checks on the CPU: the code that a GPU will run, and the bounds that hold here too."""

import pytest
import torch

from benchmarks.claims import Standing
from benchmarks.gpu import clock, product, training
from benchmarks.gpu.clock import Mark
from benchmarks.gpu.training import Peak

CPU = torch.device("cpu")
HELD, MISSED, OPEN = Standing.held, Standing.missed, Standing.undecided


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Use one thread: threads that wait for each other take longer than these small models."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("check", "standings"),
    [
        (clock.ahead, {MISSED}),  # the CPU has done what was issued
        (clock.spans, {HELD, None, OPEN}),
        (clock.streams, set(Standing)),
        (clock.turns, set(Standing)),
        (product.identity, {None}),
        (lambda device: product.energy(device, window_s=0.3), {None}),
        (lambda device: product.products(device, window_s=0.1), {None}),
    ],
)
def test_a_check_of_one_process_is_measured(check, standings):
    assert {row.standing for row in check(CPU)} <= standings


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("check", "standings"),
    [
        (clock.synchronisation, {HELD}),
        (clock.overhead, set(Standing)),
        (product.attached, {HELD}),
        (product.failures, {HELD}),
        (training.exactness, {HELD}),
        (training.receives, set(Standing)),
        (training.memory_full, {HELD}),
    ],
)
def test_a_check_of_several_processes_is_measured(check, standings):
    assert {row.standing for row in check(CPU)} <= standings


def test_a_mark_is_beyond_its_error_by_what_is_left():
    assert Mark(0, 7000, 5000, 2000).beyond_ns == 0
    assert Mark(0, 7001, 5000, 2000).beyond_ns == 1
    assert Mark(9000, 7000, 9500, 1000).beyond_ns == 1000


def test_kernels_that_overlap_are_counted_once():
    assert clock.covered([(0, 10), (5, 12), (20, 30), (22, 25)]) == 22


def test_memory_is_off_its_line_by_a_share_of_its_growth():
    def peaks(*sizes):
        return [Peak(at, size, size) for at, size in enumerate(sizes, start=2)]

    assert training.off_line(peaks(200, 300, 400, 500)) == 0
    assert training.off_line(peaks(200, 350, 450, 500)) == pytest.approx(1 / 6)
    assert training.off_line(peaks(200, 200, 200, 200)) == float("inf")
