"""Models that misbehave under way, by what they are called: `faulty:stops`, `faulty:sound`.

Four pieces, so two stages of two. The fault is in the third, in the forward of microbatch 2 of
step 1, unless their name says else.
Run in the workers, which find a copy of this file in their working directory.
"""

import ctypes
import os
import resource
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from engine.flight import read_record
from engine.run.p2p.shared_memory import MemoryChannel
from ppbench.run.machine.node_folder import flight_path, folder_of_rank

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


def pieces(third):
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 8), third, nn.Linear(8, 256))


def model(act):
    return pieces(Faulty(act))


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


def opens_all_files():
    """Leaves no descriptor to write an error with."""

    def act():
        first, (_, most) = (
            os.open(os.devnull, os.O_RDONLY),
            resource.getrlimit(resource.RLIMIT_NOFILE),
        )
        resource.setrlimit(resource.RLIMIT_NOFILE, (first + 64, most))
        while True:
            os.open(os.devnull, os.O_RDONLY)

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


def infinite_weights():
    made = sound()
    with torch.no_grad():
        made[1].weight.fill_(torch.inf)
    return made


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, is_bad):
        ctx.is_bad = is_bad
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        bad = torch.full((8,), torch.nan if ctx.is_bad else 0.0)
        return gradient, bad, None


class Unused(Faulty):
    """Has a weight on which the loss does not depend: only its gradient is not finite."""

    def __init__(self):
        super().__init__(lambda: None)
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        if isinstance(x, FakeTensor):
            return x
        return _Breaks.apply(super().forward(x), self.weight, self.num_calls == AT)


def nan_gradient():
    return pieces(Unused())


def _sibling(rank):
    """The process of another rank of the launch, by its flight record."""
    return read_record(flight_path(folder_of_rank(), rank)).pid
