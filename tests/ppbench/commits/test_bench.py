"""Sweeps in the work tree of a commit, and measuring both sides of a comparison."""

import os
import select
import sys
from pathlib import Path

import pytest
from measured import FAILS, add_measured, around, now, sweep_in
from repositories import commit, commits, make_repository

from ppbench.commits import worktrees
from ppbench.commits.bench import WORKTREE, read_tracked, rounds_of
from ppbench.commits.worktrees import Checkouts, Start
from ppbench.console import print_notes
from ppbench.errors import LaunchError, StoreError, UsageError
from ppbench.git import Repository
from ppbench.run.machine.measuring_code import code_hash
from ppbench.store import Store

IMPORTS = "import mine; print(mine.NAME); import inner; print(inner.NAME)"


@pytest.fixture
def repository(tmp_path):
    folder = make_repository(tmp_path / "repository")
    return folder, commits(folder, 3)


def ignore(_line):
    pass


def test_a_commit_s_modules_are_imported_and_not_the_callers(repository, monkeypatch, tmp_path):
    folder, _ = repository
    files = {"src/mine.py": "NAME = 'committed'", "lib/deep/inner.py": "NAME = 'committed too'"}
    sha = commit(folder, files, "Modules", day=7)
    for path in ("src/mine.py", "lib/deep/inner.py", "mine.py"):
        (folder / path).write_text("NAME = 'of the caller'")
    monkeypatch.syspath_prepend(str(folder / "lib" / "deep"))  # as an editable install does
    monkeypatch.setenv("PYTHONPATH", str(folder / "src"))
    checkouts = Checkouts(Repository.around(folder), tmp_path / "results", "", ignore)
    tree = checkouts.of(sha)
    ended = checkouts.run([sys.executable, "-c", IMPORTS], tree, tree)
    checkouts.close()
    assert ended.lines == ("committed", "committed too")


def test_the_last_few_work_trees_are_kept_and_set_up_once(repository, tmp_path):
    folder, shas = repository
    told = []
    setup = "test ! -e made && touch made"
    checkouts = Checkouts(Repository.around(folder), tmp_path / "results", setup, told.append)
    trees = [checkouts.of(sha) for sha in (*shas, *shas)]
    assert trees[:3] == trees[3:]
    assert told == [f"setup: {setup}"] * 3
    checkouts.close()
    assert not any(tree.exists() for tree in trees)


def test_a_command_is_ended_when_we_are_stopped():
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    seen = []

    def stop(line):
        seen.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        worktrees.run([Start((sys.executable, "-c", program), Path(), {})], stop)
    with pytest.raises(ProcessLookupError):
        os.kill(seen[0], 0)


