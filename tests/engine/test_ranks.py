"""The pool of ranks says which rank failed, and is of use again afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks


@pytest.fixture
def pool() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.stop()


def summed(_fabric: object, _is_member: bool, failing_rank: int, *, dies: bool = False) -> float:
    """The sum over ranks, but for one that never takes part."""
    if dist.get_rank() == failing_rank:
        if dies:
            os._exit(7)
        raise ValueError("of its own")
    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total)


def ended(fabric: object, is_member: bool, failing_rank: int) -> float:
    return summed(fabric, is_member, failing_rank, dies=True)


@pytest.mark.parametrize(
    ("function", "message"), [(summed, "ValueError: of its own"), (ended, "it has died")]
)
def test_the_rank_that_fails_is_named_and_the_next_call_is_answered(pool, function, message):
    with pytest.raises(AssertionError, match=rf"(?s)rank 1 failed:.*{message}"):
        pool.run(2, function, 1)
    assert pool.run(2, function, -1) == [2.0, 2.0]
