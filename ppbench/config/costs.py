"""A file of emulated costs: code under test, where `[emulated]` itself is the workload.

    [emulated]
    costs = "costs.toml"      F_ms, I_ms, W_ms and link_ms stand in that file, relative to where the
                              command is given

A commit that changes the file makes its stages slower, and stays comparable with those before it:
what the file says is no part of the case.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from ppbench.config.problems import describe
from ppbench.config.schema import CostsFile
from ppbench.config.source import parse, read_text
from ppbench.errors import UsageError

TIMES = ("emulated_F_ms", "emulated_I_ms", "emulated_W_ms", "emulated_link_ms")
"""Columns of `runs` that such a file fills."""


def read_costs(file: str) -> dict[str, tuple[float, ...]]:
    """Milliseconds of each stage or link by the keys of `[emulated]`.

    Raises ValueError that says what is wrong, and where.
    """
    path = Path(file)
    try:
        found = CostsFile.model_validate(parse(path, read_text(path)))
    except UsageError as error:
        raise ValueError(str(error).replace("the sweep file", "the file of costs")) from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ValueError(f"{file}: {key}: {describe(first, CostsFile)}") from None
    return dict(found.model_dump())
