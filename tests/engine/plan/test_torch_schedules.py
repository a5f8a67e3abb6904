"""Against torch.distributed.pipelining: its tables, its files, its own simulator."""

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch_schedules import (
    MULTI_STAGE,
    OUR_NAMES,
    numbers_of_microbatches,
    rows_of,
    runtime,
    schedule,
    stages_of,
)

from engine.plan.check import check
from engine.plan.lower import Policy, lower
from engine.plan.program import to_csv
from engine.plan.schedules.registry import SCHEDULES, ShapeError, build_program, read_csv

TABLES = [(name, v) for name in OUR_NAMES for v in stages_of(name)]
FILES = [(name, p) for name in MULTI_STAGE for p in (2, 4)]


@pytest.mark.parametrize(("name", "v"), TABLES)
def test_the_order_is_torchs(name, v):
    for p in (1, 2, 3, 4, 8):
        for m in numbers_of_microbatches(name, p, v):
            assert build_program(OUR_NAMES[name], p, m, v).actions == rows_of(name, p, m, v), m


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_1f1b_is_torchs_but_for_the_last_rank(p):
    """torch's table for the last rank starts at F1 and ends past the last microbatch."""
    for m in (p, p + 1, 2 * p, 4 * p):
        assert build_program("1f1b", p, m).actions[:-1] == rows_of("1F1B", p, m, 1)[:-1]


@pytest.mark.parametrize(
    ("name", "p", "m"),
    [("Interleaved1F1B", 4, 9), ("InterleavedZeroBubble", 2, 5), ("DualPipeV", 4, 7)],
)
def test_torch_refuses_the_shapes_that_we_refuse(name, p, m):
    with pytest.raises(ValueError, match="requires"):
        get_schedule_ops(name, p, m, 2)
    with pytest.raises(ShapeError):
        build_program(OUR_NAMES[name], p, m, 2)


@pytest.mark.parametrize(("name", "p"), FILES)
def test_a_file_that_torch_wrote_without_transfers_is_our_program(tmp_path, name, p):
    path, m = tmp_path / "torch.csv", 2 * p
    schedule(name, p, m, 2)._dump_csv(path, "compute_only")
    ours, read = build_program(OUR_NAMES[name], p, m, 2), read_csv(path)
    check(read)
    assert (read.actions, read.placement) == (ours.actions, ours.placement)
    assert read.num_microbatches == m
    assert ("OVERLAP_F_B" in path.read_text()) == (name == "DualPipeV")
    pairs = build_program(OUR_NAMES[name], p, m, 2, has_pairs=True)
    assert read.paired == pairs.paired


@pytest.mark.parametrize("defer_pp_recv", [False, True])
@pytest.mark.parametrize(("name", "p"), FILES)
def test_a_file_that_torch_wrote_with_transfers_is_legal_and_cannot_hang(
    tmp_path, name, p, defer_pp_recv
):
    path, m = tmp_path / "torch.csv", 2 * p
    order = schedule(name, p, m, 2).pipeline_order
    torchs = runtime(p, m, 2, defer_pp_recv=defer_pp_recv)
    torchs._prepare_schedule_with_comms(order)
    torchs._dump_csv(path)
    text = path.read_text()
    assert all(word in text for word in ("UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_F", "RECV_B"))
    read = read_csv(path)
    check(read)
    assert to_csv(read).split() == text.split()
    assert lower(read) == read.without_collectives()
    ours = build_program(OUR_NAMES[name], p, m, 2)
    assert (read.compute_only().actions, read.placement) == (ours.actions, ours.placement)
    assert sorted(map(sorted, lower(read).actions)) == sorted(map(sorted, lower(ours).actions))


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", [n for n, one in SCHEDULES.items() if not one.is_two_way])
def test_torch_loads_our_file_and_its_simulator_runs_our_transfers_to_the_end(tmp_path, name, p):
    """Posted just in time: its receives block, which an early one must not."""
    v = 1 if SCHEDULES[name].stages_per_rank.most == 1 else 2
    program = build_program(name, p, 2 * p, v)
    path, back = tmp_path / "ours.csv", tmp_path / "torchs.csv"
    path.write_text(to_csv(program))
    torchs = runtime(p, 2 * p, v)
    torchs._load_csv(path)
    torchs._dump_csv(back, "compute_only")
    assert torchs.stage_index_to_group_rank == dict(enumerate(program.placement.ranks))
    assert read_csv(back).actions == program.actions
    path.write_text(to_csv(lower(program, Policy.JUST_IN_TIME)))
    torchs = runtime(p, 2 * p, v)
    torchs._load_csv(path, "compute_comms")
    simulated = torchs._simulate()
    for rank, row in enumerate(program.actions):
        order = [one for one in simulated[rank] if one is not None and one.is_compute_op]
        assert [str(one) for one in order] == [str(action) for action in row]
