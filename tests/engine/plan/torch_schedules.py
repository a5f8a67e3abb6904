"""torch's schedules without a pipeline: its tables, its files, its own simulator."""

from functools import cache
from unittest import mock

from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime, get_schedule_class
from torch.distributed.pipelining.stage import PipelineStage

from engine.plan.action import COLLECTIVE_OPS, parse_cell
from engine.plan.schedules.registry import SCHEDULES, ShapeError, shape_of

OUR_NAMES = {
    "GPipe": "afab",
    "Interleaved1F1B": "interleaved_1f1b",
    "LoopedBFS": "looped_bfs",
    "InterleavedZeroBubble": "interleaved_zb",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipev",
}
MULTI_STAGE = [name for name in OUR_NAMES if name != "GPipe"]


def stages_of(torch_name):
    """torch's classes of several stages refuse a single one per rank."""
    allowed = SCHEDULES[OUR_NAMES[torch_name]].stages_per_rank
    return [1] if allowed.most == 1 else [2, 3] if allowed.most is None else [2]


def numbers_of_microbatches(torch_name, p, v):
    """Those of 1 to 4p that our schedule is made for."""
    numbers = sorted({1, 2, 3, 5, 8, p, p + 1, 2 * p - 1, 2 * p, 2 * p + 1, 2 * p + 2, 4 * p} - {0})
    return [m for m in numbers if _is_made_for(OUR_NAMES[torch_name], p, m, v)]


def _is_made_for(name, p, m, v):
    try:
        shape_of(name, p, m, v)
    except ShapeError:
        return False
    return True


def rows_of(torch_name, p, m, v):
    """torch's own table: idle cells and collectives dropped, pairs that may overlap in order."""
    order = schedule(torch_name, p, m, v).pipeline_order
    cells = [["" if one is None else str(one) for one in order[rank]] for rank in range(p)]
    rows = [[action for cell in row for action in parse_cell(cell)] for row in cells]
    return tuple(tuple(a for a in row if a.op not in COLLECTIVE_OPS) for row in rows)


@cache
def _stage(p, v):
    """A mock of the attributes that a schedule reads from a stage; to make one takes 30 ms."""
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.submod, stage.num_stages = 0, p, None, p * v
    return stage


def schedule(torch_name, p, m, v):
    """torch's schedule, with its transfers."""
    stage = _stage(p, v)
    return get_schedule_class(torch_name)(stage if v == 1 else [stage] * v, m)


def runtime(p, m, v, **options):
    """Torch's runtime for any schedule, without a program yet."""
    return _PipelineScheduleRuntime([_stage(p, v)] * v, m, **options)
