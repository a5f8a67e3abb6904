"""Filtering cases on a page updates its charts: the front is that of the cases left."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from chromium import Browser, Tab
from screens import needs_browser
from stored_runs import run_row, store_with

from ppbench.config.case import Case
from ppbench.report.charts.pareto import pareto_front
from ppbench.report.pages.report import write_report

pytestmark = needs_browser
AFAB, OTHER = Case(schedule="afab"), Case(schedule="1f1b")
SMALL = replace(AFAB, num_microbatches=4)
FIGURES = ((AFAB, 1000.0, 400), (OTHER, 900.0, 100), (SMALL, 800.0, 200))


@pytest.fixture(scope="module")
def tab(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Tab:
    folder = tmp_path_factory.mktemp("charts")
    rows = [
        run_row(n, case, tokens_per_s=speed, peak_memory_bytes=mib * 2**20)
        for n, (case, speed, mib) in enumerate(FIGURES)
    ]
    store, page = store_with(folder, rows), folder / "page.html"
    write_report(page, store, store.runs(), title="charts", command="ppbench", sweep_text=None)
    tab = Tab(browser, page, 1440)
    tab.evaluate("drawAll()")
    return tab


def test_the_page_and_the_report_find_the_same_front(tab: Tab) -> None:
    chance = random.Random(0)
    for count in (0, 1, 2, 30):
        points = [(chance.randrange(8), chance.randrange(8)) for _ in range(count)]
        drawn = json.dumps([{"x": x, "y": y} for x, y in points])
        expected = pareto_front([x for x, _ in points], [y for _, y in points])
        assert tab.evaluate(f"paretoFront({drawn})") == expected


@pytest.mark.parametrize(
    ("hidden", "front"),
    [((), [[100, 900], [400, 1000]]), ((OTHER,), [[200, 800], [400, 1000]])],
)
def test_the_front_is_that_of_the_cases_that_are_left(
    tab: Tab, hidden: tuple[Case, ...], front: list[list[float]]
) -> None:
    kept = [case.case_id for case, *_ in FIGURES if case not in hidden]
    found = tab.evaluate(f"""(() => {{
      const text = document.querySelector("#pareto .chart").nextElementSibling.textContent;
      const [panel] = panelsOf(JSON.parse(text), new Set({json.dumps(kept)}));
      const [line] = panel.data.filter((trace) => trace.name === "front");
      return line.x.map((x, n) => [x, line.y[n]]);
    }})()""")
    assert found == front


def test_every_rank_of_every_case_is_drawn_beside_its_bar(tab: Tab) -> None:
    in_chart = "document.querySelectorAll('#memory .chart .scatterlayer .point').length"
    assert tab.evaluate(in_chart) == 2 * len(FIGURES)


def test_a_click_on_a_name_of_the_legend_hides_what_has_it(tab: Tab) -> None:
    found = tab.evaluate("""(async () => {
      const chart = document.querySelector("#throughput .chart");
      const keys = () => [...chart.querySelectorAll(".keys button")];
      const key = () => keys().find((one) => one.textContent.includes("afab"));
      const names = () => chart.querySelector(".plot").data.map((trace) => trace.name);
      key().click();
      const hidden = [names().includes("afab"), key().ariaPressed];
      key().click();
      return [...hidden, names().includes("afab"), key().ariaPressed];
    })()""")
    assert found == [False, "false", True, "true"]


def test_panels_have_one_scale_that_holds_all_values(tab: Tab) -> None:
    found = tab.evaluate("""(() => {
      const panel = (y, error) => ({
        data: [{ x: y.map((_, n) => n), y, error_y: error && { array: [error], arrayminus: [0] } }],
        layout: { yaxis: { rangemode: "tozero" } },
      });
      return commonRange([panel([1, 4]), panel([3], 2)], "y");
    })()""")
    assert found == pytest.approx([0, 5.3])
