"""Bisections of stored launches: none of these tests starts a rank."""

import json
import shutil

import pytest
from command import printed
from measured import FAILS, SWEEP, TWO_CASES, add_line, around, now, sweep_in
from repositories import commits, make_repository
from tracked import in_one_file

from ppbench.commits.bench import Bench
from ppbench.display.formats import Format
from ppbench.errors import LaunchError
from ppbench.store import Store

GOOD, BAD = 1000.0, 930.0
ONLY_GOOD = SWEEP + '\n[track]\nsetup = "grep -qx 1 number"\n'
"""All other commits cannot be set up, so that no rank is started."""


@pytest.fixture(scope="module")
def _repository(tmp_path_factory):
    folder = make_repository(tmp_path_factory.mktemp("made") / "repository")
    return folder, commits(folder, 7)


@pytest.fixture
def repository(_repository, tmp_path):
    """Seven commits; the first bad one is the fifth, by its place 4."""
    made, shas = _repository
    return shutil.copytree(made, tmp_path / "repository"), shas


def measured(repository, figures, text=SWEEP, place=0, **changes):
    """The sweep file, with so many launches of each commit stored, which took turns just now."""
    folder, shas = repository
    file = sweep_in(folder, text)
    add_line(file, dict(zip(shas, figures, strict=True)), place, **{**now(), **changes})
    return file


def levels(*speeds):
    """Four launches of each; None is a commit that does not run."""
    return [[None] if speed is None else around(speed, 4) for speed in speeds]


USUAL = levels(GOOD, GOOD, GOOD, GOOD, BAD, BAD, BAD)


@pytest.fixture
def launching():
    """Launches are made."""


@pytest.fixture(autouse=True)
def _no_launches(monkeypatch, request):
    """Unless a test is `launching`, no launch is made: the budget is spent at once."""

    def ask(bench, targets, policy):
        launches = bench.launches(targets)
        policy(launches)
        return launches

    if "launching" not in request.fixturenames:
        monkeypatch.setattr(Bench, "measure", ask)


def asked(repository, file, how=Format.table, *options):
    _, shas = repository
    words = ["bisect", shas[0], shas[-1], file, *options, "--format", how.value]
    in_one_file(Store(file.parent / "results"))
    return printed(*words, "--results", file.parent / "results")


def test_a_launch_that_does_not_count_is_named_with_the_reason(repository):
    _, shas = repository
    figures = levels(GOOD, GOOD, GOOD, GOOD, BAD, BAD, BAD)
    figures[2][1] = 0.7 * GOOD
    file = measured(repository, figures)
    outcome = asked(repository, file)
    assert f"first bad commit: {shas[4]} " in outcome.text
    assert (
        f"discounted: {shas[2][:9]} Number 3, launch 1: its tokens_per_s is far below the others'"
    ) in outcome.text
    found = json.loads(asked(repository, file, Format.json).text)
    assert [one["launch"] for one in found["discounts"]] == [1]
    assert [row["num_discounted"] for row in found["commits"]] == [0, 0, 1, 0, 0, 0, 0]


def test_commits_that_do_not_run_make_the_answer_a_range(repository):
    _, shas = repository
    file = measured(repository, levels(GOOD, GOOD, GOOD, None, BAD, BAD, BAD))
    outcome = asked(repository, file)
    assert outcome.exit_code == 0
    head, *commits_told = outcome.text[outcome.text.index("first bad commit") :].splitlines()[:3]
    assert head == "first bad commit: one of 2; only the last of them runs"
    assert [line.split()[0] for line in commits_told] == [shas[3], shas[4]]
    assert f"skipped: {shas[3][:9]} Number 4: error: RuntimeError: made by hand" in outcome.text


@pytest.mark.usefixtures("launching")
def test_a_commit_that_ran_once_and_fails_since_does_not_end_the_search(repository):
    folder, shas = repository
    figures = [around(GOOD, 4), [], [], [GOOD], [], [], around(BAD, 4)]
    file = measured(repository, figures, ONLY_GOOD)
    outcome = asked(repository, file)
    assert f"skipped: {shas[3][:9]} Number 4: error: [track] setup: " in outcome.text
    assert "first bad commit: one of " in outcome.text
    rows = Store(folder / "results").runs(["commit"])
    assert list(rows["commit"]).count(shas[3]) == 3  # the one that ran, and two that did not


