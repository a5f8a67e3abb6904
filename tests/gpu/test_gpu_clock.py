"""Marks on the host's clock, within the error that their own clock states."""

import time

import torch

from benchmarks.gpu.clock import take_marks
from benchmarks.gpu.device import sleep, wait_for
from engine.run.clock import clock_for


def test_marks_are_read_within_their_error_of_when_they_were_taken(device: torch.device) -> None:
    marks = take_marks(device, 2000)
    assert len(marks) == 2000
    assert max(mark.beyond_ns for mark in marks) <= 0
    assert min(mark.error_ns for mark in marks) >= 0
    assert device.type == "cpu" or min(mark.error_ns for mark in marks) > 0


def test_marks_are_in_order_on_the_host_clock(device: torch.device) -> None:
    clock = clock_for(device)
    before_ns = time.monotonic_ns()
    clock.begin()
    first = clock.mark()
    sleep(1_000_000, device)
    second = clock.mark()
    wait_for(device)
    clock.end()
    after_ns = time.monotonic_ns()
    error_ns = clock.error_ns
    first_ns, second_ns = clock.read_ns(first), clock.read_ns(second)
    assert before_ns - error_ns <= first_ns < second_ns <= after_ns + error_ns


def test_marks_of_the_host_are_exact_among_others(device: torch.device) -> None:
    clock = clock_for(device)
    clock.begin()
    clock.end()
    assert clock.read_ns(123) == 123
