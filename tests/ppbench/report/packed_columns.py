"""The columns of a page's timeline, read back with numpy alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Bars:
    """The bars of a kind, in the timeline's unit of time, each with its text."""

    kind: dict[str, Any]
    begin: np.ndarray
    width: np.ndarray
    row: np.ndarray
    numbers: dict[str, np.ndarray]
    phrases: list[str]
    colors: list[str]


def columns_of(meta: dict[str, Any], data: bytes) -> dict[tuple[str, int], Bars]:
    """The bars by name and by the side on which their step lies."""
    found = {}
    for kind in meta["kinds"]:
        count = kind["count"]

        def column(layout: list[int], count: int = count) -> np.ndarray:
            place, planes, least = layout
            cut = np.frombuffer(data, np.uint8, planes * count, place).reshape(planes, count)
            weights = 256 ** np.arange(planes)
            return weights @ cut.astype(np.int64) + least if planes else np.full(count, least)

        rows = [[row, first, after] for (row, first), (_, after) in _pairs(kind["rows"], count)]
        begin = column(kind["begin"])
        for _, first, after in rows:
            begin[first:after] = np.cumsum(begin[first:after])
        amounts = column(kind["amount"]) * meta["quantum"] if "words" in kind else []
        codes = column(kind["codes"]) if "words" in kind else []
        found[kind["name"], kind["beside"]] = Bars(
            kind,
            begin * meta["quantum"],
            column(kind["width"]) * meta["quantum"],
            np.repeat([row for row, *_ in rows], [after - first for _, first, after in rows]),
            {name: column(layout) for name, layout in kind["numbers"].items()},
            [
                kind["words"][code].replace("{}", f"{amount:,.3f}{meta['unit']}")
                for code, amount in zip(codes, amounts, strict=True)
            ],
            [kind["colors"][shade] for shade in column(kind["shade"])],
        )
    return found


def _pairs(rows: list[list[float]], count: int) -> zip:
    return zip(rows, [*rows[1:], [0.0, count]], strict=True)
