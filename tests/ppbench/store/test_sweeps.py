"""The last sweep has all its runs, whichever sweep made them and whatever became of its note."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from stored_runs import run_row, store_with

import ppbench
from ppbench.config.case import Case
from ppbench.display.commands import BUDGET, repeated
from ppbench.errors import UsageError
from ppbench.store import Store, write_sweep_note
from ppbench.store.sweeps import SWEEPS, newest_sweep_note

LATER = "20990101T000000000-abcdef"
OTHER = replace(Case(), seq_len=64)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Three launches of one case: the first two made by one sweep, the third by a longer one."""
    rows = [
        run_row(1, Case(), sweep_id="short", resume_key="a", position=0),
        run_row(2, Case(), sweep_id="short", resume_key="b", position=1, launch=1),
        run_row(3, OTHER, sweep_id="other", resume_key="x", position=0),
        run_row(4, Case(), sweep_id="long", resume_key="c", position=2, launch=2),
    ]
    return store_with(tmp_path / "results", rows)


def last(store: Store) -> list[str]:
    """The keys of the last sweep's runs, which a store and its notebook agree on."""
    keys = list(store.last_sweep().runs["resume_key"])
    assert keys == list(ppbench.load(store.folder).last().runs["resume_key"])
    return keys


def test_runs_that_a_sweep_found_done_are_its_runs_too(store):
    assert last(store) == ["c"]
    write_sweep_note(
        store.folder, "long", "20200101T000000000-aa", "abc", "ppbench sweep mine.toml"
    )
    assert last(store) == ["a", "b", "c"]
    assert store.last_sweep().sweep_id == "long"
    assert store.last_sweep().note.command == "ppbench sweep mine.toml"


def test_a_sweep_that_was_called_again_and_had_nothing_to_do_is_the_last(store):
    write_sweep_note(store.folder, "short", LATER, "ab", None)
    assert last(store) == ["a", "b"]
    assert store.last_sweep().sweep_id == "short"


def test_a_sweep_that_has_no_run_yet_is_not_the_last(store):
    write_sweep_note(store.folder, "new", LATER, "yz", None)
    assert last(store) == ["c"]


def test_what_another_sweep_began_and_did_not_end_is_no_run_of_it(store):
    row = run_row(5, OTHER, sweep_id="stopped", resume_key="d", status="interrupted")
    store.write_run(row, {})
    write_sweep_note(store.folder, "long", LATER, "abcd", None)
    assert last(store) == ["a", "b", "c"]


def test_a_sweep_has_one_note_the_newest(store):
    for begun in (LATER, "20990101T000000001-abcdef"):
        write_sweep_note(store.folder, "long", begun, "abc", begun)
    assert newest_sweep_note(store.folder, "long").command == "20990101T000000001-abcdef"
    assert len(list((store.folder / SWEEPS).iterdir())) == 1


def test_a_sweeps_name_or_id_means_its_runs_wherever_runs_are_named(store):
    assert list(store.named(["short"])["resume_key"]) == ["a", "b"]
    assert len(store.named(["short", "long"])) == 3
    with pytest.raises(UsageError, match="is a sweep of 2 runs; name one of them: ppbench ls"):
        store.find("short")
    assert store.find("long")["resume_key"] == "c"


def test_the_command_of_a_sweep_works_where_its_note_is_read(store, tmp_path, monkeypatch):
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path / "a b")
    write_sweep_note(store.folder, "long", LATER, "abc", "ppbench sweep mine.toml")
    assert newest_sweep_note(store.folder).command == "ppbench sweep mine.toml"
    monkeypatch.chdir(tmp_path)
    command = f"cd '{tmp_path}/a b' && ppbench sweep mine.toml"
    assert newest_sweep_note(store.folder).command == command
    assert repeated(command, {BUDGET: "2m"}) == f"{command} --budget 2m"
