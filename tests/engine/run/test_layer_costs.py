"""Costs of layers: what is measured alone adds up to what a stage takes."""

import dataclasses
import itertools
from contextlib import nullcontext

import pytest
import torch
from fake_clock import FakeClock
from pipeline import config, lone_trainer
from samples import sampled

from engine.configuration import lowered_of, model_of
from engine.model.spec import ModelSpec
from engine.model.split import open_model
from engine.plan.memory import MemoryRow
from engine.plan.model_costs import NOTHING, ModelCosts
from engine.run import layer_costs
from engine.run.clock import HostClock
from engine.run.layer_costs import measure_model_costs
from engine.run.layer_times import PartTimes, run_round
from engine.run.lone_stage import Conditions, Parts, measure_bytes
from engine.run.optimizer import OptimizerSpec

CPU = torch.device("cpu")
SHAPE = (2, 32)
FLOAT = 4


def opened(name):
    return open_model(ModelSpec(name, "float32"), SHAPE, CPU)


def costs_of(name, *, budget_s=0, **settings) -> ModelCosts:
    return measure_model_costs(opened(name), SHAPE, CPU, budget_s=budget_s, **settings)


def parts_of(name, partition, **settings):
    conditions = Conditions(SHAPE, CPU, nullcontext(), OptimizerSpec(), **settings)
    return Parts(opened(name), partition, conditions)


def alone(num_layers):
    layers = [range(i, i + 1) for i in range(num_layers)]
    return [range(0), *layers, range(num_layers, num_layers)]


def test_a_round_has_each_parts_times_in_the_order_of_a_step():
    parts = parts_of("llama-tiny", alone(4))
    first, second = parts.build(1), parts.build(2)
    took = [
        *(1, 2),  # F
        *(30, 10),  # B, back to front
        *(5, 6),  # F before a split backward
        *(80, 70),  # I, back to front
        *(9, 11),  # W
        *(12, 13),  # the optimizer
    ]
    marks = [time for index, ns in enumerate(took) for time in (1000 * index, 1000 * index + ns)]
    assert run_round([first, second], FakeClock(marks)) == [
        PartTimes(1, 10, 5, 70, 9, 12),
        PartTimes(2, 30, 6, 80, 11, 13),
    ]


@pytest.mark.parametrize(
    ("preset", "recompute"),
    [("llama-tiny-tied", False), ("models:tied_sequential", True)],
)
def test_every_part_has_costs(preset, recompute):
    costs = costs_of(preset, recompute=recompute)
    assert len(costs.layers) == opened(preset).num_layers
    assert costs.action_ns >= 0
    every = costs.parts
    numbers = [number for part in every for number in dataclasses.astuple(part)[:-1]]
    assert min(numbers) >= 0
    assert all(part.forward_ns + part.backward_ns > 0 for part in [*costs.layers, costs.after])
    assert costs.after.message_bytes == 0


def test_a_linear_keeps_its_input_and_its_split_backward_the_output_gradient_too():
    costs = costs_of("models:linear_sequential")
    hidden = SHAPE[0] * SHAPE[1] * 64 * FLOAT
    weights = (64 * 64 + 64) * FLOAT
    for layer in costs.layers[1:4]:
        assert layer.held_after_forward == hidden
        assert layer.held_after_input == 2 * hidden
        assert layer.message_bytes == hidden
        assert layer.static_bytes == 3 * weights + 2 * FLOAT  # AdamW counts steps by parameter
        assert layer.gradient_bytes == weights
        assert hidden <= layer.transient_bytes <= 3 * hidden + weights
        assert weights <= layer.first_transient_bytes <= 3 * hidden + weights


def test_without_optimizer_state_there_are_only_weights_and_gradients():
    costs = costs_of("models:linear_sequential", optimizer=OptimizerSpec("sgd"))
    layer = costs.layers[1]
    assert layer.static_bytes == layer.gradient_bytes == (64 * 64 + 64) * FLOAT


@pytest.mark.parametrize("recompute", [False, True])
def test_the_bytes_of_layers_add_up_to_those_of_their_stage(recompute):
    partition = [range(0), range(4), range(4, 4)]
    stage = parts_of("llama-tiny", partition, recompute=recompute).build(1)
    for _ in range(2):
        run_round([stage], HostClock())
    (whole,) = measure_bytes([stage], CPU)
    added = costs_of("llama-tiny", recompute=recompute).of_stage(
        range(4), is_first=False, is_last=False
    )
    num_positions, head_size = SHAPE[1], 16
    rotary = num_positions * (2 * head_size * FLOAT + 8)  # layers of a stage share them
    for sums, measured in [
        (added.held_after_forward, whole.held_after_forward),
        (added.held_after_input, whole.held_after_input),
        (added.static_bytes, whole.static_bytes),
    ]:
        assert measured <= sums <= measured + 3 * rotary
    rise = added.memory.rise  # of B first and later, then of I
    for of_stage, one in (
        (max(rise[3:6]), whole.transient_bytes),
        (rise[2], whole.first_transient_bytes),
    ):
        highest = of_stage + added.message_bytes
        assert one - 3 * rotary <= highest <= one + 3 * rotary


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    sampled([("afab", True), ("zb_h1", False), ("1f1b", False), ("zb_h1", True)], 2),
)
def test_the_peak_of_a_run_is_what_the_model_says_of_its_layers(schedule, recompute):
    settings = config(
        *(schedule, 1, 4), dtype="float32", seq_len=64, microbatch_size=2, recompute=recompute
    )
    trainer = lone_trainer(settings)
    trainer.step(0)
    trainer.step(1)
    memory = trainer.measure_memory(2)
    trainer.close()
    model = model_of(settings, CPU)
    costs = measure_model_costs(model, (2, 64), CPU, recompute=recompute, budget_s=0)
    stage = costs.of_stage(range(4), is_first=True, is_last=True)
    row = MemoryRow(lowered_of(settings), 0)
    planned = row.peak(stage.static_bytes, [stage.memory])
    batch = 4 * 2 * 2 * 65 * 8
    assert memory.predicted_peak_bytes == pytest.approx(memory.peak_bytes, abs=100)
    assert planned == pytest.approx(memory.peak_bytes, rel=0.03, abs=batch)


