"""Pages in a real browser: they load without an error, draw their charts, react and fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from chromium import Browser, Tab
from made_pages import NASTY, simulated_run
from screens import DESK, PHONE, needs_browser

from ppbench.config.case import Case
from ppbench.report.pages.report import write_report
from ppbench.store import Store

pytestmark = needs_browser

LOOK = """
const chart = (name) => document.querySelector(`#${name} .chart`);
const timelines = (state) => all(`details.timeline${state} .chart`);
const chips = (axis) => all(`#filters input[data-axis="${axis}"]`);
const choose = (axis, value) => chips(axis).find((box) => box.value === value).click();
const isMeasured = (trace) => trace.type === "bar" && trace.y?.length && trace.y[0] !== null;
const plots = (name) => all(".plot", chart(name));
const bars = (name) => plots(name).flatMap((plot) => plot.data).filter(isMeasured);
const points = (name) => bars(name).flatMap((trace) => [...trace.y]);
const isSeen = (node) => node.checkVisibility();
const shownRows = () => all("#runs tbody tr:not(.detail)").filter((row) => row.checkVisibility());
const clear = () => document.getElementById("clear").click();
"""


@pytest.fixture(scope="module")
def page(page_of: Callable[[str], Path]) -> Path:
    return page_of("report")


@pytest.fixture(scope="module")
def desk(browser: Browser, page: Path) -> Tab:
    return opened(browser, page, DESK, "light")


@pytest.fixture(scope="module")
def phone(browser: Browser, page: Path) -> Tab:
    return opened(browser, page, PHONE, "dark")


@pytest.fixture(params=["desk", "phone"])
def tab(request: pytest.FixtureRequest) -> Tab:
    return request.getfixturevalue(request.param)


def opened(browser: Browser, page: Path, width: int, scheme: str) -> Tab:
    """The page as someone has it who has scrolled through it."""
    tab = Tab(browser, page, width, scheme, LOOK)
    tab.evaluate("drawAll()")
    return tab


def test_every_chart_is_drawn(tab: Tab) -> None:
    names = tab.evaluate("all('section.figure').map((section) => section.id)")
    assert {"throughput", "bubble", "memory"} <= set(names)
    for name in names:
        assert tab.evaluate(f"isDrawn(chart('{name}'))"), name
    for name in ("throughput", "bubble", "memory"):
        assert len(tab.evaluate(f"points('{name}')")) == 12
    assert tab.evaluate("all('.chart').every((d) => d.scrollWidth <= d.clientWidth)")
    assert tab.problems() == []


def test_panels_stand_side_by_side_on_a_desk_and_below_each_other_on_a_phone(
    desk: Tab, phone: Tab
) -> None:
    columns = "new Set(plots('throughput').map((plot) => plot.getBoundingClientRect().left)).size"
    assert (desk.evaluate(columns), phone.evaluate(columns)) == (2, 1)


def test_timelines_worth_comparing_are_drawn_at_once_and_others_when_opened(tab: Tab) -> None:
    assert tab.evaluate("timelines('[open]').length") >= 2
    assert tab.evaluate("timelines('[open]').every(isDrawn)")
    assert tab.evaluate("timelines(':not([open])').filter(isDrawn).length") == 0
    script = """(async () => {
      const closed = document.querySelector("details.timeline:not([open])");
      closed.querySelector("summary").click();
      const div = closed.querySelector(".chart");
      await show(div);
      return [closed.open, isDrawn(div)];
    })()"""
    assert tab.evaluate(script) == [True, True]


def test_a_row_opens_its_timeline_which_is_neither_unpacked_nor_drawn_before(desk: Tab) -> None:
    script = """(async () => {
      const detailOf = (button) => document.getElementById(button.getAttribute("aria-controls"));
      const nameOf = (button) => detailOf(button).querySelector(".chart").dataset.timeline;
      const isOpen = (name) => all(`[data-timeline="${name}"]`).some(isDrawn);
      const opener = all("#runs .opener").find((button) => !isOpen(nameOf(button)));
      const detail = detailOf(opener);
      const script = document.getElementById(nameOf(opener));
      const asked = [];
      const before = unpackText;
      unpackText = (one) => { asked.push(one.id); return before(one); };
      const packed = script.textContent.slice(0, 2);
      const closed = [detail.checkVisibility(), isDrawn(detail), opener.ariaExpanded, asked.length];
      opener.focus();
      opener.click();
      await show(detail.querySelector(".chart"));
      unpackText = before;
      const told = detail.querySelector(".chart").timeline.kinds.length > 0;
      const open = [detail.checkVisibility(), isDrawn(detail), opener.ariaExpanded, told];
      const isOwn = asked.length === 1 && asked[0] === script.id;
      opener.click();
      return [packed, closed, open, isOwn, detail.checkVisibility()];
    })()"""
    assert desk.evaluate(script) == [
        "eJ",  # deflated, as base64
        [False, False, "false", 0],
        [True, True, "true", True],
        True,
        False,
    ]


def test_microbatches_stand_inside_the_bars(desk: Tab) -> None:
    inside = desk.evaluate("timelines('[open]')[0].timeline.texts")
    assert sorted(inside) == sorted(str(m) for m in range(4) for _ in range(8))  # of two runs


def test_a_click_on_a_heading_sorts_by_number_and_leaves_missing_figures_last(desk: Tab) -> None:
    script = """(() => {
      const heading = all("#runs th").find((th) => th.textContent === "tokens/s");
      const column = [...heading.parentNode.children].indexOf(heading) + 1;
      heading.querySelector("button").click();
      return texts(`#runs td:nth-child(${column})`);
    })()"""
    for is_falling in (True, False):
        shown = desk.evaluate(script)
        assert shown[-1] == "–"
        speeds = [float(text.replace(",", "")) for text in shown[:-1]]
        assert speeds == sorted(speeds, reverse=is_falling)


def test_charts_take_the_colours_of_the_scheme(desk: Tab, phone: Tab) -> None:
    title = "getComputedStyle(chart('throughput').querySelector('.ytitle')).fill"
    assert desk.evaluate(title) == "rgb(93, 99, 107)"
    assert phone.evaluate(title) == "rgb(155, 162, 171)"


# Filters


def test_a_filter_changes_every_chart_and_list_and_leaves_the_answer(desk: Tab) -> None:
    script = """(async () => {
      const answer = document.getElementById("answer").textContent;
      choose("schedule", "1f1b");
      choose("world_size", "2");
      await pause();
      const names = [...new Set(bars("throughput").map((trace) => trace.name))];
      const shown = {
        bars: ["throughput", "bubble", "memory"].map((name) => points(name).length),
        names,
        rows: shownRows().length,
        count: document.getElementById("found").textContent,
        sentence: document.getElementById("shown").textContent,
        cautions: all(".caution").filter((node) => node.checkVisibility()).length,
        timelines: all("details.timeline").filter((node) => node.checkVisibility()).length,
        isSameAnswer: answer === document.getElementById("answer").textContent,
        hash: location.hash,
      };
      clear();
      await pause();
      shown.after = points("throughput").length;
      return shown;
    })()"""
    shown = desk.evaluate(script)
    assert shown["bars"] == [2, 2, 2]
    assert shown["names"] == ["1f1b"]
    assert (shown["rows"], shown["count"]) == (2, "2 of 13 runs")
    assert shown["sentence"] == "2 of 12 cases · schedule 1f1b · ranks 2"
    assert shown["cautions"] == 0  # only four ranks were oversubscribed
    assert shown["timelines"] >= 1
    assert shown["isSameAnswer"]
    assert shown["hash"] == "#schedule=1f1b&world_size=2"
    assert shown["after"] == 12


def test_panels_without_points_leave_and_bars_take_their_room(desk: Tab) -> None:
    script = """(async () => {
      const measure = () => {
        const [{ layout, data }] = plots("throughput");
        const { width } = data.find((trace) => trace.type === "bar");
        return [plots("throughput").length, width, [...layout.xaxis.ticktext]];
      };
      const before = measure();
      choose("seq_len", "256");
      choose("schedule", "afab");
      choose("world_size", "4");
      await pause();
      const after = measure();
      clear();
      return [before, after];
    })()"""
    before, after = desk.evaluate(script)
    assert (before[0], after[0]) == (2, 1)
    assert after[1] == pytest.approx(2 * before[1])  # one schedule of two
    assert (before[2], after[2]) == (["1 rank", "2 ranks", "4 ranks"], ["4 ranks"])


def test_values_that_nobody_has_together_leave_a_sentence_instead_of_charts(
    browser: Browser, tmp_path: Path
) -> None:
    """Names are text here too: in filters, in the address, in the sentence of what is shown."""
    store = Store(tmp_path)
    cases = [Case(model_preset=NASTY, world_size=1), Case(schedule="afab", world_size=2)]
    for number, case in enumerate(cases):
        simulated_run(store, number, case)
    page = tmp_path / "page.html"
    write_report(page, store, store.runs(), title=NASTY, command="c", sweep_text=NASTY)
    tab = Tab(browser, page, DESK, look=LOOK)
    script = """(async () => {
      await show(chart("throughput"));
      chips("model_preset")[0].click();
      choose("world_size", "2");
      const nothing = document.getElementById("nothing");
      const seen = () => [isSeen(nothing), all("section.figure").some(isSeen)];
      const without = seen();
      const sentence = document.getElementById("shown").textContent;
      nothing.querySelector("button").click();
      await until(() => points("throughput").length === 2);
      return [without, sentence, seen(), points("throughput").length, location.hash];
    })()"""
    assert tab.evaluate(script) == [
        [True, False], f"0 of 2 cases · ranks 2 · model {NASTY}", [False, True], 2, "",
    ]  # fmt: skip
    assert tab.evaluate("document.title") == NASTY
    assert tab.evaluate("all('b').length + all('script[src]').length") == 0
    assert tab.problems() == []


def test_the_address_restores_known_filters_and_the_search(browser: Browser, page: Path) -> None:
    tab = Tab(browser, page, DESK, look=LOOK)
    script = """(async () => {
      location.hash = "schedule=afab&schedule=zbv&world_size=1&world_size=2&x=y&find=afab+256";
      await until(() => shownRows().length === 2);
      const rows = shownRows().length;
      const chosen = all("#filters input:checked").map((box) => box.value);
      const search = document.getElementById("find").value;
      const pressed = texts("#filters button.all[aria-pressed=true]").length;
      return [rows, chosen, search, pressed];
    })()"""
    assert tab.evaluate(script) == [2, ["afab", "1", "2"], "afab 256", 1]
    tab.reload()
    assert tab.evaluate("all('#filters input:checked').map((box) => box.value)") == [
        "afab", "1", "2",
    ]  # fmt: skip
    assert tab.evaluate("shownRows().length") == 2
    assert tab.problems() == []


def test_the_search_leaves_rows_that_have_all_its_words_with_their_details_below(
    desk: Tab,
) -> None:
    script = """(() => {
      all("#runs th button")[0].click();
      const openerOf = (detail) => detail.previousElementSibling.querySelector(".opener");
      const isBelow = (detail) => openerOf(detail).getAttribute("aria-controls") === detail.id;
      const areBelow = all("#runs .detail").every(isBelow);
      const find = document.getElementById("find");
      const search = (text) => {
        find.value = text;
        find.dispatchEvent(new Event("input"));
        return [shownRows().length, document.getElementById("found").textContent];
      };
      all("#runs .opener")[0].click();
      const all_ = all("#runs .detail").filter((row) => row.checkVisibility()).length;
      const found = search("ERROR");
      const none = all("#runs .detail").filter((row) => row.checkVisibility()).length;
      const markup = search("<b>");
      const hash = location.hash;
      search("");
      all("#runs .opener")[0].click();
      return [areBelow, all_, found, none, markup, hash];
    })()"""
    assert desk.evaluate(script) == [
        True, 1, [1, "1 of 13 runs"], 0, [0, "0 of 13 runs"], "#find=%3Cb%3E",
    ]  # fmt: skip


# Paper
