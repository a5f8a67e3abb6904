"""torch.distributed.pipelining as a runtime, on real ranks: exact, and its spans tell all of it."""

import itertools
import json
import weakref

import pandas as pd
import pytest
from models import configuration_folder
from pipeline import CPU, NUM_STEPS, assert_exact, config, with_trainer
from torch.distributed.pipelining import schedules as torchs

from engine.connection import agree
from engine.plan.action import COMPUTE_OPS, RECV_OPS, Action, Op, parse_action
from engine.plan.check import check, prove_no_deadlock
from engine.plan.lower import lower
from engine.plan.messages import counterpart
from engine.plan.program import Program
from engine.plan.rules import ProgramError
from engine.plan.schedules.registry import build_program
from engine.plan.walk import Sharing
from engine.run.clock import HostClock
from engine.run.optimizer import OptimizerSpec
from engine.run.recording import Recording
from engine.trainer import Trainer
from ppbench.analysis.attribution import PARTS, attribute
from ppbench.analysis.metrics import step_figures, windows
from ppbench.config.case import Case
from ppbench.config.feasibility import TORCH_SCHEDULES
from ppbench.run.runtimes import torch_pipelining as pipelining
from ppbench.run.runtimes import torch_spans
from ppbench.run.runtimes.single import SingleRuntime, Unsplit
from ppbench.run.runtimes.torch_pipelining import (
    TorchPipeline,
    TorchRuntime,
    proved_program,
)
from ppbench.run.runtimes.torch_spans import Instrument, program_of
from ppbench.run.verification.unsplit import first_loss

pytestmark = pytest.mark.usefixtures("warm_starts")

SHAPES = [*((name, 2, 4) for name in TORCH_SCHEDULES), ("1f1b", 4, 5), ("zbv", 4, 8)]
SHAPES += [("interleaved_1f1b", 1, 3), ("1f1b", 1, 2), ("zbv", 1, 2), ("dualpipev", 1, 2)]
SHAPES += [(name, 2, 1) for name in TORCH_SCHEDULES if name not in ("1f1b", "dualpipev")]
"""Also of one rank, and of fewer microbatches than ranks where torch runs that."""
ORDINARY = (("1f1b", 2, 4), ("zbv", 4, 8), ("interleaved_zb", 2, 4), ("interleaved_1f1b", 1, 3))
ORDINARY += (("looped_bfs", 2, 1),)
MARKED = [
    pytest.param(*shape, marks=() if shape in ORDINARY else pytest.mark.thorough)
    for shape in SHAPES
]


def train_on(fabric, is_member, settings, runner=TorchPipeline):
    fabric.connect([], tuple(range(settings.world_size)), ())
    return with_trainer(fabric, is_member, settings, build=runner)


def action_of(span):
    return Action(span.stage, span.op, span.microbatch)


@pytest.fixture(scope="module")
def outcomes(ranks):
    """The results of each shape's ranks, which equal those of the unsplit model."""
    known = {}

    def of(name, p, m):
        if (name, p, m) not in known:
            known[name, p, m] = assert_exact(ranks, config(name, p, m), train_on)
        return known[name, p, m]

    return of


@pytest.mark.parametrize(("name", "p", "m"), MARKED)
def test_torchs_schedule_trains_exactly_as_the_unsplit_model(outcomes, name, p, m):
    outcomes(name, p, m)


@pytest.mark.parametrize(("name", "p", "m"), MARKED)
def test_its_program_is_torchs_own_and_ours_in_order(outcomes, name, p, m):
    programs = [outcome.lowered for outcome in outcomes(name, p, m)]
    assert all(program == programs[0] for program in programs)
    check(programs[0])
    prove_no_deadlock(programs[0], Sharing.RANK_EDGE)
    assert lower(programs[0]) == programs[0]
    ours = build_program(name, p, m)
    assert programs[0].compute_only().actions == ours.actions
    assert programs[0].placement == ours.placement
    assert sorted(map(sorted, programs[0].actions)) == sorted(map(sorted, lower(ours).actions))


@pytest.mark.parametrize(("name", "p", "m"), MARKED)
def test_its_spans_are_complete_in_order_and_causal(outcomes, name, p, m):
    found = outcomes(name, p, m)
    for step in range(NUM_STEPS):
        spans = [outcome.results[step].spans for outcome in found]
        for rank, of_rank in enumerate(spans):
            assert all((span.step, span.rank) == (step, rank) for span in of_rank)
            assert [span.op for span in of_rank].count(Op.OPT) == 1
            done = [action_of(span) for span in of_rank if span.op is not Op.OPT]
            assert done == list(found[0].lowered.actions[rank])
            compute = [span for span in of_rank if span.lane == "compute"]
            assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(compute))
        by_action = {action_of(s): s for of_rank in spans for s in of_rank if s.op is not Op.OPT}
        for action, span in by_action.items():
            assert span.start_ns <= span.end_ns
            assert (span.num_bytes > 0) == (action.op not in COMPUTE_OPS)
            if action.op in RECV_OPS:
                sent = by_action[counterpart(action)]
                assert (sent.start_ns <= span.end_ns, sent.num_bytes) == (True, span.num_bytes)
            if action.op is Op.F and action.stage > 0:
                before = by_action[action._replace(stage=action.stage - 1)]
                assert before.end_ns <= span.start_ns


