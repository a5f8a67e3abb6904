"""Replicas of a pipeline train as one device does on the whole batch, whatever they shard."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from pipeline import (
    TOLERANCE,
    Outcome,
    accumulate,
    config,
    memory_of,
    merged,
    relative_difference,
    unsplit_transformers,
    with_trainer,
)

from engine.configuration import program_of
from engine.model.data import Data
from engine.plan.action import COMPUTE_OPS, Op
from engine.plan.collectives import DataParallel, NoCollectives, TorchWindow, Zero1, Zero2, Zero3
from engine.plan.spans import Lane
from engine.run.optimizer import OptimizerSpec
from engine.run.shards import was_used

NUM_STEPS = 3
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
SHAPES = ((2, 2), (2, 1), (4, 1), (1, 4), (3, 2))  # D x p; three do not divide what they share
POLICIES = (
    *(NoCollectives(), DataParallel(), Zero1(), Zero2(), Zero2(every_backward=False)),
    *(Zero3(), Zero3(1, 0), TorchWindow()),
)
SCHEDULES = ("afab", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "looped_bfs")
KINDS = {
    "plain": {},
    "tied and clipped": {
        "preset": "llama-tiny-tied",
        "optimizer": OptimizerSpec(learning_rate=1e-3, clip_norm=0.1),
    },
    "uneven and recomputed": {
        "seq_len": "variable",
        "max_seq_len": 40,
        "microbatch_size": 2,
        "recompute": True,
    },
    "empty": {"partition": "with an empty stage"},
}
EVERY = list(itertools.product(SHAPES, POLICIES, SCHEDULES, KINDS))


def name_of(case):
    (replicas, world_size), policy, schedule, kind = case
    return f"{replicas}x{world_size}-{policy}-{schedule}-{kind}"


def pairwise(cases):
    """Few of the cases, in which each two values of different settings come together."""

    def pairs(case):
        return set(itertools.combinations(enumerate(case), 2))

    todo = set().union(*map(pairs, cases))
    while todo:
        best = max(cases, key=lambda case: len(pairs(case) & todo))
        todo -= pairs(best)
        yield best


CHIEF = (
    ((2, 2), (4, 1), (3, 2)),
    (Zero1(), Zero2(), Zero3()),
    ("1f1b", "interleaved_1f1b", "zbv"),
)
FEW = [
    *pairwise(list(itertools.product(*CHIEF, KINDS))),
    ((3, 2), DataParallel(), "zbv", "tied and clipped"),  # what ZeRO-1 does to gradients
    # what ZeRO-3 does, elsewhere in the row
    ((2, 2), TorchWindow(), "interleaved_1f1b", "tied and clipped"),
]


def settings_of(shape, policy, schedule, kind):
    replicas, world_size = shape
    settings = config(
        schedule, world_size, max(2, world_size), replicas=replicas, sharding=policy, **KINDS[kind]
    )
    if kind != "empty":
        return settings
    inner = program_of(settings_of(shape, policy, schedule, "plain")).num_stages - 2
    partition = (2, *[0] * inner, 2) if inner >= 0 else "uniform"
    return dataclasses.replace(
        settings, model=dataclasses.replace(settings.model, partition=partition)
    )


def train(trainer):
    initial = copies(trainer.gathered(lambda held: held))
    loss = trainer.compute_gradients(0)
    gradients = copies(trainer.gathered(lambda held: held.grad))
    results = tuple(trainer.step(step) for step in range(NUM_STEPS))
    trained = copies(trainer.gathered(lambda held: held))
    return Outcome(loss, initial, gradients, trained, results=results, lowered=trainer.lowered)


def copies(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def unsplit(settings, initial):
    """The gradients of the whole batch, the weights after three steps, and each step's norm."""
    data = settings.data
    num_microbatches = settings.replicas * data.num_microbatches
    batches = Data(dataclasses.replace(data, num_microbatches=num_microbatches), 256)
    model = unsplit_transformers(settings, initial)
    optimizer = torch.optim.AdamW(model.parameters(), settings.optimizer.learning_rate)
    losses, norms, gradients = [], [], {}
    for step in range(NUM_STEPS):
        losses.append(accumulate(model, batches, step))
        gradients = gradients or {n: p.grad.clone() for n, p in model.named_parameters()}
        limit = settings.optimizer.clip_norm or float("inf")
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
    return losses, norms, gradients, copies(dict(model.named_parameters()))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in FEW else pytest.mark.thorough, id=name_of(case))
        for case in EVERY
    ],
)
def test_replicas_train_as_one_device_does(ranks, case):
    settings = settings_of(*case)
    outcomes = ranks.run(settings.num_processes, with_trainer, settings, train)
    assert_as_one_device(outcomes, settings, TIED if "tied" in case[-1] else None)


