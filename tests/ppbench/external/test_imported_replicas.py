"""Traces of several replicas become one run, with what the replicas do together."""

import itertools

import pytest
from command import output_of
from traces import complete, kernel, launch, operator, trace

from engine.plan.program import from_json
from ppbench.cli.explain import explain
from ppbench.cli.runs import show
from ppbench.errors import UsageError
from ppbench.external.traces import import_traces
from ppbench.store import Store

pytestmark = pytest.mark.usefixtures("warm_starts")

US = 1000
STEP_US = 400
COMPUTED = {  # 1F1B of two ranks and two microbatches; microseconds
    0: {"0F0": (20, 30), "0F1": (30, 40), "0B0": (65, 85), "0B1": (100, 120)},
    1: {"1F0": (32, 42), "1B0": (42, 62), "1F1": (62, 72), "1B1": (72, 92)},
}
GATHERED = {0: (8, 18), 1: (12, 18)}  # by replica: both end at the same time
SUMMED = {0: (125, 150), 1: (140, 150)}


def ranks_of(order, replica, rank):
    """Numbers in the job of a rank's replicas, and of its pipeline."""
    if order == "replica by replica":
        return [rank, 2 + rank], [2 * replica, 2 * replica + 1]
    return [2 * rank, 2 * rank + 1], [replica, 2 + replica]


def on_gpu(order, replica, rank, step):
    """Ranges of torch's runtime and NCCL's kernels, of one step."""
    numbers = itertools.count(1000 * step)
    at = STEP_US * step
    replicas, _ = ranks_of(order, replica, rank)

    def nccl(name, begin, start, end, group):
        number = next(numbers)
        done = kernel(name, number, at + start, at + end)
        done["args"] |= {
            "Process Group Ranks": str(group),
            "In msg nelems": 500,
            "Out msg nelems": 1000,
            "dtype": "BFloat16",
        }
        return [launch(number, at + begin), done]

    def computed(name, start, end):
        number = next(numbers)
        return [
            complete(f"PP:{name}", at + start, at + end),
            launch(number, at + start),
            kernel("gemm", number, at + start, at + end),
        ]

    events = [complete(f"PP:{rank}UNSHARD", at + 5, at + 8)]
    events += nccl("ncclDevKernel_AllGather_RING_LL", 6, *GATHERED[replica], replicas)
    for name, times in COMPUTED[rank].items():
        events += computed(name, *times)
    middle = COMPUTED[rank][f"{rank}F0"][0] + 1
    events += nccl("ncclDevKernel_AllReduce_Sum", middle, middle, middle + 2, [0, 9])  # no replica
    begin = SUMMED[replica][0] - 2
    events += [
        complete(f"PP:{rank}REDUCE_GRAD", at + begin, at + begin + 2),
        *nccl("ncclDevKernel_ReduceScatter_Sum", begin, *SUMMED[replica], replicas),
        complete(f"PP:{rank}RESHARD", at + begin + 2, at + begin + 3),
        *nccl("ncclDevKernel_AllReduce_Sum", 160, 160, 170, [0, 1, 2, 3]),  # a norm
        complete("OPT", at + 180, at + 190),
    ]
    return events


def files(folder, order="replica by replica", num_steps=2, events=on_gpu, clocks=(0, 0)):
    """A file of each rank; a replica's clock is so many microseconds ahead."""
    folder.mkdir(exist_ok=True)
    paths = {}
    for replica, rank in itertools.product(range(2), range(2)):
        replicas, pipeline = ranks_of(order, replica, rank)
        number = replicas[replica]
        groups = [("0", [0, 1, 2, 3]), ("1", replicas), ("2", pipeline)]
        config = [{"pg_name": name, "ranks": ranks} for name, ranks in groups]
        done = [e for step in range(num_steps) for e in events(order, replica, rank, step)]
        for event in done:
            event["ts"] += clocks[replica]
        info = {"backend": "nccl", "rank": number, "world_size": 4, "pg_config": config}
        path = trace(folder, number, done, host=f"host{replica}", distributedInfo=info)
        paths[replica, rank] = path
    return paths


def imported(paths, folder, **wanted):
    done = import_traces(paths, **{"name": "job", "results": folder / "results", **wanted})
    store = Store(folder / "results")
    return done, store.find(done.run_id), store.table("spans", [done.run_id])


def refused(paths, folder, **wanted):
    with pytest.raises(UsageError) as error:
        imported(paths, folder, **wanted)
    assert not (folder / "results" / "runs").exists()
    return str(error.value)


def collectives(spans, step=0):
    """(Replica, stage, op) -> start and end in microseconds from replica 0's first gather."""
    found = spans[(spans["lane"] == "collective") & (spans["step"] == step)]
    origin = found["start_ns"].min() - GATHERED[0][0] * US
    return {
        (row.replica, row.stage, row.op): (
            (row.start_ns - origin) / US,
            (row.end_ns - origin) / US,
        )
        for row in found.itertuples()
    }


