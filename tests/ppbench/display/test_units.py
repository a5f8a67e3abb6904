"""Sizes in figures: rounded before their unit is chosen."""

from __future__ import annotations

import pytest

from ppbench.display.units import rounded_size, size


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (2**20 - 1, "1.0 MiB"),
        (2**30 - 2**20, "1,023.0 MiB"),
        (2**30 - 1, "1.00 GiB"),
        (2**30, "1.00 GiB"),
    ],
)
def test_a_size_never_shows_1024_of_the_smaller_unit(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text
    assert size(rounded_size(num_bytes)) == text
