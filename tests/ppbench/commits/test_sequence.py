"""Commits measured until the verdicts are reached; launches are stored ones, and no rank starts."""

import json

import pytest
from command import printed
from measured import FAILS, SWEEP, TWO_CASES, add_measured, now, sweep_in
from repositories import commits, make_repository

from ppbench.commits import bench
from ppbench.commits.bench import read_tracked, rounds_of
from ppbench.commits.check import check
from ppbench.commits.comparison import compare
from ppbench.errors import ExitCode, SweepInterruptedError, UsageError
from ppbench.judge.verdicts import Verdict
from ppbench.store import Store

QUIET = (1.0, 1.002, 0.999, 1.001, 0.998)
LOUD = (1.0, 1.09, 0.93, 1.05, 0.9)


@pytest.fixture
def repository(tmp_path):
    folder = make_repository(tmp_path / "repository")
    return folder, commits(folder, 2)


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """A repository whose head is clearly slower, and its sweep file; nothing is left to launch."""
    folder = make_repository(tmp_path_factory.mktemp("changed") / "repository")
    made = folder, commits(folder, 2)
    return made, stored(made, around(1000), around(930))


@pytest.fixture(scope="module")
def scattered(tmp_path_factory):
    """A repository whose launches scatter so much that nothing is decided."""
    folder = make_repository(tmp_path_factory.mktemp("scattered") / "repository")
    made = folder, commits(folder, 2)
    return made, stored(made, around(1000, LOUD), around(985, LOUD[::-1]))


def stored(repository, base, head, text=SWEEP, place=0):
    """The sweep file, with fresh launches of both commits in turn."""
    folder, shas = repository
    file = sweep_in(folder, text)
    for sha, speeds in zip(shas, (base, head), strict=True):
        add_measured(file, sha, speeds, place, **now())
    return file


def around(middle, shares=QUIET, num=5):
    return [middle * share for share in shares[:num]]


class Said:
    """A progress that keeps what is said."""

    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)

    def begin(self, what, num_left=None): ...
    def end(self, outcome): ...
    def note(self, line): ...


def options(repository, file, most=12):
    folder, shas = repository
    said = Said()
    named = {"results": folder / "results", "max_launches": most, "progress": said}
    return said, {"base": shas[0], "head": shas[1], "sweep": file, **named}


def test_a_clear_change_takes_the_first_launches_alone(changed):
    said, named = options(*changed)
    comparison = compare(**named)
    (line,) = [line for line in comparison.lines if line.metric.name == "tokens_per_s"]
    assert line.change.verdict is Verdict.slower
    assert (line.change.num_base, line.change.num_head) == (3, 3)
    assert comparison.stopped.is_decided
    assert not comparison.is_open
    assert said.lines[-1].startswith("stopped: decided after 3 launches of each side (1 look; ")
    assert said.lines[-2] == "after 3 launches of each side: 1 of 1 verdict decided"
    del named["max_launches"]
    fixed = compare(**named, launches=5)  # one look by the usual rule
    assert fixed.stopped is None
    assert "num_looks" not in fixed.frame


def test_without_an_answer_it_ends_with_the_most_launches(scattered):
    said, named = options(*scattered, most=5)
    comparison = compare(**named)
    assert not comparison.stopped.is_decided
    assert comparison.stopped.looks.counts == (3, 5)  # a start makes two launches
    assert said.lines[-1].startswith("stopped: --max-launches 5 reached, and not decided (2 looks;")


def test_a_regression_ends_with_exit_code_1_and_an_equal_head_with_0(repository):
    folder, shas = repository
    file = stored(repository, around(1000), around(930))
    _, named = options(repository, file)
    result = check(**named)
    assert (result.exit_code, result.comparison.stopped.looks.last) == (ExitCode.regression, 3)
    add_measured(file, shas[1], around(1000), tokens_per_s=1000.0, **now())
    again = check(**{**named, "results": folder / "results"})
    assert again.exit_code is ExitCode.ok


def test_every_case_must_be_decided(repository):
    file = stored(repository, around(1000), around(930), TWO_CASES)
    stored(repository, around(500, LOUD), around(495, LOUD[::-1]), TWO_CASES, place=1)
    said, named = options(repository, file, most=4)
    comparison = compare(**named)
    assert comparison.is_open
    assert said.lines[-2] == "after 4 launches of each side: 1 of 2 verdicts decided"
    by_case = {line.series.text: line for line in comparison.lines if "tokens" in line.metric.name}
    decided = {text: comparison.values_of(line)["is_decided"] for text, line in by_case.items()}
    assert sorted(decided.values()) == [False, True]


def test_as_data_it_says_how_many_looks_what_they_spent_and_whether_it_is_decided(
    changed, monkeypatch
):
    (folder, shas), file = changed
    monkeypatch.chdir(folder)
    words = ["compare", *shas, file, "--run", "--format"]
    found = json.loads(printed(*words, "json").text)
    assert found["looks"]["launches"] == [3]
    assert (found["looks"]["max_launches"], found["looks"]["is_decided"]) == (12, True)
    assert 0 < found["looks"]["level_spent"] < 0.01
    header, first, *_ = printed(*words, "csv").text.splitlines()
    assert header.endswith("num_looks,level_spent,is_decided")
    assert first.endswith(",True")
    assert "stopped: decided after 3 launches" in printed(*words, "markdown").text


