"""Which past commits are measured, in what order, and what is left alone."""

import itertools
import json
import platform
import shutil

import pytest
from command import output_of, printed
from measured import FAILS, SWEEP, TWO_CASES, add_measured, now, sweep_in
from repositories import commit, commits, git, make_repository

from ppbench.cli import runs as stored
from ppbench.commits.backfill import commits_of, order_of
from ppbench.errors import PpbenchError, UsageError
from ppbench.git import Repository
from ppbench.store import Store

EXAMPLE = [2, 9, 5, 8, 3, 7, 4, 6, 1]  # as drawn in the module


@pytest.fixture(scope="module")
def _repository(tmp_path_factory):
    folder = make_repository(tmp_path_factory.mktemp("made") / "repository")
    return folder, commits(folder, 5)


@pytest.fixture
def repository(_repository, tmp_path):
    made, shas = _repository
    return shutil.copytree(made, tmp_path / "repository"), shas


def listed(folder, file, span, *options):
    """The rows that are printed as JSON, and the exit code."""
    done = printed(
        "backfill", span, file, *options, "--results", folder / "results", "--format", "json"
    )
    return json.loads(done.text)["rows"], done.exit_code


def test_the_order_is_as_drawn():
    order = order_of(9)
    assert [order.index(place) + 1 for place in range(9)] == EXAMPLE


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 37])
def test_every_commit_comes_once_and_always_from_the_largest_gap(count):
    order = order_of(count)
    assert sorted(order) == list(range(count))
    for number in range(2, count):
        before = sorted(order[:number])
        gaps = [end - start for start, end in itertools.pairwise(before)]
        start = max(place for place in before if place < order[number])
        end = min(place for place in before if place > order[number])
        assert end - start == max(gaps)
        assert abs((order[number] - start) - (end - order[number])) <= 1


def test_a_range_has_both_its_ends_and_may_end_at_head(repository):
    folder, shas = repository
    repo = Repository.around(folder)
    assert commits_of(repo, f"{shas[1]}..{shas[3]}") == shas[1:4]
    assert commits_of(repo, f"{shas[2]}..") == shas[2:]
    assert commits_of(repo, f"{shas[2]}..{shas[2]}") == [shas[2]]


def test_a_launch_that_failed_among_others_that_did_not_is_no_end_of_them(repository):
    folder, shas = repository
    file = sweep_in(folder)
    for launch, speed in enumerate((1000.0, None, 1001.0)):
        add_measured(file, shas[4], [speed], launch=launch, process_start=f"alone {launch}")
    add_measured(file, shas[3], [None])
    for count, told in ((3, "stored"), (4, "to measure")):
        rows, _ = listed(folder, file, "HEAD~1..", "--launches", count, "--dry-run")
        assert [row["status"] for row in rows] == [told, "stored"]


def test_a_failure_of_git_is_told_and_not_stored(repository):
    folder, _ = repository
    file = sweep_in(folder)
    trees = folder / "results" / "worktrees" / platform.node()
    trees.parent.mkdir(parents=True)
    trees.write_text("no folder")
    with pytest.raises(PpbenchError, match=r"worktrees.*: cannot be made"):
        listed(folder, file, "HEAD..")
    assert not (folder / "results" / "runs").exists()


def test_what_was_measured_otherwise_or_cut_short_does_not_count(repository):
    folder, shas = repository
    file = sweep_in(folder)
    for changes in (
        {"fingerprint": "of another machine"},
        {"changes": "0123456789ab", "is_dirty": True},
        {"measure_steps": 99},
        {"case_id": "another"},
        {"status": "crash"},
        {"status": "interrupted"},
    ):
        add_measured(file, shas[4], [1000.0], **changes)
        rows, _ = listed(folder, file, "HEAD..HEAD", "--dry-run")
        assert rows[0]["status"] == "to measure", changes


def test_a_commit_counts_as_measured_when_every_case_of_the_sweep_is(repository):
    folder, shas = repository
    file = sweep_in(folder, TWO_CASES)
    add_measured(file, shas[4], [1000.0])
    assert listed(folder, file, "HEAD..", "--dry-run")[0][0]["status"] == "to measure"
    add_measured(file, shas[4], [900.0], 1)
    rows, _ = listed(folder, file, "HEAD..")
    assert [(row["schedule"], row["tokens_per_s"]) for row in rows] == [
        ("1f1b", 1000.0),
        ("afab", 900.0),
    ]


