"""Which cores ranks are bound to, by the drawings of a few machines; and that threads obey."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppbench.config.case import Case
from ppbench.run.machine.environment import available_cores
from ppbench.run.machine.placement import Place
from ppbench.run.worker import affinity as binding
from ppbench.run.worker.affinity import Cores, Cpu, cores_near, plan_cores, read_cpus, share_cores

FLAT = [Cpu(number, number) for number in range(8)]
SMT = [Cpu(number, number % 4) for number in range(8)]  # 4 shares a core with 0
HERE = [Place("here", available_cores())]
TWO_NODES = [Cpu(number, number, number // 4) for number in range(8)]
needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="needs Linux's sched_setaffinity"
)


@pytest.mark.parametrize(
    ("cpus", "num_ranks", "num_per_rank", "cores"),
    [
        (FLAT, 3, 2, ((0, 1), (2, 3), (4, 5))),
        (FLAT, 3, 3, None),
        (SMT, 4, 1, ((0,), (1,), (2,), (3,))),  # whole cores come before shared ones
        (SMT[4:], 4, 1, ((4,), (5,), (6,), (7,))),
        (SMT, 4, 2, ((0, 4), (1, 5), (2, 6), (3, 7))),  # a rank shares with itself
        (SMT, 3, 2, ((0, 4), (1, 5), (2, 3))),
        (TWO_NODES, 2, 1, ((0,), (4,))),
        (TWO_NODES, 4, 2, ((0, 1), (2, 3), (4, 5), (6, 7))),
        (TWO_NODES, 2, 3, ((0, 1, 2), (4, 5, 6))),
        (TWO_NODES[3:], 2, 2, ((4, 5), (6, 7))),  # the first node has one core
        (TWO_NODES[3:], 1, 5, ((3, 4, 5, 6, 7),)),
    ],
)
def test_ranks_have_cores_beside_each_other_and_spread_over_nodes(
    cpus, num_ranks, num_per_rank, cores
):
    assert plan_cores(cpus, num_ranks, num_per_rank) == cores


@given(
    st.sets(st.integers(0, 63), min_size=1),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(1, 6),
)
def test_cores_are_distinct_and_allowed(numbers, num_siblings, num_nodes, num_ranks, per_rank):
    num_cores = 64 // num_siblings
    cpus = [Cpu(n, n % num_cores, n % num_cores % num_nodes) for n in sorted(numbers)]
    plan = plan_cores(cpus, num_ranks, per_rank)
    assert (plan is None) == (num_ranks * per_rank > len(cpus))
    if plan is not None:
        taken = [core for cores in plan for core in cores]
        assert len(plan) == num_ranks
        assert {len(cores) for cores in plan} == {per_rank}
        assert len(set(taken)) == len(taken)
        assert set(taken) <= numbers
        whole = {cpu.core for cpu in cpus}
        used = {cpu.core for cpu in cpus if cpu.number in taken}
        assert len(used) >= min(len(taken), len(whole))


def test_lists_of_the_kernel_are_read(tmp_path, monkeypatch):
    for name, siblings in {"cpu0": "0,4", "cpu4": "0,4", "cpu1": "1-1"}.items():
        folder = tmp_path / name / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text("1,3-5\n")
    monkeypatch.setattr(binding, "_CPUS", tmp_path)
    monkeypatch.setattr(binding, "_NODES", tmp_path)
    assert read_cpus([0, 1, 4, 9]) == [Cpu(0, 0, 0), Cpu(1, 1, 1), Cpu(4, 0, 1), Cpu(9, 9, 0)]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_the_cores_near_a_gpu_are_those_of_its_node_of_memory(tmp_path):
    bus = tmp_path / "bus/pci/devices"
    write(bus / "0000:c1:00.0/numa_node", "1")
    write(bus / "0000:c1:00.0/local_cpulist", "0-7")
    write(tmp_path / "devices/system/node/node1/cpulist", "4-5,7")
    write(bus / "0000:41:00.0/numa_node", "-1")  # a machine with one node
    write(bus / "0000:41:00.0/local_cpulist", "0-2")
    assert cores_near("0000:c1:00.0", tmp_path) == {4, 5, 7}
    assert cores_near("0000:41:00.0", tmp_path) == {0, 1, 2}
    assert cores_near("0000:99:00.0", tmp_path) == cores_near("", tmp_path) == set()


FIRST, SECOND = {0, 1, 2, 3}, {4, 5, 6, 7}


@pytest.mark.parametrize(
    ("cpus", "near", "num_per_rank", "cores"),
    [
        (TWO_NODES, [FIRST, FIRST, SECOND, SECOND], 2, ((0, 1), (2, 3), (4, 5), (6, 7))),
        # As CUDA_VISIBLE_DEVICES may order them.
        (TWO_NODES, [SECOND, FIRST, SECOND, FIRST], 2, ((4, 5), (0, 1), (6, 7), (2, 3))),
        (TWO_NODES, [FIRST] * 2, 3, ((0, 1, 2, 3), (0, 1, 2, 3))),  # too few for each
        (TWO_NODES[:6], [{4, 5, 6, 7}, {6, 7}, set()], 1, ((4, 5), None, None)),  # not allowed
        (SMT, [set(range(8))] * 2, 2, ((0, 1, 4, 5), (2, 3, 6, 7))),  # threads of whole cores
    ],
)
def test_ranks_on_gpus_share_what_is_near_and_allowed(cpus, near, num_per_rank, cores):
    assert share_cores(cpus, near, num_per_rank) == cores


@needs_affinity
def test_a_rank_on_a_gpu_is_bound_by_the_address_of_its_gpu(monkeypatch):
    allowed = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(binding, "cores_near", {"a": allowed[:1], "b": allowed[-1:]}.__getitem__)
    places = [Place("here", 2, f"GPU-{pci}", pci) for pci in "ba"]
    case = Case(world_size=2, device="cuda")
    assert [Cores().of_rank(case, rank, places) for rank in (0, 1)] == [
        (allowed[-1],),
        (allowed[0],),
    ]


@needs_affinity
@pytest.mark.parametrize(
    "change",
    [{"launch_bind": False}, {"device": "emulated"}, {"device": "cuda"}],  # of unknown bus
)
def test_only_ranks_that_compute_on_cores_are_bound_and_only_if_asked(change):
    case = Case(world_size=1)
    assert len(Cores().of_rank(case, 0, HERE) or ()) == 1
    assert Cores().of_rank(dataclasses.replace(case, **change), 0, HERE) is None


@needs_affinity
def test_a_rank_that_would_share_a_core_with_its_data_workers_or_a_peer_is_not_bound():
    cores, num_cores = Cores(), available_cores()
    assert cores.of_rank(Case(data_num_workers=num_cores), 0, HERE) is None
    assert cores.of_rank(Case(), 0, HERE * (num_cores + 1)) is None
    assert len(cores.of_rank(Case(data_num_workers=num_cores - 1), 0, HERE) or ()) == num_cores


@needs_affinity
def test_all_threads_are_bound_those_to_come_too_and_released():
    code = f"""
import os, sys, threading
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_affinity import affinities, running
from ppbench.run.worker.affinity import Cores
cores, everywhere = Cores(), os.sched_getaffinity(0)
one = {{max(everywhere)}}
with running():
    cores.bind(one)
    with running():
        assert affinities() == [one] * 3, affinities()
        cores.release()
        assert affinities() == [everywhere] * 3, affinities()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class running:
    """A thread that is there meanwhile."""

    def __enter__(self):
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._end.wait)
        self._thread.start()

    def __exit__(self, *_):
        self._end.set()
        self._thread.join()


def affinities() -> list[set[int]]:
    return [os.sched_getaffinity(int(path.name)) for path in Path("/proc/self/task").iterdir()]
