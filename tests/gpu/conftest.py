"""Tests of what depends on the kind of device: on the CPU everywhere, on a GPU where one is."""

import pytest
import torch

from engine.run import device as devices

NEEDS_GPU = "needs an NVIDIA GPU and a CUDA build of torch"


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Use one thread: threads that wait for each other take longer than these small models."""
    torch.set_num_threads(1)


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each kind of device that is here."""
    if request.param == "cpu":
        return torch.device("cpu")
    if devices.kind() != "cuda":
        pytest.skip(NEEDS_GPU)
    return torch.device("cuda", 0)


@pytest.fixture
def gpu() -> torch.device:
    if devices.kind() != "cuda":
        pytest.skip(NEEDS_GPU)
    return torch.device("cuda", 0)


@pytest.fixture
def two_gpus(gpu: torch.device) -> torch.device:
    if devices.count() < 2:
        pytest.skip("NCCL needs a GPU for each rank")
    return gpu
