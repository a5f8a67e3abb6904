"""Charts over cases, from runs made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import plotly.graph_objects as go
import pytest
from stored_runs import concluded, run_row, traces

from ppbench.config.case import Case
from ppbench.display.cases import varying_axes
from ppbench.display.colors import PART_COLORS
from ppbench.display.explanation import OF_REPLICAS
from ppbench.report.charts.canvas import Measured
from ppbench.report.charts.registry import CHARTS
from ppbench.store import Store


def chart(name: str, runs: pd.DataFrame, axes: tuple[str, ...], **tables: pd.DataFrame):
    """The traces of all panels, titles and the first layout, read by plotly, which checks all."""
    store = SimpleNamespace(table=lambda table, _: tables[table])
    drawing = CHARTS[name].draw(Measured.of(store, runs, axes))
    figures = [go.Figure(panel["data"], panel["layout"]) for panel in drawing.panels]
    data = [trace for figure in figures for trace in figure.data]
    titles = [panel["title"] for panel in drawing.panels]
    first = figures[0].layout
    return SimpleNamespace(data=data, titles=titles, layout=first, drawing=drawing)


def names_of(store: Store, runs: pd.DataFrame, axes: tuple[str, ...]) -> list[str]:
    measured = Measured.of(store, runs, axes)
    return [name for name, one in CHARTS.items() if one.draw(measured) is not None]


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
    figure = chart("throughput", runs, ("schedule", "world_size"))
    assert list(figure.layout.xaxis.ticktext) == ["1 rank", "2 ranks", "4 ranks"]
    afab, other = bars_of(figure, "afab"), bars_of(figure, "1f1b")
    assert [y for _, y in afab] == [600.0, 1000.0, 9000.0]
    assert [round(x) for x, _ in other] == [0, 1, 2]
    assert all(a < b for (a, _), (b, _) in zip(afab, other, strict=True))


def test_theory_stands_on_the_bar_it_belongs_to(demo: Store) -> None:
    figure = chart("bubble", demo.runs(), ("schedule", "world_size"))
    measured = bars_of(figure, "afab") + bars_of(figure, "1f1b")
    theory = bars_of(figure, "theory")
    assert sorted(x for x, _ in theory) == sorted(x for x, _ in measured)
    assert {y for _, y in theory} == {1 / 9}


def test_peak_memory_shows_every_rank_on_its_bar(demo: Store) -> None:
    runs = demo.runs()
    ranks = demo.table("ranks", runs["run_id"])
    figure = chart("memory", runs, ("schedule", "world_size"), ranks=ranks)
    assert figure.layout.yaxis.title.text == "MiB"
    assert [y for _, y in bars_of(figure, "afab")] == [100.0, 200.0, 100.0]
    assert len(bars_of(figure, "each rank")) == 2 * (1 + 2 + 4)
    assert {y for _, y in bars_of(figure, "each rank")} == {200.0, 199.0, 100.0, 99.0, 98.0, 97.0}


def test_oversubscribed_cases_are_hatched_and_say_why(demo: Store) -> None:
    figure = chart("bubble", demo.runs(), ("schedule", "world_size"))
    (afab,) = [trace for trace in figure.data if trace.name == "afab"]
    assert list(afab.marker.pattern.shape) == ["", "", "/"]
    assert "so the schedule cannot be judged" in afab.hovertext[2]
    assert "oversubscribed" in traces(figure)


def test_sixty_cases_become_panels_that_share_one_scale(tmp_path: Path) -> None:
    cases = [
        Case(schedule=s, world_size=p, num_microbatches=m, seq_len=t)
        for s in ("afab", "1f1b")
        for p in (1, 2, 4)
        for m in (4, 8)
        for t in (64, 128, 256, 512, 1024)
    ]
    runs = pd.DataFrame([run_row(n, case) for n, case in enumerate(cases)])
    figure = chart("throughput", runs, varying_axes(runs))
    assert len(figure.titles) == 10
    assert figure.titles[0] == "4 microbatches, 64 tokens"
    assert figure.drawing.shared == ("y",)
    assert figure.layout.height == 220 + 10 + 32


def test_error_bars_go_over_launches_though_those_of_two_sweeps_have_one_number() -> None:
    rows = [
        run_row(n, Case(), sweep_id=f"s{n}", tokens_per_s=speed, tokens_per_s_low=1.0)
        for n, speed in enumerate([100.0, 200.0])
    ]
    runs = pd.DataFrame(rows)
    (bar,) = chart("throughput", runs, ()).data
    assert (list(bar.error_x.array), list(bar.error_x.arrayminus)) == ([50.0], [50.0])
    assert "median of 2 launches<br>launches: 100 to 200" in bar.hovertext[0]
    assert concluded(runs).sentence.text.endswith(" reaches 150 tokens/s.")


def test_error_bars_of_one_launch_are_what_its_steps_tell() -> None:
    interval = {"tokens_per_s_low": 950.0, "tokens_per_s_high": 1020.0}
    runs = pd.DataFrame([run_row(0, Case(), **interval)])
    (bar,) = chart("throughput", runs, ()).data
    assert (list(bar.error_x.array), list(bar.error_x.arrayminus)) == ([20.0], [50.0])
    assert "95 % interval over the steps of one launch:<br>950 to 1,020" in bar.hovertext[0]
    (bare,) = chart("throughput", runs.assign(**dict.fromkeys(interval)), ()).data
    assert bare.error_x.array is None


def speeds(*cases: tuple[Case, float]) -> pd.DataFrame:
    return pd.DataFrame([run_row(n, case, tokens_per_s=s) for n, (case, s) in enumerate(cases)])


def efficiency(figure) -> dict[str, list[float]]:
    return {
        name: [round(float(y), 3) for y in trace.y]
        for name, trace in traces(figure).items()
        if trace.ids is not None
    }


AFAB, OTHER = Case(schedule="afab"), Case(schedule="1f1b")


EMULATED = replace(AFAB, device="emulated", world_size=1)


@pytest.mark.parametrize(
    ("cases", "expected", "base"),
    [
        (  # no 1f1b on one rank: any schedule computes the same there
            [(AFAB, 4, 1200.0), (AFAB, 1, 500.0), (AFAB, 2, 800.0), (OTHER, 2, 900.0)],
            {"afab": [1.0, 0.8, 0.6], "1f1b": [0.9]},
            "1 rank",
        ),
        (
            [(AFAB, 2, 800.0), (AFAB, 4, 1200.0), (OTHER, 2, 700.0), (OTHER, 4, 1400.0)],
            {"afab": [1.0, 0.75], "1f1b": [1.0, 1.0]},
            "2 ranks",
        ),
        (
            [(AFAB, 2, 800.0), (AFAB, 4, 1200.0), (OTHER, 4, 1000.0), (OTHER, 8, 1500.0)],
            {"afab": [1.0, 0.75], "1f1b": [1.0, 0.75]},
            "fewest ranks",
        ),
        # Emulated ranks bring their own work, so tokens per s should not fall.
        ([(EMULATED, 1, 500.0), (EMULATED, 4, 400.0)], {"afab": [1.0, 0.8]}, None),
    ],
)
def test_efficiency_is_over_that_of_a_rank_alone_or_of_the_fewest_there_are(
    cases, expected, base
) -> None:
    runs = speeds(*((replace(case, world_size=p), speed) for case, p, speed in cases))
    figure = chart("scaling", runs, varying_axes(runs))
    assert efficiency(figure) == expected
    assert {shape.y0 for shape in figure.layout.shapes} == {1.0}
    if base is not None:
        assert figure.layout.yaxis.title.text == f"efficiency, {base} = 100 %"


def test_cases_that_differ_in_more_than_world_size_are_never_held_against_each_other() -> None:
    runs = speeds((replace(AFAB, world_size=1), 500.0), (replace(AFAB, num_microbatches=4), 900.0))
    for axes in (varying_axes(runs), ()):
        measured = Measured.of(None, runs, axes)  # type: ignore[arg-type]  # no table is read
        assert CHARTS["scaling"].draw(measured) is None


def test_a_rank_is_shown_beside_its_prediction() -> None:
    runs = pd.DataFrame([run_row(0, Case())])
    run_id, mib = runs["run_id"][0], 2**20
    ranks = pd.DataFrame(
        {
            "run_id": run_id,
            "rank": [0, 1],
            "peak_memory_bytes": [100 * mib, 80 * mib],
            "predicted_peak_memory_bytes": [90 * mib, 85 * mib],
        }
    )
    drawn = traces(chart("memory", runs, (), ranks=ranks))
    assert list(drawn["each rank"].x) == [100.0, 80.0]
    assert list(drawn["predicted"].x) == [90.0, 85.0]
    assert list(drawn["predicted"].y) == list(drawn["each rank"].y)
    assert "rank 1" in drawn["predicted"].hovertext[1]


def test_a_rank_of_replicas_is_shown_by_the_fullest() -> None:
    runs = pd.DataFrame([run_row(0, Case(replicas=2))])
    peaks = {"rank": [0, 0], "peak_memory_bytes": [60 * 2**20, 90 * 2**20], "replica": [0, 1]}
    ranks = pd.DataFrame({"run_id": runs["run_id"][0], **peaks})
    drawn = traces(chart("memory", runs, (), ranks=ranks))
    assert list(drawn["each rank"].x) == [90.0]


def with_memory(*cases: tuple[Case, float, int, str]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            run_row(n, case, tokens_per_s=speed, peak_memory_bytes=mib * 2**20, cautions=cautions)
            for n, (case, speed, mib, cautions) in enumerate(cases)
        ]
    )


def fronts(figure) -> list[list[tuple[float, float]]]:
    lines = [trace for trace in figure.data if trace.name == "front"]
    return [list(zip(line.x, line.y, strict=True)) for line in lines]


def test_the_front_leaves_out_what_is_slower_and_bigger_and_what_is_oversubscribed() -> None:
    runs = with_memory(
        (AFAB, 1000.0, 400, ""),
        (OTHER, 900.0, 100, ""),
        (replace(AFAB, num_microbatches=4), 800.0, 200, ""),
        (replace(OTHER, world_size=4), 9000.0, 50, "oversubscribed"),
    )
    figure = chart("pareto", runs, varying_axes(runs))
    assert fronts(figure) == [[(100.0, 900.0), (400.0, 1000.0)]]
    assert traces(figure)["front"].text[0] == "1f1b, 2 ranks, 8 microbatches"
    sound = [s for t in figure.data if t.meta and "isSound" in t.meta for s in t.meta["isSound"]]
    assert sound.count(False) == 1


def test_work_that_differs_has_fronts_of_its_own() -> None:
    runs = with_memory((AFAB, 1000.0, 400, ""), (replace(AFAB, seq_len=512), 100.0, 900, ""))
    figure = chart("pareto", runs, varying_axes(runs))
    assert fronts(figure) == [[(400.0, 1000.0)], [(900.0, 100.0)]]
    assert figure.titles == ["128 tokens", "512 tokens"]


PARTS = {
    "bubble_structure": 0.2,
    "bubble_imbalance": 0.1,
    "bubble_transfer": 0.05,
    "bubble_jitter": -0.02,
    "bubble_launch_gap": 0.03,
    "bubble_between": -0.01,
    "bubble_mean": 0.35,
}


def test_idle_time_is_stacked_by_cause_as_the_mean_over_launches_that_tell() -> None:
    rows = [run_row(n, AFAB, launch=n, **PARTS, run_id=str(n)) for n in (0, 1)]
    rows[1]["bubble_jitter"] = 0.04
    rows.append(run_row(5, OTHER))
    drawn = traces(chart("idle", pd.DataFrame(rows), ("schedule",)))
    assert [name for name, bar in drawn.items() if bar.ids == (AFAB.case_id,)] == list(drawn)
    shares = {name: round(float(bar.x[0]), 3) for name, bar in drawn.items()}
    assert shares == {
        "schedule": 0.2,
        "imbalance": 0.1,
        "transfer": 0.05,
        "jitter": 0.01,
        "launch gaps": 0.03,
        "between steps": -0.01,
    }
    colors = [color for part, color in PART_COLORS.items() if part not in OF_REPLICAS]
    assert [bar.marker.color for bar in drawn.values()] == colors


def times_of(times_ms: list[int]) -> go.Figure:
    """The chart of a run with these step times, of which the last is an outlier."""
    runs = pd.DataFrame([run_row(0, Case())])
    count = len(times_ms)
    steps = pd.DataFrame(
        {
            "run_id": runs["run_id"][0],
            "step": range(count),
            "step_ns": [t * 1_000_000 for t in times_ms],
            "is_outlier": [n == count - 1 for n in range(count)],
        }
    )
    return chart("steps", runs, (), steps=steps)


def test_few_steps_are_points_since_their_quartiles_say_nothing() -> None:
    figure = times_of([10, 12, 40])
    assert not [trace for trace in figure.data if trace.type == "box"]
    points, median, outlier = figure.data
    assert list(points.x) == [10.0, 12.0]
    assert list(outlier.x) == [40.0]
    assert "of 3 steps" in median.hovertext[0]


def test_a_box_holds_the_quartiles_and_outliers_stand_outside_its_whiskers() -> None:
    figure = times_of([10, 11, 12, 13, 14, 15, 16, 17, 40])
    (box,) = [trace for trace in figure.data if trace.type == "box"]
    assert [float(end[0]) for end in (box.q1, box.median, box.q3)] == [12.0, 14.0, 16.0]
    assert [float(end[0]) for end in (box.lowerfence, box.upperfence)] == [10.0, 17.0]
    outlier = traces(figure)["outlier"]
    assert (list(outlier.x), list(outlier.ids)) == ([40.0], [Case().case_id])


def test_every_point_of_a_case_names_it_and_no_two_points_have_one_name(demo: Store) -> None:
    runs = demo.runs()
    known = set(runs["case_id"])
    for one in CHARTS.values():
        drawing = one.draw(Measured.of(demo, runs, varying_axes(runs)))
        panels = drawing.panels if drawing else []
        for trace in (trace for panel in panels for trace in panel["data"] if "ids" in trace):
            ids = trace["ids"]
            assert len(ids) == len(set(ids)) == len(trace.get("median", trace["y"]))
            assert {point.split("/")[0] for point in ids} <= known


def test_a_report_of_measured_cases_has_the_charts_that_it_can_fill(demo: Store) -> None:
    runs = demo.runs()
    assert names_of(demo, runs, varying_axes(runs)) == [
        "throughput",
        "scaling",
        "bubble",
        "memory",
        "pareto",
        "steps",
    ]
    emulated = runs.assign(peak_memory_bytes=None, world_size=2)
    assert names_of(demo, emulated, ("schedule",)) == ["throughput", "bubble", "steps"]