def test_open_answers_end_the_commands_with_3(scattered, monkeypatch):
    (folder, shas), file = scattered
    monkeypatch.chdir(folder)
    more = ["--run", "--max-launches", 4]
    assert printed("compare", *shas, file, *more).exit_code == ExitCode.insufficient
    gate = printed("check", file, "--base", shas[0], "--head", shas[1], *more)
    assert gate.exit_code == ExitCode.insufficient
    assert "not decided: 1 metric open" in gate.text
    assert "exits with 3" in gate.text
    too_many = "it is decided after more than 30 launches of each, if at all: so many show 8 % on"
    assert f"{too_many} this machine, and the resolution is 2 %" in gate.text
    assert "go on with" not in gate.text


def test_an_open_gate_says_the_whole_command_that_would_decide_it(repository, monkeypatch):
    folder, shas = repository
    mild = (1.0, 1.02, 0.985, 1.01, 0.98)
    file = stored(repository, around(1000, mild), around(985, mild[::-1]))
    monkeypatch.chdir(folder)
    words = "--base", shas[0], "--head", shas[1], "--threshold", "3%", "--run", "--budget", "1h"
    gate = printed("check", file, *words, "--max-launches", 4)
    (line,) = (line for line in gate.text.splitlines() if line.startswith("go on with: "))
    again = line.removeprefix("go on with: ").split()
    assert again[:3] == ["ppbench", "check", file.name]
    for option in ("--threshold 3%", "--run", "--budget 1h", "--base", "--head"):
        assert option in line
    assert again.count("--max-launches") == 1
    assert int(again[again.index("--max-launches") + 1]) > 4


def test_an_open_gate_names_one_command_and_the_caution_that_forbids_its_verdict(
    repository, monkeypatch
):
    folder, shas = repository
    file = sweep_in(folder)
    for sha in shas:
        add_measured(file, sha, around(1000), cautions="behind_plan", **now())
    monkeypatch.chdir(folder)
    gate = printed(
        *("check", file.name, "--base", shas[0], "--head", shas[1]),
        *("--run", "--max-launches", 4, "--budget", "1h"),
    )
    assert gate.exit_code == ExitCode.insufficient
    assert gate.text.count(" --run") == 1 + gate.text.count("How to reproduce")
    assert gate.text.count("go on with: ") == 1
    assert "measure more with" not in gate.text
    (note,) = (line for line in gate.text.splitlines() if "forbids a verdict" in line)
    assert note.startswith("note: open: tokens/s of 1f1b")
    assert "forbids a verdict: behind_plan (Raise the emulated times, use fewer ranks" in note
    assert note.endswith("other work on the machine)")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--run", "--launches", 5, "--max-launches", 9], "give one"),
        (["--max-launches", 9], "--max-launches: is a number of launches to make; add --run"),
    ],
)
def test_numbers_that_contradict_are_refused(changed, words, message):
    (folder, shas), file = changed
    with pytest.raises(UsageError, match=message):
        printed("compare", *shas, file, *words, "--results", folder / "results")


def test_an_interruption_says_how_far_it_came(repository, monkeypatch):
    file = stored(repository, around(1000, num=2), around(985, num=2))

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.Bench, "_start", stopped)
    _, named = options(repository, file)
    with pytest.raises(SweepInterruptedError, match="after 0 starts; what is finished is kept"):
        compare(**named)


def test_what_failed_in_an_earlier_command_is_tried_again_and_is_no_failure_of_this_one(repository):
    """Its setup may have been mended since."""
    folder, _ = repository
    stored(repository, [None], around(930))
    _, named = options(repository, sweep_in(folder, FAILS), most=None)
    tried = check(**named, launches=5)
    assert tried.exit_code is ExitCode.insufficient
    (error,) = tried.comparison.base.failed["error"]
    assert error.startswith("[track] setup: ")
    stored(repository, around(930), [])
    assert check(**named, launches=5).exit_code is ExitCode.ok


def test_where_one_side_cannot_be_set_up_the_other_is_not_measured_in_vain(repository):
    """Each start leaves a row of the side that failed; one start may be of several launches."""
    folder, shas = repository
    file = stored(repository, around(1000, num=3), around(930, num=3), FAILS)
    with rounds_of(read_tracked(file), shas[0], shas[1], folder / "results") as rounds:
        assert rounds.bring_to(3) == 0
        assert rounds.bring_to(4) == 1
        assert rounds.bring_to(6) == 2
    rows = Store(folder / "results").runs(["commit", "run_id", "status"]).sort_values("run_id")
    made = rows[rows["status"] != "ok"]
    assert list(made["commit"]) == [shas[0]] * 2  # the fourth launch; the two after it
