"""The page of a history: its charts, the details of a commit, its embedded timelines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import plotly.graph_objects as go
import pytest
from histories import CASE, OTHER, CommitFacts, Runs, five
from stored_runs import NASTY, traces

from ppbench.commits.series import history
from ppbench.display.commands import from_anywhere
from ppbench.display.metrics import METRICS
from ppbench.judge.evidence import Metric
from ppbench.judge.slowdowns import NOT_KNOWN, Slowdown
from ppbench.report.charts.history import history_chart
from ppbench.report.pages import history as page_of
from ppbench.report.pages.history import HistoryPage, changes_of, changes_table, render_history
from ppbench.statistics.series import Launch, Point, Series

TOKENS = METRICS["tokens_per_s"]
BAD = 4


def sha(number: int) -> str:
    return f"{number:x}" * 40


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Two cases over seven commits, of which the fifth makes one case slower; one did not run."""
    made = Runs(tmp_path_factory.mktemp("page") / "results")
    for number in range(7):
        told = CommitFacts(sha(number), number, NASTY if number == BAD else f"change {number}")
        level = 1000.0 if number < BAD else 900.0
        made.add_launches(told, CASE, [None] if number == 2 else five(level, number)[:3])
    made.add_launches(CommitFacts(sha(6), 6), OTHER, five(2000.0, 0)[:2])
    return made


@pytest.fixture(scope="module")
def page(runs: Runs) -> Iterator[HistoryPage]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(runs.store.folder)  # in no repository
        found = history(results=runs.store.folder)
        yield HistoryPage(TOKENS, found.series, found.notes, found.line, "ppbench history")


@pytest.fixture(scope="module")
def html(runs: Runs, page: HistoryPage) -> str:
    return render_history(runs.store, page)


def details(html: str) -> dict[str, str]:
    """The rows that open below changes and commits, by their names."""
    rows = re.findall(r'class="detail" id="(series-[^"]+)" hidden>(.*?)</tr>', html, re.DOTALL)
    return dict(rows)


def facts(detail: str) -> dict[str, str]:
    return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", detail))


def commands(detail: str) -> dict[str, str]:
    return dict(re.findall(r"<p>([^<]*):</p>\n<div class=\"copyable\"><pre>(.*?)</pre>", detail))


def embedded(html: str) -> list[str]:
    return re.findall(r'x-ppbench-timeline" id="([^"]+)"', html)


def test_commands_name_the_results_that_are_elsewhere(runs: Runs, page: HistoryPage) -> None:
    html = render_history(runs.store, replace(page, options="--results there"))
    [change] = [text for name, text in details(html).items() if name.endswith("change-0")]
    assert facts(change)["commit"] == sha(BAD)
    told = commands(change)
    assert told["compare"].endswith(f"{sha(BAD)[:12]} --results there")
    assert told["both timelines"].endswith("--results there")


def test_a_commit_tells_its_figure_and_the_difference_to_the_one_before_that_ran(
    html: str,
) -> None:
    [name] = [name.partition("-change")[0] for name in details(html) if "-change" in name]
    told = facts(details(html)[f"{name}-3"])
    assert told["author date"] == "2026-01-04 00:00"
    assert told["difference"].endswith(f"% on {sha(1)[:9]}")
    assert told["tokens per s"].endswith("tokens/s, median of 3")
    second = details(html)[f"{name}-2"]
    assert "<p>1 launch did not run: error.</p>" in second
    why = from_anywhere("ppbench show 2026").replace("&", "&amp;")
    assert commands(second)["why it did not run"].startswith(why)


def test_timelines_are_of_changes_and_newest_commits_each_once(html: str) -> None:
    assert embedded(html) == ["pair-1", "pair-2", "pair-3"]
    drawn = ["data-timeline=" in text for text in details(html).values()]
    assert sum(drawn) == 4  # the change, and its commit too


def test_timelines_that_have_no_room_are_left_out_and_said(
    runs: Runs, page: HistoryPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_of, "MOST_PAIRS", 1)
    html = render_history(runs.store, page)
    assert embedded(html) == ["pair-1"]
    assert "2 more pairs of timelines are left out to limit the size of this page" in html
    monkeypatch.setattr(page_of, "MOST_BYTES", 10)
    assert embedded(render_history(runs.store, page)) == []


def test_runs_without_spans_have_panels_without_timelines(tmp_path: Path) -> None:
    made = Runs(tmp_path / "results")
    for number in range(2):
        made.add(CommitFacts(sha(number), number), CASE, 1000.0)
    told = history(results=made.store.folder).series
    html = render_history(made.store, HistoryPage(TOKENS, told, (), "", "ppbench history"))
    newest = details(html)["series-1-1"]
    assert "data-timeline=" not in newest
    assert "both timelines" in commands(newest)


