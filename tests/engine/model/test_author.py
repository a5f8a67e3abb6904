"""The comparison finds and names what is far from the author's, whatever else is there."""

from __future__ import annotations

import math

import pytest
import torch

from engine.model.author import TOLERANCE, farthest, pairs_of_gradients


def with_gradient(*values: float) -> torch.Tensor:
    parameter = torch.zeros(len(values), requires_grad=True)
    parameter.grad = torch.tensor(values)
    return parameter


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("name", "apart", "is_far"),
    [("odd", 0.0, False), ("odd", 0.01, True), ("even", 1e-6, False), ("even", 0.01, True)],
)
def test_a_gradient_that_is_not_finite_on_both_sides_hides_no_difference_and_makes_none(
    number, name, apart, is_far
):
    authors = {"odd": with_gradient(1.0, number), "even": with_gradient(1.0)}
    ours = {name: tensor.grad.clone() for name, tensor in authors.items()}
    ours[name][0] += apart
    named = [(f"{name} on rank 0", name, gradient) for name, gradient in ours.items()]
    most, text = farthest(pairs_of_gradients(named, authors, "float32"))
    assert (most > TOLERANCE["float32"]) == is_far
    assert not is_far or f"gradient of {name} on rank 0 is" in text
