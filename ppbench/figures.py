"""The figures of ppbench: each function takes runs and returns a plotly figure.

    results = ppbench.load().last()
    ppbench.figures.throughput(results)
    ppbench.figures.timeline(results, run="20261121T2026", theme="dark")

A figure shows those of the given runs that are ok. Raises UsageError if they lack its data.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ppbench.analysis.metrics import MEDIAN
from ppbench.display.cases import ok_runs, varying_axes
from ppbench.display.formats import Theme
from ppbench.display.stragglers import cause_in_words
from ppbench.errors import UsageError, nearest
from ppbench.explanation import stragglers_of_run
from ppbench.report.charts.canvas import FONT, LEGEND, Drawing, Measured, figure_text
from ppbench.report.charts.levels import memory_over_time
from ppbench.report.charts.registry import CHARTS
from ppbench.report.charts.stragglers import heat_map
from ppbench.report.pages.timeline import run_names
from ppbench.report.timeline.gantt import PATH, gantt
from ppbench.report.timeline.timelines import steps_of
from ppbench.results import Results
from ppbench.store import check_ok

_COLORS = {  # of the paper, the ink, quiet text and lines
    Theme.light: ("#ffffff", "#1a1c1f", "#5d636b", "#e3e5e8"),
    Theme.dark: ("#15171a", "#e6e8ea", "#9ba2ab", "#2d3136"),
}
_MOST_COLUMNS, _LINE = 4, 32
_PANEL_PX = 240
"""The least width of a panel beside others."""
_LEGEND_PX, _TITLE_LINE_PX, _BETWEEN_PX = 40, 15, 90


def timeline(
    results: Results,
    run: str | Sequence[str] | None = None,
    theme: str = "light",
    *,
    step: str | int = MEDIAN,
    planned: bool = False,
    path: bool = False,
) -> go.Figure:
    """A step of each named run on one time axis; by default of the last ok run.

    `step` is `median`, `slowest` or a number; `planned` adds the planned step under each measured
    one, `path` the critical path.
    """
    rows = _rows_named(results, run)
    names = run_names(pd.DataFrame(rows))
    steps = steps_of(results.store, rows, names, choice=str(step), has_plan=planned)
    figure = gantt(steps)
    if path:
        figure.update_traces(visible=True, selector={"name": PATH})
    return _styled(figure, theme)


def levels_of_memory(
    results: Results, run: str | Sequence[str] | None = None, theme: str = "light"
) -> go.Figure:
    """The allocated memory of each rank of a run over time; by default of the last ok run."""
    row = _only(_rows_named(results, run), "levels_of_memory")
    check_ok(row, "memory over time")
    table = results.table("memory", [row["run_id"]])
    if table.empty:
        raise UsageError(f"run {row['run_id']}: has no memory over time in the store")
    ranks = results.table("ranks", [row["run_id"]])
    return _styled(_composed(memory_over_time(table, ranks)), theme)


def stragglers(
    results: Results, run: str | Sequence[str] | None = None, theme: str = "light"
) -> go.Figure:
    """How much each worker of a run slows it down, replicas by ranks; by default of the last ok."""
    row = _only(_rows_named(results, run), "stragglers")
    _, found = stragglers_of_run(results.store, str(row["run_id"]))
    (panel,) = heat_map(found.by_worker, cause_in_words(found)).panels
    return _styled(go.Figure(panel["data"], panel["layout"]), theme)


OF_RUNS: dict[str, Callable[..., go.Figure]] = {
    "timeline": timeline,
    "levels_of_memory": levels_of_memory,
    "stragglers": stragglers,
}
FIGURES = (*OF_RUNS, *CHARTS)
"""The names of all figures, as `ppbench figure` takes them."""
__all__ = ["FIGURES", "draw", *FIGURES]  # noqa: PLE0604  # each is a function of this module


def __getattr__(name: str) -> Callable[..., go.Figure]:
    """Return the function of a chart of cases, which is called with results and a theme."""
    if name not in CHARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def chart(results: Results, theme: str = "light") -> go.Figure:
        return _of_cases(name, results, theme)

    chart.__name__ = chart.__qualname__ = name
    chart.__doc__ = f"{CHARTS[name].heading}. {CHARTS[name].note}"
    return chart


def __dir__() -> list[str]:
    """The figures alone: what an interactive session offers after `ppbench.figures.`."""
    return sorted(FIGURES)


def draw(
    name: str,
    results: Results,
    runs: str | Sequence[str] | None = None,
    theme: str = "light",
    *,
    width: int | None = None,
    **options: object,
) -> go.Figure:
    """Draw the figure of a name, for the named runs or for all; `options` are for `timeline`.

    Panels stand beside each other as far as a width of so many CSS pixels has room for them. Raises
    UsageError.
    """
    check_name(name)
    if options and name != "timeline":
        *others, last = (f"--{option}" for option in options)
        given = f"{', '.join(others)} and {last}" if others else last
        raise UsageError(f"{given}: only for the figure timeline, not for {name}")
    if name in OF_RUNS:
        return OF_RUNS[name](results, runs, theme, **options)
    return _of_cases(name, results if runs is None else results.named(runs), theme, width)


def check_name(name: str) -> None:
    """Raise UsageError, with the names of all figures, for any other."""
    if name not in FIGURES:
        raise UsageError(f'figure: unknown "{name}"{nearest(name, FIGURES)}')


def _rows_named(results: Results, run: str | Sequence[str] | None) -> list[pd.Series]:
    """The named runs, or the last ok one."""
    if run is None:
        return [_measured(results).iloc[-1]]
    chosen = results.named(run).runs
    return [row for _, row in chosen.iterrows()]


def _only(rows: list[pd.Series], name: str) -> pd.Series:
    if len(rows) > 1:
        raise UsageError(f"{name}: shows one run; {len(rows)} were named")
    return rows[0]


def _measured(results: Results) -> pd.DataFrame:
    """The ok runs."""
    measured = ok_runs(results.runs)
    if measured.empty:
        failed = ", ".join(results.runs["status"].unique())
        raise UsageError(
            f"none of the {len(results)} runs is ok (status {failed}); nothing to draw"
        )
    return measured


def _of_cases(name: str, results: Results, theme: str, width: int | None = None) -> go.Figure:
    runs, chart = _measured(results), CHARTS[name]
    drawing = chart.draw(Measured.of(results.store, runs, varying_axes(runs)))
    if drawing is None:
        raise UsageError(f"none of the {len(results)} runs has {chart.needs}; nothing to draw")
    return _styled(_composed(drawing, width), theme)


def _composed(drawing: Drawing, width: int | None = None) -> go.Figure:
    """The panels of a drawing in one figure."""
    num, panel_px = len(drawing.panels), 2 * _PANEL_PX if drawing.row_px else _PANEL_PX
    columns = min(num, max(1, (width or _MOST_COLUMNS * _PANEL_PX) // panel_px))
    rows = math.ceil(num / columns)
    titles = ["<br>".join(textwrap.wrap(panel["title"], _LINE)) for panel in drawing.panels]
    row_px = drawing.height + _TITLE_LINE_PX * max(title.count("<br>") for title in titles)
    figure = make_subplots(
        rows,
        columns,
        subplot_titles=[figure_text(title).replace("&lt;br&gt;", "<br>") for title in titles],
        shared_xaxes="all" if "x" in drawing.shared else False,
        shared_yaxes="all" if "y" in drawing.shared else False,
        horizontal_spacing=0.16 / columns,
        vertical_spacing=_BETWEEN_PX / (rows * row_px) if rows > 1 else 0,
    )
    for number, panel in enumerate(drawing.panels):
        row, column = (at + 1 for at in divmod(number, columns))
        for trace in panel["data"]:
            figure.add_trace(trace, row=row, col=column)
        layout = panel["layout"]
        figure.update_xaxes(layout["xaxis"], showticklabels=True, row=row, col=column)
        figure.update_yaxes(layout["yaxis"], showticklabels=True, row=row, col=column)
        for shape in layout.get("shapes", ()):
            figure.add_shape(shape, row=row, col=column)
    first = drawing.panels[0]["layout"]
    height = rows * row_px + _LEGEND_PX
    return figure.update_layout(
        barmode=first.get("barmode"),
        hovermode="closest",
        height=height,
        margin={"l": 64, "r": 12, "t": _LEGEND_PX + 24, "b": 48},
        legend={**LEGEND, "y": 1 + _LEGEND_PX / height},
    )


def _styled(figure: go.Figure, theme: str) -> go.Figure:
    """The figure with the colours that it leaves open, as charts.js sets them on a page."""
    if theme not in list(Theme):
        raise UsageError(f'theme: unknown "{theme}"{nearest(theme, Theme)}')
    paper, ink, quiet, line = _COLORS[Theme(theme)]
    axis = {"gridcolor": line, "zerolinecolor": line, "linecolor": line, "color": quiet}
    error = {"color": quiet}
    outline = {"line": {"color": paper}}
    template = {
        "layout": {
            "font": {"family": FONT, "size": 12, "color": ink},
            "paper_bgcolor": paper,
            "plot_bgcolor": paper,
            "hoverlabel": {"bgcolor": paper, "font": {"color": ink}, "align": "left"},
            "xaxis": axis,
            "yaxis": axis,
        },
        "data": {
            "bar": [{"marker": outline, "error_x": error, "error_y": error}],
            "scatter": [{"marker": {"color": ink, **outline}, "line": {"color": ink}}],
        },
    }
    figure.layout.template = template  # in place of plotly's own
    return figure
