import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Use one thread: threads that wait for each other take longer than these small models."""
    torch.set_num_threads(1)
