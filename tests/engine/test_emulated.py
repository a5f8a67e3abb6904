"""Emulated ranks: real processes, programs and messages; stages that only take time."""

from dataclasses import replace

import pytest
import torch.distributed as dist
from pipeline import config

from engine import emulated
from engine.configuration import lowered_of
from engine.connection import agree
from engine.emulated import EmulatedStages
from engine.plan.action import COMPUTE_OPS, JOINING_OPS, SEND_OPS, Action, Op
from engine.plan.collectives import DataParallel, Zero2, Zero3
from engine.plan.lower import lower
from engine.plan.messages import edge_of
from engine.plan.predict import predict, timed, took_by, uniform
from engine.plan.rules import peak_activations
from engine.plan.schedules.registry import build_program
from engine.run.emulation import Emulation
from engine.trainer import Trainer

MS = 1_000_000
F_OPS, B_OPS = (Op.SEND_F, Op.RECV_F), (Op.SEND_B, Op.RECV_B)
NUM_BYTES = 16 * 64 * 8  # tokens x hidden x float64, the messages of llama-tiny


def emulate(fabric, is_member, settings, emulation):
    agreement = agree(settings, fabric)
    if not is_member:
        return None
    trainer = Trainer(agreement, fabric, stages=EmulatedStages(agreement, emulation))
    results = [trainer.step(step) for step in range(2)]
    trainer.close()
    return results, trainer.peak_held


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
def test_the_program_runs_with_messages_of_real_size(ranks, schedule):
    program = build_program(schedule, 4, 8)
    durations = uniform(program.placement, 2 * MS, 2 * MS, 2 * MS)
    outcomes = ranks.run(4, emulate, config(schedule, 4, 8), Emulation(durations))
    lowered = lower(program)
    for rank, (results, peak_held) in enumerate(outcomes):
        assert peak_held == peak_activations(program)[rank]
        for step, result in enumerate(results):
            assert result.loss is None
            assert result.num_tokens == 8 * 16
            spans = [s for s in result.spans if s.op in COMPUTE_OPS]
            assert [Action(s.stage, s.op, s.microbatch) for s in spans] == list(
                program.actions[rank]
            )
            transfers = [s for s in result.spans if s.op not in COMPUTE_OPS]
            assert len(transfers) == len(lowered.actions[rank]) - len(program.actions[rank])
            assert {s.num_bytes for s in transfers} == {NUM_BYTES}
            assert {s.step for s in result.spans} == {step}


def test_no_action_and_no_step_is_shorter_than_planned(ranks):
    program = build_program("zb_h1", 2, 4)
    durations = uniform(program.placement, 3 * MS, 2 * MS, 1 * MS)
    outcomes = ranks.run(2, emulate, config("zb_h1", 2, 4), Emulation(durations))
    spans = [span for results, _ in outcomes for span in results[1].spans]
    by_op = {Op.F: 3 * MS, Op.I: 2 * MS, Op.W: MS}
    compute = [span for span in spans if span.op in by_op]
    assert all(span.end_ns - span.start_ns >= by_op[span.op] for span in compute)
    makespan = max(s.end_ns for s in compute) - min(s.start_ns for s in compute)
    assert makespan >= predict(program, durations).makespan_ns


def test_a_pair_is_one_action_whose_halves_share_its_time(ranks):
    program = build_program("dualpipe", 2, 6, has_pairs=True)
    durations = replace(uniform(program.placement, 4 * MS, 4 * MS, 4 * MS), pair_ns=(8 * MS,) * 4)
    took, mates = took_by(program, durations), program.mates
    halves = [half for at, mate in enumerate(mates) if mate >= 0 for half in (at, mate)]
    of_pairs = {program.table.at(at): took[at] for at in halves}
    emulation = Emulation(durations, of_actions=of_pairs)
    outcomes = ranks.run(2, emulate, config("dualpipe", 2, 6, has_pairs=True), emulation)
    spans = [span for results, _ in outcomes for span in results[1].spans]
    at = {Action(span.stage, span.op, span.microbatch): span for span in spans}
    pairs = [program.table.those([first, mate]) for first, mate in enumerate(mates) if mate >= 0]
    assert len(pairs) >= 4
    for forward, backward in pairs:
        for half, (sends, takes) in ((forward, F_OPS), (backward, B_OPS)):
            if sent := at.get(half._replace(op=sends)):
                assert sent.start_ns >= at[backward].end_ns
            if received := at.get(half._replace(op=takes)):
                assert received.end_ns <= at[forward].start_ns
        assert at[backward].end_ns - at[forward].start_ns >= 8 * MS


