"""Traces of foreign ranks become a run; every expected time is chosen by hand."""

import json

import pytest
from stored_runs import simulated_spans
from traces import (
    BASE_NS,
    complete,
    kernel,
    launch,
    on_device,
    one_step,
    operator,
    trace,
    two_ranks,
)

from engine.plan.predict import Durations, predict
from engine.plan.program import from_json
from engine.plan.schedules.registry import build_program
from ppbench.cli import export as exporting
from ppbench.errors import UsageError
from ppbench.export.bencher import name_of
from ppbench.external.clocks import clocks_of
from ppbench.external.record import RecordedRun, RunMetadata, write_run
from ppbench.external.traces import import_traces
from ppbench.report.pages.report import report_runs
from ppbench.report.pages.timeline import timeline_of_runs
from ppbench.store import Store
from ppbench.store.columns import ATTACHED

pytestmark = pytest.mark.usefixtures("warm_starts")

US = 1000


def imported(paths, folder, **wanted):
    """The run's row and its tables."""
    done = import_traces(paths, **{"name": "mine", "results": folder / "results", **wanted})
    store = Store(folder / "results")
    tables = {
        name: store.table(name, [done.run_id])
        for name in ("spans", "steps", "ranks", "edges", "attribution")
    }
    return store.find(done.run_id), tables


def times(spans, step=0):
    """Action -> start and end in microseconds from the step's first computation."""
    of_step = spans[spans["step"] == step]
    origin = of_step.loc[of_step["lane"] == "compute", "start_ns"].min()
    return {
        f"{row.stage}{row.op}{row.microbatch}" if row.stage >= 0 else f"OPT of {row.rank}": (
            (row.start_ns - origin) / US,
            (row.end_ns - origin) / US,
        )
        for row in of_step.itertuples()
    }


def refused(paths, folder, **wanted):
    with pytest.raises(UsageError) as error:
        import_traces(paths, **{"name": "mine", "results": folder / "results", **wanted})
    assert not (folder / "results" / "runs").exists()
    return str(error.value)


def test_ranges_named_like_actions_become_spans_steps_and_figures(tmp_path):
    run, tables = imported(two_ranks(tmp_path), tmp_path, tokens_per_step=1000)
    measured = times(tables["spans"])
    assert measured["0F1"] == (10, 20)
    assert measured["1B1"] == (52, 72)
    assert measured["OPT of 1"] == (72, 78)
    assert tables["steps"]["step"].tolist() == [0, 1, 2]
    assert tables["steps"]["makespan_ns"].tolist() == [100 * US] * 3
    assert tables["steps"]["step_ns"].tolist() == [105 * US, 200 * US, 200 * US]
    busy = 60 + 60 + 5 + 6  # a step follows every 200 µs, 95 of them without work on any rank
    assert run["bubble_fraction"] == pytest.approx(1 - busy / (2 * 200))
    assert run["tokens_per_s"] == pytest.approx(1000 / 200e-6)
    assert tables["ranks"]["compute_ns"].tolist() == [60 * US] * 2
    parts = tables["attribution"].filter(
        regex="^(structure|imbalance|transfer|jitter|launch|between)"
    )
    assert (parts.sum(axis=1) == tables["attribution"]["idle_ns"]).all()


def test_the_schedule_is_found_by_the_order_of_its_actions_or_as_told(tmp_path):
    run, _ = imported(two_ranks(tmp_path), tmp_path)
    assert run["schedule"] == "1f1b"
    assert from_json(run["program"]) == build_program("1f1b", 2, 2)
    told, _ = imported(two_ranks(tmp_path), tmp_path, schedule="ours")
    assert (told["schedule"], told["bubble_fraction_theory"]) == ("ours", pytest.approx(1 / 3))
    assert (run["launch"], told["launch"]) == (0, 0)
    again, _ = imported(two_ranks(tmp_path), tmp_path)
    other, _ = imported(two_ranks(tmp_path), tmp_path, name="else")
    assert (again["launch"], other["launch"]) == (0, 0)
    assert run["case_id"] == again["case_id"] != other["case_id"]
    odd = [
        trace(tmp_path, 0, [complete("0F0", 0, 1), complete("0B0", 3, 4),
                            complete("0F1", 4, 5), complete("0B1", 8, 9)]),
        trace(tmp_path, 1, [complete("1F0", 1, 2), complete("1B0", 2, 3),
                            complete("1F1", 5, 6), complete("1B1", 6, 7)]),
    ]  # fmt: skip
    assert imported(odd, tmp_path)[0]["schedule"] == "imported"


