"""Git repositories as they are found: whole, shallow, dirty, detached, merged, empty, missing."""

import shutil
import sys

import pytest
from repositories import commit, commits, git, make_repository

from ppbench.errors import RepositoryError
from ppbench.git import Repository, read_commit


@pytest.fixture
def repository(tmp_path):
    """Four commits on main."""
    folder = make_repository(tmp_path / "repository")
    return folder, commits(folder, 4)


@pytest.fixture
def merged(tmp_path):
    """main: one, two, the merge; beside it a branch with two commits. The folder, their hashes."""
    folder = make_repository(tmp_path)
    one, two = commits(folder, 2)
    git(folder, "switch", "--quiet", "--create", "side", one)
    side = [commit(folder, {f"side{n}": ""}, f"Side {n}", day=5 + n) for n in (1, 2)]
    git(folder, "switch", "--quiet", "main")
    git(
        folder, "merge", "--quiet", "--no-ff", "--message", "Merge side", "side", at_s=1_768_000_000
    )
    return folder, one, two, side, git(folder, "rev-parse", "HEAD")


def test_a_commit_tells_its_branch_date_parent_and_subject(repository):
    folder, shas = repository
    (folder / "inner").mkdir()
    state = read_commit(folder / "inner")
    assert state.commit == shas[-1]
    assert state.branch == "main"
    assert state.author_date == "2026-01-05T00:00:00+00:00"
    assert state.parent == shas[-2]
    assert state.subject == "Number 4"
    assert (state.is_dirty, state.changes) == (False, "")


def test_a_folder_without_a_repository_or_commits_has_none_and_says_so(tmp_path, capsys):
    assert read_commit(tmp_path) is None
    with pytest.raises(RepositoryError, match="not a git repository"):
        Repository.around(tmp_path)
    assert read_commit(make_repository(tmp_path)) is None
    assert capsys.readouterr().err == ""


def test_without_git_there_is_no_commit_and_the_fix_is_named(repository, monkeypatch, tmp_path):
    folder, _ = repository
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_commit(folder) is None
    with pytest.raises(RepositoryError, match="git was not found; install it"):
        Repository.around(folder)


def test_changes_to_tracked_files_make_a_tree_dirty_and_have_a_hash_of_their_own(repository):
    folder, _ = repository
    (folder / "untracked").write_text("x")
    assert not read_commit(folder).is_dirty
    (folder / "number").write_text("changed\n")
    first = read_commit(folder)
    (folder / "number").write_text("changed again\n")
    second = read_commit(folder)
    git(folder, "add", "number")
    assert first.is_dirty and second.is_dirty
    assert first.changes and first.changes != second.changes
    git(folder, "checkout", "--quiet", "HEAD", "--", "number")
    assert read_commit(folder).changes == ""


def test_changes_can_be_told_apart_from_paths_that_do_not_count(repository):
    folder, _ = repository
    commit(folder, {"kept/results": "1", "code": "1"}, "Both", day=9)
    repo = Repository.around(folder)
    (folder / "kept" / "results").write_text("2")
    assert repo.state().is_dirty
    assert not repo.state(excluded=["kept"]).is_dirty
    (folder / "code").write_text("2")
    assert repo.state(excluded=["kept"]).is_dirty


def test_the_same_changes_are_the_same_whether_they_are_staged_or_not(repository):
    folder, _ = repository
    (folder / "number").write_text("changed\n")
    before = read_commit(folder)
    git(folder, "add", "number")
    assert read_commit(folder) == before
    (folder / "number").write_text("4\n")  # staged, and undone since: what is run is HEAD's
    assert read_commit(folder).changes == ""


def test_a_state_that_git_cannot_tell_is_none_and_said(repository, capsys):
    folder, _ = repository
    (folder / "number").write_text("changed\n")
    (folder / ".git" / "index").write_bytes(b"x")
    assert read_commit(folder) is None
    assert "are not stored with the runs: " in capsys.readouterr().err


def test_subjects_and_branches_of_any_characters_are_kept(repository):
    folder, _ = repository
    subject, branch = "Ünïcode \"quotes\" 'x' [a] <b> $HOME `ls` %H\t|", "feature/ä'b#1"
    git(folder, "switch", "--quiet", "--create", branch)
    sha = commit(folder, {"x": "1"}, subject, day=9)
    assert Repository.around(folder).describe(sha).subject == subject
    assert read_commit(folder).branch == branch
    assert Repository.around(folder).resolve(branch) == sha


def test_names_resolve_to_full_hashes_and_an_unknown_one_is_named(repository):
    folder, shas = repository
    git(folder, "tag", "--annotate", "--message", "x", "v1", shas[1])
    repo = Repository.around(folder)
    for name in ("v1", "main~2", shas[1][:10], shas[1]):
        assert repo.resolve(name) == shas[1]
    for name in ("nope", "--help", "", "HEAD:number"):
        with pytest.raises(RepositoryError, match="no such revision"):
            repo.resolve(name)


