from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from repositories import commits, git, make_repository
from tracked import CASE, STEADY, add_launches

from ppbench.comparison.sides import Places, Side, both_fresh, find_side
from ppbench.errors import NotMeasuredError, RepositoryError, UsageError
from ppbench.git import Repository


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "repository")


def ids(side: Side) -> list[str]:
    return list(side.runs["run_id"])


def test_revisions_branches_tags_and_hashes_mean_a_commits_clean_runs(repository, store):
    first, second = commits(repository, 2)
    git(repository, "tag", "v1", first)
    mine = add_launches(store, STEADY, first)
    add_launches(store, STEADY, first, changes="c4a9", is_dirty=True, fingerprint="f9")
    others = add_launches(store, STEADY, second)
    places = Places(store, repository)
    for name in ("v1", "HEAD~1", first, first[:7]):
        assert ids(find_side(name, places)) == mine, name
    assert ids(find_side("main", places)) == others
    side = find_side("v1", places)
    assert side.title == f"v1 = {first[:9]} Number 1"
    assert (side.commit, side.is_clean, side.notes) == (first, True, ())


def test_a_commit_that_git_has_lost_is_found_in_the_store_with_a_note(repository, store):
    commits(repository, 1)
    lost = "ab12" * 10
    mine = add_launches(store, STEADY, lost)
    side = find_side("ab12ab", Places(store, repository))
    assert ids(side) == mine
    assert "rebased away, or not fetched; its stored runs are used" in side.notes[0]


def test_a_stored_commit_is_found_without_any_repository(tmp_path, store):
    mine = add_launches(store, STEADY, "ab12" * 10)
    side = find_side("ab12", Places(store, tmp_path))
    assert (ids(side), side.notes) == (mine, ())


def test_runs_sweeps_and_folders_need_no_repository(tmp_path, store, monkeypatch):
    mine = add_launches(store, STEADY, None, sweep_id="5weep")
    more = add_launches(store, STEADY[:2], None, sweep_id="other", launch=7)
    places = Places(store, tmp_path)
    assert ids(find_side("5weep", places)) == mine
    assert ids(find_side(mine[1], places)) == [mine[1]]
    assert ids(find_side("last", places)) == [more[-1]]
    monkeypatch.chdir(tmp_path)
    assert ids(find_side("results", places)) == [*mine, more[-1]]


def test_of_each_case_fingerprint_and_launch_the_newest_counts(repository, store):
    (sha,) = commits(repository, 1)
    add_launches(store, STEADY[:1], sha)
    new = add_launches(store, STEADY[:1], sha)
    elsewhere = add_launches(store, STEADY[:1], sha, fingerprint="f9")
    add_launches(store, STEADY[:1], sha, status="interrupted")
    assert ids(find_side("HEAD", Places(store, repository))) == [*new, *elsewhere]


def test_failed_runs_are_kept_apart_and_are_no_launches(repository, store):
    (sha,) = commits(repository, 1)
    (ok,) = add_launches(store, STEADY[:1], sha)
    other = replace(CASE, schedule="afab")
    bad = add_launches(store, [None], sha, other, status="oom")
    side = find_side("HEAD", Places(store, repository))
    assert (ids(side), list(side.failed["run_id"])) == ([ok], bad)


def test_the_work_tree_is_its_commit_and_exactly_these_changes(repository, store):
    (sha,) = commits(repository, 1)
    clean = add_launches(store, STEADY, sha)
    places = Places(store, repository)
    assert ids(find_side("worktree", places)) == clean
    (repository / "number").write_text("changed\n")
    with pytest.raises(NotMeasuredError, match=r"with changes [0-9a-f]{12}: not measured"):
        find_side("worktree", places)
    changes = Repository.around(repository).state().changes
    mine = add_launches(store, STEADY, sha, changes=changes, is_dirty=True)
    assert ids(find_side("worktree", places)) == mine
    head = find_side("HEAD", places)
    assert ids(head) == clean
    assert head.notes[0].endswith("uncommitted changes, which are part of `worktree`")


def test_a_name_that_could_be_two_things_is_refused(repository, store, tmp_path, monkeypatch):
    (sha,) = commits(repository, 1)
    add_launches(store, STEADY, sha)
    git(repository, "branch", "results")
    monkeypatch.chdir(tmp_path)
    places = Places(store, repository)
    with pytest.raises(UsageError, match=r"2 things: a results folder; the commit [0-9a-f]{9}"):
        find_side("results", places)
    assert len(find_side("./results", places).runs) == 5
    assert len(find_side("heads/results", places).runs) == 5


def test_a_commit_with_dirty_runs_alone_says_how_many_there_are(repository, store):
    first, _ = commits(repository, 2)
    add_launches(store, STEADY, first, changes="c4a9", is_dirty=True)
    with pytest.raises(NotMeasuredError, match=r"not measured in .* \(5 runs of it had"):
        find_side("main~1", Places(store, repository))


def test_a_repository_without_a_commit_is_one_all_the_same(store, repository):
    with pytest.raises(RepositoryError) as caught:
        find_side("worktree", Places(store, repository))
    assert "without a repository" not in str(caught.value)


def test_a_shallow_clone_says_how_to_fetch_the_rest(repository, store, tmp_path):
    commits(repository, 3)
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{repository}", "shallow")
    with pytest.raises(UsageError, match="the clone is shallow: git fetch --unshallow"):
        find_side("HEAD~1", Places(store, tmp_path / "shallow"))


def test_of_what_was_measured_now_no_older_launches_count(store, tmp_path):
    now = datetime(2026, 1, 2, tzinfo=UTC)
    one, other = "0e" * 20, "07" * 20
    places = Places(store, tmp_path)
    add_launches(store, STEADY, one)
    add_launches(store, STEADY, other, created_at=now.isoformat())
    base, head = (find_side(sha, places) for sha in (one, other))
    assert both_fresh(base, head, now) == (base, head)
    mine = add_launches(store, STEADY[:3], one, created_at=now.isoformat())
    first, last = both_fresh(find_side(one, places), head, now)
    assert (ids(first), ids(last), last.notes) == (mine, ids(head), ())
    assert first.notes == (
        f"2 runs of {one} excluded: made over an hour earlier, or by another version of ppbench",
    )
