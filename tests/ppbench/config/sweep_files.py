"""Sweep files of tests, read as a sweep reads its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppbench.config.case import Case
from ppbench.config.reader import read_sweep
from ppbench.config.sweep import Sweep
from ppbench.errors import SweepFileError


def read(folder: Path, text: str, *overrides: str) -> Sweep:
    path = folder / "sweep.toml"
    path.write_text(text)
    return read_sweep(path, list(overrides), "cpu")


def only_case(sweep: Sweep) -> Case:
    ((case, _),) = sweep.cases
    return case


def assert_refused(folder: Path, text: str, where: str, what: str) -> None:
    """The file is refused with one line: its line and key, and what is wrong there."""
    with pytest.raises(SweepFileError) as caught:
        read(folder, text)
    message = str(caught.value)
    assert message.startswith(f"{folder / 'sweep.toml'}:{where}: "), message
    assert what in message
    assert "\n" not in message
