"""Timing is exact under a fake clock; spans of ranks are in the order of what they need."""

import torch
from fake_clock import FakeClock
from pipeline import config, with_trainer
from ranks import Ranks

from engine.model.data import DataSpec
from engine.model.spec import ModelSpec
from engine.plan.action import NO_INDEX, Op
from engine.plan.spans import Lane, Span
from engine.run.p2p.fabric import Fabric
from engine.trainer import Trainer, TrainerConfig, agree


def one_rank(num_microbatches):
    data = DataSpec(seq_len=8, num_microbatches=num_microbatches)
    return TrainerConfig(model=ModelSpec("llama-tiny"), data=data, schedule="1f1b")


def test_each_action_has_one_span_with_the_clocks_times():
    clock = FakeClock([0, 10, 12, 30, 40, 45, 45, 70, 80, 81])
    fabric = Fabric(torch.device("cpu"), clock, is_device_shared=False)
    trainer = Trainer(agree(one_rank(2), fabric), fabric)
    spans = trainer.step(7).spans
    assert spans == [
        Span(7, 0, Lane.COMPUTE, 0, Op.F, 0, 0, 10, 0),
        Span(7, 0, Lane.COMPUTE, 0, Op.B, 0, 12, 30, 0),
        Span(7, 0, Lane.COMPUTE, 0, Op.F, 1, 40, 45, 0),
        Span(7, 0, Lane.COMPUTE, 0, Op.B, 1, 45, 70, 0),
        Span(7, 0, Lane.COMPUTE, NO_INDEX, Op.OPT, NO_INDEX, 80, 81, 0),
    ]


def spans_of_a_step(trainer: Trainer) -> list[Span]:
    trainer.step(0)
    return trainer.step(1).spans


def test_measured_spans_obey_the_dependencies_across_ranks(ranks: Ranks):
    by_rank = ranks.run(3, with_trainer, config("1f1b", 3, 4), spans_of_a_step)
    at = {(s.op, s.stage, s.microbatch): s for spans in by_rank for s in spans}
    for microbatch in range(4):
        for stage in (1, 2):
            send, receive = at[Op.SEND_F, stage - 1, microbatch], at[Op.RECV_F, stage, microbatch]
            assert at[Op.F, stage - 1, microbatch].end_ns <= send.start_ns
            assert send.start_ns < receive.end_ns
            assert receive.end_ns <= at[Op.F, stage, microbatch].start_ns
            backward, earlier = at[Op.B, stage, microbatch], at[Op.B, stage - 1, microbatch]
            assert backward.end_ns <= earlier.start_ns
