"""Programs of every schedule, what chance makes of them, and costs to simulate them with."""

from dataclasses import replace

from hypothesis import strategies as st
from schedule_grid import stages_per_rank

from engine.plan.action import COMPUTE_OPS, Action, Op
from engine.plan.lower import Policy, lower
from engine.plan.predict import Durations
from engine.plan.schedules.registry import SCHEDULES, ShapeError, build_program
from engine.plan.walk import TransferModel

FEW_RANKS = st.integers(1, 4)
KINDS = ("swap", "drop", "double", "move", "relabel")


@st.composite
def programs(draw, ranks=FEW_RANKS):
    """Programs of each schedule in small shapes; some full backwards are split in place."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    p, m = draw(ranks), draw(st.integers(1, 6))
    v = draw(st.sampled_from(stages_per_rank(name)))
    try:
        program = build_program(name, p, m, v)
    except ShapeError:
        program = build_program(name, p, 2 * p, v)
    if draw(st.booleans()):
        rows = [list(row) for row in program.actions]
        _split_some(draw, rows)
        program = with_rows(program, rows)
    return program


def with_rows(program, rows):
    return replace(program, actions=tuple(tuple(row) for row in rows))


def _split_some(draw, rows):
    for row in rows:
        full = [at for at, action in enumerate(row) if action.op is Op.B]
        if full:
            at = draw(st.sampled_from(full))
            row[at : at + 1] = [row[at]._replace(op=Op.I), row[at]._replace(op=Op.W)]


@st.composite
def mutated_programs(draw):
    program = draw(programs())
    rows = [list(row) for row in program.actions]
    for _ in range(draw(st.integers(0, 2))):
        _mutate(draw, rows, lambda action: True)
    return with_rows(program, rows)


@st.composite
def lowered_programs(draw, ranks=FEW_RANKS):
    policy, ahead = draw(st.sampled_from(Policy)), draw(st.integers(0, 3))
    return lower(draw(programs(ranks)), policy, ahead)


@st.composite
def mutated_transfers(draw):
    """Lowered programs whose compute order is left alone."""
    lowered = draw(lowered_programs(st.integers(2, 3)))
    rows = [list(row) for row in lowered.actions]
    for _ in range(draw(st.integers(0, 2))):
        _mutate(draw, rows, lambda action: action.op not in COMPUTE_OPS)
    return with_rows(lowered, rows)


@st.composite
def simulations(draw):
    """Arguments of `simulate`: a program, its costs by stage (some zero) and its transfers."""
    program = draw(programs())
    costs = st.tuples(*[st.integers(0, 9)] * program.num_stages)
    durations = Durations(draw(costs), draw(costs), draw(costs))
    model = TransferModel(latency_ns=draw(st.integers(0, 12)), overlaps=draw(st.booleans()))
    return program, durations, model


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
