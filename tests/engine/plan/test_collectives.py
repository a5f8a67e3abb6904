"""Where a policy puts collectives, against torch's own passes and against all orders of a cache."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from drawn_programs import POLICIES, small_program
from torch.distributed.pipelining.schedules import _add_reduce_grad, _add_unshard_reshard
from torch_schedules import OUR_NAMES, numbers_of_microbatches, runtime, schedule, stages_of

from engine.plan.action import COLLECTIVE_OPS, COMPUTE_OPS, NO_INDEX, Action, Op, parse_cell
from engine.plan.collective_rules import check_collectives
from engine.plan.collectives import (
    DataParallel,
    NoCollectives,
    TorchWindow,
    Zero1,
    Zero2,
    Zero3,
    add_collectives,
)
from engine.plan.lower import lower
from engine.plan.program import from_csv, from_json, to_csv, to_json
from engine.plan.rules import ProgramError
from engine.plan.schedules.registry import SCHEDULES, build_program


def rows_of(program):
    return [" ".join(map(str, row)) for row in program.actions]


def torchs_own(torch_name, p, m, v, window):
    """The rows of torch's own table with its collectives; of a pair, its two actions in order."""
    order = schedule(torch_name, p, m, v).pipeline_order
    for rank in range(p):
        computations = [one for one in order[rank] if one is not None and one.is_compute_op]
        actions = _add_reduce_grad(_add_unshard_reshard(computations, window), m)
        yield [a for action in actions for a in parse_cell(str(action))]


@pytest.mark.parametrize("name", OUR_NAMES)
def test_torchs_own_tables_get_the_same_collectives_but_for_pairs_in_a_window_of_one(
    name, is_thorough
):
    """Torch gathers both stages of a pair that may overlap; here each computation is alone."""
    ranks = range(1, 9) if is_thorough else (1, 4)
    sizes = itertools.product(ranks, stages_of(name), range(1, 6))
    num_rows = Counter()
    for p, v, window in sizes:
        for m in numbers_of_microbatches(name, p, v):
            placed = add_collectives(build_program(OUR_NAMES[name], p, m, v), TorchWindow(window))
            theirs = torchs_own(name, p, m, v, window)
            for ours, row in zip(placed.actions, theirs, strict=True):
                num_rows[window == 1, list(ours) == row] += 1
    differ = {key for key in num_rows if not key[1]}
    assert differ == ({(True, False)} if name == "DualPipeV" else set())
    assert min(num_rows.values()) > 2


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_policy_changes_neither_computations_nor_transfers_and_obeys_its_rules(policy):
    programs = [small_program(name) for name in SCHEDULES]
    for program in (*programs, *map(lower, programs)):
        placed, name = add_collectives(program, policy), program.schedule
        check_collectives(placed, policy)
        assert placed.without_collectives() == program
        assert add_collectives(placed, policy) == placed
        assert from_csv(to_csv(placed), name) == placed
        assert from_json(to_json(placed)) == placed
        without_transfers = [
            [a for a in row if a.op in COMPUTE_OPS | COLLECTIVE_OPS] for row in placed.actions
        ]
        assert without_transfers == list(
            map(list, add_collectives(program.compute_only(), policy).actions)
        )


@pytest.mark.parametrize("name", ["interleaved_zb", "zbv"])
def test_torch_loads_a_program_with_collectives_and_transfers_and_writes_it_back(tmp_path, name):
    program = add_collectives(lower(build_program(name, 2, 4, 2)), Zero3(1, 0))
    path, back = tmp_path / "ours.csv", tmp_path / "torchs.csv"
    path.write_text(to_csv(program))
    loaded = runtime(2, 4, 2)
    loaded._load_csv(path, "compute_comms")
    loaded._dump_csv(back)
    assert from_csv(back.read_text(), name) == program


REDUCED = "0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD"
RESHARDED = "1F0 1B0 1REDUCE_GRAD 1RESHARD "
DRAWN = [
    (NoCollectives(), "0F0 1F0 1B0 0B0"),
    *((policy, REDUCED) for policy in (DataParallel(), Zero1(), Zero2())),
    (
        Zero3(1, 0),
        f"0UNSHARD 0F0 0RESHARD 1UNSHARD {RESHARDED}0UNSHARD 0B0 0REDUCE_GRAD 0RESHARD",
    ),
    (Zero3(2, 0), f"0UNSHARD 0F0 1UNSHARD {RESHARDED}0B0 0REDUCE_GRAD 0RESHARD"),
    (Zero3(2, 1), f"0UNSHARD 1UNSHARD 0F0 {RESHARDED}0B0 0REDUCE_GRAD 0RESHARD"),
]


