"""ppbench in a notebook: DataFrames from a store, narrowed, and figures of them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
import pytest
from stored_runs import rewrite, run_row, store_with

import ppbench
from ppbench import figures
from ppbench.config.case import Case
from ppbench.display.rows import View
from ppbench.errors import UsageError
from ppbench.report.charts.idle import PART_COLUMNS
from ppbench.results import Results
from ppbench.store import Store


@pytest.fixture
def results(demo: Store) -> Results:
    return ppbench.load(demo.folder)


def test_importing_ppbench_imports_nothing_heavy_and_names_what_it_offers() -> None:
    script = (
        "import sys, ppbench; assert {'load', 'figures'} <= set(dir(ppbench));"
        "heavy = {'pandas', 'plotly', 'numpy', 'pyarrow', 'torch', 'typer'} & set(sys.modules);"
        "assert not heavy, heavy;"
        "ppbench.load; assert 'pandas' in sys.modules; assert 'plotly' not in sys.modules;"
        "ppbench.figures.throughput; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        ppbench.lode  # noqa: B018


def test_a_notebook_shows_the_answer_of_a_command(demo: Store, capsys) -> None:
    listed = ppbench.answer("ls", results=demo.folder)
    assert [row["schedule"] for row in listed.rows.viewed(View()).records()] == [
        *demo.runs(["schedule"])["schedule"]
    ]
    assert "<table" in listed._repr_html_()
    again = ppbench.answer("ls", results=str(demo.folder))  # a path as text
    assert again._repr_html_() == listed._repr_html_()
    ids = [*demo.runs(["run_id"])["run_id"]]
    pairs = ppbench.answer("compare", ids, across="schedule", results=demo.folder)
    assert "forest" in pairs.html()
    assert "forest" not in pairs._repr_html_()  # a notebook has no style for it
    with pytest.raises(UsageError, match='unknown command "compar"; did you mean "compare"'):
        ppbench.answer("compar")
    drawn = ppbench.answer("schedules draw", "1f1b", ranks=2, microbatches=3)
    assert "rank 0  F0 F1 .  .  B0" in drawn._repr_html_()
    assert capsys.readouterr().out == ""


def test_the_module_of_figures_offers_figures_only() -> None:
    assert tuple(dir(figures)) == tuple(sorted(figures.FIGURES))
    assert all(callable(getattr(figures, name)) for name in dir(figures))


def test_tables_hold_the_rows_of_the_runs(results: Results) -> None:
    assert len(results) == len(results.runs) == 7
    assert len(results.steps) == 6 * 3
    assert len(results.ranks) == 2 * (1 + 2 + 4)
    assert len(results.spans) == 6 * 3 * 10
    assert results.memory.empty
    one = results.runs["run_id"].iloc[1]
    assert set(results.table("spans", [one])["run_id"]) == {one}
    assert results.steps is results.steps  # read once
    assert repr(results) == f"Results(7 runs in {results.store.folder}; afab, 1f1b)"


def test_runs_are_narrowed_by_their_columns(results: Results) -> None:
    chosen = results.select(schedule="1f1b", ranks=[2, 4], status="ok")
    assert list(chosen.runs["world_size"]) == [2, 4]
    assert set(chosen.steps["run_id"]) == set(chosen.runs["run_id"])
    assert len(results.run("last").runs) == 1
    assert results.run("last").runs["status"].item() == "oom"


def test_last_is_the_newest_run_of_each_case_of_the_last_sweep(tmp_path: Path) -> None:
    rows = [
        run_row(1, Case(), sweep_id="old", resume_key="a"),
        run_row(2, Case(), sweep_id="new", resume_key="a"),
        run_row(3, Case(), sweep_id="new", resume_key="a"),
        run_row(4, replace(Case(), seq_len=64), sweep_id="new", resume_key="b"),
    ]
    last = ppbench.load(store_with(tmp_path / "results", rows).folder).last()
    assert list(last.runs["run_id"]) == [row["run_id"] for row in rows[2:]]


def test_mistakes_say_what_there_is(results: Results, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no runs here yet; start with: ppbench sweep FILE"):
        ppbench.load(tmp_path / "nowhere")
    with pytest.raises(UsageError, match='unknown column "shedule"; did you mean "schedule"'):
        results.select(shedule="1f1b")
    with pytest.raises(UsageError, match='did you mean "ranks"'):
        results.select(rankss=4)
    with pytest.raises(UsageError, match="no run has world_size 3; there are: 1, 2, 4"):
        results.select(world_size=3)
    with pytest.raises(UsageError, match='unknown "span"; did you mean "spans"'):
        results.table("span")
    with pytest.raises(UsageError, match='run "2030": not in'):
        results.run("2030")
    with pytest.raises(UsageError, match='theme: unknown "drak"; did you mean "dark"'):
        figures.throughput(results, theme="drak")


def test_an_unreadable_file_is_warned_of_and_left_out(demo: Store) -> None:
    broken = min((demo.folder / "runs").iterdir())
    broken.write_text("no parquet")
    with pytest.warns(UserWarning, match="damaged, its rows of runs are left out"):
        assert len(ppbench.load(demo.folder)) == 6


def test_runs_are_in_the_order_of_their_names_and_each_once(results: Results) -> None:
    first, second = results.runs["run_id"].iloc[[0, 1]]
    chosen = results.named([second, first, second])
    assert list(chosen.runs["run_id"]) == [second, first]
    assert list(chosen.ranks["run_id"]) == [second] * 2 + [first]
    titles = [a.text[:10] for a in figures.timeline(results, [second, first]).layout.annotations]
    assert titles == ["<b>2 ranks", "<b>1 rank "]


def test_a_name_by_itself_is_one_run_and_no_name_is_none(results: Results) -> None:
    name = results.runs["run_id"].iloc[1]
    assert results.table("spans", name).equals(results.table("spans", [name]))
    assert results.named(name).runs.equals(results.named([name]).runs)
    assert figures.draw("bubble", results, name) == figures.draw("bubble", results, [name])
    for ask in (
        lambda: results.named([]),
        lambda: results.table("spans", []),
        lambda: figures.timeline(results, run=[]),
        lambda: figures.draw("bubble", results, []),
    ):
        with pytest.raises(UsageError, match="runs: none is named; give ids"):
            ask()


def complete(folder: Path) -> Results:
    """Two runs with what newer versions store as well."""
    parts = dict.fromkeys([*PART_COLUMNS.values(), "bubble_mean"], 0.05)
    rows = [
        run_row(n, Case(schedule=name), resume_key=name, **parts)
        for n, name in enumerate(("afab", "1f1b"))
    ]
    store = store_with(folder, rows)
    levels = pd.DataFrame({"rank": [0, 0], "time_ns": [0, 7], "num_bytes": [10, 20]})
    rewrite(store, pd.Series(rows[1]), {"memory": levels})
    return ppbench.load(folder)


def test_figures_of_what_newer_versions_store(tmp_path: Path) -> None:
    results = complete(tmp_path / "results").last()
    assert {trace.name for trace in figures.idle(results).data} >= {"jitter", "launch gaps"}
    (line,) = figures.levels_of_memory(results).data
    assert (line.name, len(line.x)) == ("rank 0", 2)


def test_every_figure_is_drawn_and_has_legible_text_on_white_and_on_dark(results: Results) -> None:
    skipped = {"idle", "levels_of_memory", "stragglers"}  # these runs have no data for them
    drawings = [(name, "dark") for name in set(figures.FIGURES) - skipped]
    colors = {"light": ("#ffffff", "#1a1c1f"), "dark": ("#15171a", "#e6e8ea")}
    for name, theme in [*drawings, ("throughput", "light")]:
        drawn = figures.draw(name, results, theme=theme)
        assert isinstance(drawn, go.Figure)
        assert len(drawn.data) > 0, name
        paper, ink = colors[theme]
        layout = drawn.layout.template.layout
        assert (layout.paper_bgcolor, layout.plot_bgcolor) == (paper, paper), name
        assert layout.font.color == ink


def test_a_figure_of_what_was_not_measured_says_so(results: Results, tmp_path: Path) -> None:
    """What commands say too is recorded, in `recorded/errors/store.txt`."""
    with pytest.raises(UsageError, match="none of the 7 runs has its idle time by cause"):
        figures.idle(results)
    shutil.rmtree(results.store.folder / "steps")
    with pytest.raises(UsageError, match="none of the 7 runs has step times"):
        figures.steps(results)


def test_a_timeline_shows_the_median_step_of_the_named_run(results: Results) -> None:
    name = results.runs["run_id"].iloc[1]
    one, same = (figures.timeline(results, run=run) for run in (name, [name]))
    assert one == same
    (title,) = one.layout.annotations
    assert title.text.startswith(
        "<b>afab, 2 ranks, 8 microbatches, 128 tokens · step 2, the median"
    )
    assert "4 ranks" in figures.timeline(results).layout.annotations[0].text  # of the last ok run


def test_timelines_of_several_runs_stand_on_one_axis(results: Results) -> None:
    names = list(results.runs["run_id"].iloc[[0, 1]])
    drawn = figures.timeline(results, names, step="slowest", path=True)
    assert [a.text.split(" · ")[1] for a in drawn.layout.annotations] == ["step 3, the slowest"] * 2
    (path,) = [trace for trace in drawn.data if trace.name == "critical path"]
    assert path.visible is True
    with pytest.raises(UsageError, match="--step and --path: only for the figure timeline"):
        figures.draw("throughput", results, step="slowest", path=True)


def test_the_example_of_the_page_on_notebooks_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "python.md").read_text()
    example = re.search(r"```py\n(.*?)```", page, flags=re.DOTALL)
    assert example is not None
    complete(tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    exec(example[1], {})
    assert "1f1b        1000.0" in capsys.readouterr().out
