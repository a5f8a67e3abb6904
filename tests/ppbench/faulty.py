"""Models that misbehave under way, by what they are called: `faulty:stops`, `faulty:sound`.

In the second stage of two, in the forward of microbatch 2 of step 1, unless their name says else.
Run in the workers, which find this file in their working directory.
"""

import ctypes
import os
import signal
import time
from pathlib import Path

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from engine.flight import read_record
from engine.run.p2p.shared_memory import MemoryChannel
from ppbench.run.machine.node_folder import node_folder_of_rank

AT = 6  # of the forwards so far, four in each step
NO_LIMIT = 10**6


class Faulty(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.act, self.num_calls = act, 0

    def forward(self, x):
        if not isinstance(x, FakeTensor):  # a message's shape is found without running
            if self.num_calls == AT:
                self.act()
            self.num_calls += 1
        return x


def rank():
    return os.environ.get("RANK")


def model(act):
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 8), Faulty(act), nn.Linear(8, 256))


def sound():
    return model(lambda: None)


def fills_its_cgroup():
    def act():
        procs, num_bytes = os.environ["FAULTY_CGROUP"].split(":")
        Path(procs).write_text(str(os.getpid()))
        bytearray(b"x" * int(num_bytes))

    return model(act)


def segfaults():
    return model(lambda: ctypes.string_at(0))


def floods():
    def act():
        raise RuntimeError("first\x1b[31m\u202e\ud800 words\n" + "x" * 10**7 + "\nlast words")

    return model(act)


def stops():
    return model(lambda: os.kill(os.getpid(), signal.SIGSTOP))


def sleeps():
    return model(lambda: time.sleep(NO_LIMIT))


def drops():
    """A model after whose fault all messages of the rank are lost."""

    def act():
        MemoryChannel.send = lambda *_arguments: None

    return model(act)


def unbuildable():
    """A factory that fails on one rank only, after the ranks have agreed on all else."""
    if rank() == "1":
        raise RuntimeError("no weights today")
    return sound()


def kills_an_idle_rank():
    return model(lambda: os.kill(_sibling(1), signal.SIGKILL))


def once():
    """Fails where it has not failed before."""

    def act():
        path = Path("failed-once")
        if not path.exists():
            path.touch()
            raise RuntimeError("try again")

    return model(act)


def broken():
    """Until it is mended."""

    def act():
        if not Path("mended").exists():
            raise RuntimeError("mend me")

    return model(act)


def _sibling(rank):
    """The process of another rank of the launch, by its flight record."""
    return read_record(node_folder_of_rank() / f"flight-rank{rank}").pid