def assert_as_one_device(outcomes, settings, shared=None):
    """The loss, the gradients, three steps of AdamW and the norm are of the whole batch."""
    initial = merged([o.initial for o in outcomes[: settings.world_size]], shared)
    losses, norms, gradients, trained = unsplit(settings, initial)
    for first in range(0, settings.num_processes, settings.world_size):
        pipeline = outcomes[first : first + settings.world_size]
        (last,) = (o for o in pipeline if o.loss is not None)
        assert last.loss == pytest.approx(losses[0], rel=TOLERANCE)
        assert [r.loss for r in last.results] == pytest.approx(losses, rel=TOLERANCE)
        assert_same(merged([o.gradients for o in pipeline], shared), gradients)
        assert_same(merged([o.trained for o in pipeline], shared), trained)
        if settings.optimizer.clip_norm:
            assert [r.gradient_norm for r in last.results] == pytest.approx(norms, rel=TOLERANCE)
            assert norms[0] > settings.optimizer.clip_norm


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert relative_difference(tensor, theirs[name]) < TOLERANCE, name


def test_every_collective_of_the_program_leaves_one_span_in_the_order_of_its_lane(ranks):
    settings = settings_of((2, 2), Zero3(1, 0), "interleaved_1f1b", "plain")
    for process, outcome in enumerate(ranks.run(4, with_trainer, settings, train)):
        replica, rank = divmod(process, 2)
        spans = outcome.results[-1].spans
        assert {(span.replica, span.rank) for span in spans} == {(replica, rank)}
        joined = [span for span in spans if span.lane is Lane.COLLECTIVE]
        issued = [a for a in outcome.lowered.actions[rank] if a.op in (Op.UNSHARD, Op.REDUCE_GRAD)]
        assert [(span.stage, span.op) for span in joined] == [(a.stage, a.op) for a in issued]
        for before, after in itertools.pairwise(joined):
            assert before.start_ns < before.end_ns <= after.start_ns
        at = {(s.op, s.stage, s.microbatch): s for s in spans}
        begun = iter(joined)
        unsharded = {}
        for action in outcome.lowered.actions[rank]:
            if action.op in (Op.UNSHARD, Op.REDUCE_GRAD):
                unsharded[action.stage] = next(begun).end_ns
            elif action.op in COMPUTE_OPS:
                computed = at[action.op, action.stage, action.microbatch]
                assert computed.start_ns >= unsharded[action.stage]


@pytest.mark.parametrize("policy", [DataParallel(), Zero3()], ids=str)
def test_replicas_of_bfloat16_stay_equal_bit_for_bit(ranks, policy):
    settings = dataclasses.replace(
        settings_of((2, 2), policy, "zbv", "tied and clipped"),
        optimizer=OptimizerSpec(learning_rate=0.1),
    )
    model = dataclasses.replace(settings.model, dtype="bfloat16")
    settings = dataclasses.replace(settings, model=model)
    outcomes = ranks.run(4, with_trainer, settings, train)
    for one, other in zip(outcomes[:2], outcomes[2:], strict=True):
        assert [r.loss for r in one.results] == [r.loss for r in other.results]
        for name, tensor in one.trained.items():
            assert tensor.dtype is torch.bfloat16
            assert torch.equal(tensor, other.trained[name]), name
            assert not torch.equal(tensor, one.initial[name]), name


HELD = {  # of the bytes of its parameters: parameters, gradients, two moments
    DataParallel(): 1 + 1 + 2,
    Zero1(): 1 + 1 + 2 / 2,
    Zero2(): 1 + 1 / 2 + 2 / 2,
    Zero3(): 1 / 2 + 1 / 2 + 2 / 2,
}


@pytest.mark.parametrize("policy", HELD, ids=str)
def test_a_rank_holds_the_bytes_that_its_policy_leaves_it(ranks, policy):
    """Measured at the end of a step: what the profiler saw come and go, on what was there."""
    settings = config("1f1b", 2, 2, preset="llama-8m", replicas=2, sharding=policy)
    for parameter_bytes, held_bytes in ranks.run(4, with_trainer, settings, held_bytes_of):
        assert held_bytes == pytest.approx(HELD[policy] * parameter_bytes, rel=0.05)


def held_bytes_of(trainer):
    held = memory_of(trainer).timeline[-1].num_bytes
    return sum(p.nbytes for p in trainer.parameters().values()), held


@pytest.mark.parametrize(
    ("first", "has_gradient"), [(-0.5, True), (0.0, True), (-0.0, False)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_a_sum_tells_whether_there_was_a_gradient(first, has_gradient, dtype):
    total = torch.full((3,), first, dtype=dtype)
    assert was_used(total) == has_gradient
