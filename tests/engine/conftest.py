from collections.abc import Iterator

import pytest
from ranks import Ranks

NUM_RANKS = 6  # more than llama-tiny has layers


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(NUM_RANKS)
    yield pool
    pool.stop()