def test_what_a_command_has_started_is_ended_with_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    program = "(exec 3> pipe; echo begun >&3; echo started; exec sleep 600) & wait"

    def stop(_line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        worktrees.run([Start(("/bin/sh", "-c", program), tmp_path, dict(os.environ))], stop)
    assert os.read(reader, 99) == b"begun\n"
    poll = select.poll()  # unlike select.select, of descriptors of any number
    poll.register(reader, select.POLLIN)
    assert poll.poll(30_000)  # at its end: nobody writes any more
    assert os.read(reader, 99) == b""
    os.close(reader)


def test_an_account_begins_with_what_tells_most():
    ours = worktrees.Ended(2, ("case 1 of 1", "error: a.toml:3: key: problem", "  a drawing"))
    assert ours.error_text() == "a.toml:3: key: problem\n  a drawing"
    trace = worktrees.Ended(1, ("Traceback (most recent call last):", "KeyError: 'x'", ""))
    assert trace.error_text().splitlines()[:2] == [
        "KeyError: 'x'",
        "Traceback (most recent call last):",
    ]
    assert (
        worktrees.Ended(3, ()).error_text().strip()
        == "it ended with exit code 3, and printed nothing"
    )
    assert "killed by signal 9" in worktrees.Ended(-9, ()).error_text()


def measure_sides(sweep, base, head, launches, results):
    with rounds_of(sweep, base, head, results) as rounds:
        rounds.bring_to(launches)
        return rounds.names


def test_sides_that_were_just_measured_are_named_and_not_measured(repository, capsys):
    folder, shas = repository
    file = sweep_in(folder)
    for sha in shas[1:]:
        add_measured(file, sha, around(1000.0, 2), **now())
    results = folder / "results"
    sweep = read_tracked(file)
    print_notes()
    assert measure_sides(sweep, "HEAD~1", "HEAD", 2, results) == (shas[1], shas[2])
    told = capsys.readouterr().err
    for sha in shas[1:]:
        assert f"{sha[:9]} Number" in told
    assert told.count("takes 2 launches of the last hour, and makes only what is missing") == 2
    assert measure_sides(sweep, None, WORKTREE, 2, results) == (shas[1], shas[2])  # by default
    assert len(Store(results).runs(["run_id"])) == 4


def test_of_launches_that_a_sweep_made_alone_none_counts_for_two_sides(repository):
    folder, shas = repository
    file = sweep_in(folder)
    for sha in shas[1:]:
        add_measured(file, sha, around(1000.0, 2), **now())
        add_measured(file, sha, [900.0], launch=2, process_start=f"alone {sha}", **now())
    with rounds_of(read_tracked(file), *shas[1:], folder / "results") as sides:
        assert [own.figures(0, "tokens_per_s") for own in sides.launches()] == [(1000, 1002)] * 2


@pytest.mark.parametrize(
    ("old", "number"),
    [
        ({"created_at": "2026-01-01T00:00:00+00:00", "code": code_hash()}, 2),
        ({"code": "another"}, 0),  # which a sweep does not skip
    ],
)
def test_older_launches_and_those_of_other_code_do_not_count(repository, old, number, capsys):
    folder, shas = repository
    file, results = sweep_in(folder, FAILS), folder / "results"
    add_measured(file, shas[1], around(1000.0, 2), **{**now(), **old})
    print_notes()
    with pytest.raises(LaunchError, match="Number 2: does not run"):
        measure_sides(read_tracked(file), "HEAD~1", "HEAD", 2, results)
    assert "of the last hour" not in capsys.readouterr().err
    newest = Store(results).runs(["run_id", "launch", "status"]).iloc[-1]
    assert (newest["launch"], newest["status"]) == (number, "error")


def test_a_dirty_tree_is_a_side_of_its_own_and_measured_in_place(repository, capsys):
    folder, shas = repository
    file, results = sweep_in(folder), folder / "results"
    (folder / "number").write_text("changed\n")
    changes = Repository.around(folder).state().changes
    add_measured(file, shas[2], [1000.0], **now())
    add_measured(file, shas[2], [900.0], changes=changes, is_dirty=True, **now())
    print_notes()
    sides = measure_sides(read_tracked(file), "HEAD", "HEAD", 1, results)
    assert sides == (shas[2], WORKTREE)
    assert "has uncommitted changes; measured as it is, in place" in capsys.readouterr().err


def test_a_commit_is_not_compared_with_itself(repository):
    folder, _ = repository
    with pytest.raises(UsageError, match="is both sides, with no uncommitted changes"):
        measure_sides(read_tracked(sweep_in(folder)), "main", "HEAD", 2, folder / "results")


def test_a_side_that_does_not_run_is_told_of_before_the_other_is_measured_again(repository):
    folder, shas = repository
    file = sweep_in(folder, FAILS)
    with pytest.raises(LaunchError, match=r"Number 2: does not run: error: \[track\] setup"):
        measure_sides(read_tracked(file), "HEAD~1", "HEAD", 5, folder / "results")
    assert list(Store(folder / "results").runs(["commit"])["commit"]) == [shas[1]]


def test_a_store_that_cannot_be_locked_is_named(repository, tmp_path):
    folder, _ = repository
    (tmp_path / "locks").write_text("no folder")
    with pytest.raises(StoreError, match="cannot be written"):
        Checkouts(Repository.around(folder), tmp_path, "", ignore)
