"""Series over commits: which runs are in them, in which order, and what is said of the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from histories import CASE, OTHER, CommitFacts, Runs, repository
from repositories import git

from ppbench.commits.series import History, history, metric_called
from ppbench.errors import RepositoryError, UsageError


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """An empty store, and a working directory that is in no repository."""
    monkeypatch.chdir(tmp_path)
    return Runs(tmp_path / "results")


def made(folder: Path, num_commits: int) -> list[str]:
    return repository(folder, [f"change {number}" for number in range(num_commits)])


def asked(runs: Runs, repo: Path | None = None, **changes) -> History:
    return history(repo=repo, results=runs.store.folder, **changes)


def commits(found: History, number: int = 0) -> list[str]:
    return [point.commit for point in found.series[number].points]


def test_commits_stand_in_the_repositorys_order_whenever_they_were_measured(
    runs: Runs, tmp_path: Path
) -> None:
    shas = made(tmp_path / "repo", 4)
    for number in (3, 0, 2, 1):
        runs.add(CommitFacts(shas[number], 100 - number), CASE, 1000.0 + number)
    found = asked(runs, tmp_path / "repo")
    assert commits(found) == list(found.frame.query("kind == 'launch'")["commit"]) == shas
    assert [point.value for point in found.series[0].points] == [1000, 1001, 1002, 1003]
    assert found.line == "first-parent line of main"
    assert found.notes == ()
    git(tmp_path, "clone", "--quiet", "--depth=2", f"file://{tmp_path}/repo", "shallow")
    shallow = asked(runs, tmp_path / "shallow")
    assert commits(shallow) == shas[2:]
    assert "2 runs of 2 commits off the first-parent line of main; " in shallow.notes[0]
    assert "git fetch --unshallow" in shallow.notes[0]
    git(tmp_path / "repo", "checkout", "--quiet", shas[1])
    detached = asked(runs, tmp_path / "repo")
    assert commits(detached) == shas[:2]
    assert detached.line == f"first-parent line of {shas[1][:9]} (no branch is checked out)"


def test_commits_that_were_not_measured_are_counted_where_they_are(
    runs: Runs, tmp_path: Path
) -> None:
    shas = made(tmp_path / "repo", 10)
    for number in (1, 2, 6):
        runs.add(CommitFacts(shas[number], number), CASE, 1000.0)
    found = asked(runs, tmp_path / "repo")
    [series] = found.series
    assert [point.num_before for point in series.points] == [0, 0, 3]
    assert series.num_unmeasured == 3
    assert found.notes == (f"3 commits after {shas[6][:9]}: not measured yet",)


def test_a_failed_run_is_a_point_without_a_figure(runs: Runs) -> None:
    runs.add(CommitFacts("a" * 40, 0), CASE, 1000.0)
    failed = runs.add(CommitFacts("b" * 40, 1), CASE, None)
    [series] = asked(runs).series
    first, second = series.points
    assert (first.figures, first.failures) == ((1000.0,), ())
    assert (second.figures, second.value) == ((), None)
    assert [(one.run_id, one.status) for one in second.failures] == [(failed, "error")]


def test_a_launch_that_was_run_again_counts_once_by_its_newest_run(runs: Runs) -> None:
    for figure in (900.0, None, 1000.0):
        runs.add(CommitFacts("a" * 40, 0), CASE, figure, launch=0)
    runs.add(CommitFacts("a" * 40, 0), CASE, None, launch=0, status="interrupted")
    [series] = asked(runs).series
    assert [point.figures for point in series.points] == [(1000.0,)]
    assert series.num_failures == 0


def test_fingerprints_are_never_mixed_and_the_last_that_measured_comes_first(runs: Runs) -> None:
    commit = CommitFacts("a" * 40, 0)
    runs.add(commit, CASE, 1000.0, fingerprint="old")
    runs.add(commit, OTHER, 1100.0, fingerprint="new")
    runs.add(commit, CASE, 2000.0, fingerprint="new")
    found = asked(runs)
    told = [(one.fingerprint, one.case, one.points[0].value) for one in found.series]
    assert told == [
        ("new", "16 microbatches", 1100.0),
        ("new", "8 microbatches", 2000.0),
        ("old", "8 microbatches", 1000.0),
    ]
    assert any("2 fingerprints, which cannot be compared" in note for note in found.notes)
    assert found.series[0].machine == "cpu, Some <CPU>, 2 cores"


def merged(folder: Path) -> tuple[list[str], str, str]:
    """Two commits on main, a branch from the first, and its merge: line, branch's commit, merge."""
    line = made(folder, 2)
    git(folder, "checkout", "--quiet", "-b", "side", line[0])
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "on a branch")
    side = git(folder, "rev-parse", "HEAD")
    git(folder, "checkout", "--quiet", "main")
    git(folder, "merge", "--quiet", "--no-ff", "--message", "merge", "side")
    return line, side, git(folder, "rev-parse", "HEAD")


def test_commits_of_a_merged_branch_are_beside_the_line(runs: Runs, tmp_path: Path) -> None:
    (first, second), side, merge = merged(tmp_path / "repo")
    for number, sha in enumerate((first, side, second, merge)):
        runs.add(CommitFacts(sha, number), CASE, 1000.0)
    found = asked(runs, tmp_path / "repo")
    assert commits(found) == [first, second, merge]
    assert found.notes == ("1 run of 1 commit off the first-parent line of main: excluded",)


