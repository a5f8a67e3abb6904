import sys
from pathlib import Path

import pytest

ENGINE_TESTS = Path(__file__).parents[2] / "engine"


@pytest.fixture(scope="package")
def ranks():
    """Four: two pipelines of two, as data parallelism has them."""
    sys.path.insert(0, str(ENGINE_TESTS))  # where the pool lives
    from ranks import Ranks

    pool = Ranks(4)
    yield pool
    pool.stop()
    sys.path.remove(str(ENGINE_TESTS))
