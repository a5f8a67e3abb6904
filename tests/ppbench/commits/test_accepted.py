from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from repositories import commits, make_repository
from tracked import CASE, SWEEP

from ppbench.commits.gate import Accepted, accept_file, entry_text, in_force, read_accepted
from ppbench.config.case import Measure
from ppbench.config.reader import read_sweep
from ppbench.config.sweep import parse_only
from ppbench.errors import SweepFileError, UsageError
from ppbench.git import Repository

PLANNED = (CASE, Measure())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "repository")


def entries(root: Path, text: str) -> list[Accepted]:
    file = root / "demo.accept.toml"
    file.write_text(text)
    return read_accepted(file, Repository.around(root))


def refusal(root: Path, text: str) -> str:
    with pytest.raises(SweepFileError) as caught:
        entries(root, text)
    return str(caught.value).removeprefix(f"{root}/")


def test_an_entry_names_a_commit_a_reason_and_perhaps_cases_a_metric_and_a_size(root):
    first, second = commits(root, 2)
    found = entries(
        root,
        f'[[accept]]\ncommit = "{first[:8]}"\nreason = "exact"\n\n'
        '[[accept]]\ncommit = "HEAD"\nreason = "more"\nmetric = "tokens_per_s"\n'
        'cases = "schedule=1f1b and world_size=2"\nup_to = "10%"\n',
    )
    only = parse_only(["schedule=1f1b", "world_size=2"])
    assert found == [
        Accepted(first, "exact"),
        Accepted(second, "more", only, "tokens_per_s", 0.1),
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[[accept]]\nreason = "x"\n', "1: accept.commit: is missing; every entry needs a commit"),
        ('[[accept]]\nreason = "x"\ncommit = 3\n', "3: accept.commit: expected a string, got 3"),
        (
            '[[accept]]\nreason = "x"\ncommit = "HEAD"\nupto = "2%"\n',
            '4: accept.upto: unknown key, set to "2%" (a string); did you mean "up_to"?',
        ),
        (
            '[[accept]]\nreason = "x"\ncommit = "HEAD"\ncases = "schedul=1f1b"\n',
            '4: accept.cases: schedul=1f1b: unknown key "schedul"; did you mean "schedule"?',
        ),
        (
            '[[accept]]\nreason = "x"\ncommit = "HEAD"\nmetric = "tokens"\n',
            '4: accept.metric: unknown metric "tokens"; did you mean "tokens_per_s"?',
        ),
        ("\n[accept]\n", "2: accept: expected [[accept]], an array of tables"),
        ("[[acept]]\n", "1: acept: unknown key"),
        ("[[accept]]\nreason = \n", "2: not valid TOML"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_line(root, text, told):
    commits(root, 1)
    assert refusal(root, text).startswith(f"demo.accept.toml:{told}")


def test_an_entry_holds_while_its_commit_lies_between_base_and_head(root):
    first, second, third = commits(root, 3)
    repository, entry = Repository.around(root), Accepted(second, "x")
    (gone,) = entries(root, '[[accept]]\ncommit = "beefbeef"\nreason = "x"\n')
    assert (gone.commit, gone.problem[:30]) == ("beefbeef", '"beefbeef": no such revision i')
    assert in_force([gone], repository, first, third) == []
    assert in_force([entry], repository, first, third) == [entry]
    assert in_force([entry], repository, first, second) == [entry]
    assert in_force([entry], repository, second, third) == []
    assert in_force([entry], repository, first, first) == []


def test_an_entry_covers_its_metric_its_cases_and_its_size_alone():
    any_case, some = Accepted("c", "x"), parse_only(["schedule=1f1b"])
    assert any_case.covers("tokens_per_s", 0.9, None)
    entry = Accepted("c", "x", some, "tokens_per_s", 0.1)
    assert entry.covers("tokens_per_s", 0.1, PLANNED)
    assert not entry.covers("tokens_per_s", 0.11, PLANNED)
    assert not entry.covers("bubble_fraction", 0.1, PLANNED)
    assert not entry.covers("tokens_per_s", 0.1, (replace(CASE, schedule="afab"), Measure()))
    assert not entry.covers("tokens_per_s", 0.1, None)


def test_what_is_printed_to_be_pasted_can_be_read_back(root):
    (sha,) = commits(root, 1)
    text = entry_text(sha[:12], {"schedule": "1f1b", "world_size": 4}, "tokens_per_s", 0.09)
    only = parse_only(["schedule=1f1b", "world_size=4"])
    reason = "why this is intended"
    assert entries(root, text) == [Accepted(sha, reason, only, "tokens_per_s", 0.09)]
    text = entry_text(sha[:12], {}, "peak_memory_bytes", 1.6)  # it may grow to several times
    assert entries(root, text)[0].up_to == 1.6


def test_the_file_is_the_one_named_or_the_one_beside_the_sweep(tmp_path):
    file = tmp_path / "demo.toml"
    file.write_text(SWEEP)
    assert accept_file(read_sweep(file, [], "cpu")) is None
    (tmp_path / "demo.accept.toml").write_text("")
    assert accept_file(read_sweep(file, [], "cpu")) == tmp_path / "demo.accept.toml"
    file.write_text(f'{SWEEP}[track]\naccept = "other.toml"\n')
    with pytest.raises(UsageError, match=r"track\.accept: no such file: .*other\.toml"):
        accept_file(read_sweep(file, [], "cpu"))
    (tmp_path / "other.toml").write_text("")
    assert accept_file(read_sweep(file, [], "cpu")) == tmp_path / "other.toml"
