"""Hand-written spans, exact expected parts; replayed programs with one cause put in."""

import itertools
import random
from dataclasses import replace

import pandas as pd
import pytest
from spans import frame

from engine.plan.action import CODES, COMPUTE_OPS, SEND_OPS, Op
from engine.plan.lower import lower
from engine.plan.period import with_end
from engine.plan.predict import Durations, predict, timed, uniform
from engine.plan.schedules.registry import SCHEDULES, build_program
from engine.plan.walk import walk
from ppbench.analysis.attribution import PARTS, PHASES, attribute
from ppbench.analysis.costs import measured_slices, variation
from ppbench.analysis.metrics import windows

ONE_MICROBATCH = frame(
    (0, "F", 0, 0, 100, 120),
    (0, "SEND_F", 0, 0, 122, 130),
    (1, "RECV_F", 1, 0, 90, 130),
    (1, "F", 1, 0, 131, 171),
    (1, "B", 1, 0, 175, 235),
    (1, "SEND_B", 1, 0, 235, 240),
    (0, "RECV_B", 0, 0, 121, 240),
    (0, "B", 0, 0, 240, 260),
)
"""Two ranks, AFAB. F takes 20 and 40, B 20 and 60; messages 8 and 5; the host 2, 1 and 4."""


def attributed(spans, lowered):
    return attribute(spans, lowered, windows(spans, lowered.world_size))


def parts_of(rows):
    return [tuple(row) for row in rows[list(PARTS)].to_numpy()]


def test_the_parts_and_phases_of_a_hand_written_step():
    rows = attributed(ONE_MICROBATCH, lower(build_program("afab", 2, 1))).rows
    # Equal stages: F 30, B 40 on both, one after the other: 140. Unequal: 20 + 40 + 60 + 20 = 140.
    # With messages: 140 + 8 + 5 = 153. Measured: 160.
    assert rows["idle_ns"].tolist() == [160 - 40, 160 - 100]
    structure, imbalance, transfer, *rest = (140 - 70, 30, 13, 0, 7, 0)
    assert parts_of(rows) == [
        (structure, imbalance, transfer, *rest),
        (structure, -imbalance, transfer, *rest),
    ]
    # Rank 0 begins its backward at 240, having computed 20 since 100; rank 1 at 175, having 40.
    assert [tuple(row) for row in rows[list(PHASES)].to_numpy()] == [
        (140 - 20, 0, 20 - 20),
        (75 - 40, 0, 85 - 60),
    ]


def test_steady_state_is_between_the_first_backward_and_the_last_forward():
    spans = frame(
        (0, "F", 0, 0, 0, 10),
        (0, "B", 0, 0, 13, 20),
        (0, "F", 0, 1, 25, 30),
        (0, "B", 0, 1, 31, 40),
    )
    rows = attributed(spans, lower(build_program("1f1b", 1, 2))).rows
    (phases,) = rows[list(PHASES)].to_numpy().tolist()
    assert phases == [13 - 10, 17 - 12, 10 - 9]


def test_what_differs_from_step_to_step_is_jitter_and_the_mean_is_not():
    slower = ONE_MICROBATCH.assign(step=6)
    slower.loc[slower["op"].isin(["B"]) & (slower["rank"] == 0), "end_ns"] += 2
    both = pd.concat([ONE_MICROBATCH, slower], ignore_index=True)
    rows = attributed(both, lower(build_program("afab", 2, 1))).rows.set_index(["step", "rank"])
    # B of rank 0 takes 20 and 22, 21 on average: rank 1 idles 1 less and 1 more than on average.
    assert rows.loc[(5, 1), "jitter_ns"] == -1
    assert rows.loc[(6, 1), "jitter_ns"] == 1
    assert rows.loc[(5, 0), "jitter_ns"] == rows.loc[(6, 0), "jitter_ns"] == 0


def steps_of(lowered, duration_ns, moving_ns, num_steps=5):
    """Spans of some steps; `duration_ns` and `moving_ns` are asked for every action of each."""
    frames = []
    for step in range(num_steps):
        actions = [action for row in lowered.actions for action in row]
        took = [
            duration_ns(a) if a.op in COMPUTE_OPS else moving_ns(a) if a.op in SEND_OPS else 0
            for a in actions
        ]
        spans = timed(lowered, [took]).spans()
        frames.append(pd.DataFrame(spans).assign(step=step))
    return pd.concat(frames, ignore_index=True)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_parts_and_the_phases_add_up_to_the_nanosecond_for_every_schedule(name):
    program = build_program(name, 4, 8)
    costs, drawn = uniform(program.placement, 12_000, 18_000, 6_000).by_op(), random.Random(name)
    spans = steps_of(
        lower(program),
        lambda a: round(costs[a.op][a.stage] * drawn.uniform(0.7, 1.3)),
        lambda _: drawn.randrange(5_000),
    )
    spans["end_ns"] += [drawn.randrange(50) for _ in range(len(spans))]  # overlaps: no model of it
    rows = attributed(spans, lower(program)).rows
    compute = spans[spans["lane"] == "compute"]
    busy = (compute["end_ns"] - compute["start_ns"]).groupby([compute["step"], compute["rank"]])
    step_ns = spans.groupby("step")["end_ns"].max() - compute.groupby("step")["start_ns"].min()
    idle = step_ns.loc[rows["step"]].to_numpy() - busy.sum().to_numpy()
    assert rows["idle_ns"].tolist() == idle.tolist()
    assert rows[list(PARTS)].sum(axis=1).tolist() == idle.tolist()
    assert rows[list(PHASES)].sum(axis=1).tolist() == idle.tolist()