def test_a_layer_that_takes_longer_than_its_like_keeps_its_own_times():
    layers = costs_of("models:uneven_sequential", budget_s=1.0).layers
    light, heavy = layers[1], layers[3]
    assert heavy.forward_ns > 3 * light.forward_ns
    assert heavy.held_after_forward > 10 * light.held_after_forward


def test_equal_layers_have_equal_times():
    measured = PartTimes(1, 2, 1, 1, 1, 1)
    slower = PartTimes(2, 4, 2, 2, 2, 2)

    def part(samples, kind):
        return layer_costs._Measured(samples, NOTHING, kind)

    in_turns = [[measured, slower] * 5, [slower, measured] * 5]
    ends = part([measured] * 10, "end")
    pooled = layer_costs.pooled_samples(
        [ends, *(part(samples, "layer") for samples in in_turns), ends]
    )
    assert pooled[1] is pooled[2]
    assert len(pooled[1]) == 20
    apart = [ends, part([measured] * 10, "layer"), part([slower] * 10, "layer"), ends]
    assert layer_costs.pooled_samples(apart) == [one.samples for one in apart]


def parts_taking(*alone_ns):
    samples = ([PartTimes(*[ns] * 6)] * 5 for ns in alone_ns)
    return [layer_costs._Measured(of_part, NOTHING, "layer") for of_part in samples]


@pytest.mark.parametrize(
    ("alone_ns", "together_ns", "added_ns"),
    [
        ((50.0, 100.0, 100.0, 100.0, 100.0, 60.0), [370.0] * 5, 10),
        ((4.0, 100.0, 100.0, 60.0), [170.0] * 5, 4),  # no more than the smallest part takes
        ((50.0, 100.0, 100.0, 60.0), [150.0, 190.0, 199.0, 215.0, 260.0], 0),  # by chance
        ((50.0, 100.0, 100.0, 60.0), [220.0] * 5, -20),  # layers slow each other down
    ],
)
def test_what_a_call_adds_is_in_each_action_and_not_in_the_layers(alone_ns, together_ns, added_ns):
    parts = parts_taking(*alone_ns)
    together = [PartTimes(*[ns] * 6) for ns in together_ns]
    added = layer_costs.added_ns_of(parts, len(parts) - 2, together)
    assert added == PartTimes(*[added_ns] * 6)
    assert layer_costs._layer_costs(parts[1], parts[1].samples, added).forward_ns == 100 - added_ns


def test_what_a_forward_takes_longer_before_a_split_backward_is_the_latters():
    """As far as it is more than chance: the forwards of a round are compared with each other."""
    none = PartTimes(*[0.0] * 6)
    (part,) = parts_taking(0.0)
    drifting = [PartTimes(ns, 200.0, ns + 10.0, 90.0, 50.0, 1.0) for ns in (100.0, 300.0, 900.0)]
    assert layer_costs._layer_costs(part, drifting, none).input_ns == 100
    by_chance = [
        one._replace(split_forward=ns) for one, ns in zip(drifting, (300, 100, 950), strict=True)
    ]
    assert layer_costs._layer_costs(part, by_chance, none).input_ns == 90


@pytest.mark.parametrize(
    ("parameters", "together"),
    [
        ((10, *[1000] * 8, 10), 4),
        ((10, *[1000] * 3, 1e12), 3),
        ((1e9, *[5e7] * 5, 1e9), 0),
        ((1e6, *[1e7] * 6, 1e9), 3),
        ((1, 1000, 1), 0),
    ],
)
def test_every_part_is_measured_once_and_no_more_are_kept_than_fit(parameters, together):
    num = layer_costs.num_together_of(parameters)
    assert num == together
    groups = layer_costs.groups_of(parameters, num)
    assert sorted(itertools.chain(*groups)) == list(range(len(parameters)))
    assert set(range(1, num + 1)) <= set(groups[0])
    for group in groups:
        kept = 16 * sum(parameters[index] for index in group)
        assert len(group) == 1 or kept <= layer_costs.KEPT_BYTES
