"""A trace, opened in Perfetto's own trace processor, against the store."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
import pytest
from chromium import Browser
from perfetto.trace_processor import TraceProcessor
from screens import needs_browser
from trace_processor import Bridge, needs_perfetto

from engine.plan.predict import predict, uniform
from engine.plan.schedules.registry import build_program
from engine.plan.walk import TransferModel
from ppbench.cli.export import trace
from ppbench.config.case import Case
from ppbench.store import Store

pytestmark = [needs_browser, needs_perfetto]
MS = 1_000_000
RANKS, MICROBATCHES, STEPS = 3, 4, (1, 2)
HOSTS = ['a "b" <i>', "ü", "c"]
LANES = {"compute": "compute", "send": "send", "receive": "recv"}
SLICES = """
    select slice.id, pid - 1 as rank, ifnull(thread.name, process_track.name) as track,
        ts as start_ns, dur as duration_ns, slice.name as action, depth,
        extract_arg(slice.arg_set_id, 'args.step') as step,
        extract_arg(slice.arg_set_id, 'args.bytes') as num_bytes
    from slice
        left join thread_track on track_id = thread_track.id left join thread using (utid)
        left join process_track on track_id = process_track.id
        join process on process.upid = ifnull(thread.upid, process_track.upid)
"""
LEVELS = """
    select pid - 1 as rank, ts as time_ns, cast(value as int) as num_bytes
    from counter
        join process_counter_track as track on track_id = track.id
        join process using (upid)
    order by rank, time_ns, counter.id
"""
SPAN = ["rank", "lane", "step", "action", "start_ns", "duration_ns", "num_bytes"]


def spans_of_step(step: int) -> pd.DataFrame:
    """A simulated step, with most receives posted 25 ms ahead, so that they overlap."""
    program = build_program("1f1b", RANKS, MICROBATCHES)
    durations = uniform(program.placement, 10 * MS + 1, 20 * MS + 1, 1)
    transfers = TransferModel(latency_ns=MS + 1, message_bytes=4096)
    spans = pd.DataFrame(predict(program, durations, transfers).spans()).assign(step=step)
    spans.loc[(spans["lane"] == "recv") & (spans["microbatch"] > 0), "start_ns"] -= 25 * MS
    return spans.assign(**{name: spans[name] + step * 400 * MS for name in ("start_ns", "end_ns")})


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("results"))
    case = Case(schedule="1f1b", world_size=RANKS, num_microbatches=MICROBATCHES)
    run = {"run_id": "20260101T000000001-abcdef", "case_id": case.case_id, "launch": 0}
    ranks = {"rank": range(RANKS), "hostname": HOSTS, "device": "cpu"}
    memory = {"rank": [0, 0, 2], "time_ns": [0, 7001, 7001], "num_bytes": [10, 2**40 + 1, 0]}
    tables = {
        "spans": pd.concat([spans_of_step(step) for step in STEPS], ignore_index=True),
        "steps": pd.DataFrame({"step": STEPS, "step_ns": 400 * MS}),
        "ranks": pd.DataFrame(ranks),
        "memory": pd.DataFrame(memory),
    }
    store.write_run({**run, "status": "ok", **case.settings()}, tables)
    return store


@pytest.fixture(scope="module")
def opened(
    browser: Browser,
    store: Store,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[TraceProcessor]:
    path = tmp_path_factory.mktemp("traces") / "trace.json.gz"
    trace("last", path, "all", results=store.folder)
    with Bridge(browser) as bridge, TraceProcessor(str(path), addr=bridge.address) as processor:
        yield processor


def table(opened: TraceProcessor, query: str) -> pd.DataFrame:
    return opened.query(query).as_pandas_dataframe()


def slices(opened: TraceProcessor) -> pd.DataFrame:
    found = table(opened, SLICES)
    found["lane"] = found["track"].str.split().str[0].map(LANES)
    found["num_bytes"] = found["num_bytes"].fillna(0)
    return found


def stored(store: Store) -> pd.DataFrame:
    spans = store.table("spans", list(store.runs()["run_id"]))
    actions = spans["stage"].astype(str) + spans["op"] + spans["microbatch"].astype(str)
    return spans.assign(action=actions, duration_ns=spans["end_ns"] - spans["start_ns"])


def rows(frame: pd.DataFrame, columns: list[str]) -> list[tuple]:
    return sorted(frame[columns].astype({"step": int}).itertuples(index=False, name=None))


def messages(store: Store) -> Iterator[tuple[tuple, tuple]]:
    """The step, rank and action of both ends."""
    for send in stored(store).query("lane == 'send'").itertuples():
        to = send.stage + (1 if send.op == "SEND_F" else -1)
        received = f"{to}{send.op.replace('SEND', 'RECV')}{send.microbatch}"
        yield (send.step, send.rank, send.action), (send.step, to, received)


def test_every_span_is_a_slice_of_its_rank_and_lane_to_the_nanosecond(opened, store) -> None:
    found = slices(opened)
    assert set(found["depth"]) == {0}  # and no slice is anything else
    assert rows(found, SPAN) == rows(stored(store), SPAN)
    assert "receive activations 2" in set(found["track"])  # there was something to keep apart


def test_ranks_are_processes_named_as_in_the_store(opened) -> None:
    found = table(opened, "select name from process where pid > 0 order by pid")
    expected = [f"rank {rank} ({host}, cpu)" for rank, host in enumerate(HOSTS)]
    assert found["name"].to_list() == expected


def test_an_arrow_joins_each_send_and_the_receive_of_its_message(opened, store) -> None:
    shown = slices(opened).set_index("id")
    shown["place"] = list(
        zip(shown["step"].astype(int), shown["rank"], shown["action"], strict=True)
    )
    arrows = table(opened, "select slice_out, slice_in from flow")
    first, second = (shown.loc[arrows[name]] for name in ("slice_out", "slice_in"))
    is_from_send = (first["lane"] == "send").to_numpy()
    # Perfetto's own choice, however an arrow is written: what begins first is what it leads from.
    is_posted_ahead = first["start_ns"].to_numpy() < second["start_ns"].to_numpy()
    assert is_from_send.any()
    assert not is_from_send.all()
    assert is_posted_ahead[~is_from_send].all()
    pairs = zip(is_from_send, first["place"], second["place"], strict=True)
    found = [(a, b) if from_send else (b, a) for from_send, a, b in pairs]
    assert sorted(found) == sorted(messages(store))


def test_memory_is_a_counter_of_its_rank_in_bytes(opened, store) -> None:
    memory = store.table("memory", list(store.runs()["run_id"]))
    memory["time_ns"] += stored(store)["start_ns"].min()
    expected = memory[["rank", "time_ns", "num_bytes"]].to_numpy().tolist()
    assert table(opened, LEVELS).to_numpy().tolist() == expected


def test_the_trace_processor_found_nothing_wrong(opened) -> None:
    """Nor dropped anything: it counts that in its table of statistics."""
    complaints = table(opened, "select name, severity, value from stats where value != 0")
    is_wrong = (complaints["severity"] != "info") | complaints["name"].str.startswith("flow_")
    assert complaints[is_wrong].to_dict("records") == []
    assert len(complaints)  # it does count
