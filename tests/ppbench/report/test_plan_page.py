"""The page of a plan: its sentences, its picture, its table."""

from __future__ import annotations

import re

import pytest
from toy_plan import toy_page, toy_plan

from ppbench.planning.plan import Plan
from ppbench.planning.words import sentences_of
from ppbench.report.charts.frontier import Point, frontier
from ppbench.report.pages.plan import PlanPage, document_of, render_plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return toy_plan()


@pytest.fixture(scope="module")
def page(plan: Plan) -> PlanPage:
    return toy_page(plan)


def test_the_page_says_what_to_run_first_and_names_every_proposal(page, plan):
    html = render_plan(page)
    text = html.partition('<p class="lead">')[2].partition("</p>")[0]
    assert text == sentences_of(plan)[0]
    assert text.startswith("Run ")
    assert "No program of these layers on these stages can be quicker" in html
    rows, blocks = document_of(plan, None, is_page=True)
    table = blocks[-1].blocks[0]
    assert [detail.label.partition(",")[0] for detail in table.details] == [
        row[rows.columns.index("schedule")] for row in rows.cells
    ]
    assert html.count('class="opener"') == len(rows.cells) >= len(plan.proposals)
    assert "world_size" not in table.columns  # of a plan for one number of ranks
    assert "http:" not in html.replace("http://www.w3.org", "")
    assert "https:" not in html


def test_the_front_rises_with_memory_and_leaves_out_what_is_beaten():
    points = [Point(m, s, f"{m}", "found") for m, s in ((4, 10.0), (2, 5.0), (3, 4.0), (5, 10.0))]
    html = frontier(points, 6).html()
    assert 'class="limit"' in html
    line = html.partition('points="')[2].partition('"')[0]
    places = [tuple(map(float, corner.split(","))) for corner in line.split()]
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    assert [y for _, y in places] == sorted((y for _, y in places), reverse=True)
    spots = re.findall(r'class="spot found" style="left: ([\d.]+)%; bottom: ([\d.]+)%', html)
    assert len(spots) == len(points)
    assert all(0 <= float(place) <= 100 for spot in spots for place in spot)
    assert 'class="limit"' not in frontier(points[:1], None).html()
