"""Partitions against all there are, on small models; how even, how quick, and what is refused."""

import itertools
import random
from dataclasses import replace

import pytest

from engine.plan.model_costs import NOTHING, ModelCosts, StageCosts
from engine.plan.program import Placement, loop_placement, v_placement
from ppbench.planning.layout import solve_partition


def every_partition(num_layers, num_stages):
    for cuts in itertools.combinations_with_replacement(range(num_layers + 1), num_stages - 1):
        yield [range(*pair) for pair in itertools.pairwise((0, *cuts, num_layers))]


def loads_of(costs, placement, partition):
    """By rank, from the costs of stages as `ModelCosts` makes them."""
    loads, last = [0.0] * placement.world_size, len(partition) - 1
    for stage, layers in enumerate(partition):
        own = costs.of_stage(layers, is_first=stage == 0, is_last=stage == last)
        loads[placement.ranks[stage]] += own.forward_ns + own.backward_ns
    return loads


def drawn_layer(random_, scatter):
    forward, backward = (random_.randint(100 - scatter, 100 + scatter) for _ in range(2))
    return StageCosts(forward, 2 * backward, backward, backward)


def drawn(seed):
    """A small model and its placement."""
    random_ = random.Random(seed)
    p, v = random_.choice([(1, 2), (2, 1), (2, 2), (3, 1), (3, 2), (2, 3), (4, 1), (5, 1)])
    placement = random_.choice([loop_placement, v_placement])(p, v)
    if seed % 4 == 0:
        placement = Placement(tuple(random_.sample(placement.ranks, p * v)), p)
    scatter = random_.choice([0, 2, 60])
    layers = tuple(drawn_layer(random_, scatter) for _ in range(random_.randint(0, 9)))
    ends = [random_.choice([NOTHING, drawn_layer(random_, 50)]) for _ in "ba"]
    costs = ModelCosts(ends[0], layers, ends[1], action_ns=random_.choice([0, 7]))
    return random_, costs, placement


def test_the_heaviest_rank_is_as_light_as_in_the_best_of_all_partitions(is_thorough):
    for seed in range(1000 if is_thorough else 60):
        random_, costs, placement = drawn(seed)
        num_stages = placement.num_stages
        least = [0] * num_stages
        if seed % 3 == 0 and len(costs.layers) >= num_stages:
            least = [random_.randint(0, 1) for _ in placement.ranks]
        best = min(
            max(loads_of(costs, placement, partition))
            for partition in every_partition(len(costs.layers), num_stages)
            if all(map(int.__ge__, map(len, partition), least))
        )
        found = solve_partition(costs, placement, least=least)
        assert [layer for layers in found for layer in layers] == list(range(len(costs.layers)))
        assert all(map(int.__ge__, map(len, found), least))
        assert max(loads_of(costs, placement, found)) == pytest.approx(best, rel=1e-9)


ALIKE = StageCosts(100, 200, 100, 100)


def test_layers_that_are_alike_are_spread_evenly():
    for placement, num_layers in [(loop_placement(4, 2), 26), (v_placement(3, 3), 20)]:
        found = solve_partition(ModelCosts(NOTHING, (ALIKE,) * num_layers, NOTHING), placement)
        by_rank = [
            sum(len(found[stage]) for stage in placement.stages_of(rank))
            for rank in range(placement.world_size)
        ]
        assert max(by_rank) - min(by_rank) <= 1
        assert max(map(len, found)) - min(map(len, found)) <= 1


def test_96_layers_on_128_stages_meet_the_bound_of_layers_that_are_alike():
    random_ = random.Random(1)
    layers = tuple(replace(ALIKE, forward_ns=random_.uniform(99, 101)) for _ in range(96))
    head = replace(ALIKE, forward_ns=250, backward_ns=500, input_ns=250, weight_ns=250)
    for placement, least in ((loop_placement(64, 2), 750), (v_placement(64), 750 + 300)):
        found = solve_partition(ModelCosts(ALIKE, layers, head), placement)
        loads = loads_of(ModelCosts(ALIKE, layers, head), placement, found)
        assert max(loads) == least
        others = sorted(loads)[:-2]  # 63 ranks or fewer with 96 layers: at most two each
        assert max(others) <= 2 * 301


def test_halves_that_are_quicker_than_a_whole_backward_count():
    split = replace(ALIKE, input_ns=50, weight_ns=50)
    costs = ModelCosts(NOTHING, (ALIKE,) * 4 + (split,) * 3, NOTHING)
    assert [len(layers) for layers in solve_partition(costs, loop_placement(2))] == [3, 4]


def test_numbers_that_do_not_fit_the_stages_are_refused():
    costs, placement = ModelCosts(NOTHING, (ALIKE,) * 6, NOTHING), loop_placement(3)
    with pytest.raises(ValueError, match="expected 3 least layers, got 2"):
        solve_partition(costs, placement, least=[1, 1])
    with pytest.raises(ValueError, match="6 layers are too few for 7"):
        solve_partition(costs, placement, least=[3, 3, 1])
