"""Saved comparisons: written, read back, judged anew by newer launches."""

from __future__ import annotations

import contextlib
import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
from command import Printed, printed
from measured import FAILS, TWO_CASES, add_measured, around, sweep_in
from repositories import commits, make_repository

from ppbench.errors import ExitCode, LaunchError, NotMeasuredError, UsageError
from ppbench.git import Repository
from ppbench.run.machine.measuring_code import code_hash
from ppbench.store import Store

pytestmark = pytest.mark.usefixtures("warm_starts")

DAY_1, DAY_2 = "2026-01-01T09:00:00+00:00", "2026-01-02T09:00:00+00:00"
FILE = Path("comparison.json")


@pytest.fixture(scope="module")
def _made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = make_repository(tmp_path_factory.mktemp("made") / "repository")
    made = commits(folder, 2)
    sweep_in(folder)
    return folder, made


@pytest.fixture
def shas(
    _made: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Two commits of a repository with a sweep file; we are in it."""
    folder, shas = _made
    monkeypatch.chdir(shutil.copytree(folder, tmp_path / "repository"))
    return shas


def measure(shas: list[str], base: list[float], head: list[float], at: str, **changes) -> None:
    for sha, speeds in zip(shas, (base, head), strict=True):
        facts = {"created_at": at, "code": code_hash(), "sweep_file": "sweep.toml", **changes}
        add_measured(Path("sweep.toml"), sha, speeds, **facts)


def compared(shas: list[str], *options: str) -> Printed:
    return printed("compare", *shas, "sweep.toml", "--metric", "tokens_per_s", *options)


@pytest.fixture(scope="module")
def _compared(_made: tuple[Path, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(_made[0], tmp_path_factory.mktemp("compared") / "repository"))
    with contextlib.chdir(folder):
        measure(_made[1], around(1000.0, 5), around(950.0, 5), DAY_1)
        assert compared(["HEAD~1", "HEAD"], "-o", str(FILE)).exit_code == 0
    return folder


@pytest.fixture
def saved(_compared: Path, shas: list[str]) -> None:
    """The second commit is slower by 5 %, in `comparison.json`."""
    shutil.copytree(_compared, Path.cwd(), dirs_exist_ok=True)


def checked(*options: str) -> Printed:
    return printed("check", FILE, *options)


def test_what_is_saved_is_what_is_printed_as_json_with_names_that_last(saved, shas):
    content = json.loads(FILE.read_text())
    assert content == json.loads(compared(["HEAD~1", "HEAD"], "--format", "json").text)
    assert [content[side]["revision"] for side in ("base", "head")] == shas
    assert content["sweep_file"] == "sweep.toml"


def test_the_sweep_file_that_is_saved_is_the_one_that_was_named(shas):
    measure(shas, around(1000.0, 5), around(950.0, 5), DAY_1, sweep_file="elsewhere.toml")
    compared(shas, "-o", str(FILE))
    assert json.loads(FILE.read_text())["sweep_file"] == "sweep.toml"


@pytest.mark.parametrize(
    ("base", "head", "outcome", "exit_code"),
    [
        (around(990.0, 5), around(942.0, 5), "held", ExitCode.ok),
        (around(1000.0, 5), around(1001.0, 5), "not held", ExitCode.regression),
        ([1000.0], [950.0], "not decided", ExitCode.insufficient),
        ([900.0, 1000.0, 1100.0], [850.0, 990.0, 1100.0], "not decided", ExitCode.insufficient),
        (around(1000.0, 5), [None] * 5, "not decided", ExitCode.failed_runs),
    ],
)
def test_newer_launches_say_whether_it_holds(saved, shas, base, head, outcome, exit_code):
    measure(shas, base, head, DAY_2)
    done = checked()
    assert done.exit_code == exit_code
    assert done.text.startswith(f"{outcome}: tokens/s of 1f1b, ")
    assert "; stated: slower, -5.0 % [" in done.text
    if exit_code is ExitCode.failed_runs:
        values = json.loads(checked("--format", "json").text)
        assert (values["outcome"], values["exit_code"]) == (outcome, exit_code)
        assert values["changes"][0]["stated_verdict"] == "slower"


def test_each_of_several_cases_must_hold(shas):
    Path("sweep.toml").write_text(TWO_CASES)
    for at, slow in ((DAY_1, 900.0), (DAY_2, 1000.0)):
        for place, head in ((0, 950.0), (1, slow)):
            for sha, level in ((shas[0], 1000.0), (shas[1], head)):
                facts = (Path("sweep.toml"), sha, around(level, 5), place)
                add_measured(*facts, created_at=at, code="c0de")
        if at == DAY_1:
            compared(shas, "-o", str(FILE))
    done = checked()
    assert done.exit_code == ExitCode.regression
    assert done.text.startswith("not held: tokens/s of afab: same, ")


def test_launches_of_the_comparison_are_not_its_own_proof(saved):
    with pytest.raises(NotMeasuredError, match=r"newer than those of comparison\.json"):
        checked()


def test_a_comparison_that_is_open_states_nothing_to_measure_again(shas):
    measure(shas, [900.0, 1000.0, 1100.0], [850.0, 990.0, 1100.0], datetime.now(UTC).isoformat())
    assert compared(shas, "-o", str(FILE)).exit_code == ExitCode.insufficient
    Path("sweep.toml").write_text(FAILS)  # nothing is launched
    for options in ((), ("--run",)):
        with pytest.raises(UsageError, match=r"states nothing that could hold, as every"):
            checked(*options)


def test_a_commit_is_not_compared_with_itself(saved):
    with pytest.raises(UsageError, match="are the same runs; name two"):
        compared(["HEAD", "HEAD"])


def test_with_run_both_sides_are_measured_anew(shas):
    now = datetime.now(UTC).isoformat()
    measure(shas, around(1000.0, 5), around(950.0, 5), now)
    compared(shas, "-o", str(FILE))
    measure(shas, around(1000.0, 5), around(950.0, 5), now)
    done = checked("--run", "--launches", "5")  # those just made are taken
    assert done.exit_code == ExitCode.ok
    assert len(Store(Path("results")).runs(["run_id"])) == 20


def test_with_run_the_launches_of_the_last_hour_do_not_count_if_they_were_compared(shas):
    measure(shas, around(1000.0, 5), around(950.0, 5), datetime.now(UTC).isoformat())
    compared(shas, "-o", str(FILE))
    Path("sweep.toml").write_text(FAILS)
    with pytest.raises(LaunchError, match="does not run"):  # so some were to be made
        checked("--run", "--launches", "3")


def test_measuring_needs_the_sweep_file(saved):
    Path("sweep.toml").unlink()
    with pytest.raises(UsageError, match="its sweep file is not here, so it cannot be measured"):
        checked("--run")


def test_options_of_the_gate_are_not_for_a_comparison(saved):
    sides = ("--base=HEAD", "--head=HEAD")
    for option in (*sides, "--threshold=3%", "--summary=a", "--max-launches=9"):
        with pytest.raises(UsageError, match="is for the gate; a comparison says itself what"):
            checked(option)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "[1", "null", '{"changes": []}', '{"format": "ppbench claim"}', "[" * 100_000],
)
def test_another_file_is_refused_in_one_line(tmp_path, text):
    file = tmp_path / "some.json"
    file.write_text(text)
    with pytest.raises(UsageError) as raised:
        printed("check", file)
    assert str(raised.value) == (
        f"{file}: is no saved comparison of two sides; expected what this writes: ppbench compare "
        f"BASE HEAD SWEEP -o {file}"
    )


def test_a_dirty_tree_is_checked_with_exactly_its_changes(shas):
    Path("number").write_text("changed\n")
    state = Repository.around(Path.cwd()).state()
    facts = {"created_at": DAY_1, "code": code_hash()}
    dirty = {"changes": state.changes, "is_dirty": True}
    add_measured(Path("sweep.toml"), shas[0], around(1000.0, 5), **facts)
    add_measured(Path("sweep.toml"), shas[1], around(950.0, 5), **dirty, **facts)
    compared([shas[0], "worktree"], "-o", str(FILE))
    assert json.loads(FILE.read_text())["head"]["revision"] == "worktree"
    Path("number").write_text("changed again\n")
    with pytest.raises(UsageError, match=r"expected worktree = .* which was compared"):
        checked()