@pytest.mark.parametrize(("name", "p", "m"), [("1f1b", 2, 4), ("zbv", 4, 8)])
def test_its_bubble_is_attributed_to_the_nanosecond(outcomes, name, p, m):
    found = outcomes(name, p, m)
    spans = pd.DataFrame([s for o in found for result in o.results for s in result.spans])
    of_ranks = windows(spans, p)
    steps = step_figures(spans, of_ranks, dict.fromkeys(range(NUM_STEPS), 64)).set_index("step")
    attribution = attribute(spans, found[0].lowered, of_ranks)
    assert (attribution.rows[list(PARTS)].sum(axis=1) == attribution.rows["idle_ns"]).all()
    assert steps["bubble_fraction"].between(0, 1).all()


def test_the_unsplit_runner_holds_one_microbatch(ranks):
    (outcome,) = ranks.run(1, train_on, config("1f1b", 1, 3), Unsplit)
    done = [(s.op, s.microbatch) for s in outcome.results[0].spans]
    assert done == [*((op, mb) for mb in range(3) for op in (Op.F, Op.B)), (Op.OPT, -1)]
    assert outcome.peak_held == 1


def with_torchs(fabric, is_member, settings, work, runner=TorchPipeline):
    """The result of `work` with a rank's trainer, which runs torch's schedule."""
    fabric.connect([], tuple(range(settings.world_size)), ())
    agreement = agree(settings, fabric)
    if not is_member:
        return None
    trainer = Trainer(agreement, fabric, build=runner)
    result = work(trainer)
    trainer.close()
    return result


def memory_of_the_third_step(trainer):
    for step in range(2):
        trainer.step(step)
    return trainer.measure_memory(2)


@pytest.mark.parametrize("name", [pytest.param("1f1b", marks=pytest.mark.thorough), "zbv"])
def test_its_memory_is_the_engines_and_its_buffers_and_is_predicted(ranks, name):
    """All of torch's receive buffers are there from the first step on."""
    settings, shape = config(name, 2, 4, dtype="float32"), 16 * 64 * 4
    ours = ranks.run(2, with_torchs, settings, memory_of_the_third_step, None)
    torchs_own = ranks.run(2, with_torchs, settings, memory_of_the_third_step)
    for our, their in zip(ours, torchs_own, strict=True):
        assert their.at_peak.parameter_bytes == our.at_peak.parameter_bytes
        assert their.at_peak.optimizer_bytes == our.at_peak.optimizer_bytes
        assert their.timeline[0].num_bytes - our.timeline[0].num_bytes >= 4 * shape
        assert their.predicted_peak_bytes == pytest.approx(their.peak_bytes, rel=0.05)


def loss_and_reference(trainer, results):
    return trainer.step(0).loss, first_loss(results, "key", trainer.config, CPU)


def test_the_expected_loss_is_unknown_where_the_order_of_microbatches_decides_it(ranks, tmp_path):
    for preset in (
        "authors:rotating",  # it counts its calls in a buffer
        configuration_folder(tmp_path, "gpt_neox", hidden_dropout=0.1),
    ):
        settings, results = config("1f1b", 1, 2, preset=preset), tmp_path / preset[-3:]
        ((loss, expected),) = ranks.run(1, with_trainer, settings, loss_and_reference, results)
        assert loss is not None
        assert expected is None


@pytest.mark.parametrize("seq_len", [16, "variable"])
def test_the_expected_loss_is_the_unsplit_models_for_any_number_of_microbatches(
    ranks, tmp_path, seq_len
):
    for num, known in ((2, 2), (5, 5), (3, 5)):  # each microbatch is computed once
        settings = config("zbv", 1, num, seq_len=seq_len, max_seq_len=16, microbatch_size=2)
        ((loss, expected),) = ranks.run(1, with_trainer, settings, loss_and_reference, tmp_path)
        assert loss == pytest.approx(expected, rel=1e-12)
        assert (
            len(json.loads((tmp_path / "verified" / "first-key.json").read_text())["sums"]) == known
        )


def watch(trainer):
    """Whether torch is patched while a step is recorded, and what is left of it afterwards."""
    schedule = trainer.runner.schedule
    (stage,) = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    owners = (stage, schedule, torchs)
    before = [set(vars(owner)) for owner in owners], torchs._batch_p2p, torchs._wait_batch_p2p
    instrument = Instrument(schedule, HostClock())
    instrument.start_step()
    is_patched = "forward_one_chunk" in vars(stage) and torchs._batch_p2p is not before[1]
    instrument.remove()
    instrument.remove()
    after = [set(vars(owner)) for owner in owners], torchs._batch_p2p, torchs._wait_batch_p2p
    inside = trainer.issue(0).marks.recorded.row
    return is_patched, before == after, program_of(schedule) is not None, len(inside)


