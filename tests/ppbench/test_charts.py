"""Charts over cases, from runs made by hand."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from stored_runs import run_row, store_with, traces

from ppbench.config.case import Case
from ppbench.report import charts
from ppbench.report.answer import answer
from ppbench.report.cases import varying_axes
from ppbench.store import Store


def bars_of(figure, name: str) -> list[tuple[float, float]]:
    return [
        (float(x), float(y))
        for trace in figure.data
        if trace.name == name and trace.x[0] is not None
        for x, y in zip(*_along_and_value(trace), strict=True)
    ]


def _along_and_value(trace) -> tuple:
    return (trace.y, trace.x) if trace.orientation == "h" else (trace.x, trace.y)


def test_charts_put_ranks_on_x_and_schedules_side_by_side(demo: Store) -> None:
    runs = demo.runs()
    figure = charts.throughput(runs, ("schedule", "world_size"))
    assert list(figure.layout.xaxis.ticktext) == ["1 rank", "2 ranks", "4 ranks"]
    afab, other = bars_of(figure, "afab"), bars_of(figure, "1f1b")
    assert [y for _, y in afab] == [600.0, 1000.0, 9000.0]
    assert [round(x) for x, _ in other] == [0, 1, 2]
    assert all(a < b for (a, _), (b, _) in zip(afab, other, strict=True))


def test_theory_stands_on_the_bar_it_belongs_to(demo: Store) -> None:
    figure = charts.bubble(demo.runs(), ("schedule", "world_size"))
    measured = bars_of(figure, "afab") + bars_of(figure, "1f1b")
    theory = bars_of(figure, "theory")
    assert sorted(x for x, _ in theory) == sorted(x for x, _ in measured)
    assert {y for _, y in theory} == {1 / 9}


def test_peak_memory_shows_every_rank_on_its_bar(demo: Store) -> None:
    runs = demo.runs()
    ranks = demo.table("ranks", runs["run_id"])
    figure = charts.peak_memory(runs, ranks, ("schedule", "world_size"))
    assert figure.layout.yaxis.title.text == "MiB"
    assert [y for _, y in bars_of(figure, "afab")] == [100.0, 200.0, 100.0]
    assert len(bars_of(figure, "each rank")) == 2 * (1 + 2 + 4)
    assert {y for _, y in bars_of(figure, "each rank")} == {200.0, 199.0, 100.0, 99.0, 98.0, 97.0}


def test_oversubscribed_cases_are_hatched_and_say_why(demo: Store) -> None:
    figure = charts.bubble(demo.runs(), ("schedule", "world_size"))
    (afab,) = [trace for trace in figure.data if trace.name == "afab"]
    assert list(afab.marker.pattern.shape) == ["", "", "/"]
    assert "says nothing about the schedule" in afab.customdata[2][1]
    assert "oversubscribed" in traces(figure)


def test_a_case_shows_the_median_over_its_launches(tmp_path: Path) -> None:
    rows = [
        run_row(n, Case(), launch=n, tokens_per_s=speed)
        for n, speed in enumerate([100.0, 300.0, 900.0])
    ]
    figure = charts.throughput(store_with(tmp_path, rows).runs(), ())
    assert [y for _, y in bars_of(figure, "1f1b")] == [300.0]
    assert "median of 3 launches" in figure.data[0].customdata[0][1]


def test_sixty_cases_become_panels_that_share_one_scale(tmp_path: Path) -> None:
    cases = [
        Case(schedule=s, world_size=p, num_microbatches=m, seq_len=t)
        for s in ("afab", "1f1b")
        for p in (1, 2, 4)
        for m in (4, 8)
        for t in (64, 128, 256, 512, 1024)
    ]
    runs = pd.DataFrame([run_row(n, case) for n, case in enumerate(cases)])
    figure = charts.throughput(runs, varying_axes(runs))
    titles = [annotation.text for annotation in figure.layout.annotations]
    assert len(titles) == 10
    assert titles[0] == "4 microbatches, 64 tokens"
    assert figure.layout.yaxis10.matches == "y"
    arrangements = figure.layout.meta["arrangements"]
    assert set(arrangements) == {"1", "2", "3", "4"}
    assert arrangements["1"]["height"] > arrangements["4"]["height"]


def test_switches_are_axes_with_words_on_them(tmp_path: Path) -> None:
    cases = [Case(train_recompute=on, schedule=s) for on in (False, True) for s in ("afab", "1f1b")]
    runs = store_with(tmp_path, [run_row(n, case) for n, case in enumerate(cases)]).runs()
    figure = charts.throughput(runs, varying_axes(runs))
    assert list(figure.layout.xaxis.ticktext) == ["no recompute", "recompute"]
    assert "no recompute" in answer(runs, varying_axes(runs))[0]
