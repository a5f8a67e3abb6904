"""Values of a parameter of which a few are tried, and the others with `--thorough` alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest


def sampled(values: Iterable[object], num: int = 1) -> Sequence[object]:
    """The values, of which all but the first `num` are marked as thorough."""
    every = list(values)
    return [
        *every[:num],
        *(pytest.param(*_arguments(one), marks=pytest.mark.thorough) for one in every[num:]),
    ]


def _arguments(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)
