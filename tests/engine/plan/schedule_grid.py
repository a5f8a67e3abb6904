"""The shapes that tests try every schedule in, and the policies of replicas."""

from engine.plan.collectives import DataParallel, NoCollectives, TorchWindow, Zero1, Zero2, Zero3
from engine.plan.rules import peak_activations
from engine.plan.schedules.registry import SCHEDULES, ShapeError, build_program, shape_of

RANKS = (1, 2, 3, 4, 8, 16)
POLICIES = (
    NoCollectives(),
    DataParallel(),
    Zero1(),
    Zero2(),
    Zero2(every_backward=False),
    *(Zero3(most, ahead) for most in (1, 2, 3) for ahead in range(most)),
    *map(TorchWindow, (1, 2, 3)),
)


def numbers_of_microbatches(p):
    """Fewer than ranks, as many, odd ones between, and multiples of p; fewer numbers of many."""
    numbers = {1, 5, p - 1, p, p + 1, 2 * p, 3 * p}
    if p <= 8:
        numbers |= {2, 2 * p - 1, 2 * p + 2}
    if p <= 4:
        numbers |= {3, 4 * p}
    return sorted(numbers - {0})


def stages_per_rank(name):
    allowed = SCHEDULES[name].stages_per_rank
    return [v for v in (1, 2, 3) if allowed.least <= v <= (allowed.most or v)]


def families(ranks=RANKS):
    """Every (schedule, p, v)."""
    return [(name, p, v) for name in SCHEDULES for p in ranks for v in stages_per_rank(name)]


def programs_of(name, p, v, numbers=None):
    """Shape -> program, for each number of microbatches that the schedule is made for."""
    programs = {}
    for m in numbers or numbers_of_microbatches(p):
        try:
            shape = shape_of(name, p, m, v)
        except ShapeError:
            continue
        programs[shape] = build_program(name, p, m, v)
    return programs


def peak_in_rank_shares(program):
    """The most that each rank holds, in microbatches of all its stages together."""
    share = program.world_size / program.num_stages
    return [peak * share for peak in peak_activations(program)]