def test_slices_that_differ_are_no_jitter_and_hide_no_imbalance():
    measured = (0.2, 0.3, 0.5)
    planned = lower(build_program("seq1f1b", 2, 4, slices=(1 / 3,) * 3))
    of_stage = {0: 60_000, 1: 63_000}
    spans = steps_of(
        planned, lambda a: round(of_stage[a.stage] * measured[a.microbatch % 3]), lambda _: 0
    )
    shares = measured_slices(spans, planned.slices)
    assert shares == pytest.approx(measured)
    program = replace(planned, slices=shares)
    found = attributed(spans, program)
    assert found.costs.by_stage == {Op.F: (20_000, 21_000), Op.B: (20_000, 21_000)}
    assert variation(spans, found.costs, program) == pytest.approx(0, abs=1e-6)
    lost = found.rows[list(PARTS)].sum()
    assert lost["imbalance_ns"] != 0
    assert lost.sum() == pytest.approx(lost["structure_ns"] + lost["imbalance_ns"], rel=1e-3)


def test_the_shares_of_slices_that_differ_by_chance_are_those_of_the_plan():
    drawn, planned = random.Random(3), lower(build_program("seq1f1b", 2, 4, slices=(0.25, 0.75)))
    spans = steps_of(
        planned,
        lambda a: round(1_000 * planned.slices[a.microbatch % 2] * drawn.uniform(0.8, 1.2)),
        lambda _: 0,
    )
    assert measured_slices(spans, planned.slices) == pytest.approx(planned.slices)
    assert measured_slices(spans, ()) == ()


def training(program, tooks, optimizer_ns, *, meets=False, host=lambda: 0):
    """Spans of steps 2 to 4 of five in a row, each with its times.

    The host comes late to each action by what `host` says.
    """
    ended = with_end(program, meets=meets)
    rows = [slice(*ends) for ends in itertools.pairwise(program.table.offset)]
    last = [0, optimizer_ns] if meets else [optimizer_ns]
    times = [ns for took in tooks for row in rows for ns in [*took[row], *last]]
    walked = walk(ended, [times])
    spans = []
    for step in (2, 3, 4):
        starts, ends = (walked.of_step(of, 0, step) for of in (walked.starts_ns, walked.ends_ns))
        for at, (start, end) in enumerate(zip(starts, ends, strict=True)):
            rank, _ = ended.table.place(at)
            stage, op, microbatch = ended.table.at(at)
            if op is not Op.NORM:
                spans.append((rank, op.value, stage, microbatch, start + host(), end, step))
    return pd.DataFrame(
        spans, columns=["rank", "op", "stage", "microbatch", "start_ns", "end_ns", "step"]
    ).assign(lane="compute", num_bytes=0, replica=0)