@pytest.mark.usefixtures("launching")
def test_commits_that_failed_are_tried_again_when_it_is_asked_for(repository):
    folder, shas = repository
    figures = levels(GOOD, GOOD, None, GOOD, BAD, BAD, BAD)
    file = measured(
        repository, [[] if n == 3 else some for n, some in enumerate(figures)], ONLY_GOOD
    )
    asked(repository, file)
    before = list(Store(folder / "results").runs(["commit"])["commit"])
    assert before.count(shas[2]) == 1
    asked(repository, file, Format.table, "--retry-failed")
    after = list(Store(folder / "results").runs(["commit"])["commit"])
    assert after.count(shas[2]) == 2
    assert after.count(shas[3]) == 2


def test_an_end_that_does_not_run_is_told_of(repository):
    file = measured(repository, levels(GOOD, GOOD, GOOD, GOOD, BAD, BAD, None))
    with pytest.raises(LaunchError, match=r"Number 7: does not run, .* RuntimeError: made by hand"):
        asked(repository, file)


@pytest.mark.usefixtures("launching")
def test_an_end_that_cannot_be_set_up_is_told_of_after_one_try(repository):
    folder, _ = repository
    with pytest.raises(LaunchError, match=r"does not run, .* \[track\] setup"):
        asked(repository, sweep_in(folder, FAILS))
    assert len(Store(folder / "results").runs(["run_id"])) == 1


def test_a_change_for_the_better_is_called_one(repository):
    _, shas = repository
    outcome = asked(repository, measured(repository, levels(*[BAD] * 4, *[GOOD] * 3)))
    assert f"first bad commit: {shas[4]} " in outcome.text
    assert "+7.5 %" in outcome.text
    assert "for the better: the bad end is the better one here" in outcome.text


def test_of_several_cases_the_one_that_differs_most_is_searched(repository):
    _, shas = repository
    slight = levels(GOOD, GOOD, 985.0, 985.0, 985.0, 985.0, 985.0)
    file = measured(repository, slight, TWO_CASES)
    measured(repository, USUAL, TWO_CASES, place=1)
    outcome = asked(repository, file)
    assert "case: schedule=afab\n" in outcome.text
    assert f"first bad commit: {shas[4]} " in outcome.text
    chosen = asked(repository, file, Format.table, "--only", "schedule=1f1b")
    assert f"first bad commit: {shas[2]} " in chosen.text


def test_without_launches_enough_it_says_what_is_likeliest_and_how_to_go_on(repository):
    _, shas = repository
    few = [around(GOOD, 4), [], [], [], [], [], around(BAD, 4)]
    outcome = asked(repository, measured(repository, few), Format.table, "--confidence", "99%")
    assert outcome.exit_code == 3
    assert "undecided after 8 launches (0 made now), --budget is spent; likeliest: " in outcome.text
    last = outcome.text.splitlines()[-1]
    assert last.startswith(f"go on with: ppbench bisect {shas[0]} {shas[-1]} ")
    assert "--confidence 99%" in last
    assert json.loads(asked(repository, repository[0] / "sweep.toml", Format.json).text)["go_on"]


def test_two_changes_in_the_range_are_searched_one_by_one(repository):
    _, shas = repository
    file = measured(repository, levels(GOOD, GOOD, 960.0, 960.0, 960.0, BAD, BAD))
    outcome = asked(repository, file)
    assert outcome.exit_code == 3
    commands = [line for line in outcome.text.splitlines() if line.startswith("ppbench bisect ")]
    middle = next(sha for sha in shas[2:5] if sha in commands[0])
    assert commands[0].startswith(f"ppbench bisect {shas[0]} {middle} ")
    assert commands[1].startswith(f"ppbench bisect {middle} {shas[-1]} ")


@pytest.mark.parametrize(
    "changes",
    [
        {"created_at": "2026-01-01T00:00:00+00:00"},
        {"code": "another"},
        {"process_start": None},  # each alone
    ],
)
def test_launches_of_another_day_or_code_or_alone_do_not_count(repository, changes):
    """A machine that is slower today than yesterday would look like a commit."""
    outcome = asked(repository, measured(repository, USUAL, **changes))
    assert outcome.exit_code == 3
    assert "undecided after " in outcome.text
    assert "likeliest: " in outcome.text
    assert "(16.7 %)" in outcome.text  # one of six: nothing is known


def test_a_commit_that_was_measured_while_no_other_was_is_not_compared(repository):
    """A machine that has become slower since the good commit was measured is no bad commit."""
    folder, shas = repository
    file = sweep_in(folder, SWEEP)
    for number, (sha, speeds) in enumerate(zip(shas, USUAL, strict=True)):
        add_line(file, {sha: speeds}, **{**now(), "process_start": f"start {number}"})
    outcome = asked(repository, file)
    assert outcome.exit_code == 3
    assert "first bad commit" not in outcome.text
    assert "(16.7 %)" in outcome.text  # one of six: nothing is known