def test_each_policy_is_drawn():
    program = build_program("interleaved_1f1b", 1, 1, 2)
    for policy, row in DRAWN:
        assert rows_of(add_collectives(program, policy)) == [row]
    # What a backward made is sent before its gradients are summed.
    placed = add_collectives(lower(build_program("1f1b", 2, 1)), Zero3(1, 0))
    assert rows_of(placed)[1] == "1RECV_F0 1UNSHARD 1F0 1B0 1SEND_B0 1REDUCE_GRAD 1RESHARD"


def least_unshards(stages, residency):
    """The fewest UNSHARDs of any order, by trying all that may be resharded."""
    costs = {frozenset(): 0}
    for stage in stages:
        following = {}
        for held, cost in costs.items():
            for size in range(min(residency - 1, len(held - {stage})) + 1):
                for kept in itertools.combinations(sorted(held - {stage}), size):
                    after = frozenset({*kept, stage})
                    total = cost + (stage not in held)
                    following[after] = min(total, following.get(after, total))
        costs = following
    return min(costs.values())


@pytest.mark.parametrize("residency", [1, 2, 3])
@pytest.mark.parametrize("name", ["interleaved_1f1b", "looped_bfs", "interleaved_zb"])
def test_without_look_ahead_no_order_has_fewer_unshards(name, residency):
    for row in add_collectives(build_program(name, 2, 6, 4), Zero3(residency, 0)).actions:
        stages = [action.stage for action in row if action.op in COMPUTE_OPS]
        unshards = [action for action in row if action.op is Op.UNSHARD]
        assert len(unshards) == least_unshards(stages, residency)


def test_settings_that_cannot_be_kept_are_refused():
    for residency, look_ahead in ((0, 0), (1, 1), (2, 3), (1, -1)):
        with pytest.raises(ValueError, match=f"got look_ahead {look_ahead}, residency {residency}"):
            Zero3(residency, look_ahead)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        TorchWindow(0)


# rules


@pytest.mark.parametrize(
    ("row", "policy", "position", "reason"),
    [
        ("0F0,0UNSHARD,0B0,0REDUCE_GRAD,0RESHARD", Zero3(), 0, "is unsharded only later"),
        ("0UNSHARD,0F0,0RESHARD,0B0,0REDUCE_GRAD", Zero3(), 3, "is not unsharded again"),
        ("0UNSHARD,0F0,0UNSHARD,0B0", Zero3(), 2, "stage 0 is unsharded already"),
        ("0UNSHARD,0RESHARD,0RESHARD,0F0,0B0", Zero3(), 2, "stage 0 is not unsharded"),
        ("0UNSHARD,0F0,0B0,0REDUCE_GRAD", Zero3(), 4, "stage 0 is still unsharded"),
        ("0UNSHARD,1UNSHARD,0F0,1F0,1B0,0B0", Zero3(1, 0), 1, "unsharded are stages 0; at most 1"),
        ("0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD", Zero2(), 0, "shards no parameters"),
        ("0F0,0B0,2REDUCE_GRAD", Zero2(), 2, "there are 1 stages"),
        ("0F0,0B0", DataParallel(), 2, "the gradients of stage 0 are not summed"),
        ("0F0,0REDUCE_GRAD,0B0", DataParallel(), 1, "has no gradients to sum"),
        ("0F0,0B0,0REDUCE_GRAD", NoCollectives(), 2, "has no gradients to sum"),
        ("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD", Zero1(), 3, "has no gradients to sum"),
        ("0F0,0F1,0B0,0REDUCE_GRAD,0B1", Zero1(), 3, "comes before the last backward of stage 0"),
        ("0F0,0F1,0B0,0B1,0REDUCE_GRAD", Zero2(), 3, "before it are not summed"),
    ],
)
def test_a_collective_out_of_place_is_refused_by_rank_position_and_action(
    row, policy, position, reason
):
    program = from_csv(f"{row}\n", "mine")
    with pytest.raises(ProgramError) as caught:
        check_collectives(program, policy)
    error = caught.value
    actions = [*row.split(","), "end of program"]
    assert (error.rank, error.position, error.action) == (0, position, actions[position])
    assert reason in error.reason
    assert position == len(actions) - 1 or f"[{error.action}]" in str(error)


def test_a_collective_is_on_the_rank_of_its_stage_and_the_optimizer_last():
    program = from_csv("0F0,0B0,0REDUCE_GRAD\n1F0,1B0,1REDUCE_GRAD,0REDUCE_GRAD\n", "mine")
    with pytest.raises(ProgramError, match="rank 1, position 3, 0REDUCE_GRAD: stage 0 is placed"):
        check_collectives(program, Zero1())
    placed = add_collectives(build_program("1f1b", 1, 1), DataParallel())
    for at in range(4):
        row = list(placed.actions[0])
        row.insert(at, Action(NO_INDEX, Op.OPT, NO_INDEX))
        changed = replace(placed, actions=[row])
        if at == 3:
            check_collectives(changed, DataParallel())
            return
        with pytest.raises(ProgramError, match=r"comes after the optimizer|are not summed"):
            check_collectives(changed, DataParallel())
