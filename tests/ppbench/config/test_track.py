"""`[track]`, and costs that are code under test."""

from pathlib import Path

import pytest
from sweep_files import read

from ppbench.config.case import Case, Measure
from ppbench.errors import SweepFileError

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


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot read the costs file: No such file"),
        ("F_ms = ", "costs.toml:1: not valid TOML"),
        (
            COSTS.replace("F_ms", "Fms"),
            'costs.toml:1: Fms: unknown key, set to 2 (an integer); did you mean "F_ms"? ',
        ),
        (COSTS.replace("= 2", '= "2"'), "costs.toml:1: F_ms: expected milliseconds"),
        (COSTS.replace("[1, 2]", "[1, 2, 3]"), "3 times for 2 stages"),
        ("F_ms = 2\nI_ms = 1\n", "emulated.W_ms is missing"),
    ],
)
def test_a_file_of_costs_that_cannot_be_used_is_one_clear_error(folder, content, told):
    if content is not None:
        Path("costs.toml").write_text(content)
    with pytest.raises(SweepFileError) as raised:
        read(folder, EMULATED)
    assert told in str(raised.value)
    assert "sweep.toml" in str(raised.value)


def test_times_beside_a_file_of_costs_are_refused(folder):
    Path("costs.toml").write_text(COSTS)
    with pytest.raises(SweepFileError, match=r"toml:4: emulated.F_ms: emulated.costs names a"):
        read(folder, EMULATED + "F_ms = 3\n")
    with pytest.raises(SweepFileError, match="applies only with"):
        read(folder, EMULATED, "device=cpu")