def test_between_is_the_path_along_first_parents_where_a_merge_counts_once(merged):
    folder, one, two, side, merge = merged
    repo = Repository.around(folder)
    on_line = f"does not lie on the first-parent line of main in .*, such as {one[:12]}"
    with pytest.raises(RepositoryError, match=on_line):
        repo.between(side[0], "main")
    assert repo.between(one, merge) == [two, merge]
    assert repo.describe(merge).parent == two
    with pytest.raises(RepositoryError, match="does not lie on the first-parent line of"):
        repo.between(side[0], merge)
    with pytest.raises(RepositoryError, match="are the same commit"):
        repo.between(merge, "main")


def test_the_merge_base_is_where_two_branches_parted(merged):
    folder, one, two, side, _ = merged
    repo = Repository.around(folder)
    assert repo.merge_base(two, side[1]) == one
    assert repo.is_ancestor(one, side[1])
    assert not repo.is_ancestor(two, side[1])
    git(folder, "switch", "--quiet", "--orphan", "other")
    other = commit(folder, {"y": "1"}, "Unrelated")
    with pytest.raises(RepositoryError, match="have no common commit"):
        repo.merge_base(other, two)


def test_positions_have_parents_first_and_leave_out_what_is_not_there(merged):
    folder, one, two, side, merge = merged
    repo = Repository.around(folder)
    places = repo.positions([merge, *side, two, one, "0" * 40, "no hash"])
    assert places.keys() == {one, two, *side, merge}
    for parent, child in ((one, two), (one, side[0]), (side[0], side[1]), (side[1], merge)):
        assert places[parent] < places[child]
    assert repo.positions(["0" * 40]) == {}


def test_a_commit_that_was_rebased_away_is_found_as_long_as_git_keeps_it(repository):
    folder, shas = repository
    git(folder, "reset", "--quiet", "--hard", shas[1])
    repo = Repository.around(folder)
    assert repo.describe(shas[3]).subject == "Number 4"
    assert repo.positions([shas[3]]).keys() == {shas[3]}
    with pytest.raises(RepositoryError, match="is newer than main; swap them"):
        repo.between(shas[3], "main")
    git(folder, "reflog", "expire", "--expire=now", "--all")
    git(folder, "gc", "--quiet", "--prune=now")
    assert repo.positions(shas).keys() == set(shas[:2])
    with pytest.raises(RepositoryError):
        repo.describe(shas[3])


def test_a_shallow_clone_knows_the_parent_and_says_what_it_lacks(repository, tmp_path):
    folder, shas = repository
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--depth=2", f"file://{folder}", str(clone))
    repo = Repository.around(clone)
    assert repo.is_shallow()
    assert repo.state().parent == shas[2]
    assert repo.describe(shas[2]).parent == shas[1]  # itself not there
    for ask in (lambda: repo.resolve(shas[0]), lambda: repo.between(shas[0], "HEAD")):
        with pytest.raises(RepositoryError, match="git fetch --unshallow"):
            ask()


def test_the_base_is_the_parent_on_main_and_elsewhere_where_the_branch_left_it(repository):
    folder, shas = repository
    repo = Repository.around(folder)
    assert repo.default_base() == shas[2]
    git(folder, "switch", "--quiet", "--create", "feature", shas[1])
    commits(folder, 2, first=10)
    assert repo.default_base() == shas[1]


def test_an_only_branch_is_the_main_one_and_of_several_none_is_guessed(repository):
    folder, shas = repository
    git(folder, "branch", "--move", "trunk")
    repo = Repository.around(folder)
    assert repo.default_base() == shas[2]
    git(folder, "switch", "--quiet", "--create", "feature", shas[1])
    commits(folder, 2, first=10)
    with pytest.raises(
        RepositoryError, match="none of its 2 branches is known to be the main one; "
    ):
        repo.default_base()


@pytest.mark.parametrize("what", ["feature", "v1"])
def test_a_clone_of_one_branch_or_tag_has_no_base_until_the_main_one_is_fetched(
    repository, tmp_path, what
):
    folder, shas = repository
    git(folder, "switch", "--quiet", "--create", "feature", shas[1])
    commits(folder, 2, first=10)
    git(folder, "tag", "v1")
    git(folder, "switch", "--quiet", "main")
    clone = tmp_path / "clone"
    options = ("--quiet", "--single-branch", "--branch", what, f"file://{folder}")
    git(tmp_path, "-c", "advice.detachedHead=false", "clone", *options, str(clone))
    with pytest.raises(RepositoryError, match="is a clone of one branch or tag") as error:
        Repository.around(clone).default_base()
    words = str(error.value).partition("git fetch ")[2].split()
    git(clone, "fetch", "--quiet", *words)
    assert Repository.around(clone).default_base() == shas[1]