def test_what_a_commit_says_is_text_and_the_page_is_the_same_each_time(
    runs: Runs, page: HistoryPage, html: str
) -> None:
    assert "<script>alert" not in html
    assert "<b>bold</b>" not in html
    assert html == render_history(runs.store, page)


def test_the_page_says_what_changed_and_lists_every_series(html: str) -> None:
    assert "1 of 2 series changed. The newest change: -" in html
    assert html.count('<tr data-cases="series-') == 2
    assert ">changed</td>" in html
    assert ">one commit</td>" in html


def series(
    levels: Sequence[Sequence[float]], gaps: dict[int, int], metric: Metric = TOKENS
) -> Series:
    points = tuple(
        Point(
            sha(number),
            launches=tuple(Launch("r", "ok", value) for value in values) or (Launch("r", "oom"),),
            num_before=gaps.get(number, 0),
        )
        for number, values in enumerate(levels)
    )
    return Series(metric, "c", "case", "f", points)


def figure_of(told: Series) -> go.Figure:
    (panel,) = history_chart(told).panels
    return go.Figure(panel["data"], panel["layout"])


def drawn(metric: Metric = TOKENS) -> dict:
    levels = [five(1000.0 if n < 5 else 1100.0, n) for n in range(10)]
    levels[2] = []
    figure = figure_of(series(levels, {5: 3}, metric))
    return {"figure": figure, **traces(figure)}


def test_the_chart_has_launches_medians_levels_and_what_did_not_run() -> None:
    chart = drawn()
    assert len(chart["launch"].x) == 9 * 5
    assert list(chart["median"].customdata) == [0, 1, 3, 4, 5, 6, 7, 8, 9]
    assert [x for x in chart["level"].x if x is not None] == [-0.4, 4.4, 4.6, 9.4]
    assert (list(chart["did not run"].x), chart["did not run"].yaxis) == ([2], "y2")
    assert (list(chart["not measured"].x), list(chart["not measured"].text)) == ([4.5], ["3"])


def test_a_change_is_marked_with_its_size_and_the_commits_that_may_have_made_it() -> None:
    chart = drawn()
    [size] = chart["change"].text
    assert re.fullmatch(r"<b>\+(9\.9|10\.\d) %</b>", size)
    assert list(chart["change"].marker.symbol) == ["triangle-up"]
    [shade] = chart["figure"].layout.shapes
    assert (shade.x0, shade.x1) == (4.5, 5.5)


def test_changes_are_listed_in_the_order_of_the_commits_and_keep_the_numbers_of_the_chart() -> None:
    levels = [five(1000.0 if n < 12 else 1200.0, n) for n in range(20)]
    levels[5] = five(700.0, 5)
    told = series(levels, {})
    numbered = changes_of(told)
    assert [step.first for _, step in numbered] == [5, 12]
    drawn_at = traces(figure_of(told))["change"]
    marks = dict(zip(drawn_at.customdata, drawn_at.x, strict=True))
    assert {f"change {number}": step.first for number, step in numbered} == marks
    first, *_ = changes_table([told]).rows.cells
    assert "spike" in str(first)


def test_a_ring_is_around_a_launch_that_does_not_count_and_says_why() -> None:
    levels = [1000.0 + number % 3 for number in range(12)]
    levels[6], slowed = 700.0, {8: Slowdown(0.2)}
    points = tuple(
        Point(sha(n), launches=(Launch(f"r{n}", "ok", level, slowed.get(n, NOT_KNOWN)),))
        for n, level in enumerate(levels)
    )
    chart = traces(figure_of(Series(TOKENS, "c", "case", "f", points)))
    ring = chart["discounted"]
    assert (list(ring.customdata), list(ring.y)) == ([6, 8], [levels[6], levels[8]])
    assert "r6 counts for no level and no change: it lies far from the others" in ring.hovertext[0]
    assert "its reference ran 20 % slower than usual" in ring.hovertext[1]
    assert ["1 launch discounted" in text for text in chart["median"].hovertext] == [
        n in (6, 8) for n in range(12)
    ]


def test_the_same_change_is_worse_where_less_is_better() -> None:
    better, worse = (drawn(METRICS[name])["change"] for name in ("tokens_per_s", "step_ns"))
    assert list(better.marker.color) != list(worse.marker.color)
    assert list(better.marker.symbol) == list(worse.marker.symbol)
