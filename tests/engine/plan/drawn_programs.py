"""Programs that tests try: of every schedule and shape, changed by chance, or drawn."""

import random
from dataclasses import replace

from hypothesis import strategies as st

from engine.plan.action import COMPUTE_OPS, Action, Op
from engine.plan.collectives import DataParallel, NoCollectives, TorchWindow, Zero1, Zero2, Zero3
from engine.plan.lower import Policy, lower
from engine.plan.predict import Durations
from engine.plan.program import Placement, Program
from engine.plan.schedules.registry import SCHEDULES, ShapeError, build_program
from engine.plan.walk import TransferModel

POLICIES = (
    NoCollectives(),
    DataParallel(),
    Zero1(),
    Zero2(),
    Zero2(every_backward=False),
    *(Zero3(most, ahead) for most in (1, 2, 3) for ahead in range(most)),
    *map(TorchWindow, (1, 2, 3)),
)
ONE_TO_FOUR, TWO_OR_THREE = st.integers(1, 4), st.integers(2, 3)
KINDS = ("swap", "drop", "double", "move", "relabel")


def stages_per_rank(name):
    allowed = SCHEDULES[name].stages_per_rank
    return [v for v in (1, 2, 3) if allowed.least <= v <= (allowed.most or v)]


FAMILIES = [(name, v) for name in SCHEDULES for v in stages_per_rank(name)]


def numbers_of_microbatches(p):
    """Fewer than ranks, as many, odd ones between, and multiples of p; fewer numbers of many."""
    numbers = {1, 5, p - 1, p, p + 1, 2 * p, 3 * p}
    if p <= 8:
        numbers |= {2, 2 * p - 1, 2 * p + 2}
    if p <= 4:
        numbers |= {3, 4 * p}
    return sorted(numbers - {0})


def programs_of(name, p, v, numbers=None):
    """The program for each number of microbatches that the schedule is made for."""
    for m in numbers or numbers_of_microbatches(p):
        try:
            yield build_program(name, p, m, v)
        except ShapeError:
            continue


def small_program(name):
    """One of two ranks and four microbatches; with two stages on each rank where there may be."""
    return build_program(name, 2, 4, 1 if SCHEDULES[name].stages_per_rank.most == 1 else 2)


def with_rows(program, rows):
    return replace(program, actions=tuple(tuple(row) for row in rows))


@st.composite
def programs(draw, ranks=ONE_TO_FOUR):
    """Programs of each schedule in small shapes; some full backwards are split in place."""
    name, v = draw(st.sampled_from(FAMILIES))
    p, m = draw(ranks), draw(st.integers(1, 6))
    try:
        program = build_program(name, p, m, v)
    except ShapeError:
        p += p % 2 if SCHEDULES[name].is_two_way else 0
        program = build_program(name, p, 2 * p, v)
    if draw(st.booleans()):
        rows = [list(row) for row in program.actions]
        for row in rows:
            full = [at for at, action in enumerate(row) if action.op is Op.B]
            if full:
                at = draw(st.sampled_from(full))
                row[at : at + 1] = [row[at]._replace(op=Op.I), row[at]._replace(op=Op.W)]
        program = with_rows(program, rows)
    return program


@st.composite
def mutated_programs(draw):
    return _mutated(draw, draw(programs()), lambda action: True)


@st.composite
def lowered_programs(draw):
    policy, ahead = draw(st.sampled_from(Policy)), draw(st.integers(0, 3))
    return lower(draw(programs(TWO_OR_THREE)), policy, ahead)


@st.composite
def mutated_transfers(draw):
    """Lowered programs whose compute order is left alone."""
    return _mutated(draw, draw(lowered_programs()), lambda action: action.op not in COMPUTE_OPS)


@st.composite
def simulations(draw):
    """Arguments of `predict`: a program, its costs by stage (some zero) and its transfers."""
    program = draw(programs())
    costs = st.tuples(*[st.integers(0, 9)] * program.num_stages)
    durations = Durations(draw(costs), draw(costs), draw(costs))
    return program, durations, TransferModel(draw(st.integers(0, 12)), overlaps=draw(st.booleans()))


def _mutated(draw, program, may_change):
    rows = [list(row) for row in program.actions]
    for _ in range(draw(st.integers(0, 2))):
        _mutate(draw, rows, may_change)
    return with_rows(program, rows)


def _mutate(draw, rows, may_change):
    places = [(r, at) for r, row in enumerate(rows) for at in range(len(row))]
    chosen = [(r, at) for r, at in places if may_change(rows[r][at])]
    if not chosen:
        return
    rank, at = draw(st.sampled_from(chosen))
    near = [(r, to) for r, to in chosen if r == rank and abs(to - at) <= 4]
    there, to = draw(st.sampled_from(draw(st.sampled_from([near, chosen]))))
    action = rows[rank][at]
    match draw(st.sampled_from(KINDS)):
        case "swap":
            rows[rank][at], rows[there][to] = rows[there][to], action
        case "drop":
            del rows[rank][at]
        case "double":
            rows[there].insert(to, action)
        case "move":
            del rows[rank][at]
            rows[there].insert(to, action)
        case "relabel":
            hop = draw(st.sampled_from([(0, 1), (0, -1), (1, 0), (-1, 0)]))
            rows[rank][at] = Action(action.stage + hop[0], action.op, action.microbatch + hop[1])


def shuffled_program(seed, world_size=None):
    """A legal program of 2 to 6 ranks, each with 1 to 3 stages anywhere in the model.

    It is drawn action by action: of all that can be done next, on whichever rank, one is chosen. So
    receivers take microbatches in another order than they were sent, and forwards, backwards and
    their halves lie about as no schedule would have them.
    """
    drawn = random.Random(seed)
    world_size = world_size or drawn.randint(2, 6)
    ranks = [rank for rank in range(world_size) for _ in range(drawn.randint(1, 3))]
    drawn.shuffle(ranks)
    num_stages, num_microbatches = len(ranks), drawn.randint(3, 6)
    is_split = {
        (stage, m): drawn.random() < 0.5
        for stage in range(num_stages)
        for m in range(num_microbatches)
    }

    def backward(stage, m):
        return Action(stage, Op.I if is_split[stage, m] else Op.B, m)

    rows = [[] for _ in range(world_size)]
    waiting = [Action(0, Op.F, m) for m in range(num_microbatches)]
    while waiting:
        action = stage, op, m = waiting.pop(drawn.randrange(len(waiting)))
        rows[ranks[stage]].append(action)
        if op is Op.F:
            is_last = stage == num_stages - 1
            waiting.append(backward(stage, m) if is_last else Action(stage + 1, Op.F, m))
        elif op is not Op.W:
            waiting += [backward(stage - 1, m)] if stage else []
            waiting += [Action(stage, Op.W, m)] if op is Op.I else []
    actions = tuple(map(tuple, rows))
    return Program(
        f"shuffled {seed}", Placement(tuple(ranks), world_size), num_microbatches, actions
    )
