"""A run whose loss or gradients are NaN or infinite is marked, and no verdict rests on it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from command import inside, ppbench, printed
from histories import CASE as LATER_CASE
from histories import CommitFacts, Runs, repository
from repositories import commit, commits, git, make_repository
from stored_runs import concluded, run_row, store_with
from tracked import STEADY, SWEEP, add_launches, store_in

from ppbench.config.case import Case
from ppbench.display.cases import NOT_FINITE
from ppbench.report.charts.canvas import Measured
from ppbench.report.charts.pareto import pareto
from ppbench.report.pages.report import render_report
from ppbench.run.records import LOSS, NotFinite, first_of
from ppbench.store import Store

pytestmark = pytest.mark.usefixtures("warm_starts")

AFAB, OTHER = Case(schedule="afab"), Case(schedule="1f1b")
BROKEN = {
    "cautions": "not_finite,few_steps",
    "is_finite": False,
    "not_finite_step": 3,
    "not_finite_rank": 1,
    "not_finite_what": "loss",
}
WHERE = "loss was NaN or infinite, first in step 3 on rank 1"
BREAKING = """\
name = "breaking"
world_size = 2
num_microbatches = 4
seq_len = 16
measure = {warmup_steps = 1, max_warmup_steps = 3, steps = 3}

[grid]
model.preset = ["faulty:sound", "faulty:infinite_weights", "faulty:nan_gradient"]
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sweep over models that break down, and one that does not."""
    folder = tmp_path_factory.mktemp("breaking")
    shutil.copy(Path(__file__).parents[2] / "faulty.py", folder)
    (folder / "sweep.toml").write_text(BREAKING)
    done = ppbench("sweep", "sweep.toml", "--no-report", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder


def row_of(folder: Path, model: str) -> pd.Series:
    runs = Store(folder / "results").every_run()
    ((_, row),) = runs[runs["model_preset"] == f"faulty:{model}"].iterrows()
    return row


@pytest.mark.parametrize(
    ("model", "step", "rank", "what"),
    [("infinite_weights", 0, 1, "loss"), ("nan_gradient", 1, 1, "gradient of 2.weight")],
)
def test_the_first_step_and_rank_are_in_the_row(swept, model, step, rank, what):
    row = row_of(swept, model)
    assert row["status"] == "ok"
    assert "not_finite" in row["cautions"].split(",")
    assert not row["is_finite"]
    first = row["not_finite_step"], row["not_finite_rank"], row["not_finite_what"]
    assert first == (step, rank, what)


def test_a_sound_run_is_finite_and_has_no_caution(swept):
    row = row_of(swept, "sound")
    assert row["is_finite"]
    assert "not_finite" not in row["cautions"]
    assert pd.isna(row["not_finite_step"])


def test_every_command_says_which_runs_broke_down(swept):
    row = row_of(swept, "nan_gradient")
    for arguments in (["ls"], ["show", row["run_id"]], ["explain", row["run_id"]]):
        assert "not_finite" in inside(*arguments, folder=swept), arguments
    shown = inside("show", row["run_id"], "--format", "json", folder=swept)
    assert json.loads(shown)["run"]["not_finite_what"] == "gradient of 2.weight"
    written = inside("report", folder=swept)
    page = Path(swept / written.strip().splitlines()[-1]).read_text()
    assert "a loss or gradient was NaN or infinite" in page
    assert "Decided." not in page


def front_of(runs: pd.DataFrame) -> list[float]:
    """The speeds on the front of memory and throughput, in the order of its line."""
    measured = Measured.of(None, runs, ("schedule",))  # type: ignore[arg-type]  # no table is read
    drawing = pareto(measured)
    assert drawing is not None
    (front,) = [trace for trace in drawing.panels[0]["data"] if trace["name"] == "front"]
    return list(front["y"])


def test_a_broken_case_is_never_the_fastest_nor_on_the_front(tmp_path):
    rows = [
        run_row(1, AFAB, tokens_per_s=9000.0, peak_memory_bytes=2**20, **BROKEN),
        run_row(2, OTHER, tokens_per_s=1000.0, cautions="oversubscribed"),
    ]
    runs = pd.DataFrame(rows)
    conclusions = concluded(runs)
    answer = conclusions.sentence.text
    assert answer.startswith("Nothing to compare. 1f1b reaches 1,000 tokens/s")
    assert any("1 case in which a loss or gradient was NaN" in note for note in conclusions.notes)
    assert "afab" not in answer
    assert front_of(runs) == [1000.0]
    store = store_with(tmp_path, rows)
    page = render_report(store, store.every_run(), title="t", command="c", sweep_text=None)
    assert "not_finite" in page


def test_where_every_case_broke_down_nothing_is_fastest():
    runs = pd.DataFrame([run_row(1, AFAB, **BROKEN), run_row(2, OTHER, **BROKEN)])
    conclusions = concluded(runs)
    (left_out,) = conclusions.notes
    assert left_out.startswith("Left out: 2 cases in which a loss or gradient")
    assert "(afab; 1f1b)" in left_out
    assert conclusions.sentence.text.startswith(
        "Nothing to compare. Every loss or gradient was NaN"
    )
    assert not conclusions.tiles
    assert front_of(runs) == []


def test_one_launch_that_broke_down_spoils_its_case():
    rows = [run_row(1, AFAB, tokens_per_s=9000.0), run_row(2, OTHER)]
    broken = run_row(3, AFAB, launch=1, tokens_per_s=9000.0, **BROKEN)
    assert "1f1b reaches" in concluded(pd.DataFrame([*rows, broken])).sentence.text


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = make_repository(tmp_path / "repository")
    commit(folder, {"demo.toml": SWEEP}, "The sweep")
    commits(folder, 2)
    monkeypatch.chdir(folder)
    return folder


def test_the_gate_fails_where_head_breaks_down_however_fast_it_is(root, tmp_path):
    store = store_in(tmp_path)
    base, head = (git(root, "rev-parse", name) for name in ("HEAD~1", "HEAD"))
    add_launches(store, STEADY, base)
    add_launches(store, [2 * speed for speed in STEADY], head, **BROKEN)
    outcome = printed("check", "--results", store.folder)
    assert outcome.exit_code == 4
    assert f"5 launches failed at head, {NOT_FINITE}: {WHERE}" in outcome.text


def test_history_counts_what_broke_down_as_failed(tmp_path, monkeypatch):
    folder = tmp_path / "repository"
    shas = repository(folder, ["one", "two"])
    monkeypatch.chdir(folder)
    runs = Runs(tmp_path / "results")
    runs.add_launches(CommitFacts(shas[0], 0), LATER_CASE, STEADY)
    runs.add_launches(CommitFacts(shas[1], 1), LATER_CASE, [2 * s for s in STEADY], **BROKEN)
    outcome = printed("history", "--no-page", "--results", tmp_path / "results", "--format", "json")
    rows = json.loads(outcome.text)["rows"]
    launches = [row for row in rows if row["kind"] == "launch" and row["commit"] == shas[1]]
    assert {(one["status"], one["value"]) for one in launches} == {(NOT_FINITE, None)}


def test_the_loss_comes_before_what_follows_from_it():
    late, early = NotFinite(2, 0, "gradient of a"), NotFinite(1, 1, "gradient of b")
    assert first_of([late, None, early]) == early
    assert first_of([NotFinite(1, 0, "gradient of a"), NotFinite(1, 1, LOSS)]).what == LOSS
    assert first_of([None, None]) is None