def test_the_same_recording_is_one_launch_however_often_it_is_imported(tmp_path):
    for _ in range(3):
        done = import_traces(two_ranks(tmp_path), "mine", tmp_path / "results")
    runs = Store(tmp_path / "results").runs()
    assert runs["launch"].tolist() == [0, 0, 0]
    assert runs["resume_key"].nunique() == 1
    assert f"run {runs['run_id'].iloc[1]} is of the same recording" in done.notes[-1]
    other = import_traces(two_ranks(tmp_path), "mine", tmp_path / "results", steps=(0, 1))
    assert Store(tmp_path / "results").find(other.run_id)["launch"] == 1


@pytest.mark.parametrize(
    ("sources", "num_cases"), [(("a", "b"), 2), (("a", "a"), 1), (("", ""), 1)]
)
def test_two_scripts_of_one_name_are_two_cases(tmp_path, sources, num_cases):
    program = build_program("1f1b", 2, 2)
    spans, ranks = simulated_spans("1f1b", 2, 2), [{"hostname": "a"}, {"hostname": "a"}]
    store = Store(tmp_path)
    for source in sources:
        recorded = RecordedRun(ATTACHED, program, spans, ranks, {}, source=source)
        write_run(recorded, RunMetadata("mine"), store)
    assert store.runs()["case_id"].nunique() == num_cases


def test_what_a_trace_does_not_tell_is_null_or_unknown(tmp_path):
    told = ("model.preset=llama-8b", "seq_len=64")
    run, tables = imported(two_ranks(tmp_path), tmp_path, settings=told)
    for column in ("tokens_per_s", "tokens_per_step", "peak_memory_bytes", "last_loss", "mfu"):
        assert run.isna()[column], column
    assert tables["steps"][["num_tokens", "loss", "tokens_per_s"]].isna().all(axis=None)
    assert tables["edges"][["num_bytes", "bytes_per_s"]].isna().all(axis=None)
    assert (run["origin"], run["model_preset"], run["seq_len"]) == ("imported", "llama-8b", 64)
    assert run["model_dtype"] == run["train_optimizer"] == "unknown"
    assert {"model_preset", "seq_len", "schedule"} <= set(json.loads(run["settings_told"]))
    assert "model_dtype" not in run["settings_told"]
    untold, _ = imported(two_ranks(tmp_path), tmp_path)
    assert untold["seq_len"] == "unknown"


def test_an_imported_run_has_pages_and_is_named_by_what_was_told(tmp_path):
    imported(two_ranks(tmp_path), tmp_path, settings=("model.preset=llama-8b",))
    store = Store(tmp_path / "results")
    assert timeline_of_runs(store, ["last"], tmp_path / "t.html", tmp_path, has_plan=True).exists()
    report_runs(store, [], tmp_path / "r.html", tmp_path)
    assert "unknown length" in (tmp_path / "r.html").read_text()
    name = name_of(store.find("last"))
    assert name.startswith("mine 1f1b world_size=2 num_microbatches=2 device=cpu model.preset=")
    assert "unknown" not in name


