"""Ranks that meet through a store which outlives them; real processes, killed at chosen moments."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import wait_until
from torch.distributed import PrefixStore, TCPStore

from ppbench.run.worker.rendezvous import MeetingError, agree_on_name, join_other_ranks

PATIENCE_S = 120.0
CONTEXT = multiprocessing.get_context("forkserver")  # ranks do not each import torch


class Rank:
    """A process; what it comes to is read from a pipe."""

    def __init__(self, target: Callable[..., Any], port: int, rank: int, world_size: int) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        arguments = (theirs, target, port, rank, world_size)
        self._process = CONTEXT.Process(target=_answer, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def answer(self) -> Any:
        assert self.pipe.poll(PATIENCE_S), "a rank did not answer: the meeting hangs"
        failure, result = self.pipe.recv()
        assert failure is None, failure
        return result

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _answer(pipe: Connection, target: Callable[..., Any], *arguments: int) -> None:
    try:
        pipe.send((None, target(*arguments)))
    except Exception as error:
        pipe.send((repr(error), None))


def name_of(port: int, rank: int, world_size: int) -> str:
    store = TCPStore("127.0.0.1", port, is_master=False)
    return agree_on_name(store, rank, world_size, PATIENCE_S)


def sum_of_ranks(port: int, rank: int, world_size: int) -> int:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",  # as on a node whose own workers never failed
    )
    join_other_ranks(PATIENCE_S)
    total = torch.tensor([rank])
    dist.all_reduce(total)
    dist.barrier()
    return int(total)


@pytest.fixture
def store() -> TCPStore:
    """The agent's."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def leave_nonce(store: TCPStore, rank: int) -> None:
    """Leave a nonce, as a rank does that dies before it can confirm anything."""
    PrefixStore("ppbench-meeting", store).set(f"nonce/{rank}", "of the dead")


def names(ranks: list[Rank]) -> set[str]:
    return {rank.answer() for rank in ranks}


def test_each_start_of_the_ranks_meets_under_a_name_of_its_own(store):
    seen = [names([Rank(name_of, store.port, rank, 3) for rank in range(3)]) for _ in range(3)]
    assert [len(one) for one in seen] == [1, 1, 1]
    assert len(set.union(*seen)) == 3


def test_ranks_that_meet_again_through_one_store_reach_each_other_and_not_the_dead(store):
    for _ in range(3):
        ranks = [Rank(sum_of_ranks, store.port, rank, 4) for rank in range(4)]
        assert [rank.answer() for rank in ranks] == [6] * 4
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("restarted", [0, 1])
def test_a_rank_that_is_restarted_after_it_has_confirmed_a_roll_is_met(store, restarted):
    leave_nonce(store, 2)
    ranks = [Rank(name_of, store.port, rank, 3) for rank in (0, 1)]
    left = PrefixStore("ppbench-meeting", store)
    wait_until(lambda: left.check(["nonce/0", "nonce/1", "roll"]), every_s=0.005)
    ranks[restarted].kill()
    ranks[restarted] = Rank(name_of, store.port, restarted, 3)
    ranks.append(Rank(name_of, store.port, 2, 3))
    assert len(names(ranks)) == 1


def test_who_never_came_is_named(store):
    leave_nonce(store, 1)
    with pytest.raises(MeetingError, match=r"rank 0 of 4 waited 0\.2 s .*; missing: 2, 3\. Are"):
        agree_on_name(store, 0, 4, patience_s=0.2)


def test_who_came_and_died_is_named(store):
    leave_nonce(store, 1)
    with pytest.raises(MeetingError, match=r"missing: 1\. Are all nodes started"):
        agree_on_name(store, 0, 2, patience_s=0.2)
