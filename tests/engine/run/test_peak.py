import pytest
import torch

from engine.run.peak import BUDGET_NS, best_rate, measured_peak_flops


class Machine:
    """Multiplies at a set rate, in a time of its own."""

    def __init__(self, flops_per_ns):
        self.flops_per_ns, self.now, self.sizes = flops_per_ns, 0, []

    def now_ns(self):
        return self.now

    def prepare(self, size):
        def multiply():
            self.sizes.append(size)
            self.now += round(2 * size**3 / self.flops_per_ns(size))

        return multiply


def test_sizes_double_while_the_next_fits_and_the_last_is_repeated():
    machine = Machine(lambda size: 64)
    assert best_rate(machine.prepare, 512, machine.now_ns) == pytest.approx(64e9)
    times = 2 * 512**3 // 64
    assert machine.sizes[:2] == [128, 256]
    assert set(machine.sizes[2:]) == {512}
    assert BUDGET_NS - times < machine.now <= BUDGET_NS


def test_a_slow_machine_is_not_kept_longer_than_the_budget():
    machine = Machine(lambda size: 0.2)
    assert best_rate(machine.prepare, 4096, machine.now_ns) == 0.2e9
    assert set(machine.sizes) == {128}
    assert machine.now <= BUDGET_NS


def test_the_best_size_counts():
    machine = Machine({128: 20, 256: 80, 512: 40}.__getitem__)
    assert best_rate(machine.prepare, 512, machine.now_ns) == pytest.approx(80e9, rel=1e-5)


def test_this_machine_is_measured_once():
    rate = measured_peak_flops(torch.device("cpu"), torch.float32)
    assert rate > 1e6
    assert measured_peak_flops(torch.device("cpu"), torch.float32) == rate
