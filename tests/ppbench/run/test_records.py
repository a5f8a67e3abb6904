"""Rows from what ranks report: hand-written spans, exact expected figures."""

import dataclasses
import json

import pandas as pd
import plotly.graph_objects as go
import pytest
from spans import TWO_RANKS

from engine.model.descriptions import FlopFacts
from engine.plan.action import Op
from engine.plan.lower import lower
from engine.plan.schedules.registry import build_program
from engine.plan.spans import COLUMNS, Lane, Span
from ppbench.analysis.mfu import Peak
from ppbench.config.case import Case, Measure
from ppbench.config.programs import bubble_in_theory, durations_of, program_of
from ppbench.display.explanation import parts_of
from ppbench.errors import UsageError
from ppbench.explanation import explain
from ppbench.report.charts.levels import memory_over_time
from ppbench.run.job import Attempt, Job, PlannedRun
from ppbench.run.machine.placement import Place
from ppbench.run.records import CaseResult, RankResult, finished_run, rows_of, write_result
from ppbench.store import Store

NS_OF_STEP = 1000
ALONE = {"world_size": 1, "num_microbatches": 1}
BEGUN = Attempt(0, "a", 1)
TWO_ON_GPUS = Case(schedule="afab", num_microbatches=1, device="cuda")
NUM_TOKENS = [7, 100, 300, 500]  # the first step is a warm-up


def result(*, facts):
    """One rank, one microbatch, three measured steps of a microsecond each."""
    spans = []
    for step in (1, 2, 3):
        start, half, end = (step * NS_OF_STEP + ns for ns in (0, 400, NS_OF_STEP))
        spans.append(Span(step, 0, Lane.COMPUTE, 0, Op.F, 0, start, half, 0))
        spans.append(Span(step, 0, Lane.COMPUTE, 0, Op.B, 0, half + 100, end, 0))
    columns = {name: [span[i] for span in spans] for i, name in enumerate(COLUMNS)}
    rank = {"peak_memory_bytes": 1, "peak_held_microbatches": 1}
    ranks = [RankResult(rank, columns, [4.0, 3.0, 2.0, 1.0], NUM_TOKENS)]
    return CaseResult(ranks, facts, [1700], build_program("1f1b", 1, 1), places=(Place("m", 8),))


def job_of(tmp_path, item):
    return Job("l", str(tmp_path), "s", "name", "file.toml", None, (item,))


def write(tmp_path, case, **facts):
    item = PlannedRun(case, Measure(warmup_steps=1, steps=3), 0, "key")
    job = job_of(tmp_path, item)
    write_result(job, item, BEGUN, result(facts=facts))
    store = Store(tmp_path)
    return store.find("a"), store.table("steps", ["a"])


def test_every_step_has_its_own_tokens_and_the_run_their_median(tmp_path):
    run, steps = write(tmp_path, Case(seq_len="variable", **ALONE))
    assert list(steps["num_tokens"]) == [100, 300, 500]
    assert list(steps["tokens_per_s"]) == pytest.approx([100e6, 300e6, 500e6])
    assert (run["seq_len"], run["tokens_per_step"]) == ("variable", 300)
    assert run["tokens_per_s"] == pytest.approx(300e6)


def test_what_the_partition_gave_to_each_stage_is_in_the_row(tmp_path):
    shares = {"parameters_per_stage": "[9]", "stage_shares": "[1.0]", "layers_per_stage": "[4]"}
    run, _ = write(tmp_path, Case(**ALONE), **shares)
    assert {name: run[name] for name in shares} == shares


def test_where_the_idle_time_went_is_in_the_row_and_adds_up(tmp_path):
    run, _ = write(tmp_path, Case(**ALONE))
    parts = list(parts_of(run).values())
    assert parts == pytest.approx([0, 0, 0, 0, 0.1, 0])
    assert run["bubble_mean"] == pytest.approx(sum(parts))
    assert (run["modelled_step_ns"], run["op_costs_ns"]) == (900, '{"B": [500], "F": [400]}')
    assert run["model_residual"] == pytest.approx(1000 / 900 - 1)
    rows = Store(tmp_path).table("attribution", ["a"])
    assert rows["launch_gap_ns"].tolist() == rows["idle_ns"].tolist() == [100, 100, 100]
    planned = Store(tmp_path).table("planned", ["a"])
    assert planned[["step", "op", "start_ns", "end_ns"]].to_numpy().tolist() == [
        [-1, "F", -900, -500],
        [-1, "B", -500, 0],
        [0, "F", 0, 400],
        [0, "B", 400, 900],
        [1, "F", 900, 1300],
        [1, "B", 1300, 1800],
    ]