def test_torchs_ranges_are_timed_without_their_waiting(tmp_path):
    """On two ranks with one microbatch, the ranges of rank 1 begin with waiting for rank 0."""
    first = [
        complete("PP:0UNSHARD", 0, 1), complete("PP:0F0", 1, 10), operator("aten::mm", 2, 9),
        complete("PP:0SEND_F0", 10, 12), operator("c10d::send", 10, 11),
        complete("PP:0RECV_B0", 12, 13), complete("PP:0B0", 13, 60),
        operator("autograd::engine::evaluate_function: Mm", 45, 59),
        complete("PP:0REDUCE_GRAD", 60, 61),
        complete("Optimizer.step#AdamW.step", 61, 64), complete("Optimizer.step#SGD.step", 66, 70),
    ]  # fmt: skip
    second = [
        complete("PP:1RECV_F0", 0, 2), operator("c10d::recv_", 0, 1),
        complete("PP:1F0", 2, 25), operator("aten::mm", 15, 24),
        complete("PP:1B0", 25, 40), operator("aten::mm", 26, 39),
        complete("PP:1SEND_B0", 40, 42),
    ]  # fmt: skip
    paths = [trace(tmp_path, 0, first), trace(tmp_path, 1, second)]
    _, tables = imported(paths, tmp_path)
    measured = times(tables["spans"])
    at = 2  # when the first computation begins
    assert measured["0F0"] == (2 - at, 10 - at)
    assert measured["1F0"] == (15 - at, 25 - at)
    assert measured["1B0"] == (26 - at, 40 - at)
    assert measured["0B0"] == (45 - at, 60 - at)
    assert measured["OPT of 0"] == (61 - at, 70 - at)  # two optimizers, one span
    assert measured["0SEND_F0"] == (10 - at, 15 - at)
    assert measured["0RECV_B0"] == (10 - at, 45 - at)  # idle since then
    moved = tables["edges"].set_index("source")["moving_ns"]
    assert moved.to_dict() == {0: 5 * US, 1: 5 * US}  # from when both ends were ready


def test_gpipes_ranges_hold_receiving_and_sending_too(tmp_path):
    first = [
        complete("Forward 0", 0, 30), operator("aten::mm", 1, 10), operator("c10d::send", 12, 20),
        complete("Backward 0", 30, 60), operator("c10d::recv_", 30, 31),
        operator("autograd::engine::evaluate_function: Mm", 50, 59),
    ]  # fmt: skip
    second = [
        complete("Forward 0", 0, 25), operator("c10d::recv_", 1, 2), operator("aten::mm", 14, 24),
        complete("Backward 0", 25, 48), operator("aten::mm", 26, 39),
        operator("c10d::send", 41, 47),
    ]  # fmt: skip
    paths = [trace(tmp_path, 4, first), trace(tmp_path, 9, second)]  # ranks of the job
    run, tables = imported(paths, tmp_path)
    measured = times(tables["spans"])
    assert (measured["0F0"], measured["1F0"]) == ((0, 11), (13, 24))
    assert (measured["1B0"], measured["0B0"]) == ((25, 40), (49, 59))
    assert (tables["ranks"]["clock_error_ns"] == 0).all()
    assert run["schedule"] in ("afab", "1f1b")  # of one microbatch they are the same