@pytest.mark.parametrize("meets", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_h2"])
def test_steps_in_a_row_have_the_idle_time_of_their_period(name, meets):
    program = build_program(name, 4, 8)
    spans = training(program, [[1000] * program.table.num_actions] * 5, 500, meets=meets)
    if name == "1f1b":  # whole backwards take as long as both halves
        took = [2000 if op == CODES[Op.B] else 1000 for op in program.table.op]
        spans = training(program, [took] * 5, 500, meets=meets)
    of_ranks = windows(spans, 4).drop(index=2, level="step")
    assert of_ranks["follows"].all()
    found = attribute(spans, lower(program), of_ranks, meets=meets)
    # Closed forms, in units of 1000: makespans, and the period of steps that overlap.
    makespan = {"1f1b": 33, "zb_h1": 27, "zb_h2": 27}[name]
    period = {"1f1b": 33, "zb_h1": 27, "zb_h2": 24}[name]
    step_ns = 1000 * (makespan if meets else period) + 500
    assert found.modelled_step_ns == step_ns
    for _, rows in found.rows.groupby("step"):
        assert rows["idle_ns"].sum() == rows["structure_ns"].sum() == 4 * (step_ns - 24_500)
        assert (rows[list(PARTS)].sum(axis=1) == rows["idle_ns"]).all()


def test_the_parts_of_steps_in_a_row_add_up_to_the_nanosecond():
    drawn = random.Random(39)
    for name in SCHEDULES:
        program = build_program(name, 4, 8)
        took = [drawn.randint(500, 1500) for _ in range(program.table.num_actions)]
        late = iter(drawn.choices(range(50), k=10_000))
        spans = training(program, [took] * 5, 700, host=lambda late=late: next(late))
        of_ranks = windows(spans, 4)
        rows = attribute(spans, lower(program), of_ranks).rows
        assert rows[list(PARTS)].sum(axis=1).tolist() == rows["idle_ns"].tolist()
        assert rows[list(PHASES)].sum(axis=1).tolist() == rows["idle_ns"].tolist()


@pytest.mark.parametrize("meets", [False, True])
def test_what_a_late_neighbour_costs_a_step_is_jitter_and_no_launch_gap(meets):
    drawn = random.Random(7)
    for name in SCHEDULES:
        program = build_program(name, 4, 8)
        tooks = [[drawn.randint(500, 1500) for _ in program.table.op] for _ in range(5)]
        spans = training(program, tooks, 700, meets=meets)
        of_ranks = windows(spans, 4).drop(index=2, level="step")
        rows = attribute(spans, lower(program), of_ranks, meets=meets).rows
        assert rows[list(PARTS)].sum(axis=1).tolist() == rows["idle_ns"].tolist()
        assert rows["launch_gap_ns"].abs().max() == 0
        assert rows["between_ns"].abs().max() == 0
        # A pause before step 4: that stands alone, and 3 goes on from what came before it.
        apart = windows(spans, 4, [4]).drop(index=2, level="step")
        rows = attribute(spans, lower(program), apart, meets=meets).rows
        assert rows[list(PARTS)].sum(axis=1).tolist() == rows["idle_ns"].tolist()
        assert rows[rows["step"] == 3]["launch_gap_ns"].abs().max() == 0


def test_ranks_that_go_on_late_are_idle_between_steps():
    program = build_program("zb_h2", 4, 8)
    spans = training(program, [[1000] * program.table.num_actions] * 5, 700)
    spans.loc[spans["op"] == "OPT", "end_ns"] -= 100  # which the host takes
    of_ranks = windows(spans, 4).drop(index=2, level="step")
    rows = attribute(spans, lower(program), of_ranks).rows
    assert rows["between_ns"].tolist() == [100] * 8
    assert rows["launch_gap_ns"].abs().max() == 0


PROGRAM = lower(build_program("1f1b", 4, 8))


def total(spans):
    return attributed(spans, PROGRAM).rows[list(PARTS)].sum() / spans["step"].nunique()


def test_a_slow_stage_is_imbalance_and_nothing_else():
    halves = (500, 750, 500, 500)
    durations = Durations((1000, 1500, 1000, 1000), halves, halves)
    slow, step_ns = durations.by_op(), predict(PROGRAM, durations).makespan_ns
    parts = total(steps_of(PROGRAM, lambda a: slow[a.op][a.stage], lambda _: 0))
    # With the same work spread evenly the step would take 11 x 2250.
    assert parts["structure_ns"] == 4 * 24_750 - 4 * 8 * 2250
    assert parts["imbalance_ns"] == 4 * (step_ns - 24_750)
    assert parts[["transfer_ns", "jitter_ns", "launch_gap_ns"]].tolist() == [0, 0, 0]


def test_a_slow_link_is_exposed_transfer_and_nothing_else():
    parts = total(steps_of(PROGRAM, lambda _: 1000, lambda a: 300 if a.stage == 2 else 0))
    assert parts["structure_ns"] == 4 * 6_000
    assert parts["transfer_ns"] > 0
    assert parts[["imbalance_ns", "jitter_ns", "launch_gap_ns"]].tolist() == [0, 0, 0]


def test_chance_is_jitter_and_no_imbalance():
    drawn = random.Random(0)
    parts = total(steps_of(PROGRAM, lambda _: round(drawn.gauss(10_000, 1_000)), lambda _: 0, 20))
    assert parts["imbalance_ns"] == 0
    assert parts["jitter_ns"] > 0.03 * parts["structure_ns"]
    assert abs(parts["launch_gap_ns"]) == 0


def test_a_computation_without_a_span_is_no_computation_of_no_time():
    lowered = lower(build_program("afab", 2, 1))
    spans = ONE_MICROBATCH.assign(step=0)
    both = pd.concat([spans, spans.assign(step=1)], ignore_index=True)
    is_missing = (both["step"] == 1) & (both["op"] == "B") & (both["stage"] == 1)
    with pytest.raises(KeyError, match=r"stage=1.*B"):
        attributed(both[~is_missing], lowered)


def test_a_span_of_another_program_takes_no_part_in_the_replays():
    lowered = lower(build_program("afab", 2, 1))
    forward = (ONE_MICROBATCH["op"] == "F") & (ONE_MICROBATCH["stage"] == 0)
    outside = ONE_MICROBATCH[forward].assign(op="W", microbatch=7)
    spans = pd.concat([ONE_MICROBATCH, outside], ignore_index=True)
    assert attributed(spans, lowered).modelled.makespan_ns == 153
