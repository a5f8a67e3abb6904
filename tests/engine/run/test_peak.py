import pytest
import torch

from engine.run.peak import (
    LARGE,
    SEARCH_NS,
    WINDOW_NS,
    fastest_size,
    largest_with_room,
    measured_peak_flops,
    sustained_rate,
)


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


def test_sizes_double_while_the_next_fits():
    machine = Machine(lambda size: 64 + size / 1024)
    assert fastest_size(machine.prepare, 512, machine.now_ns) == 512
    assert machine.sizes == [128, 256, 512]
    assert machine.now <= SEARCH_NS


def test_a_slow_machine_is_not_kept_longer_than_a_product_over_the_window():
    machine = Machine(lambda size: 0.2)
    assert sustained_rate(machine.prepare, 4096, machine.now_ns) == pytest.approx(0.2e9)
    assert set(machine.sizes) == {128}
    assert machine.now <= SEARCH_NS + WINDOW_NS + 2 * 128**3 / 0.2


def test_the_fastest_size_counts():
    machine = Machine({128: 20, 256: 80, 512: 40}.__getitem__)
    assert sustained_rate(machine.prepare, 512, machine.now_ns) == pytest.approx(80e9, rel=1e-5)


def test_a_core_that_is_shared_counts_as_half():
    turns = iter(range(10**6))
    machine = Machine(lambda size: 64 if next(turns) % 2 else 64 / 3)  # every other one waits
    rate = sustained_rate(machine.prepare, 128, machine.now_ns)
    assert rate == pytest.approx(32e9, rel=0.01)


def test_an_accelerators_products_are_as_large_as_its_memory_allows():
    tried = []

    def prepare(size, largest):
        tried.append(size)
        if size > largest:
            raise torch.OutOfMemoryError

    assert largest_with_room(lambda size: prepare(size, 9999), LARGE) == LARGE == 8192
    assert largest_with_room(lambda size: prepare(size, 2048), LARGE) == 2048
    assert tried == [8192, 8192, 4096, 2048]


def test_this_machine_is_measured():
    assert measured_peak_flops(torch.device("cpu"), torch.float32) > 1e6
