"""Series, and `ppbench history`: its tables, its exit codes, its JSON and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from command import Printed, printed
from histories import CASE, OTHER, CommitFacts, Runs, five, repository

from ppbench.commits.series import history
from ppbench.display.formats import Format
from ppbench.display.metrics import METRICS
from ppbench.judge.evidence import Metric
from ppbench.statistics.series import Launch, Point, Series, State

pytestmark = pytest.mark.usefixtures("warm_starts")

TOKENS, BUBBLE = METRICS["tokens_per_s"], METRICS["bubble_fraction"]
NUM_COMMITS, BAD = 14, 8


def series(
    levels: Sequence[Sequence[float]], gaps: dict[int, int] | None = None, metric: Metric = TOKENS
) -> Series:
    """Commits 0, 1, 2, ... with these launches; `gaps` are the commits not measured before one."""
    points = tuple(
        Point(
            f"{number:x}" * 40,
            launches=tuple(Launch(f"{number}-{n}", "ok", value) for n, value in enumerate(values)),
            num_before=(gaps or {}).get(number, 0),
        )
        for number, values in enumerate(levels)
    )
    return Series(metric, "c", "a case", "f", points)


def falling(first_bad: int, num: int = 12) -> list[list[float]]:
    return [five(1000.0 if n < first_bad else 920.0, n) for n in range(num)]


def test_a_step_is_found_where_it_is_and_has_its_size() -> None:
    told = series(falling(7))
    [step] = told.changes.steps
    assert (step.good, step.first, step.last) == (6, 7, 7)
    assert (step.num_commits, told.num_unmeasured_of(step)) == (1, 0)
    assert step.size.low < -0.08 < step.size.high
    assert told.is_better(step) is False
    assert [(level.first, level.last) for level in told.changes.levels] == [(0, 6), (7, 11)]
    assert told.current is not None
    assert told.current.estimate == pytest.approx(920, rel=0.002)
    assert told.state is State.changed


def test_commits_that_were_not_measured_are_among_those_that_may_have_made_a_change() -> None:
    levels = falling(7)
    levels[5] = []  # tried, did not run
    told = series(levels, gaps={3: 2, 7: 4})
    [step] = told.changes.steps
    assert (step.good, step.first, step.last) == (6, 7, 7)
    assert (step.num_commits, told.num_unmeasured_of(step)) == (5, 4)
    assert [(level.first, level.last) for level in told.changes.levels] == [(0, 6), (7, 11)]


def test_a_lower_bubble_is_better_and_its_change_is_in_points() -> None:
    levels = [[value / 4000 for value in values] for values in falling(7)]
    told = series(levels, metric=BUBBLE)
    [step] = told.changes.steps
    assert told.is_better(step) is True
    assert step.size.estimate == pytest.approx(-0.02, rel=0.1)


def test_a_state_says_how_much_a_series_can_tell() -> None:
    states = {
        State.steady: [five(1000.0, n) for n in range(6)],
        State.unclear: [[1000.0, 1080.0], [1060.0, 1010.0]],
        State.alone: [five(1000.0, 0)],
        State.few: [[1000.0], [1001.0]],
        State.failed: [[], []],
    }
    for state, levels in states.items():
        assert series(levels).state is state


def test_the_launch_that_stands_for_a_commit_is_a_middle_one() -> None:
    point = series([[5.0, 1.0, 4.0, 2.0]]).points[0]
    assert point.middle == Launch("0-3", "ok", 2.0)
    assert point.value == 3.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository in which the ninth of 14 commits makes a case 8 % slower, and its results."""
    place = tmp_path_factory.mktemp("history")
    shas = repository(place, [f"change {n}" for n in range(NUM_COMMITS)])
    runs = Runs(place / "results")
    for number, sha in enumerate(shas):
        told = CommitFacts(sha, number, f"change {number}")
        if number not in (4, BAD - 1):
            level = 1000.0 if number < BAD else 920.0
            runs.add_launches(told, CASE, [None] if number == 2 else five(level, number)[:3])
        if number % 4 == 1:
            runs.add_launches(told, OTHER, five(2000.0, number)[:3])
    return place


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def told_by(how: Format = Format.table, *options: str) -> Printed:
    return printed("history", "--no-page", "--format", how.value, *options)


def test_a_history_is_data_for_a_notebook(here: Path) -> None:
    found = history(where=[f"num_microbatches={CASE.num_microbatches}"])
    rows = csv.DictReader(io.StringIO(told_by(Format.csv).text))
    assert list(found.frame) == rows.fieldnames
    of_kinds = found.frame.groupby("kind").size().to_dict()
    assert of_kinds == {"change": 1, "launch": 11 * 3 + 1, "level": 2}
    assert repr(found) == "<History of tokens_per_s: changed>"
    assert found.series[0].changes.steps[0].num_commits == 2


def test_one_commit_alone_is_no_error(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "results")
    runs.add_launches(CommitFacts("a" * 40, 0), CASE, five(1000.0, 0))
    outcome = printed("history", "--no-page", "--results", tmp_path / "results")
    assert outcome.exit_code == 0
    assert "one commit" in outcome.text


def test_where_nothing_ran_it_exits_with_3_and_says_how_to_see_why(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "results")
    runs.add(CommitFacts("a" * 40, 0), CASE, None)
    outcome = printed("history", "--no-page", "--results", tmp_path / "results")
    assert outcome.exit_code == 3
    assert "1 run failed: ppbench ls, ppbench show RUN" in outcome.notes[-1]


def test_a_commit_that_was_reverted_is_listed_as_a_spike(tmp_path: Path) -> None:
    levels = [1400.0] * 3 + [1080.0] + [1400.0] * 4 + [1171.0] * 4
    runs = Runs(tmp_path / "results")
    for number, level in enumerate(levels):
        sha = f"{number:x}" * 40
        runs.add_launches(CommitFacts(sha, number), CASE, five(level, number)[:3])
    outcome = printed("history", "--no-page", "--results", tmp_path / "results")
    assert "spike -22.9 %, worse" in outcome.text
    [told] = history(results=tmp_path / "results").series
    [step], [spike] = told.changes.steps, told.changes.spikes
    assert step.first == 8
    assert step.size.low < 1171 / 1400 - 1 < step.size.high
    assert (spike.good, spike.first, spike.last, told.is_better(spike)) == (2, 3, 3, False)