def test_a_held_up_link_takes_its_time_from_when_both_ends_are_ready(ranks):
    program = build_program("1f1b", 3, 4)
    durations = uniform(program.placement, MS, MS, MS)
    emulation = Emulation(durations, link_ns=(0, 4 * MS))
    outcomes = ranks.run(3, emulate, config("1f1b", 3, 4), emulation)
    at = {
        Action(s.stage, s.op, s.microbatch): s for results, _ in outcomes for s in results[1].spans
    }
    for microbatch in range(4):
        ends = (Action(1, Op.SEND_F, microbatch), Action(2, Op.RECV_F, microbatch))
        back = (Action(2, Op.SEND_B, microbatch), Action(1, Op.RECV_B, microbatch))
        for send, receive in ((at[one], at[other]) for one, other in (ends, back)):
            assert receive.end_ns - max(send.start_ns, receive.start_ns) >= 4 * MS
    lowered, by_op = lower(program), durations.by_op()
    took = [
        by_op[a.op][a.stage]
        if a.op in COMPUTE_OPS
        else 4 * MS * (a.op in SEND_OPS and max(edge_of(a)) == 2)
        for row in lowered.actions
        for a in row
    ]
    spans = [span for span in at.values() if span.op in COMPUTE_OPS]
    makespan = max(s.end_ns for s in spans) - min(s.start_ns for s in spans)
    assert makespan >= timed(lowered, [took]).makespan_ns


def test_jitter_follows_from_seed_step_and_action():
    durations = uniform(build_program("1f1b", 1, 1).placement, 10 * MS, 10 * MS, 10 * MS)
    plan, again, other = (Emulation(durations, 0.1, seed) for seed in (1, 1, 2))
    actions = [Action(0, op, m) for op in (Op.F, Op.B) for m in range(200)]
    drawn = [plan.duration_ns(action, 3) for action in actions]
    assert drawn == [again.duration_ns(action, 3) for action in actions]
    assert drawn != [other.duration_ns(action, 3) for action in actions]
    assert drawn != [plan.duration_ns(action, 4) for action in actions]
    forwards = drawn[:200]
    assert abs(sum(forwards) / 200 - 10 * MS) < 0.3 * MS
    assert len(set(forwards)) > 190
    assert min(Emulation(durations, 1.0).duration_ns(action, 0) for action in actions) == 0


def emulate_with_own_clocks(fabric, is_member, settings, emulation):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated, "clock_identity", lambda: str(dist.get_rank()))
        return emulate(fabric, is_member, settings, emulation)


def joint_step_ns(lowered, emulation, replicas):
    by_op = emulation.durations.by_op()
    actions = [action for row in lowered.actions for action in row]
    times = [
        [
            emulation.collective_ns(a)
            if a.op in JOINING_OPS
            else round(by_op[a.op][a.stage] * factor)
            if a.op in by_op
            else 0
            for a in actions
        ]
        for factor in emulation.factors or (1,) * replicas
    ]
    return timed(lowered, times).makespan_ns


