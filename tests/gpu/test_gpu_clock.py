"""CUDA events on the host's clock, within the error that their clock states."""

import time

import torch

from engine.run.clock import DeviceClock

DEVICE = torch.device("cuda", 0)


def test_an_event_is_read_within_its_error_of_when_it_happened():
    clock = DeviceClock(DEVICE)
    clock.begin_step()
    seen = []
    for _ in range(20):
        before_ns = time.monotonic_ns()
        mark = clock.mark()
        torch.cuda.synchronize(DEVICE)
        seen.append((before_ns, mark, time.monotonic_ns()))
    clock.end_step()
    assert clock.error_ns > 0
    for before_ns, mark, after_ns in seen:
        assert before_ns - clock.error_ns <= clock.read_ns(mark) <= after_ns + clock.error_ns


def test_marks_of_the_host_are_exact_among_events():
    clock = DeviceClock(DEVICE)
    clock.begin_step()
    clock.end_step()
    assert clock.read_ns(123) == 123
