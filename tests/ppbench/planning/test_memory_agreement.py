"""A plan's peaks are the trainer's predictions of the same cases, whose steps are made up here."""

import random

import pytest
from exhaustive import peak_bytes
from worlds import costs_of

from engine.plan.action import NO_INDEX, Op
from engine.plan.lower import lower
from engine.plan.memory import Messages, predict_peak
from engine.plan.model_costs import LinkCosts, ModelCosts, StageCosts
from engine.plan.schedules.registry import SCHEDULES, ShapeError, build_program
from engine.plan.spans import Lane, Span
from engine.run.memory import Block, Level
from engine.run.memory import costs_of as cut_out
from ppbench.planning.fitting import Fit, Layout
from ppbench.planning.space import Shape
from ppbench.planning.stages import StageTable


def drawn_layer(drawn, message_bytes, *, recompute):
    held, left = drawn.randint(200, 400), drawn.randint(50, 200)
    if recompute:
        held, left = message_bytes, held + 100
    return StageCosts(
        *(1e6, 2e6, 1e6, 1e6),
        held_after_forward=held,
        held_after_input=left,
        transient_bytes=drawn.randint(0, 90) + 2 * message_bytes + recompute * left,
        first_transient_bytes=drawn.randint(400, 500) + recompute * left,
        weight_transient_bytes=drawn.randint(0, 90),
        gradient_bytes=drawn.randint(1, 300),
        static_bytes=drawn.randint(1, 900),
        message_bytes=message_bytes,
    )


def cases():
    for p in (1, 2, 3, 4):
        for name in SCHEDULES:
            for v in (1, 2):
                for m in (4, 6, 8):
                    try:
                        yield build_program(name, p, m, v)
                    except ShapeError:
                        continue


def measured_step(program, stages, rank, message_bytes):
    """The levels, blocks and spans of a rank's step, in which every action takes ten."""
    levels, spans, blocks = [], [], []

    def tell(action, bytes_on_its_way):
        start = 10 * len(spans)
        if action[1] in (Op.F, Op.B, Op.I, Op.W):
            before, *others, after = bytes_on_its_way
            levels.append(Level(start, before))
            levels.extend(Level(start + 1 + at, num) for at, num in enumerate(others))
            levels.append(Level(start + 9, after))
            stage, op, microbatch = action
            spans.append(Span(0, rank, Lane.COMPUTE, stage, op, microbatch, start, start + 8, 0))
            depth, ranks = program.placement.depth, program.placement.ranks
            to = stage + 1 if op is Op.F else stage - 1
            is_here = to // depth == stage // depth
            if op is not Op.W and is_here and ranks[to] != rank:
                blocks.append(Block(start + 1, start + 9, message_bytes))
        else:
            levels.append(Level(start - 1, bytes_on_its_way[-1]))

    peak_bytes(program, stages, rank, tell)
    spans.append(
        Span(0, rank, Lane.COMPUTE, NO_INDEX, Op.OPT, NO_INDEX, *(10 * len(spans),) * 2, 0)
    )
    return levels, blocks, spans


@pytest.mark.parametrize("recompute", [False, True])
def test_a_plan_predicts_what_the_trainer_predicts_of_its_program(recompute):
    drawn = random.Random(recompute)
    for program in cases():
        m, placement = program.num_microbatches, program.placement
        message_bytes = drawn.randint(1, 40)
        layers = [
            drawn_layer(drawn, message_bytes, recompute=recompute)
            for _ in range(placement.depth + 3)
        ]
        model = ModelCosts(layers[0], tuple(layers[1:-1]), layers[-1])
        costs = costs_of({(1, recompute): model}, LinkCosts())
        shape = Shape(program.schedule, placement, 1, m)
        table = StageTable({recompute: model})
        fit = Fit(shape, program, table, costs, "none", meets=False)
        partition = (range(2), *(range(at + 1, at + 2) for at in range(1, placement.depth)))
        layout = Layout(partition, (recompute,) * program.num_stages)
        stages, lowered = table.of_all(*layout), lower(program)
        last = program.num_stages - 1
        messages = [0 if placement.is_last(at) else message_bytes for at in range(last)]
        known = Messages(messages, messages, is_posted=False, is_queued=False)
        for rank, planned in enumerate(fit.peaks(layout)):
            step = measured_step(program, stages, rank, message_bytes)
            start_bytes, measured = cut_out(*step)
            predicted = predict_peak(lowered, rank, start_bytes, measured, known)
            true = peak_bytes(program, stages, rank)
            assert planned == predicted == true, (program.schedule, placement, m, rank)