def test_copies_of_a_stage_meet_once_in_a_step_and_then_take_the_time_of_their_sum(ranks):
    settings = config("chimera", 4, 4)
    lowered = lowered_of(settings)
    durations = uniform(lowered.placement, 2 * MS, 2 * MS, 2 * MS)
    emulation = Emulation(durations, reduce_ns=(5 * MS,) * 8)
    outcomes = ranks.run(4, emulate, settings, emulation)
    spans = [span for results, _ in outcomes for span in results[1].spans]
    sums = {s.stage: s for s in spans if s.op is Op.REDUCE_GRAD}
    assert sorted(sums) == list(range(8))
    for part in range(4):
        one, other = sums[part], sums[part + 4]
        assert {one.rank, other.rank} == {part, 3 - part}
        assert min(one.end_ns, other.end_ns) >= max(one.start_ns, other.start_ns) + 5 * MS
    by_op, actions = durations.by_op(), [a for row in lowered.actions for a in row]
    took = [by_op[a.op][a.stage] if a.op in COMPUTE_OPS else 0 for a in actions]
    sum_ns = [5 * MS if a.op is Op.REDUCE_GRAD else ns for a, ns in zip(actions, took, strict=True)]
    planned = timed(lowered, [sum_ns])
    assert planned.makespan_ns == timed(lowered, [took]).makespan_ns + 10 * MS
    timed_spans = [s for s in spans if s.op in (*COMPUTE_OPS, Op.REDUCE_GRAD)]
    assert (
        max(s.end_ns for s in timed_spans) - min(s.start_ns for s in timed_spans)
        >= planned.makespan_ns
    )


@pytest.mark.parametrize(
    ("policy", "run"),
    [
        (DataParallel(), emulate),
        (Zero3(2, 1), emulate),
        (Zero2(), emulate_with_own_clocks),
    ],
)
def test_replicas_meet_at_each_collective_which_then_takes_its_time(ranks, policy, run):
    settings = config("interleaved_1f1b", 2, 4, replicas=2, sharding=policy)
    lowered = lowered_of(settings)
    durations = uniform(lowered.placement, 2 * MS, 2 * MS, 2 * MS)
    stages = lowered.num_stages
    emulation = Emulation(
        durations, gather_ns=(3 * MS,) * stages, reduce_ns=(5 * MS,) * stages, factors=(1, 1.5)
    )
    outcomes = ranks.run(4, run, settings, emulation)
    spans = [span for results, _ in outcomes for span in results[1].spans]
    assert {(s.replica, s.rank) for s in spans} == {(d, r) for d in range(2) for r in range(2)}
    assert {result.num_tokens for results, _ in outcomes for result in results} == {2 * 4 * 16}
    for rank, actions in enumerate(lowered.actions):
        row = [action for action in actions if action.op in JOINING_OPS]
        own, other = (
            [s for s in spans if (s.replica, s.rank, s.lane) == (d, rank, "collective")]
            for d in range(2)
        )
        assert [(s.stage, s.op) for s in own] == [(a.stage, a.op) for a in row]
        assert [(s.stage, s.op) for s in other] == [(a.stage, a.op) for a in row]
        for one, two in zip(own, other, strict=True):
            least = emulation.collective_ns(Action(one.stage, one.op, -1))
            assert min(one.end_ns, two.end_ns) >= max(one.start_ns, two.start_ns) + least
    timed = [s for s in spans if s.lane in ("compute", "collective")]
    gathers = {}  # of a rank, in each replica the first
    for span in sorted((s for s in timed if s.op is Op.UNSHARD), key=lambda s: s.start_ns):
        gathers.setdefault(span.rank, {}).setdefault(span.replica, span.start_ns)
    ready = [max(of_replicas.values()) for of_replicas in gathers.values()]
    begin = min([*ready, *(s.start_ns for s in timed if s.lane == "compute")])
    assert max(s.end_ns for s in timed) - begin >= joint_step_ns(lowered, emulation, 2)
    for span in (s for s in timed if s.lane == "compute"):
        own = [
            s
            for s in timed
            if (s.op, s.stage, s.replica) == (Op.UNSHARD, span.stage, span.replica)
            and s.start_ns <= span.start_ns
        ]
        assert all(s.end_ns <= span.start_ns for s in own)