def test_warm_up_steps_and_intervals_are_in_the_row(tmp_path):
    run, steps = write(tmp_path, Case(**ALONE))
    assert (run["num_warmup_steps"], run["warmup_step_ns"]) == (1, "[1700]")
    assert pd.isna(run["step_ns_low"])  # three steps have no interval of 95 %
    assert run["num_outliers"] == 0
    assert not steps["is_outlier"].any()


def test_the_last_loss_is_that_of_a_step_which_every_run_makes(tmp_path):
    item = PlannedRun(Case(**ALONE), Measure(warmup_steps=1, steps=2), 0, "key")
    job = job_of(tmp_path, item)
    write_result(job, item, BEGUN, result(facts={}))
    assert Store(tmp_path).find("a")["last_loss"] == 2.0


def emulated(schedule, **settings):
    times = {f"emulated_{op}_ms": (2.0,) for op in "FIW"}
    case = {"world_size": 4, "num_microbatches": 8, "device": "emulated", **times, **settings}
    return Case(schedule=schedule, **case)


def test_an_emulated_run_has_no_memory_and_its_theory_is_what_was_emulated(tmp_path):
    case = emulated("1f1b", world_size=1, num_microbatches=1, emulated_W_ms=(1.0,))
    item = PlannedRun(case, Measure(warmup_steps=1, steps=3), 0, "key")
    measured = result(facts={})
    measured.ranks[0].facts["peak_memory_bytes"] = None
    measured.ranks[0].losses[:] = [None] * 4
    write_result(job_of(tmp_path, item), item, BEGUN, measured)
    run = Store(tmp_path).find("a")
    assert run["planned_step_ns"] == 5_000_000
    assert (run["emulated_F_ms"], run["emulated_W_ms"]) == ("[2.0]", "[1.0]")
    assert pd.isna(run["peak_memory_bytes"])
    assert pd.isna(run["last_loss"])


@pytest.mark.parametrize(
    ("schedule", "clip_norm", "bubble"),
    [
        ("1f1b", 0.0, 3 / 11),
        ("zb_h1", 0.0, 3 / 27),
        ("zb_h2", 0.0, 0.0),
        ("zb_h2", 1.0, 3 / 27),
        ("zbv", 0.0, 0.0),
        ("zbv", 1.0, 1.5 / 25.5),
    ],
)
def test_theory_is_of_steps_in_a_row_with_equal_halves(schedule, clip_norm, bubble):
    v = 2 if schedule == "zbv" else 1
    shape = {"world_size": 4, "num_microbatches": 8, "stages_per_rank": v}
    case = Case(schedule=schedule, train_clip_norm=clip_norm, **shape)
    assert bubble_in_theory(case, program_of(case)) == pytest.approx(bubble)


def test_a_number_is_the_time_of_a_rank_and_a_list_has_the_times_of_stages():
    durations = durations_of(emulated("zbv", stages_per_rank=2, emulated_I_ms=tuple(range(8))))
    assert durations.forward_ns == (1_000_000,) * 8
    assert durations.input_ns == tuple(range(0, 8_000_000, 1_000_000))


def two_ranks(errors_ns, **facts):
    """One step of AFAB with one microbatch, written by hand in `spans.py`."""
    ranks = []
    for rank in (0, 1):
        of_rank = TWO_RANKS[TWO_RANKS["rank"] == rank]
        told = {"peak_memory_bytes": 1, "peak_held_microbatches": 1, "hostname": "a", **facts}
        columns = {name: of_rank[name].tolist() for name in COLUMNS}
        losses = [None] * 6 if rank == 0 else [1.0] * 6
        told["clock_error_ns"] = errors_ns[rank]
        ranks.append(RankResult(told, columns, losses, [10] * 6))
    lowered = lower(build_program("afab", 2, 1))
    return CaseResult(ranks, {}, [300, 100, 90], lowered, places=(Place("m", 8),) * 2)


