"""A timeline of replicas in a browser: the slowest at first, others and ranks of all by a menu."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from chromium import Browser, Tab
from screens import DESK, PHONE, needs_browser
from stored_runs import run_row

from benchmarks.made_up_jobs import Shape, make
from engine.plan.program import to_json
from ppbench.analysis.transfers import waiting_ns
from ppbench.config.case import Case
from ppbench.report.pages.timeline import write_timeline
from ppbench.store import Store

pytestmark = needs_browser
LOOK = """
let timeline = null;
const isReady = () => {
  timeline = document.querySelector(".chart").timeline;
  return timeline?.kinds && timeline.plane && !menu().disabled;
};
const menu = () => document.querySelector(".tl-replicas");
const choose = (text) => {
  menu().value = [...menu().options].find((one) => one.textContent === text).value;
  menu().dispatchEvent(new Event("change"));
};
const begins = () => {
  const kind = timeline.kinds.find(({ name }) => name === "forward");
  return kind.rows.map(({ from }) => kind.replicaOf(from));
};
"""
FEW, MANY = Shape(ranks=2, microbatches=4, replicas=3), Shape(ranks=4, microbatches=8, replicas=32)


@pytest.fixture(scope="module", params=[FEW, MANY], ids=["drawn as bars", "packed on a phone"])
def shape(request: pytest.FixtureRequest) -> Shape:
    return request.param


@pytest.fixture(scope="module")
def slowest(shape: Shape) -> int:
    return make(shape, "replica", np.random.default_rng(5)).culprit[1]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, shape: Shape) -> Path:
    folder = tmp_path_factory.mktemp("replicas")
    spans = make(shape, "replica", np.random.default_rng(5)).walk.spans()
    case = Case(
        world_size=shape.ranks, num_microbatches=shape.microbatches, replicas=shape.replicas
    )
    run = run_row(0, case, program=to_json(shape.lowered))
    store = Store(folder / "results")
    of_step = spans.groupby("step")
    took = of_step["end_ns"].max() - of_step["start_ns"].min()
    steps = pd.DataFrame({"step": took.index, "step_ns": took})
    store.write_run(run, {"spans": spans.assign(waiting_ns=waiting_ns(spans)), "steps": steps})
    write_timeline(folder / "replicas.html", store, store.runs(), choice="0")
    return folder / "replicas.html"


@pytest.fixture(scope="module")
def tab(browser: Browser, page: Path, shape: Shape) -> Tab:
    width, scheme = (DESK, "light") if shape == FEW else (PHONE, "dark")
    opened = Tab(browser, page, width, scheme, LOOK)
    assert opened.evaluate("until(isReady)")
    return opened


def test_the_slowest_replica_is_in_sight_and_the_menu_names_it(tab, shape, slowest) -> None:
    menu = tab.evaluate("[...menu().options].map((one) => one.textContent)")
    assert len(menu) == shape.replicas + shape.ranks
    assert (
        tab.evaluate("menu().selectedOptions[0].textContent") == f"replica {slowest}, the slowest"
    )
    assert tab.evaluate("begins()") == [slowest] * shape.ranks
    assert tab.problems() == []


def test_another_replica_is_shown_and_found_in(tab, shape, slowest) -> None:
    other = (slowest + 1) % shape.replicas
    tab.evaluate(f'choose("replica {other}")')
    assert tab.evaluate("begins()") == [other] * shape.ranks
    tab.evaluate('timeline.find("F0")')
    assert tab.evaluate("timeline.matches.length") == shape.ranks
    tab.evaluate('timeline.find("0REDUCE_GRAD"); timeline.go(1)')
    lines = tab.evaluate('document.querySelector(".tl-side").innerText')
    assert "0REDUCE_GRAD reduce gradients" in lines
    assert f"replica {other}" in lines
    tab.evaluate('timeline.choose(null); timeline.find("")')
    assert tab.problems() == []


def test_a_rank_of_all_replicas_has_a_row_for_each(tab, shape, slowest) -> None:
    last = shape.ranks - 1
    tab.evaluate(f'choose("rank {last} of all replicas")')
    assert tab.evaluate("begins()") == list(range(shape.replicas))
    assert tab.evaluate("timeline.steps[0].ranks") == shape.replicas
    tab.evaluate("timeline.measure({ start: 0, end: 5 })")
    table = tab.evaluate('document.querySelector(".tl-side table").innerText')
    assert table.startswith("replica")
    tab.evaluate(f'choose("replica {slowest}, the slowest")')
    assert tab.evaluate("begins()") == [slowest] * shape.ranks
    assert tab.problems() == []
