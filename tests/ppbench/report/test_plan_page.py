"""The page of a plan: its sentences, its picture, its table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.plan.model_costs import LayerCosts, LinkCosts, ModelCosts
from ppbench.planning.cost_set import CostSet, Setting
from ppbench.planning.plan import Plan, PlanRequest
from ppbench.planning.planner import make_plan, simulated
from ppbench.planning.words import sentences_of
from ppbench.report.charts.frontier import Point, frontier
from ppbench.report.pages.plan import PlanPage, render_plan
from ppbench.report.pages.templates import render_index, write_page

MIB = 2**20


def costs() -> CostSet:
    layer = LayerCosts(2e6, 4e6, 2e6, 2e6, 0.01, 20 * MIB, 10 * MIB, 4 * MIB, 50 * MIB, MIB, 1e5)
    after = replace(layer, forward_ns=4e6, backward_ns=8e6, input_ns=4e6, weight_ns=4e6)
    before = replace(layer, forward_ns=1e5, backward_ns=1e5, input_ns=0, weight_ns=1e5)
    model = ModelCosts(before, (layer,) * 4, after)
    by_setting = {Setting(1, recompute=False): model}
    link = LinkCosts(1e5, 1e10, 0.05)
    return CostSet("drawn", "float32", 128, "adamw", "cpu", "drawn", by_setting, link)


@pytest.fixture(scope="module")
def plan() -> Plan:
    request = PlanRequest((2,), 700 * MIB, 8, 128, ("afab", "1f1b", "zb_h1", "auto"), (1,))
    return make_plan(request, costs(), effort=0.01)


@pytest.fixture(scope="module")
def page(plan: Plan) -> PlanPage:
    proposals = [one for one in (plan.first, plan.baseline) if one is not None]
    steps = [(one, simulated(plan, one)) for one in proposals]
    return PlanPage("toy on 2 ranks", plan, steps, "file costs.toml", [("Run:", "x")], "ppbench")


def test_the_page_says_what_to_run_first_and_names_every_proposal(page, plan):
    html = render_plan(page)
    text = html.partition('<p class="lead">')[2].partition("</p>")[0]
    assert text == sentences_of(plan)[0]
    assert text.startswith("Run ")
    assert "No program of these layers on these stages can be quicker" in html
    assert html.count('<th scope="row"') >= len(plan.proposals)
    assert "http:" not in html.replace("http://www.w3.org", "")
    assert "https:" not in html


def test_the_front_rises_with_memory_and_leaves_out_what_is_beaten():
    points = [Point(m, s, f"{m}", "found") for m, s in ((4, 10.0), (2, 5.0), (3, 4.0), (5, 10.0))]
    drawn = frontier(points, 6)
    assert drawn.limit is not None
    places = [tuple(map(float, corner.split(","))) for corner in drawn.line.split()]
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    assert [y for _, y in places] == sorted((y for _, y in places), reverse=True)
    assert all(0 <= spot["left"] <= 100 and 0 <= spot["bottom"] <= 100 for spot in drawn.spots)
    assert frontier(points[:1], None).limit is None


def test_the_index_lists_plans_with_their_answer(page, plan, tmp_path: Path):
    write_page(tmp_path / "plan.html", render_plan(page))
    index = render_index(tmp_path)
    assert "<h2>Plans</h2>" in index
    assert sentences_of(plan)[0] in index
