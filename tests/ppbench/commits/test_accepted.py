from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from repositories import commits, make_repository
from tracked import CASE, SWEEP

from ppbench.commits.gate import entry_text, in_force
from ppbench.config.case import Measure
from ppbench.config.conditions import conditions_of, parse_only
from ppbench.config.reader import read_sweep
from ppbench.config.sweep import Accepted
from ppbench.git import Repository

PLANNED = (CASE, Measure())
ENTRY = '[[track.accept]]\nreason = "x"\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "repository")


def entries(folder: Path, text: str) -> tuple[Accepted, ...]:
    file = folder / "demo.toml"
    file.write_text(SWEEP + text)
    return read_sweep(file, [], "cpu").track.accept


def test_an_entry_names_a_commit_a_reason_and_perhaps_cases_a_metric_and_a_size(tmp_path):
    found = entries(
        tmp_path,
        f'{ENTRY}commit = "3f2a"\n\n{ENTRY}commit = "HEAD"\nmetric = "tokens_per_s"\n'
        'cases = "schedule=1f1b and world_size=2"\nup_to = "10%"\n',
    )
    only = parse_only(["schedule=1f1b", "world_size=2"], "cpu")
    assert found == (
        Accepted("3f2a", "x"),
        Accepted("HEAD", "x", "schedule=1f1b and world_size=2", "tokens_per_s", 0.1, only),
    )


def test_an_entry_holds_while_its_commit_lies_between_base_and_head(root):
    first, second, third = commits(root, 3)
    repository, entry = Repository.around(root), Accepted(second, "x")

    def found(base, head, *, of=entry):
        return in_force([of], repository, base, head)

    (note,) = found(first, third, of=Accepted("beefbeef", "x"))[1]
    assert 'an entry is not in force: "beefbeef": no such revision i' in note
    assert found(first, third, of=Accepted("HEAD~1", "x")) == ([entry], [])
    assert found(first, second) == ([entry], [])
    for base, head in ((second, third), (first, first), (None, third)):
        assert found(base, head) == ([], [])


def test_an_entry_covers_its_metric_its_cases_and_its_size_alone():
    any_case, some = Accepted("c", "x"), parse_only(["schedule=1f1b"], "cpu")
    assert any_case.covers("tokens_per_s", 0.9, None)
    entry = Accepted("c", "x", metric="tokens_per_s", up_to=0.1, only=some)
    assert entry.covers("tokens_per_s", 0.1, PLANNED)
    assert not entry.covers("tokens_per_s", 0.11, PLANNED)
    assert not entry.covers("bubble_fraction", 0.1, PLANNED)
    assert not entry.covers("tokens_per_s", 0.1, (replace(CASE, schedule="afab"), Measure()))
    assert not entry.covers("tokens_per_s", 0.1, None)


def test_what_is_printed_to_be_pasted_can_be_read_back(tmp_path):
    conditions = conditions_of((replace(CASE, world_size=4), Measure()), ("schedule", "world_size"))
    (found,) = entries(tmp_path, entry_text("3f2a", conditions, "tokens_per_s", 0.09))
    only = parse_only(["schedule=1f1b", "world_size=4"], "cpu")
    assert set(found.only.each) == set(only.each)
    assert (found.commit, found.metric, found.up_to) == ("3f2a", "tokens_per_s", 0.09)
    text = entry_text("3f2a", [], "peak_memory_bytes", 1.6)  # it may grow to several times
    assert entries(tmp_path, text)[0].up_to == 1.6