@pytest.mark.parametrize(("name", "knows"), [("1f1b", False), ("interleaved_zb", True)])
def test_an_instrument_leaves_nothing_behind(ranks, name, knows):
    settings = config(name, 2, 4, stages_per_rank=1)
    for told in ranks.run(2, with_torchs, settings, watch):
        assert told[:3] == (True, True, knows)
        assert told[3] > 0


def crossing(first, second):
    """A receive posted by rank 0 before the send that rank 1 needs to answer it, or after it."""
    placement = build_program("afab", 2, 1).placement
    rows = [["0F0", first, second, "0B0"], ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]]
    actions = tuple(tuple(parse_action(text) for text in row) for row in rows)
    return Program("crossing", placement, 1, actions)


@pytest.mark.parametrize("transport", ["memory", "gloo", "gloo via host memory", "nccl", "xccl"])
def test_a_receive_before_the_send_that_it_waits_for_hangs_on_the_one_stream_of_nccl(
    monkeypatch, transport
):
    """Over gloo only messages from one rank to another wait for each other."""
    for crossed in (crossing("0SEND_F0", "0RECV_B0"), crossing("0RECV_B0", "0SEND_F0")):
        monkeypatch.setattr(pipelining, "program_of", lambda _schedule, crossed=crossed: crossed)
        if transport.endswith("ccl") and crossed.actions[0][1].op is Op.RECV_B:
            with pytest.raises(ProgramError, match="hangs"):
                proved_program(None, transport)
        else:
            assert proved_program(None, transport) is crossed


def sends_alive(trainer):
    """The most operations that were still there when the next ones were started."""
    usual, started, alive = torchs._batch_p2p, [], []

    def starting(operations, *arguments, **named):
        alive.append(sum(one() is not None for one in started))
        started.extend(map(weakref.ref, operations))
        return usual(operations, *arguments, **named)

    torchs._batch_p2p = starting
    try:
        trainer.step(0)
    finally:
        torchs._batch_p2p = usual
    return len(started), max(alive)


def test_an_instrument_lets_go_of_what_has_been_sent(ranks):
    settings = config("1f1b", 2, 8)
    for num_started, num_alive in ranks.run(2, with_torchs, settings, sends_alive):
        assert num_started == 16
        assert num_alive <= 3  # as many as torch itself has at hand


def early_on(fabric, is_member, settings, threshold_ns):
    """The receives of two steps, with this threshold for a receive that was waited for."""
    fabric.connect([], (0, 1), ())
    agreement = agree(settings, fabric)
    if not is_member:
        return None
    usual, torch_spans.EARLY_NS = torch_spans.EARLY_NS, threshold_ns
    try:
        runtime = TorchRuntime(Case(), agreement, fabric)
        results = [
            runtime.step(step, recording)
            for step, recording in enumerate((Recording.spans, Recording.flight_only))
        ]
        runtime.close()
    finally:
        torch_spans.EARLY_NS = usual
    watched, unwatched = results
    receives = {action_of(span) for span in watched.spans if span.op in RECV_OPS}
    return receives, watched.early, unwatched.early


@pytest.mark.parametrize("threshold_ns", [0, 10**12])
def test_a_step_tells_which_receives_were_there_when_asked_for(ranks, threshold_ns):
    for receives, early, unwatched in ranks.run(2, early_on, config("1f1b", 2, 4), threshold_ns):
        assert len(receives) == 4
        assert early == (receives if threshold_ns else frozenset())
        assert unwatched == frozenset()


def turn_on(fabric, is_member, settings, build, is_turn):
    fabric.connect([], tuple(range(settings.world_size)), ())
    agreement = agree(settings, fabric)
    if not is_member:
        return None
    runtime = build(Case(), agreement, fabric)
    numbers = range(1, 4)
    runtime.step(0)
    results = runtime.steps(numbers) if is_turn else [runtime.step(number) for number in numbers]
    weights = {name: p.detach().clone() for name, p in runtime.parameters().items()}
    runtime.close()
    return results, weights


@pytest.mark.parametrize(
    ("build", "name", "p"), [(TorchRuntime, "1f1b", 2), (SingleRuntime, "1f1b", 1)]
)
def test_steps_in_a_row_are_those_of_single_steps(ranks, build, name, p):
    clipped = OptimizerSpec(learning_rate=1e-3, clip_norm=0.1)
    settings = config(name, p, 4, optimizer=clipped)
    turn, single = (ranks.run(p, turn_on, settings, build, is_turn) for is_turn in (True, False))
    for (ours, weights), (theirs, expected) in zip(turn, single, strict=True):
        for number, result, other in zip(range(1, 4), ours, theirs, strict=True):
            assert (result.loss, result.gradient_norm) == (other.loss, other.gradient_norm)
            assert {span.step for span in result.spans} == {number}
            assert [*map(action_of, result.spans)] == [*map(action_of, other.spans)]
        for before, after in itertools.pairwise(ours):
            first_ns = min(span.start_ns for span in after.spans)
            assert first_ns > max(span.start_ns for span in before.spans)
        assert all(weights[name].equal(weight) for name, weight in expected.items())
