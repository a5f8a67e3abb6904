"""Replicas with torch's schedules, shared by torch: they train what the engine's replicas do."""

import pytest
from pipeline import NUM_STEPS, assert_as_unsplit, config, train
from samples import sampled

from engine.plan.action import Op
from engine.plan.collectives import DataParallel, NoCollectives, TorchWindow, Zero1, Zero3
from engine.plan.spans import Lane
from engine.run.optimizer import OptimizerSpec
from engine.trainer import Trainer, agree
from ppbench.config.case import Case
from ppbench.config.feasibility import problems_of_runtime
from ppbench.run.runtimes.runtime import RefusalError
from ppbench.run.runtimes.torch_pipelining import TorchPipeline, share_by_torch

pytestmark = pytest.mark.usefixtures("warm_starts")

CASES = [
    *(("1f1b", policy) for policy in (NoCollectives(), DataParallel(), Zero3(), TorchWindow())),
    ("interleaved_zb", Zero3()),
    *(("interleaved_zb", policy) for policy in (NoCollectives(), DataParallel(), TorchWindow())),
]


def trained_by_torch(fabric, is_member, settings):
    agreement = agree(settings, fabric)
    if not is_member:
        return None
    trainer = Trainer(agreement, fabric, build=TorchPipeline, share=share_by_torch)
    outcome = train(trainer)
    trainer.close()
    return outcome


def refused(fabric, is_member, settings):
    with pytest.raises(RefusalError) as error:
        trained_by_torch(fabric, is_member, settings)
    return str(error.value)


@pytest.mark.parametrize(("schedule", "policy"), sampled(CASES, 5), ids=str)
def test_gradients_losses_and_norms_are_those_of_one_device(ranks, schedule, policy):
    optimizer = OptimizerSpec(learning_rate=1e-3, clip_norm=0.1)
    settings = config(schedule, 2, 2, replicas=2, sharding=policy, optimizer=optimizer)
    outcomes = ranks.run(settings.num_processes, trained_by_torch, settings)
    assert_as_unsplit(outcomes, settings)
    for process, outcome in enumerate(outcomes):
        replica, rank = divmod(process, 2)
        for step, result in enumerate(outcome.results):
            assert {(s.step, s.rank, s.replica) for s in result.spans} == {(step, rank, replica)}
            done = [span for span in result.spans if span.lane is Lane.COLLECTIVE]
            kinds = {span.op for span in done}
            expected = {
                NoCollectives: set(),
                DataParallel: {Op.REDUCE_GRAD},
            }.get(type(policy), {Op.UNSHARD, Op.REDUCE_GRAD})
            assert kinds == expected
            stages = {span.stage for span in result.spans if span.stage >= 0}
            assert not kinds or {span.stage for span in done} == stages
    assert len(outcomes[0].results) == NUM_STEPS


def test_other_policies_are_refused_in_one_message(ranks):
    settings = config("1f1b", 2, 2, replicas=2, sharding=Zero1())
    answers = ranks.run(4, refused, settings)
    assert all('expected sharding.policy "none", "ddp", "zero3" or "torch"' in a for a in answers)
    case = Case(runtime="torch", replicas=2, sharding_policy="zero2", sharding_max_active_stages=1)
    found = [(problem.key, problem.message) for problem in problems_of_runtime(case)]
    assert found == [
        ("sharding.policy", '"torch" has no policy "zero2". It has: none, ddp, zero3, torch'),
        ("sharding.max_active_stages", '"torch" unshards 3 stages, got 1'),
    ]
    assert not list(problems_of_runtime(Case(runtime="torch", replicas=2)))


def memory_of_a_step(fabric, is_member, settings):
    agreement = agree(settings, fabric)
    if not is_member:
        return None
    trainer = Trainer(agreement, fabric, build=TorchPipeline, share=share_by_torch)
    whole_bytes = sum(p.numel() * p.element_size() for p in trainer.parameters().values())
    trainer.step(0)
    split = trainer.measure_memory(1).at_peak
    trainer.close()
    return [split.parameter_bytes / whole_bytes, split.optimizer_bytes / whole_bytes]


@pytest.mark.parametrize(("policy", "share"), [(DataParallel(), 1), (Zero3(), 1 / 2)], ids=str)
def test_memory_is_that_of_what_torch_keeps_of_a_stage(ranks, policy, share):
    settings = config("1f1b", 2, 2, replicas=2, sharding=policy)
    for kept in ranks.run(4, memory_of_a_step, settings):
        assert kept == pytest.approx([share, 2 * share], rel=0.05)
