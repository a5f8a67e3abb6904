"""A link's latency and bandwidth, from messages of several sizes."""

import random

import pytest
from ranks import Ranks

from engine.plan.model_costs import LinkCosts
from engine.run.link_costs import SIZES_BYTES, link_through, measure_link


@pytest.mark.parametrize("link", [LinkCosts(20_000, 4e9), LinkCosts(0, 1e9), LinkCosts(5e6, 1e10)])
def test_the_line_through_exact_times_is_the_link(link):
    samples = {size: [link.latency_ns + size / link.bytes_per_s * 1e9] for size in SIZES_BYTES}
    found = link_through(samples)
    assert found.latency_ns == pytest.approx(link.latency_ns, abs=1)
    assert found.bytes_per_s == pytest.approx(link.bytes_per_s, rel=1e-6)
    assert found.error < 1e-6


def test_a_noisy_link_is_found_within_its_error():
    numbers, hits = random.Random(4), 0
    for _ in range(200):
        off = {size: numbers.gauss(1, 0.1) for size in SIZES_BYTES}
        samples = {size: [off[size] * (30_000 + size / 2)] for size in SIZES_BYTES}
        found = link_through(samples)
        size = numbers.choice(SIZES_BYTES)
        message_ns = found.latency_ns + size / found.bytes_per_s * 1e9
        hits += abs(message_ns / (30_000 + size / 2) - 1) < 2 * found.error
        assert found.error < 0.4
    assert hits > 170


def test_where_larger_messages_take_no_longer_the_bandwidth_has_no_limit():
    found = link_through({size: [50_000.0] for size in SIZES_BYTES})
    assert (found.latency_ns, found.bytes_per_s) == (pytest.approx(50_000), float("inf"))


def test_a_line_below_zero_goes_through_it():
    found = link_through({2**10: [10.0], 2**20: [2e6], 2**21: [8e6]})
    assert found.latency_ns == 0
    assert found.bytes_per_s > 0


def link_of_ranks(fabric, _is_member):
    return measure_link(fabric)


def test_the_link_of_two_ranks_is_measured(ranks: Ranks):
    first, second, third = ranks.run(3, link_of_ranks)
    assert (second, third) == (None, None)
    assert first.latency_ns >= 0
    assert first.bytes_per_s > 1e6
    assert first.bytes_per_s < float("inf")
