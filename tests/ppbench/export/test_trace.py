"""Traces, read back by other means than those that wrote them, against the store."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from decimal import Decimal
from pathlib import Path

import pandas as pd
import pytest
from command import output_of
from stored_runs import MS, run_row, spans, store_of_replicas

from ppbench.cli.export import trace
from ppbench.config.case import Case
from ppbench.errors import StoreError
from ppbench.export.chrome import trace_of
from ppbench.store import Store

LANES = {"compute": "compute", "send": "send", "recv": "receive"}
NS_PER_US = 1000


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """One run on two ranks, three steps, with memory and names of machines."""
    store = Store(tmp_path / "results")
    timed = pd.concat([spans(1), spans(2, 100), spans(3, 203)], ignore_index=True)
    timed.loc[timed["step"] == 2, "end_ns"] += 1  # no whole number of microseconds
    ranks = pd.DataFrame({"rank": [0, 1], "hostname": ['a "b"', "ü"], "device": ["cpu", "cuda:1"]})
    memory = pd.DataFrame({"rank": [0, 0, 1], "time_ns": [0, 7001, 5], "num_bytes": [10, 20, 30]})
    ends = [{"step": n, "step_ns": MS * (n if n < 3 else 0)} for n in (1, 2, 3)]
    tables = {"spans": timed, "ranks": ranks, "memory": memory, "steps": pd.DataFrame(ends)}
    store.write_run(run_row(1, Case()), tables)
    return tmp_path / "results"


def written(results: Path, step: str = "all") -> str:
    path = results.parent / "trace.json.gz"
    trace("last", path, step, results=results)
    return gzip.decompress(path.read_bytes()).decode()


def chrome(results: Path, step: str = "all") -> dict:
    return json.loads(written(results, step), parse_float=Decimal)


def events(data: dict, kind: str) -> list[dict]:
    return [event for event in data["traceEvents"] if event["ph"] == kind]


def slices(data: dict) -> list[dict]:
    return events(data, "X")


def names(data: dict, what: str) -> dict:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events(data, "M")
        if event["name"] == what
    }


def test_each_rank_of_each_replica_is_a_process_with_its_collectives(tmp_path):
    store = store_of_replicas(tmp_path / "results")
    (run_id,) = store.runs()["run_id"]
    table = store.table("spans", [run_id])
    data = chrome(tmp_path / "results")
    processes = {pid: name for (pid, _), name in names(data, "process_name").items()}
    assert processes[2 * 2 + 1 + 1].startswith("rank 1 of replica 2")
    assert len(processes) == 8
    tracks = names(data, "thread_name")
    lanes = LANES | {"collective": "collectives"}
    expected, found = defaultdict(list), defaultdict(list)
    for span in table.itertuples():
        place = span.replica * 2 + span.rank + 1, lanes[span.lane]
        expected[place].append(span.end_ns - span.start_ns)
    for event in slices(data):
        lane = tracks[event["pid"], event["tid"]].split()[0]
        found[event["pid"], lane].append(int(event["dur"] * NS_PER_US))
    assert {key: sorted(of) for key, of in found.items()} == {
        key: sorted(of) for key, of in expected.items()
    }
    gathered = [e for e in slices(data) if e["name"] == "1UNSHARD"]
    assert {frozenset(e["args"]) for e in gathered} == {
        frozenset(["step", "op", "stage", "bytes", "waiting_ns"])
    }
    moved = [e["dur"] * NS_PER_US - e["args"]["waiting_ns"] for e in gathered]
    assert set(moved) == {2 * MS}


def test_a_slice_tells_its_action_and_its_circumstances(results):
    data = chrome(results)
    known = {(e["pid"], e["name"], e["args"]["step"]): e for e in slices(data)}
    sent = known[1, "0SEND_F0", 2]
    assert (sent["ts"], sent["dur"]) == (Decimal("115000.000"), Decimal("2000.001"))
    assert sent["args"] == {
        "step": 2, "op": "SEND_F", "stage": 0, "microbatch": 0, "bytes": 4096, "waiting_ns": 0,
    }  # fmt: skip
    # Posted at 17 ms, and the send at its other end begins at 39.
    assert known[1, "0RECV_B0", 1]["args"]["waiting_ns"] == 22 * MS
    assert known[2, "OPT", 1]["args"] == {"step": 1, "op": "OPT"}
    assert known[2, "1B0", 1]["cat"] == "B"
    assert "extra step" in data["otherData"]["memory"]


@pytest.mark.parametrize(("end_ns", "has_arrow"), [(9, False), (10, False), (11, True)])
def test_a_message_that_arrives_before_it_is_sent_has_no_arrow(end_ns, has_arrow):
    ends = pd.DataFrame(
        [(0, 0, "SEND_F", "send", 10, 20), (1, 1, "RECV_F", "recv", 1, end_ns)],
        columns=["rank", "stage", "op", "lane", "start_ns", "end_ns"],
    ).assign(step=0, microbatch=0, num_bytes=1, replica=0)
    made = trace_of({}, ends, _no_rows("replica", "rank", "hostname", "device"), _no_memory())
    data = json.loads("".join(made))
    assert [len(events(data, end)) for end in "sf"] == [has_arrow] * 2


@pytest.mark.parametrize(("step", "shown"), [("2", {2}), ("slowest", {2}), ("all", {1, 2, 3})])
def test_steps_are_chosen_by_number_or_by_what_they_are(results, step, shown):
    assert {event["args"]["step"] for event in slices(chrome(results, step))} == shown


def test_the_same_run_gives_the_same_bytes(results, tmp_path):
    contents = set()
    for folder in ("one", "two"):
        path = tmp_path / folder / "a.json.gz"
        trace("last", path, "all", results=results)
        contents.add(path.read_bytes())
    assert len(contents) == 1


def test_the_default_file_is_named_by_the_run(results, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path(output_of(trace, "last", None, "median", results=results))
    assert path == Path("reports") / f"trace-{run_row(1, Case())['run_id']}.json.gz"
    assert gzip.decompress(path.read_bytes()).startswith(b'{"displayTimeUnit":"ms"')


def test_spans_that_are_lost_are_said_to_be(results):
    (spans_of_run,) = (results / "spans").iterdir()
    spans_of_run.unlink()
    with pytest.raises(StoreError, match="its spans are not in the store"):
        trace("last", None, "all", results=results)


def _no_rows(*columns: str) -> pd.DataFrame:
    return pd.DataFrame(columns=list(columns))


def _no_memory() -> pd.DataFrame:
    return _no_rows("replica", "rank", "time_ns", "num_bytes").astype("int64")
