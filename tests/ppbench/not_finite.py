"""Models that stop being finite, by what they are called: `not_finite:weights`.

Four pieces, so two stages of two. Run in the workers, which find a copy of this file in their
working directory.
"""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

BAD_CALL = 6  # of the forwards so far, four in each step: in step 1


def pieces(third):
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 8), third, nn.Linear(8, 256))


def sound():
    return pieces(nn.Linear(8, 8))


def weights():
    model = sound()
    with torch.no_grad():
        model[1].weight.fill_(torch.inf)
    return model


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, is_bad):
        ctx.is_bad = is_bad
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        bad = torch.full((8,), torch.nan if ctx.is_bad else 0.0)
        return gradient, bad, None


class Unused(nn.Module):
    """Has a weight on which the loss does not depend: only its gradient is not finite."""

    def __init__(self):
        super().__init__()
        self.weight, self.num_calls = nn.Parameter(torch.ones(8)), 0

    def forward(self, x):
        if isinstance(x, FakeTensor):
            return x
        self.num_calls += 1
        return _Breaks.apply(x, self.weight, self.num_calls == BAD_CALL)


def gradient():
    return pieces(Unused())