@pytest.mark.parametrize(
    ("schedule", "ranks", "forward_us", "backward_us"),
    [
        ("afab", 2, (10, 20), (10, 20)),
        ("1f1b", 2, (20, 10), (40, 20)),
        ("1f1b", 4, (10,) * 4, (20,) * 4),
        ("1f1b", 4, (10, 20, 10, 10), (20, 40, 20, 20)),
        ("interleaved_1f1b", 2, (10,) * 4, (20,) * 4),
    ],
)
def test_no_message_moves_while_its_receiver_is_busy(
    tmp_path, schedule, ranks, forward_us, backward_us
):
    program, half = build_program(schedule, ranks, 8), tuple(us // 2 for us in backward_us)
    planned = predict(program, Durations(forward_us, half, half))  # free messages, no gaps
    paths = [
        trace(
            tmp_path,
            rank,
            [
                complete(str(action), step + start, step + end)
                for step in (0, planned.makespan_ns, 2 * planned.makespan_ns)
                for action, start, end in zip(row, starts, ends, strict=True)
            ],
        )
        for rank, (row, starts, ends) in enumerate(
            zip(program.actions, planned.start_ns, planned.end_ns, strict=True)
        )
    ]
    run, tables = imported(paths, tmp_path)
    parts = tables["attribution"][["transfer_ns", "jitter_ns", "launch_gap_ns"]]
    assert (parts == 0).all().all()
    assert run["modelled_bubble_fraction"] == pytest.approx(planned.bubble_fraction)


def test_with_kernels_an_action_takes_from_its_first_to_its_last(tmp_path):
    """Also those that backward's own thread launches; messages' kernels are not computation."""
    first = [
        complete("PP:0F0", 0, 5), launch(1, 1), launch(2, 2), launch(3, 3),
        kernel("gemm", 1, 10, 20), kernel("gemm", 2, 25, 30),
        kernel("ncclDevKernel_AllGather", 3, 2, 80),
        complete("PP:0SEND_F0", 5, 6), launch(4, 5), kernel("ncclDevKernel_SendRecv", 4, 31, 40),
        complete("PP:0RECV_B0", 6, 7), launch(5, 6), kernel("ncclDevKernel_SendRecv", 5, 41, 90),
        complete("PP:0B0", 7, 20), launch(6, 9, tid=99), kernel("gemm", 6, 91, 99),
    ]  # fmt: skip
    second = [
        complete("PP:1RECV_F0", 0, 2), launch(1, 1), kernel("ncclDevKernel_SendRecv", 1, 3, 40),
        complete("PP:1F0", 2, 25), launch(2, 9), kernel("gemm", 2, 41, 50),
        complete("PP:1B0", 25, 40), launch(3, 30), kernel("gemm", 3, 50, 80),
        complete("PP:1SEND_B0", 40, 42), launch(4, 41),
        kernel("ncclDevKernel_SendRecv", 4, 81, 90),
    ]  # fmt: skip
    gpus = {"deviceProperties": [{"name": "NVIDIA H100"}]}
    paths = [trace(tmp_path, 0, first, **gpus), trace(tmp_path, 1, second, **gpus)]
    run, tables = imported(paths, tmp_path)
    measured = times(tables["spans"])
    assert (measured["0F0"], measured["0B0"]) == ((0, 20), (81, 89))
    assert (measured["1F0"], measured["1B0"]) == ((31, 40), (40, 70))
    assert (measured["0SEND_F0"], measured["1RECV_F0"]) == ((21, 30), (-7, 30))
    assert (measured["1SEND_B0"], measured["0RECV_B0"]) == ((71, 80), (31, 80))
    assert run["device"] == "cuda"
    assert tables["ranks"]["device"].tolist() == ["NVIDIA H100"] * 2


@pytest.mark.parametrize("category", ["cuda_driver", "xpu_runtime"])
def test_kernels_of_every_runtime_are_matched_with_their_launches(tmp_path, category):
    paths = [trace(tmp_path, rank, on_device(rank, category)) for rank in (0, 1)]
    run, tables = imported(paths, tmp_path)
    assert times(tables["spans"])["1B1"] == (52, 72)
    assert run["bubble_fraction"] == pytest.approx(1 - (60 + 60 + 5 + 6) / (2 * 105))
    assert run["device"] == category.partition("_")[0]


def test_host_times_in_place_of_kernels_are_said(tmp_path):
    paths = [trace(tmp_path, rank, on_device(rank, "unknown")) for rank in (0, 1)]
    notes = import_traces(paths, "mine", tmp_path / "results").notes
    assert [note.partition(":")[0] for note in notes] == ["rank 0", "rank 1"]
    assert "its times are the host's, for none of its 5 kernels has a launch" in notes[0]


@pytest.mark.parametrize(("at_us", "took_us"), [(-BASE_NS / US, 10), (90, 10), (12, -10)])
def test_kernels_with_impossible_times_stretch_no_action_and_are_named(tmp_path, at_us, took_us):
    """One began in 1970, one long after what was launched behind it, one ended before it began."""
    events = [on_device(rank) for rank in (0, 1)]
    _, plain = imported([trace(tmp_path, rank, events[rank]) for rank in (0, 1)], tmp_path)
    lost = [launch(99, 13), kernel("lost", 99, at_us, at_us + took_us)]  # of 1F0
    paths = [trace(tmp_path, 0, events[0]), trace(tmp_path, 1, [*events[1], *lost])]
    done = import_traces(paths, "other", tmp_path / "results")
    spans = Store(tmp_path / "results").table("spans", [done.run_id])
    assert times(spans) == times(plain["spans"])
    why = "rank 1: 1 of its 6 kernels are left out, for they have impossible times (1 of lost)"
    assert done.notes == [why]


def test_a_step_that_does_not_train_is_left_out_and_named(tmp_path):
    """The second step's kernels have no times, and its backwards none either."""
    events = [on_device(rank, num_steps=3) for rank in (0, 1)]
    events[1] = [
        event for event in events[1] if not (event["cat"] == "kernel" and 200 <= event["ts"] < 400)
    ]
    paths = [trace(tmp_path, rank, events[rank]) for rank in (0, 1)]
    done = import_traces(paths, "mine", tmp_path / "results")
    assert done.notes == ["step 1 is left out: rank 1 has no backward in it that takes time"]
    assert Store(tmp_path / "results").table("steps", [done.run_id])["step"].tolist() == [0, 2]
    assert "step 1: rank 1 has no backward" in refused(paths, tmp_path / "x", steps=(1,))


def merged(folder, events, names=("", "")):
    """One file of two ranks: a process each, and one that only loads data."""
    for rank, of_rank in enumerate(events):
        for event in of_rank:
            event["pid"] = f"{9 + rank}" if event["cat"] != "kernel" else "0"
    called = [
        {"ph": "M", "name": "process_name", "pid": str(9 + rank), "args": {"name": name}}
        for rank, name in enumerate(names)
    ]
    loader = operator("aten::load", 0, 5) | {"cat": "user_annotation", "pid": "500"}
    return trace(folder, None, [*called, loader, *events[0], *events[1]], name="merged.json")


def test_each_process_of_a_file_is_a_rank(tmp_path):
    for names, order in ((("", ""), (0, 1)), (("trainer rank 1", "trainer rank 0"), (1, 0))):
        path = merged(tmp_path, [one_step(rank) for rank in order], names)
        run, tables = imported([path], tmp_path)
        assert (run["world_size"], run["schedule"]) == (2, "1f1b")
        assert run["bubble_fraction"] == pytest.approx(1 - (60 + 60 + 5 + 6) / (2 * 105))
        assert times(tables["spans"])["1B1"] == (52, 72)


def test_merged_kernels_that_cannot_be_told_apart_are_refused(tmp_path):
    path = merged(tmp_path, [on_device(rank) for rank in (0, 1)])
    assert "holds 2 ranks whose kernels cannot be told apart" in refused([path], tmp_path)


def test_a_trace_that_ppbench_wrote_is_imported_with_its_ranks(tmp_path):
    run, tables = imported(two_ranks(tmp_path), tmp_path)
    exporting.trace("last", tmp_path / "ours.json", "all", results=tmp_path / "results")
    again, others = imported([tmp_path / "ours.json"], tmp_path)
    assert again["program"] == run["program"]
    assert again["bubble_fraction"] == pytest.approx(run["bubble_fraction"])
    assert others["steps"]["step_ns"].tolist() == tables["steps"]["step_ns"].tolist()


def test_a_forward_and_a_backward_in_one_range_are_parted_where_autograd_begins(tmp_path):
    grad = "autograd::engine::evaluate_function: Mm"
    events = [
        complete("PP:0F0", 0, 10), operator("aten::mm", 0, 9),
        complete("PP:(0F1;0B0)OVERLAP_F_B", 10, 40),
        operator("aten::mm", 12, 20), operator(grad, 22, 39, tid=99),
        complete("PP:0B1", 40, 50), operator(grad, 40, 49, tid=99),
    ]  # fmt: skip
    _, tables = imported([trace(tmp_path, 0, events)], tmp_path)
    measured = times(tables["spans"])
    assert measured["0F1"][1] == measured["0B0"][0] == 22
    blind = [event for event in events if event["cat"] != "cpu_op"]
    assert "ProfilerActivity.CPU" in refused([trace(tmp_path, 0, blind)], tmp_path / "blind")


def test_torchs_stages_are_read_from_pythons_stack(tmp_path):
    """Ranges of Schedule1F1B name no microbatch, and the stage follows from the rank."""
    stage = "torch/distributed/pipelining/stage.py({}): {}_one_chunk"

    def call(line, what, start, end):
        return complete(stage.format(line, what), start, end, "python_function")

    first = [complete("ProfilerStep#4", 0, 100), call(857, "forward", 0, 10),
             call(857, "forward", 10, 20), call(937, "backward", 45, 65),
             call(937, "backward", 80, 100)]  # fmt: skip
    second = [complete("ProfilerStep#4", 0, 100), call(857, "forward", 12, 22),
              call(937, "backward", 22, 42), call(857, "forward", 42, 52),
              call(937, "backward", 52, 72)]  # fmt: skip
    run, tables = imported([trace(tmp_path, 0, first), trace(tmp_path, 1, second)], tmp_path)
    assert run["schedule"] == "1f1b"
    assert tables["steps"]["step"].tolist() == [4]
    assert times(tables["spans"], 4)["1B1"] == (52, 72)
    unmarked = [trace(tmp_path, r, e[1:]) for r, e in enumerate((first, second))]
    assert "ProfilerStep#1" in refused(unmarked, tmp_path / "unmarked")


def test_a_pattern_reads_other_names(tmp_path):
    events = [complete(f"chunk {op} mb={m}", at, at + 5) for at, op, m in
              ((0, "fwd", 0), (5, "fwd", 1), (10, "bwd", 0), (15, "bwd", 1))]  # fmt: skip
    path = trace(tmp_path, None, events, name="only.json.gz")
    pattern = r"chunk (?P<op>\w+) mb=(?P<microbatch>\d+)"
    _, tables = imported([path], tmp_path, pattern=pattern)
    assert times(tables["spans"])["0B1"] == (15, 20)
    assert '"chunk fwd mb=0"' in refused([path], tmp_path / "a", pattern=r"(?P<op>x)")
    assert 'op is "chunk"' in refused([path], tmp_path / "d", pattern="(?P<op>chunk)")


def test_steps_are_the_profilers_and_can_be_chosen(tmp_path):
    paths = [
        trace(tmp_path, rank, [
            complete(f"ProfilerStep#{number}", number * 200 - 5, number * 200 + 195)
            for number in (7, 8, 9)
        ] + [event for number in (7, 8) for event in one_step(rank, number * 200)])
        for rank in (0, 1)
    ]  # fmt: skip
    _, tables = imported(paths, tmp_path)
    assert tables["steps"]["step"].tolist() == [7, 8]
    _, tables = imported(paths, tmp_path, steps=(8,))
    assert tables["steps"]["step"].tolist() == [8]


def test_a_step_that_is_cut_off_is_refused_with_what_it_lacks(tmp_path):
    first, second = (
        [event for step in range(3) for event in one_step(rank, step * 200)] for rank in (0, 1)
    )
    paths = [trace(tmp_path, 0, first), trace(tmp_path, 1, second[:-2])]  # no 1B1 in step 2
    message = refused(paths, tmp_path)
    assert message.startswith("step 2: rank 1 lacks 1B1")
    assert imported(paths, tmp_path, steps=(0, 1))[1]["steps"]["step"].tolist() == [0, 1]


def test_another_order_in_another_step_is_another_program(tmp_path):
    swapped = [complete("0F1", 200, 210), complete("0F0", 210, 220),
               complete("0B0", 245, 265), complete("0B1", 280, 300)]  # fmt: skip
    paths = [
        trace(tmp_path, 0, [*one_step(0), *swapped]),
        trace(tmp_path, 1, [*one_step(1), *one_step(1, 200)]),
    ]
    assert "another order in step 1 than in step 0" in refused(paths, tmp_path)


def test_files_that_are_no_traces_of_a_pipeline_are_refused(tmp_path):
    (tmp_path / "text.json").write_text("no json")
    (tmp_path / "cut.json.gz").write_bytes(b"\x1f\x8b\0")
    (tmp_path / "list.json").write_text('{"a": 1}')
    (tmp_path / "odd.json").write_text('[{"ph": "X", "ts": "x", "name": "0F0"}]')
    for name in ("text.json", "cut.json.gz"):
        assert "is not a Chrome trace" in refused([tmp_path / name], tmp_path), name
    assert "no list of traceEvents" in refused([tmp_path / "list.json"], tmp_path)
    assert "cannot be read" in refused([tmp_path / "odd.json"], tmp_path)
    assert "cannot be read" in refused([tmp_path / "absent.json"], tmp_path)
    path = trace(tmp_path, 0, [complete("ProfilerStep#1", 0, 9), complete("my forward", 0, 5)])
    message = refused([path], tmp_path)
    assert '"my forward", "ProfilerStep#1"' in message
    assert "with_stack=True" in message
    only_forward = [complete("0F0", 0, 1), complete("0F1", 1, 2)]
    assert "with forward and backward" in refused([trace(tmp_path, 0, only_forward)], tmp_path)


def test_the_files_must_be_of_one_pipelines_ranks_each_once(tmp_path):
    first, second = two_ranks(tmp_path)
    assert "stage 1 is in none of the 1 traces" in refused(
        [trace(tmp_path, 0, [*one_step(0), complete("0SEND_F0", 10, 11)])], tmp_path
    )
    assert "stage 0 is in none of the 1 traces" in refused([second], tmp_path)
    twin = trace(tmp_path, 2, one_step(0))
    assert "stage 0 is in 2 of the traces, stage 1 in 1" in refused([first, second, twin], tmp_path)


def test_the_rank_is_the_traces_or_its_names_or_the_order(tmp_path):
    by_name = [trace(tmp_path, None, one_step(r), name=f"x_rank-{r}.json") for r in (1, 0)]
    by_order = [trace(tmp_path, None, one_step(r), name=f"{n}.json") for r, n in enumerate("za")]
    for paths in (by_name, by_order, two_ranks(tmp_path)[::-1]):
        _, tables = imported(paths, tmp_path)
        assert times(tables["spans"])["1F0"] == (12, 22)
        assert tables["ranks"]["stages"].tolist() == ["[0]", "[1]"]


def test_clocks_of_two_hosts_are_moved_as_little_as_messages_ask_for(tmp_path):
    """1F0 begins 2 after 0F0 ends, 0B0 3 after 1B0: the clocks agree to within that."""
    run, tables = imported(two_ranks(tmp_path, clock=5000, hosts=("a", "b")), tmp_path)
    ranks = tables["ranks"].set_index("rank")
    assert ranks.loc[1, "clock"] == "aligned by messages"
    assert ranks.loc[1, "clock_offset_ns"] == 4997 * US  # no message is early any more
    assert ranks.loc[1, "clock_error_ns"] == 5 * US  # the two waits together
    assert times(tables["spans"])["1F0"] == (15, 25)
    assert "coarse_clock" in run["cautions"]
    _, near = imported(two_ranks(tmp_path, clock=1, hosts=("a", "b")), tmp_path)
    assert near["ranks"]["clock_offset_ns"].tolist() == [0, 0]  # nothing contradicts


def test_ranks_of_one_host_share_its_clock_unless_messages_contradict():
    hosts = ["a", "a", "b", "b"]
    apart = {(0, 1): 5, (1, 0): 5, (1, 2): -1000, (2, 1): 1010, (2, 3): 5, (3, 2): 5}
    clocks = clocks_of(hosts, {pair: us * US for pair, us in apart.items()})
    assert [clock.offset_ns for clock in clocks] == [0, 0, -1000 * US, -1000 * US]
    assert [clock.error_ns for clock in clocks] == [0, 0, 10 * US, 10 * US]
    assert [clock.is_shared for clock in clocks] == [True, True, False, False]
    odd = clocks_of(["a", "a"], {(0, 1): -100 * US, (1, 0): 300 * US})
    assert odd[1].offset_ns == -100 * US


def test_messages_that_contradict_each_other_widen_the_error():
    (_, other) = clocks_of(["a", "b"], {(0, 1): -100 * US, (1, 0): 40 * US})
    assert -101 * US <= other.offset_ns <= -39 * US
    assert other.error_ns >= 30 * US


def test_a_rank_without_its_pipeline_is_refused(tmp_path):
    """Forward and backward alone are a whole step of a pipeline of one rank."""

    def of(rank, size, *more):
        alone = [complete("0F0", 0, 10), complete("0B0", 40, 50), *more]
        told = {"distributedInfo": {"backend": "gloo", "rank": rank, "world_size": size}}
        return trace(tmp_path, None, alone, name=f"rank{rank}of{size}.json", **told)

    sends = operator("c10d::send", 10, 12)
    assert "1 cannot be a whole pipeline" in refused([of(0, 2, sends)], tmp_path)
    assert imported([of(0, 2)], tmp_path)[0]["world_size"] == 1  # data parallel
    assert "jobs of 2 and 4 ranks" in refused([of(0, 2), of(1, 4)], tmp_path / "a")
    three = [of(rank, 4) for rank in range(3)]
    assert "of which 3 cannot be" in refused(three, tmp_path / "b")