def write_two_ranks(tmp_path, result, **settings):
    case = Case(schedule="afab", num_microbatches=1, **settings)
    item = PlannedRun(case, Measure(warmup_steps=3, steps=1), 0, "key")
    write_result(job_of(tmp_path, item), item, BEGUN, result)
    return Store(tmp_path).find("a")


def test_a_receive_that_nobody_waited_for_ends_before_it_was_taken(tmp_path):
    """The sender noticed the end late, too: the other step's receive gives the duration."""
    result = two_ranks((0, 0))
    columns = pd.concat([pd.DataFrame(rank.spans) for rank in result.ranks])
    spans = pd.concat([columns, columns.assign(step=4)], ignore_index=True)
    of_4, op = spans["step"] == 4, spans["op"]
    spans.loc[of_4, ["start_ns", "end_ns"]] += 1000
    spans.loc[of_4 & (op == "SEND_B"), "end_ns"] = 1580
    spans.loc[of_4 & (op == "RECV_B"), "end_ns"] = 1580
    both = [
        dataclasses.replace(rank, spans=spans[spans["rank"] == number].to_dict("list"))
        for number, rank in enumerate(result.ranks)
    ]
    early = [dataclasses.replace(both[0], early={(4, 0, Op.RECV_B, 0)}), both[1]]
    origin_ns, taken_ns = 90, 1580
    for ranks, end_ns in ((both, taken_ns), (early, 1410 + 30)):
        item = PlannedRun(
            Case(schedule="afab", num_microbatches=1), Measure(warmup_steps=3, steps=1), 0, "key"
        )
        measured = dataclasses.replace(result, ranks=ranks)
        found = rows_of(finished_run(item, measured)).tables["spans"]
        ends = found[found["op"] == "RECV_B"].set_index("step")["end_ns"] + origin_ns
        assert dict(ends) == {4: end_ns, 5: 440}


@pytest.mark.parametrize(("errors_ns", "is_coarse"), [((0, 0), False), ((0, 300), True)])
def test_transfers_shorter_than_the_clocks_error_carry_a_caution(tmp_path, errors_ns, is_coarse):
    run = write_two_ranks(tmp_path, two_ranks(errors_ns))
    assert ("coarse_clock" in run["cautions"]) == is_coarse


def test_steps_that_still_got_faster_carry_a_caution(tmp_path):
    result = two_ranks((0, 0))
    assert "unsettled_steps" in write_two_ranks(tmp_path, result)["cautions"]
    settled = dataclasses.replace(result, warmup_step_ns=[300, 100, 100, 96])
    assert "unsettled_steps" not in write_two_ranks(tmp_path, settled)["cautions"]
    unknown = dataclasses.replace(result, warmup_step_ns=[300, 100])
    assert "unsettled_steps" not in write_two_ranks(tmp_path, unknown)["cautions"]


def test_energy_per_token_counts_a_machine_once_and_the_parts_of_all_ranks_on_gpus(tmp_path):
    measured = two_ranks((0, 0), cpu_energy_j=50.0)
    for rank, name in zip(measured.ranks, ("a container", "another"), strict=True):
        rank.facts["hostname"] = name
    run = write_two_ranks(tmp_path, measured)
    assert (run["energy_per_token_j"], run["energy_source"]) == (5.0, "cpu packages")
    run = write_two_ranks(tmp_path, measured, device="cuda")  # its GPUs do not tell theirs
    assert run["energy_per_token_j"] is None or pd.isna(run["energy_per_token_j"])
    # Each process may see its own GPU alone, and calls it cuda:0; those that share have parts.
    each = two_ranks((0, 0), cpu_energy_j=50.0, gpu_energy_j=10.0, device="cuda:0")
    run = write_two_ranks(tmp_path, each, device="cuda")
    assert (run["energy_per_token_j"], run["energy_source"]) == (2.0, "gpus")


def on_gpus(*devices, case=TWO_ON_GPUS):
    places = tuple(Place("m", 8, device) for device in devices)
    peaks = (("x", Peak(1e12, "y")), ("z", Peak(1e12, "y")))
    measured = two_ranks((0, 0), device="cuda:0")
    ranks = [
        dataclasses.replace(rank, peak=peak)
        for rank, peak in zip(measured.ranks, peaks, strict=True)
    ]
    flops = FlopFacts(1000, ())
    return dataclasses.replace(measured, ranks=ranks, places=places, flops=flops)


