"""`[track]`, and costs that are code under test."""

from pathlib import Path

import pytest
from sweep_files import read

from ppbench.config.case import Case, Measure

TRACKED = """\
schedule = "1f1b"
[track]
repo = "model"
setup = "make"
[track.thresholds]
default = "2%"
"schedule=1f1b and world_size=4" = 0.05
"""
COSTS = "F_ms = 2\nI_ms = [1, 2]\nW_ms = 1.5\n"
EMULATED = 'device = "emulated"\n[emulated]\ncosts = "costs.toml"\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """That of the sweep file, in another one, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweeps" / "model").mkdir(parents=True)
    return tmp_path / "sweeps"


def test_a_threshold_is_of_all_cases_or_of_those_that_meet_its_conditions(folder):
    default, special = read(folder, TRACKED).track.thresholds
    assert (default.fraction, special.fraction) == (0.02, 0.05)
    assert default.only.matches((Case(), Measure()))
    assert special.only.matches((Case(world_size=4), Measure()))
    assert not special.only.matches((Case(), Measure()))


def test_a_file_of_costs_tells_the_times_and_is_no_part_of_the_case(folder):
    Path("costs.toml").write_text(COSTS)
    (before, _), *_ = read(folder, EMULATED).cases
    assert (before.emulated_F_ms, before.emulated_I_ms) == ((2.0,), (1.0, 2.0))
    Path("costs.toml").write_text(COSTS.replace("[1, 2]", "[1, 2.2]"))
    (after, _), *_ = read(folder, EMULATED).cases
    assert after.emulated_I_ms == (1.0, 2.2)
    assert after.case_id == before.case_id
