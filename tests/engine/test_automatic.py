"""`schedule = "auto"`: the program that is found for measured costs, and training with it."""

import dataclasses

import pytest
from pipeline import CPU, assert_exact, config, lone_trainer, train_unsplit, unsplit_transformers

from engine import automatic
from engine.automatic import MemoryLimitError, found_program
from engine.configuration import TrainerConfig, lowered_of, model_of, num_stages_of
from engine.plan.check import check
from engine.plan.model_costs import LayerCosts, ModelCosts
from engine.plan.program import v_placement
from engine.plan.schedules.registry import ScheduleError

LAYER = LayerCosts(
    10, 22, 10, 9, held_after_forward=100, held_after_input=40, transient_bytes=30,
    static_bytes=1000,
)  # fmt: skip
COSTS = ModelCosts(LayerCosts(0, 0, 0, 0, static_bytes=500), (LAYER,) * 4, LAYER)


@pytest.fixture
def costs_known(monkeypatch):
    """Costs that need no measuring; those of recomputed layers hold a tenth."""
    asked = []

    def known(_model, _shape, _device, _autocast, _optimizer, *, recompute):
        asked.append(recompute)
        small = dataclasses.replace(LAYER, held_after_forward=10, held_after_input=70)
        layers = ((small if recompute else LAYER),) * 4
        return dataclasses.replace(COSTS, layers=layers)

    monkeypatch.setattr(automatic, "measure_model_costs", known)
    return asked


def found(world_size, num_microbatches, **rest):
    settings = config("auto", world_size, num_microbatches, **rest)
    stages = num_stages_of(settings)
    share = 4 // stages
    partition = [range(share * stage, share * (stage + 1)) for stage in range(stages)]
    return found_program(settings, model_of(settings, CPU), partition, CPU)


def held_bytes(program, rank, after_forward, after_input):
    """The most that a rank holds in activations, counted action by action."""
    held = most = 0
    for stage, op, _ in program.actions[rank]:
        taken, left = after_forward[stage], after_input[stage]
        held += {"F": taken, "B": -taken, "I": left - taken, "W": -left}[op]
        most = max(most, held)
    return most


@pytest.mark.usefixtures("costs_known")
def test_no_rank_needs_more_than_the_limit():
    """Rank 0 has its embeddings and two layers, rank 1 two layers and what follows them."""
    own = (500 + 2000 + 30, 3000 + 30)
    taken, left = (200, 300), (80, 120)
    for limit in (3330, 3640, 4000, 10_000):
        program = found(2, 6, memory_limit=limit)
        check(program)
        needs = [own[rank] + held_bytes(program, rank, taken, left) for rank in range(2)]
        assert max(needs) <= limit, limit


@pytest.mark.usefixtures("costs_known")
def test_a_limit_that_nothing_keeps_within_is_refused_with_the_least_that_would_do():
    message = (
        "memory_limit 3329 B: no program keeps within it; the least that would do is 3.26 KiB: "
        "rank 1 needs 2.96 KiB whatever it holds, and 300 B for one microbatch"
    )
    with pytest.raises(MemoryLimitError) as caught:
        found(2, 6, memory_limit=3329)
    assert message.replace("3329 B", "3.26 KiB") in str(caught.value)
    assert isinstance(caught.value, ScheduleError)


def test_only_recomputed_stages_have_whole_backwards(costs_known):
    program = found(2, 4, recompute=(True, False))
    ops = [{str(action.op) for action in row} for row in program.actions]
    assert ops[0] == {"F", "B"}
    assert ops[1] == {"F", "I", "W"}
    assert sorted(costs_known) == [False, True]


@pytest.mark.usefixtures("costs_known")
def test_two_stages_per_rank_may_be_a_v():
    """With one microbatch, only a V has no rank that waits for the others to turn back."""
    program = found(2, 1, stages_per_rank=2)
    assert program.placement == v_placement(2)
    check(program)


def test_a_rank_alone_measures_nothing_without_a_limit(costs_known):
    program = found(1, 3)
    assert [str(a) for a in program.actions[0]][:3] == ["0F0", "0I0", "0W0"]
    assert costs_known == []


@pytest.mark.parametrize(
    ("world_size", "rest"),
    [
        (2, {"memory_limit": "1 GiB", "recompute": (False, True)}),
        (2, {"stages_per_rank": 2}),
    ],
    ids=["limited", "two stages"],
)
def test_loss_and_gradients_equal_those_of_one_device(ranks, world_size, rest):
    outcomes = assert_exact(ranks, config("auto", world_size, 4, **rest))
    programs = {repr(outcome.lowered.actions) for outcome in outcomes}
    assert len(programs) == 1


def test_a_trainer_alone_finds_its_program_without_connect():
    trainer = lone_trainer(config("auto", 1, 2))
    assert trainer.program.schedule == "auto"
    initial = {name: p.detach().clone() for name, p in trainer.modules[0].own_state().items()}
    loss = trainer.step(0).loss
    assert loss == pytest.approx(
        train_unsplit(config("auto", 1, 2), initial, unsplit_transformers).loss, rel=1e-12
    )


def test_an_open_program_is_said_to_be_found_by_connect():
    with pytest.raises(ScheduleError, match="connect\\(\\) finds the program"):
        lowered_of(TrainerConfig(schedule="auto", world_size=2))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"memory_limit": "1 GiB"}, 'is for schedule "auto".*got schedule "1f1b"'),
        ({"schedule": "auto", "memory_limit": "0 GiB"}, "memory_limit is '0 GiB'; expected a size"),
        ({"schedule": "auto", "memory_limit": -5}, "memory_limit is -5"),
        ({"schedule": "auto", "memory_limit": "much"}, "memory_limit is 'much'; expected"),
    ],
)
def test_a_limit_that_is_none_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        TrainerConfig(**settings)