def stored_on_gpus(folder, *devices):
    item = PlannedRun(TWO_ON_GPUS, Measure(warmup_steps=3, steps=1), 0, "key")
    write_result(job_of(folder, item), item, BEGUN, on_gpus(*devices))
    return Store(folder)


def test_ranks_that_share_a_gpu_have_no_bubble_and_no_mfu_and_the_caution_says_why(tmp_path):
    apart, shared = (
        stored_on_gpus(tmp_path / name, *devices)
        for name, devices in (("apart", "ab"), ("shared", "aa"))
    )
    alone, sliced = apart.find("a"), shared.find("a")
    assert "time_sliced" in sliced["cautions"]
    assert not {"time_sliced", "oversubscribed"} & set(alone["cautions"].split(","))
    measured = ["mfu", "bubble_fraction", "bubble_mean", "bubble_structure", "bubble_launch_gap"]
    assert sliced[measured].isna().all()
    assert alone[measured].notna().all()
    assert sliced["step_ns"] == alone["step_ns"]
    assert sliced["bubble_fraction_theory"] == alone["bubble_fraction_theory"]
    assert shared.table("steps", ["a"])["bubble_fraction"].isna().all()
    assert shared.table("ranks", ["a"])["idle_fraction"].isna().all()


def test_idle_time_of_ranks_that_share_a_gpu_is_not_explained(tmp_path):
    with pytest.raises(UsageError, match="run a: its ranks shared a GPU"):
        explain("a", results=stored_on_gpus(tmp_path, "a", "a").folder)


@pytest.mark.parametrize(("num_cores", "is_oversubscribed"), [(2, True), (4, False)])
def test_ranks_with_too_few_cores_carry_a_caution(tmp_path, num_cores, is_oversubscribed):
    crowded = dataclasses.replace(two_ranks((0, 0)), places=(Place("m", num_cores),) * 2)
    run = write_two_ranks(tmp_path, crowded, launch_threads_per_rank=2)
    assert ("oversubscribed" in run["cautions"]) == is_oversubscribed


@pytest.mark.parametrize(
    ("caution", "figures"),
    [
        ("busy_machine", {"other_load_cores": 2.0, "watched_cores": 4}),
        ("throttled", {"cpu_throttled_fraction": 0.5}),
    ],
)
def test_what_held_up_one_rank_is_a_caution(tmp_path, caution, figures):
    result = two_ranks((0, 0))
    assert caution not in write_two_ranks(tmp_path, result)["cautions"]
    result.ranks[1] = dataclasses.replace(result.ranks[1], facts=result.ranks[1].facts | figures)
    assert caution in write_two_ranks(tmp_path, result)["cautions"]


def test_the_variables_and_the_precision_are_in_the_row(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    run, _ = write(tmp_path, Case(device="cuda", **ALONE), float32_precision="ieee")
    assert run["float32_precision"] == "ieee"
    variables = json.loads(run["device_variables"])
    assert variables["CUDA_LAUNCH_BLOCKING"] == "0"
    assert variables["CUDA_MODULE_LOADING"] == "EAGER"
    run, _ = write(tmp_path / "cpu", Case(**ALONE))
    assert pd.isna(run["device_variables"])


def test_the_memory_of_each_rank_is_stored_from_the_first_ones_start(tmp_path):
    result = two_ranks((0, 0))
    result.ranks[0].memory.extend([(1000, 7), (1500, 9)])
    result.ranks[1].memory.extend([(1200, 5)])
    write_two_ranks(tmp_path, result)
    levels = Store(tmp_path).table("memory", ["a"])
    assert levels[["rank", "time_ns", "num_bytes"]].to_numpy().tolist() == [
        [0, 0, 7], [0, 500, 9], [1, 200, 5],
    ]  # fmt: skip
    ranks = pd.DataFrame({"rank": [0, 1], "predicted_peak_memory_bytes": [8, None]})
    figure = go.Figure(memory_over_time(levels, ranks).panels[0]["data"])
    names = [trace.name for trace in figure.data]
    assert names == ["rank 0", "rank 0", "rank 1"]
    assert list(figure.data[1].y) == [8 / 1024] * 2
