from collections.abc import Iterator

import pytest
import torch
from ranks import Ranks, seed_without_stacks

NUM_RANKS = 6  # more than llama-tiny has layers


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Use one thread, as on the ranks: sums over threads round differently."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _no_stacks() -> None:
    seed_without_stacks()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(NUM_RANKS)
    yield pool
    pool.stop()
