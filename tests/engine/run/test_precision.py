"""The precision of float32 products, however it was set before."""

import pytest
import torch

from engine.run.precision import float32_precision, force_ieee


@pytest.fixture(autouse=True)
def afterwards():
    yield
    force_ieee()


def by_old_interface():
    torch.set_float32_matmul_precision("high")


def by_new_interface():
    torch.backends.fp32_precision = "tf32"
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def by_a_convolution():
    torch.backends.cudnn.conv.fp32_precision = "tf32"


@pytest.mark.parametrize("change", [by_old_interface, by_new_interface, by_a_convolution])
def test_it_is_ieees_whatever_has_changed_it(change):
    change()
    force_ieee()
    assert float32_precision() == "ieee"
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is False


def test_what_a_model_changes_afterwards_is_told():
    force_ieee()
    by_old_interface()
    assert float32_precision() == "tf32"