def test_a_commit_that_cannot_be_set_up_has_a_row_and_is_not_tried_again(repository, capsys):
    folder, shas = repository
    file, results = sweep_in(folder, FAILS), folder / "results"
    rows, exit_code = listed(folder, file, "HEAD~1..")
    assert {row["status"] for row in rows} == {"error"}
    assert exit_code == 4  # nothing ran at all
    runs = Store(results).runs()
    assert set(runs["commit"]) == set(shas[3:])
    newest = runs[runs["commit"] == shas[4]].iloc[0]
    assert newest["error"].startswith("[track] setup: echo one; echo two >&2; exit 3: ended with")
    assert newest["error"].splitlines()[1:] == ["one", "two"]
    assert (newest["subject"], newest["parent"]) == ("Number 5", shas[3])
    assert newest["author_date"] == "2026-01-06T00:00:00+00:00"
    assert shas[4][:9] in output_of(stored.list_runs, [], None, results)
    capsys.readouterr()
    listed(folder, file, "HEAD~1..")
    assert "2 of 2 commits are measured already" in capsys.readouterr().err
    assert len(Store(results).runs(["run_id"])) == 2
    listed(folder, file, "HEAD~1..", "--retry-failed")
    assert len(Store(results).runs(["run_id"])) == 4


def test_no_commit_has_its_second_launch_before_all_have_their_first(repository):
    """The reference cannot be set up, so the others are measured without it."""
    folder, shas = repository
    file = sweep_in(folder, FAILS)
    add_measured(file, shas[4], [1000.0], **now())
    listed(folder, file, "HEAD~2..", "--launches", 2)
    made = Store(folder / "results").runs(["commit", "launch"]).iloc[1:]
    expected = [(shas[4], 1), (shas[2], 0), (shas[3], 0)]
    assert list(made.itertuples(index=False, name=None)) == expected


def test_a_setup_may_not_change_what_git_tracks_and_no_work_tree_stays(repository):
    """Those of killed processes are cleared away too."""
    folder, shas = repository
    file = sweep_in(folder, SWEEP + '\n[track]\nsetup = "echo changed > number"\n')
    trees = folder / "results" / "worktrees"
    left = Repository.around(folder).worktree(shas[0], trees / platform.node())
    left.__enter__()
    rows, _ = listed(folder, file, "HEAD..")
    assert "changed files that git tracks; have it write others" in rows[0]["error"]
    assert not trees.exists()
    assert git(folder, "worktree", "list").count("\n") == 0


def test_what_no_file_has_a_say_in_is_refused_before_a_commit_is_tried(repository):
    folder, _ = repository
    file, results = sweep_in(folder), folder / "results"
    with pytest.raises(PpbenchError, match="1f1b needs exactly 1 stage per rank, got 7"):
        listed(folder, file, "HEAD..", "--set", "stages_per_rank=7")
    assert not (results / "runs").exists()


def test_a_case_whose_files_lie_in_the_commits_is_not_looked_at_here(repository):
    folder, _ = repository
    commit(folder, {"costs.toml": "F_ms = 1"}, "Costs", day=8)
    git(folder, "rm", "--quiet", "costs.toml")
    emulated = (
        'device = "emulated"\n[model]\npreset = "mine:build"\n[emulated]\ncosts = "costs.toml"\n'
    )
    file = sweep_in(folder, emulated)
    rows, _ = listed(folder, file, "HEAD..", "--dry-run")
    assert rows[0]["subject"] == "Costs"


def test_the_newest_takes_turns_with_itself_and_others_take_turns_with_it(repository):
    """Its launches beside others do not count as its own."""
    folder, shas = repository
    file = sweep_in(folder)
    for start, commits_of_start in enumerate(([4, 4], [3, 4], [2, 4])):
        for launch, place in enumerate(commits_of_start):
            number = {"launch": 2 * start + launch, "process_start": f"start {start}"}
            add_measured(file, shas[place], [1000.0], **number)
    for count, told in ((1, "stored"), (2, "to measure")):
        rows, _ = listed(folder, file, "HEAD~2..", "--launches", count, "--dry-run")
        assert [row["status"] for row in rows] == [told] * 3


SLOW_SETUP = SWEEP + '\n[track]\nsetup = "sleep 2; exit 3"\n'


def test_a_budget_begins_no_launch_that_would_end_later_and_says_what_is_missing(
    repository, capsys
):
    folder, shas = repository
    file = sweep_in(folder, SLOW_SETUP)
    rows, exit_code = listed(folder, file, "HEAD~2..", "--budget", "3.9s")
    assert [row["status"] for row in rows] == ["not measured", "not measured", "error"]
    assert exit_code == 4  # nothing ran
    told = capsys.readouterr().err
    assert f"--budget is spent: 2 commits lack launches: {shas[2][:9]} Number 3; " in told
    with pytest.raises(UsageError, match="--budget: 0:01 is too short for one round; the first"):
        listed(folder, file, "HEAD~2..", "--budget", "1s")
    assert len(Store(folder / "results").runs(["run_id"])) == 2