def test_uncommitted_changes_on_main_are_compared_with_its_newest_commit(repository):
    folder, shas = repository
    (folder / "number").write_text("changed\n")
    repo = Repository.around(folder)
    assert repo.default_base() == shas[3]
    assert repo.default_base("HEAD") == shas[2]
    git(folder, "switch", "--quiet", "--create", "feature")
    commits(folder, 1, first=10)
    (folder / "number").write_text("changed\n")
    assert repo.default_base() == shas[3]


def test_the_first_commit_has_no_base(tmp_path):
    folder = make_repository(tmp_path)
    commits(folder, 1)
    with pytest.raises(RepositoryError, match="HEAD is its first commit; name a base with --base"):
        Repository.around(folder).default_base()


def test_a_work_tree_has_the_files_of_its_commit_and_is_gone_afterwards(repository, tmp_path):
    folder, shas = repository
    repo = Repository.around(folder)
    with repo.worktree(shas[1], tmp_path / "trees") as tree:
        assert (tree / "number").read_text() == "2\n"
        assert read_commit(tree).commit == shas[1]
        assert read_commit(tree).branch is None
    assert not (tmp_path / "trees").exists()
    assert git(folder, "worktree", "list").count("\n") == 0
    assert read_commit(folder).branch == "main"


def test_what_a_killed_process_left_of_a_work_tree_is_cleared_away(repository, tmp_path):
    folder, shas = repository
    repo = Repository.around(folder)
    left = repo.worktree(shas[1], tmp_path / "trees")
    tree = left.__enter__()
    (tree / "number").write_text("changed by whoever was killed")
    (tree / "left").write_text("over")
    with repo.worktree(shas[1], tmp_path / "trees") as again:
        assert again == tree
        assert (again / "number").read_text() == "2\n"
        assert not (again / "left").exists()
    assert git(folder, "worktree", "list").count("\n") == 0


def test_other_work_trees_stay_known_though_their_disk_is_away(repository, tmp_path):
    folder, shas = repository
    git(folder, "worktree", "add", "--quiet", "--detach", str(tmp_path / "mine"), shas[2])
    (tmp_path / "mine").rename(tmp_path / "away")
    with Repository.around(folder).worktree(shas[1], tmp_path / "trees"):
        pass
    (tmp_path / "away").rename(tmp_path / "mine")
    assert read_commit(tmp_path / "mine").commit == shas[2]


def test_a_work_tree_that_something_else_has_removed_is_made_again(repository, tmp_path):
    folder, shas = repository
    repo = Repository.around(folder)
    left = repo.worktree(shas[1], tmp_path / "trees")
    shutil.rmtree(left.__enter__())
    with repo.worktree(shas[1], tmp_path / "trees") as tree:
        (tree / ".git").unlink()
    assert git(folder, "worktree", "list").count("\n") == 0


def test_neither_hooks_nor_large_files_have_a_part_in_a_work_tree(repository, tmp_path):
    folder, _ = repository
    hook = folder / ".git" / "hooks" / "post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch '{tmp_path}/ran'\n")
    hook.chmod(0o755)
    told = f"sh -c 'cat; echo $GIT_LFS_SKIP_SMUDGE > {tmp_path}/skips'"
    sha = commit(folder, {".gitattributes": "large filter=lfs\n", "large": "x"}, "Large", day=9)
    git(folder, "config", "filter.lfs.smudge", told)
    with Repository.around(folder).worktree(sha, tmp_path / "trees"):
        pass
    assert not (tmp_path / "ran").exists()
    assert (tmp_path / "skips").read_text() == "1\n"


def test_what_git_sets_for_its_hooks_does_not_mislead(repository, tmp_path):
    folder, _ = repository
    other = make_repository(tmp_path / "other")
    commits(other, 1, first=99)
    hook = folder / ".git" / "hooks" / "post-commit"
    program = f"from ppbench.git import read_commit; print(read_commit({str(other)!r}).subject)"
    hook.write_text(f"#!/bin/sh\n{sys.executable} -c \"{program}\" > '{tmp_path}/said'\n")
    hook.chmod(0o755)
    commit(folder, {"z": "1"}, "With a hook", day=9)
    assert (tmp_path / "said").read_text() == "Number 99\n"


def test_users_settings_change_nothing(repository, tmp_path, monkeypatch):
    folder, shas = repository
    settings = tmp_path / "gitconfig"
    settings.write_text(
        "[log]\nshowSignature = true\n[color]\nui = always\n[core]\npager = false\n"
        "[status]\nshort = true\n[diff]\nexternal = /bin/false\n[format]\npretty = fuller\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    repo = Repository.around(folder)
    assert repo.describe(shas[1]).subject == "Number 2"
    states = []
    for text in ("changed\n", "changed again\n"):
        (folder / "number").write_text(text)
        states.append(repo.state())
    assert all(state.is_dirty and state.subject == "Number 4" for state in states)
    assert states[0].changes != states[1].changes