def test_a_trial_over_other_steps_is_not_mixed_in_and_other_code_is_said(
    runs: Runs, tmp_path: Path
) -> None:
    shas = made(tmp_path / "repo", 2)
    for number, sha in enumerate(shas):
        told = CommitFacts(sha, number)
        runs.add_launches(told, CASE, [1000.0] * 3, measure_steps=50, code=f"c{number}")
    runs.add_launches(CommitFacts(shas[1], 1), CASE, [500.0] * 3, measure_steps=1, code="c1")
    found = asked(runs, tmp_path / "repo")
    assert [point.figures for point in found.series[0].points] == [(1000.0,) * 3] * 2
    other_steps, other_code = found.notes
    assert other_steps == "3 runs with other measurement settings: excluded"
    assert other_code.startswith(f"ppbench itself changed at {shas[1][:9]}: ")


def test_without_a_repository_commits_are_in_the_order_of_their_dates(runs: Runs) -> None:
    for number in (2, 0, 1):
        runs.add(CommitFacts(f"{number}" * 40, number), CASE, 1000.0)
    found = asked(runs)
    assert commits(found) == ["0" * 40, "1" * 40, "2" * 40]
    assert "no repository here has these commits" in found.notes[0]
    with pytest.raises(RepositoryError):
        asked(runs, Path())


def test_the_repository_is_the_one_around_here_or_that_of_the_sweep(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [sha] = made(tmp_path / "repo", 1)
    sweep = tmp_path / "repo" / "sweep.toml"
    sweep.write_text('[grid]\nschedule = "1f1b"\n')
    runs.add(CommitFacts(sha, 0), CASE, 1000.0, sweep_file=str(sweep))
    assert asked(runs).line == "first-parent line of main"
    sweep.unlink()
    assert asked(runs).line == "by author date"
    monkeypatch.chdir(tmp_path / "repo")
    assert asked(runs).line == "first-parent line of main"


def test_runs_without_a_commit_or_without_the_figure_are_left_out_and_counted(runs: Runs) -> None:
    runs.add(CommitFacts("a" * 40, 0), CASE, 1000.0)
    runs.add(CommitFacts("a" * 40, 0), CASE, 1000.0, commit=None)
    runs.add(CommitFacts("a" * 40, 0), CASE, 1000.0, tokens_per_s=None)
    found = asked(runs)
    assert found.series[0].num_launches == 1
    assert found.notes[0] == "2 runs without a commit or tokens_per_s: excluded"


def test_conditions_choose_the_runs(runs: Runs) -> None:
    runs.add(CommitFacts("a" * 40, 0), CASE, 1000.0)
    runs.add(CommitFacts("a" * 40, 0), replace(CASE, schedule="afab"), 900.0)
    found = asked(runs, where=["schedule=afab"])
    assert [one.points[0].value for one in found.series] == [900.0]
    none = asked(runs, where=["world_size=64"])
    assert none.series == ()
    assert "--where world_size=64: no run has this value; its values are 2" in none.notes[0]


def test_a_metric_is_a_column_with_figures() -> None:
    assert metric_called("peak_memory_bytes").higher_is_better is False
    assert metric_called("bubble_transfer").in_points
    for name in ("commit", "num_microbatches", "measure_steps", "launch"):
        with pytest.raises(UsageError, match="no figure is called"):
            metric_called(name)


def test_runs_that_do_not_count_are_counted_and_named_in_the_rows(
    runs: Runs, tmp_path: Path
) -> None:
    shas = made(tmp_path / "repo", 12)
    figures = [1000.0 + number % 3 for number in range(12)]
    figures[7] = 830.0
    ids = [
        runs.add(CommitFacts(shas[number], number), CASE, figure)
        for number, figure in enumerate(figures)
    ]
    found = asked(runs, tmp_path / "repo")
    assert any(note.startswith("1 launch discounted, since ") for note in found.notes)
    launches = found.frame[found.frame["kind"] == "launch"].set_index("run_id")
    assert launches["discount"].dropna().to_dict() == {ids[7]: "apart"}
    (series,) = found.series
    assert series.changes.steps == ()
    assert series.current is not None
    assert series.current.num_launches == 11


def test_what_took_turns_with_a_reference_counts_by_its_difference_from_it(
    runs: Runs, tmp_path: Path
) -> None:
    """The machine is another one in each start; the fifth of eight commits is 4 % slower."""
    shas = made(tmp_path / "repository", 8)
    levels = [1000.0] * 4 + [960.0] * 4
    machine = [1.0, 0.88, 1.07, 0.93, 1.1, 0.9, 1.03, 0.96]
    for number, (sha, level) in enumerate(zip(shas, levels, strict=True)):
        for again in range(2):
            pace = machine[(3 * number + 5 * again) % 8]
            start = f"start {number} {again}"
            sides = ((sha, number, level), (shas[-1], 7, levels[-1]))
            for at, (commit, day, own) in enumerate(sides):
                wobble = 1 + ((7 * number + 3 * again + at) % 5 - 2) / 2000
                facts = CommitFacts(commit, day)
                runs.add(facts, CASE, own * pace * wobble, process_start=start)
    found = asked(runs, tmp_path / "repository")
    (series,) = found.series
    (step,) = series.changes.steps
    assert series.points[step.first].commit == shas[4]
    assert -0.045 < step.size.estimate < -0.035
    assert [len(point.launches) for point in series.points] == [2] * 8
    assert any(f"16 launches took turns with {shas[-1][:9]}: " in note for note in found.notes)


def test_without_launches_of_its_own_no_commit_is_a_reference(runs: Runs, tmp_path: Path) -> None:
    shas = made(tmp_path / "repository", 3)
    for number in (1, 2):
        for sha, day, speed in ((shas[0], 0, 1000.0), (shas[number], number, 990.0)):
            runs.add(CommitFacts(sha, day), CASE, speed, process_start=f"start {number}")
    (series,) = asked(runs, tmp_path / "repository").series
    assert [len(point.launches) for point in series.points] == [2, 1, 1]
