"""Amounts of memory in words."""

import random

import pytest

from engine.plan.sizes import bytes_of, exact_text, size_text


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1.5 GiB", 1_610_612_736),
        ("800 MB", 800_000_000),
        ("  2KiB ", 2048),
        ("1 kB", 1000),
        ("0.1 GB", 100_000_000),
        ("3 TiB", 3 * 2**40),
        ("7 B", 7),
        ("0 GiB", 0),
    ],
)
def test_a_size_is_read_exactly(text, num_bytes):
    assert bytes_of(text) == num_bytes


@pytest.mark.parametrize("text", ["", "1.5", "GiB", "1,5 GiB", "-1 GiB", "1 gib", "1e3 B", "x"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="expected a number and a unit"):
        bytes_of(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (1_610_612_736, "1.5 GiB"),
        (2**20, "1 MiB"),
        (1023, "1023 B"),
        (2**30 + 1, "1073741825 B"),
        (1234 * 2**20, "1234 MiB"),
        (900_000_000, "900 MB"),
    ],
)
def test_the_same_bytes_have_one_text(num_bytes, text):
    assert exact_text(num_bytes) == text
    rng = random.Random(num_bytes)
    for drawn in (rng.randrange(2**45) for _ in range(200)):
        assert bytes_of(exact_text(drawn)) == drawn


def test_a_size_that_is_told_is_never_less_than_it_is():
    assert size_text(0) == "0 B"
    assert size_text(1536) == "1.5 KiB"
    assert size_text(2**30 + 1) == "1.01 GiB"
    # The unit is that of the rounded number.
    assert size_text(2**20 - 1024) == "1023 KiB"
    assert [size_text(2**power - 1) for power in (20, 30, 40)] == ["1 MiB", "1 GiB", "1 TiB"]
    rng = random.Random(3)
    for drawn in (rng.randrange(2**45) for _ in range(500)):
        assert drawn <= bytes_of(size_text(drawn)) <= 1.011 * drawn + 1
