"""Which status an exception gives a run: who is at fault is not always who is missing."""

import pytest
import torch.distributed as dist

from engine.run.p2p.channel import TransferError
from engine.run.streams import TooManyEdgesError
from ppbench.run.failures.evidence import PEER_LOST
from ppbench.run.worker import rank
from ppbench.run.worker.rank import status_of

TWICE = """NCCL error in: NCCLUtils.cpp:94, invalid usage, NCCL version 2.27.5
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"""


def test_a_wrong_use_of_nccl_is_an_error_and_no_lost_peer():
    assert status_of(dist.DistBackendError(TWICE), TWICE) == "error"


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError(
            "NCCL error: ncclRemoteError: A call failed possibly due to a network error or a "
            "remote process exiting prematurely."
        ),
        dist.DistNetworkError("Connection closed by peer"),
        TransferError("receive from rank 1: Connection reset by peer"),
    ],
)
def test_a_peer_that_is_gone_is_lost(error):
    assert status_of(error, str(error)) == PEER_LOST


def test_a_case_that_needs_more_streams_than_there_are_is_invalid():
    assert status_of(TooManyEdgesError("a rank"), "a rank") == "invalid"


def test_memory_that_ran_out_is_named_also_as_the_cause_of_another_error():
    assert status_of(MemoryError(), "") == "oom"
    error = RuntimeError("the layer failed")
    error.__cause__ = MemoryError()
    assert status_of(error, "the layer failed") == "oom"
    assert status_of(RuntimeError(), "can't allocate memory") == "oom"
    assert status_of(RuntimeError(), "") == "error"


def test_a_rank_that_waits_in_vain_names_those_that_are_missing(monkeypatch):
    store = dist.HashStore()
    store.set("here/2", "yes")
    monkeypatch.setattr(rank, "store_of_ranks", lambda _patience: store)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match=r"rank 0 of 4 waited 0\.1 s .* missing: 1, 3"):
        rank.join_other_ranks(0.1)
