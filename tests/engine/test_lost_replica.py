"""A replica that dies in a collective ends the others, which say where they were."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from pipeline import CPU, config
from ranks import Alone

from engine.flight import FlightRecord, read_record
from engine.plan.action import NO_INDEX, Action, Op
from engine.plan.collectives import DataParallel, Zero3
from engine.run.clock import HostClock
from engine.run.collective_lane import CollectiveError
from engine.run.p2p.fabric import Fabric
from engine.trainer import Trainer, agree

TIMEOUT_S = 120
"""Of a collective: who is left is told as soon as the connection ends, long before."""


def train(process, folder, policy, fatal):
    """One step, and one in which the last of two replicas is `fatal` to itself as it joins."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=process,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    fabric = Fabric(CPU, HostClock(), is_device_shared=False)
    agreement = agree(config("1f1b", 1, 2, replicas=2, sharding=policy), fabric)
    flight = FlightRecord(folder / f"flight-{process}", process)
    trainer = Trainer(agreement, fabric, flight)
    trainer.step(0)
    if process == 1:
        usual = trainer.shards.begin

        def begin(action):
            if action.op is fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            usual(action)

        trainer.runner._operations[fatal] = begin
    began = time.monotonic()
    with pytest.raises(CollectiveError) as lost:
        trainer.step(1)
    error = lost.value
    return time.monotonic() - began, (error.rank, error.replica, error.action), str(error)


@pytest.mark.parametrize(
    ("policy", "fatal"),
    [(DataParallel(), Op.REDUCE_GRAD), (Zero3(), Op.UNSHARD)],
    ids=str,
)
def test_the_replica_that_is_left_names_rank_replica_and_action(tmp_path, policy, fatal):
    lost = Alone(train, 1, tmp_path, policy, fatal)
    seconds, where, words = Alone(train, 0, tmp_path, policy, fatal).result()
    assert seconds < TIMEOUT_S
    assert where == (0, 0, Action(0, fatal, NO_INDEX))
    assert words.startswith(f"0{fatal} of rank 0, replica 0: ")
    with pytest.raises(AssertionError, match="it has died"):
        lost.result()
    assert read_record(tmp_path / "flight-0").collective == Action(0, fatal, NO_INDEX)
