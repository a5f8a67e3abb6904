"""Steps in a row, read after the last of them, are those that are read one by one."""

import itertools

import pytest
import torch
from pipeline import config, with_trainer
from samples import sampled

from engine.plan.collectives import Zero3
from engine.plan.spans import Lane
from engine.run.optimizer import OptimizerSpec
from engine.run.recording import Recording

CLIPPED = OptimizerSpec(learning_rate=1e-3, clip_norm=0.1)
NUMBERS = range(2, 6)
KINDS = {
    "plain": {},
    "clipped": {"optimizer": CLIPPED, "preset": "llama-tiny-tied"},
    "variable": {"seq_len": "variable", "max_seq_len": 16},
    "replicas": {"optimizer": CLIPPED, "replicas": 2, "sharding": Zero3()},
}


def trained(trainer, is_turn, recording):
    if is_turn:
        results = trainer.steps(NUMBERS, recording)
    else:
        results = [trainer.step(number, recording) for number in NUMBERS]
    whole = trainer.gathered(lambda parameter: parameter.detach())
    return results, {name: weight.clone() for name, weight in whole.items()}


WAYS = (Recording.spans, Recording.flight_only)


@pytest.mark.parametrize(
    ("kind", "recording"),
    sampled([*zip(KINDS, WAYS * 2, strict=True), *zip(KINDS, WAYS[::-1] * 2, strict=True)], 4),
)
def test_steps_in_a_row_train_what_single_steps_train(ranks, kind, recording):
    settings = config("zbv", 2, 4, **KINDS[kind])
    num_ranks = 2 * settings.replicas
    turn, single = (
        ranks.run(num_ranks, with_trainer, settings, trained, is_turn, recording)
        for is_turn in (True, False)
    )
    for (ours, weights), (theirs, expected) in zip(turn, single, strict=True):
        for result, other in zip(ours, theirs, strict=True):
            assert (result.loss, result.num_tokens) == (other.loss, other.num_tokens)
            assert result.gradient_norm == other.gradient_norm
            assert len(result.spans) == len(other.spans)
            assert bool(result.spans) == recording.has_spans
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


def test_spans_of_each_step_of_a_row_begin_after_those_of_the_step_before(ranks):
    settings = config("1f1b", 2, 4)
    for results, _ in ranks.run(2, with_trainer, settings, trained, True, Recording.spans):
        assert [{s.step for s in result.spans} for result in results] == [{n} for n in NUMBERS]
        for before, after in itertools.pairwise(results):
            first_ns = min(span.start_ns for span in after.spans)
            computed = [span for span in before.spans if span.lane is Lane.COMPUTE]
            assert first_ns >= max(span.end_ns for span in computed)
            assert first_ns > max(span.start_ns for span in before.spans)
