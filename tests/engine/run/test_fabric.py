"""Which communicators and streams a rank has, and how they are made: pure, without a device."""

import types
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from engine.plan.action import COMPUTE_OPS
from engine.plan.lower import Policy, lower
from engine.plan.messages import edge_of
from engine.plan.schedules.registry import build_program
from engine.run import device as devices
from engine.run.clock import HostClock
from engine.run.p2p import fabric as fabrics
from engine.run.p2p.fabric import Fabric, Link, check_streams, links_of
from engine.run.p2p.nccl import MOST_CTAS
from engine.run.streams import MOST_EDGES, TooManyEdgesError


def edges_of(schedule, world_size, stages_per_rank=None):
    program = lower(build_program(schedule, world_size, 8, stages_per_rank), Policy.EARLY, 1)
    transfers = (a for row in program.actions for a in row if a.op not in COMPUTE_OPS)
    return list(dict.fromkeys(edge_of(a) for a in transfers)), program.placement.ranks


def test_a_link_is_of_two_processes_and_not_of_stages():
    few, ranks_of_few = edges_of("1f1b", 4)
    many, ranks_of_many = edges_of("interleaved_1f1b", 4, 2)
    first, second = links_of(few, ranks_of_few, range(4)), links_of(many, ranks_of_many, range(4))
    assert set(first) <= set(second)  # a case with more stages uses those of the one before
    assert len(set(second)) == len(many)  # and no two edges share one
    assert Link(0, 1, 1) in second  # stages 0 to 1, and 4 to 5


def test_a_replicas_links_are_its_own():
    edges, ranks = edges_of("1f1b", 2)
    assert links_of(edges, ranks, (2, 3)) == [
        Link(2 + a, 2 + b, n) for a, b, n in links_of(edges, ranks, (0, 1))
    ]


def test_more_edges_than_streams_are_refused_in_one_sentence():
    edges, ranks = edges_of("interleaved_1f1b", 2, 16)
    with pytest.raises(TooManyEdgesError) as refused:
        check_streams(edges, ranks)
    message = str(refused.value)
    assert f"streams for {MOST_EDGES}" in message
    assert message.startswith("rank 0 sends or receives over 62 edges")
    assert "fewer stages on each rank" in message


class Options:
    def __init__(self, is_high_priority_stream=False):
        self.is_high_priority_stream = is_high_priority_stream
        self.config = types.SimpleNamespace(min_ctas=-1, max_ctas=-1)


@pytest.fixture
def made(monkeypatch):
    """A fabric between devices of one process, and the communicators that it has made or freed."""
    made = []

    class Group:
        def __init__(self, ranks, backend, more):
            self.ranks, self.backend, self.more, self.is_free = ranks, backend, more, False

    def new_group(ranks=None, backend=None, **more):
        made.append(Group(ranks, backend, more))
        return made[-1]

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 9)
    monkeypatch.setattr(dist, "destroy_process_group", lambda g: setattr(g, "is_free", True))
    monkeypatch.setattr(
        dist, "ProcessGroupNCCL", types.SimpleNamespace(Options=Options), raising=False
    )
    monkeypatch.setattr(
        dist.distributed_c10d, "_set_pg_timeout", lambda t, g: g.more.update(timeout=t)
    )
    monkeypatch.setattr(devices, "backend_of", lambda device: "nccl")
    monkeypatch.setattr(devices, "wait_for_all", lambda device: None)
    monkeypatch.setattr(fabrics, "_is_member", lambda group: True)
    made.append(Fabric(torch.device("meta"), HostClock(), is_device_shared=False))
    return made


def nccl(made):
    return [group for group in made[1:] if group.backend == "nccl" and not group.is_free]


def test_nccls_streams_are_of_the_pool_of_high_priority_and_its_edges_take_few_sms(made):
    made[0].connect(*edges_of("1f1b", 2), [])
    assert len(nccl(made)) == 3  # forth, back, and sums
    assert all(g.more["pg_options"].is_high_priority_stream for g in nccl(made))
    ctas = [g.more["pg_options"].config.max_ctas for g in nccl(made)]
    assert sorted(ctas) == [-1, MOST_CTAS, MOST_CTAS]


def test_the_next_case_keeps_the_communicators_that_it_uses_and_the_others_are_freed(made):
    fabric = made[0]
    fabric.connect(*edges_of("1f1b", 4), [])
    of_four = nccl(made)
    fabric.connect(*edges_of("1f1b", 2), [])
    kept = nccl(made)
    assert {tuple(g.ranks) for g in kept} == {(0, 1), (1, 0)}
    assert len([g for g in kept if g in of_four]) == 2  # its links; the sum of two ranks is new
    fabric.close()
    assert nccl(made) == []


def test_nccls_own_time_limit_is_that_of_the_case(made):
    fabric = made[0]
    fabric.limit(1800)
    fabric.connect(*edges_of("1f1b", 2), [])
    assert {g.more["timeout"] for g in nccl(made)} == {timedelta(seconds=1800)}
    fabric.limit(0)
    assert {g.more["timeout"] for g in nccl(made)} == {timedelta(days=365)}