@pytest.mark.parametrize("order", ["replica by replica", "rank by rank"])
def test_a_folder_of_all_replicas_is_one_run_with_their_collectives(tmp_path, order):
    files(tmp_path / "traces", order)
    done, run, spans = imported([tmp_path / "traces"], tmp_path)
    assert (done.num_replicas, done.world_size, done.notes) == (2, 2, [])
    assert (run["replicas"], run["world_size"], run["schedule"]) == (2, 2, "1f1b")
    assert [[str(action) for action in row] for row in from_json(run["program"]).actions] == [
        ["0UNSHARD", "0F0", "0F1", "0B0", "0B1", "0REDUCE_GRAD", "0RESHARD"],
        ["1UNSHARD", "1F0", "1B0", "1F1", "1B1", "1REDUCE_GRAD", "1RESHARD"],
    ]
    expected = {
        (replica, stage, op): times[replica]
        for op, times in (("UNSHARD", GATHERED), ("REDUCE_GRAD", SUMMED))
        for replica, stage in itertools.product(range(2), range(2))
    }
    for step in range(2):
        assert collectives(spans, step) == expected
    sizes = spans[spans["lane"] == "collective"]["num_bytes"]
    assert set(sizes) == {2000}
    computed = spans[spans["op"].isin(["F", "B"])]
    lengths = (computed["end_ns"] - computed["start_ns"]).groupby(computed["op"]).agg(set)
    assert lengths.to_dict() == {"F": {10 * US}, "B": {20 * US}}
    assert "replicas              2\n" in output_of(show, "last", tmp_path / "results")
    told = output_of(explain, ["last"], tmp_path / "results")
    assert "2 microbatches, 2 replicas, sharding policy unknown" in told


def test_clocks_of_replicas_are_aligned_by_what_they_do_together(tmp_path):
    """Replica 1 is on another host: its collectives would end before they began on the first."""
    paths = files(tmp_path / "traces", clocks=(0, -1000))
    done, _, spans = imported(list(paths.values()), tmp_path)
    assert [clock.is_shared for clock in done.clocks] == [True, True, False, False]
    low, high = -1010, -990  # a gather lasts 10 us on replica 0
    assert all(low * US <= clock.offset_ns <= high * US for clock in done.clocks[2:])
    assert max(clock.error_ns for clock in done.clocks) <= 20 * US
    begun, ended = {}, {}
    for (replica, stage, op), (start, end) in collectives(spans).items():
        begun.setdefault((stage, op), {})[replica] = start
        ended.setdefault((stage, op), {})[replica] = end
    for name, starts in begun.items():
        assert max(starts.values()) <= min(ended[name].values())


def test_what_is_missing_of_replicas_is_one_clear_error(tmp_path):
    paths = files(tmp_path / "traces")
    some = [path for place, path in paths.items() if place != (1, 1)]
    assert "a job of 4 ranks, of which 3 cannot be a whole pipeline" in refused(some, tmp_path)
    assert "--replicas 4: each stage is in 2 of the 4 traces" in refused(
        list(paths.values()), tmp_path, replicas=4
    )
    (tmp_path / "empty").mkdir()
    assert "has no traces" in refused([tmp_path / "empty"], tmp_path)
    paths[1, 0].write_text("{")
    assert "is not a Chrome trace" in refused(list(paths.values()), tmp_path)


def test_one_replica_alone_is_a_run_without_collectives(tmp_path):
    paths = files(tmp_path / "traces")
    done, run, spans = imported([paths[1, 0], paths[1, 1]], tmp_path)
    assert (done.num_replicas, run["replicas"], done.job_size) == (1, 1, 4)
    assert "collective" not in set(spans["lane"])


def test_other_collectives_in_some_step_are_left_out_with_a_reason(tmp_path):
    def odd(order, replica, rank, step):
        events = on_gpu(order, replica, rank, step)
        is_kept = not (step == 1 and replica == 1 and rank == 0)
        return [e for e in events if is_kept or "ReduceScatter" not in e["name"]]

    files(tmp_path / "traces", events=odd)
    done, run, spans = imported([tmp_path / "traces"], tmp_path)
    (left_out,) = done.notes
    assert "rank 0 of replica 1 has others in step 1" in left_out
    assert run["replicas"] == 2
    assert "collective" not in set(spans["lane"])


def test_replicas_without_named_stages_are_told_by_their_number(tmp_path):
    """torch's GPipe names no stages; gloo's thread does what the host has begun."""

    def on_cpu(_order, replica, rank, step):
        at = STEP_US * step
        backward = 60 + 40 * (1 - rank)
        return [
            complete("Forward 0", at + 20 + 20 * rank, at + 35 + 20 * rank),
            complete("Backward 0", at + backward, at + backward + 30),
            operator("c10d::_reduce_scatter_base_", at + 140, at + 142),
            complete("gloo:all_reduce", at + 141 + replica, at + 150, tid=9),
            complete("Optimizer.step#SGD.step", at + 160, at + 170),
        ]

    paths = files(tmp_path / "traces", events=on_cpu)
    assert "--replicas 3: 4 traces are not so many pipelines" in refused(
        list(paths.values()), tmp_path, replicas=3
    )
    done, run, spans = imported([tmp_path / "traces"], tmp_path, replicas=2)
    assert (done.num_replicas, run["world_size"], run["schedule"]) == (2, 2, "afab")
    found = spans[spans["lane"] == "collective"]
    assert found.groupby(["replica", "stage", "op"]).size().to_dict() == {
        (replica, stage, "REDUCE_GRAD"): 2 for replica in range(2) for stage in range(2)
    }
    assert set(found["end_ns"] - found["start_ns"]) == {9 * US, 8 * US}
