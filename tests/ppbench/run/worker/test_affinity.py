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
from ppbench.run.worker import affinity as binding
from ppbench.run.worker.affinity import Cores, Cpu, plan_cores, read_cpus

FLAT = [Cpu(number, number) for number in range(8)]
SMT = [Cpu(number, number % 4) for number in range(8)]  # 4 shares a core with 0
TWO_NODES = [Cpu(number, number, number // 4) for number in range(8)]
needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="needs Linux's sched_setaffinity"
)


def test_each_rank_has_a_core_of_its_own():
    assert plan_cores(FLAT, num_ranks=3, num_per_rank=1) == ((0,), (1,), (2,))


def test_the_threads_of_a_rank_are_on_cores_beside_each_other():
    assert plan_cores(FLAT, num_ranks=3, num_per_rank=2) == ((0, 1), (2, 3), (4, 5))


def test_with_too_few_cores_nobody_is_bound():
    assert plan_cores(FLAT, num_ranks=9, num_per_rank=1) is None
    assert plan_cores(FLAT, num_ranks=3, num_per_rank=3) is None


def test_whole_cores_are_used_before_two_ranks_share_one():
    assert plan_cores(SMT, num_ranks=4, num_per_rank=1) == ((0,), (1,), (2,), (3,))
    assert plan_cores(SMT[4:], num_ranks=4, num_per_rank=1) == ((4,), (5,), (6,), (7,))


def test_when_cores_must_be_shared_a_rank_shares_with_itself():
    assert plan_cores(SMT, num_ranks=4, num_per_rank=2) == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_no_more_cores_are_shared_than_must_be():
    assert plan_cores(SMT, num_ranks=3, num_per_rank=2) == ((0, 4), (1, 5), (2, 3))


def test_ranks_are_spread_over_nodes_with_neighbours_beside_each_other():
    assert plan_cores(TWO_NODES, num_ranks=2, num_per_rank=1) == ((0,), (4,))
    assert plan_cores(TWO_NODES, num_ranks=4, num_per_rank=2) == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_a_rank_stays_in_one_node_while_one_has_room():
    assert plan_cores(TWO_NODES, num_ranks=2, num_per_rank=3) == ((0, 1, 2), (4, 5, 6))
    lopsided = TWO_NODES[3:]  # one core of the first node is all that is allowed
    assert plan_cores(lopsided, num_ranks=2, num_per_rank=2) == ((4, 5), (6, 7))
    assert plan_cores(lopsided, num_ranks=1, num_per_rank=5) == ((3, 4, 5, 6, 7),)


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


@needs_affinity
def test_the_cpus_that_this_process_may_use_are_read():
    allowed = os.sched_getaffinity(0)
    cpus = read_cpus(allowed)
    assert {cpu.number for cpu in cpus} == allowed
    assert len({cpu.core for cpu in cpus}) <= len(cpus)


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


@needs_affinity
@pytest.mark.parametrize(
    "change", [{"launch_bind": False}, {"device": "emulated"}, {"device": "cuda"}]
)
def test_only_ranks_that_compute_on_cores_are_bound_and_only_if_asked(change):
    case = Case(world_size=1)
    assert len(Cores().of_rank(case, 0, 1) or ()) == 1
    assert Cores().of_rank(dataclasses.replace(case, **change), 0, 1) is None


@needs_affinity
def test_a_rank_that_would_share_a_core_with_its_data_workers_or_a_peer_is_not_bound():
    cores, num_cores = Cores(), available_cores()
    assert cores.of_rank(Case(data_num_workers=num_cores), 0, 1) is None
    assert cores.of_rank(Case(), 0, num_cores + 1) is None
    assert len(cores.of_rank(Case(data_num_workers=num_cores - 1), 0, 1) or ()) == num_cores


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
