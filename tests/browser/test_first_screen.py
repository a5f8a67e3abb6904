"""The first screen of a report, and its controls, by a real mouse: desk, laptop, phone, paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import gestures
import pytest
from chromium import Browser, Tab
from made_pages import simulated_run
from screens import DESK, PHONE, needs_browser

from ppbench.config.case import Case
from ppbench.report.pages.report import write_report
from ppbench.store import Store

pytestmark = needs_browser
LAPTOP, SCREEN_PX = 1024, 900
ORDINARY = ((DESK, "light"), (PHONE, "dark"))
"""The screens that are looked at unless all of them are (`--thorough`)."""
SCREENS = [
    pytest.param((width, scheme), marks=() if (width, scheme) in ORDINARY else pytest.mark.thorough)
    for width in (DESK, LAPTOP, PHONE)
    for scheme in ("light", "dark")
]

LOOK = """
const frameOf = (node) => {
  const { left, right, top, bottom } = node.getBoundingClientRect();
  return { left, right, top, bottom };
};
"""


@pytest.fixture(scope="module")
def page(page_of: Callable[[str], Path]) -> Path:
    return page_of("answered")


@pytest.fixture(scope="module", params=SCREENS, ids=lambda screen: f"{screen[0]}-{screen[1]}")
def tab(request: pytest.FixtureRequest, browser: Browser, page: Path) -> Iterator[Tab]:
    width, scheme = request.param
    tab = Tab(browser, page, width, scheme, LOOK)
    tab.evaluate("drawAll()")
    yield tab
    tab.close()


@pytest.fixture(scope="module")
def clicked(browser: Browser, page: Path) -> Iterator[Tab]:
    tab = Tab(browser, page, DESK, look=LOOK)
    yield tab
    tab.close()


@pytest.fixture
def desk(clicked: Tab) -> Tab:
    """A page that others may have clicked on, each in a section of its own."""
    clicked.evaluate("scrollTo(0, 0)")
    return clicked


def click(tab: Tab, selector: str, nth: int = 0) -> None:
    """Scroll an element into sight and click on its middle with the mouse."""
    script = f"""(async () => {{
      const node = all({selector!r})[{nth}];
      const {{ top, bottom }} = node.getBoundingClientRect();
      if (top < 0 || bottom > innerHeight) node.scrollIntoView({{ block: "center" }});
      // Charts that come near are drawn, and may move what is below them.
      const topOf = () => frameOf(node).top;
      for (let before = NaN; before !== topOf(); await pause(250)) before = topOf();
      const box = node.getClientRects()[0];
      return [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
    }})()"""
    x, y = tab.evaluate(script)  # type: ignore[misc]
    gestures.click(tab, (x, y))


def test_the_first_screen_holds_the_sentence_the_figures_and_a_picture(tab: Tab) -> None:
    bottoms = tab.evaluate("""["#answer .lead", ".tile:last-child", ".pictures > section"]
      .map((selector) => document.querySelector(selector).getBoundingClientRect().bottom)""")
    assert max(bottoms) <= SCREEN_PX
    assert tab.evaluate("document.querySelector('#answer .lead').textContent").startswith(
        "Decided. Use zb_h1: faster than 1f1b over 2 settings"
    )
    assert tab.evaluate("all('#answer .tile').length") == 3
    if tab.evaluate("innerWidth") >= LAPTOP:
        assert tab.evaluate("frameOf(document.querySelector('.pictures .tl')).bottom") <= SCREEN_PX


def test_both_steps_are_drawn_on_one_scale(tab: Tab) -> None:
    drawn = tab.evaluate("""(() => {
      const { steps, last, kinds, view } = document.querySelector(".pictures .tl").timeline;
      const inks = [...new Set(kinds.map((kind) => kind.height))];
      return [steps.map(({ title }) => title.split(",")[0]), view.end === last, inks.length];
    })()""")
    assert drawn == [["zb_h1", "1f1b"], True, 1]  # computations alone
    name = "document.querySelector('.pictures .tl').ariaLabel"
    assert str(tab.evaluate(name)).startswith("Timeline of one step of zb_h1, 8 microbatches and")


def test_a_click_anywhere_in_a_row_opens_its_timeline_and_another_closes_it(desk: Tab) -> None:
    script = """(async () => {
      const detail = document.querySelector("#runs tr.detail");
      const isDrawn = () => detail.querySelector(".chart").childElementCount > 0;
      for (let n = 0; n < 400 && !detail.hidden && !isDrawn(); n++) await pause();
      const opener = document.querySelector("#runs .opener");
      return [!detail.hidden, isDrawn(), opener.getAttribute("aria-expanded")];
    })()"""
    click(desk, "#runs tr:has(.opener) td:nth-child(3)")
    assert desk.evaluate(script) == [True, True, "true"]
    click(desk, "#runs tr:has(.opener) td:nth-child(5)")
    assert desk.evaluate(script) == [False, True, "false"]
    click(desk, "#runs .opener")
    assert desk.evaluate(script) == [True, True, "true"]


def test_the_contents_lead_to_their_sections(desk: Tab) -> None:
    click(desk, "#contents a[href='#bubble']")
    desk.evaluate("pause(300)")
    top = desk.evaluate("frameOf(document.getElementById('bubble')).top")
    assert 0 <= top < 200  # type: ignore[operator]
    assert (
        desk.evaluate("document.querySelector('#contents [aria-current]').textContent") == "Bubble"
    )


def test_what_is_about_the_whole_sweep_is_hidden_while_filters_are_set(desk: Tab) -> None:
    chip = "#filters input[data-axis=schedule][value='1f1b']"
    desk.evaluate("document.getElementById('throughput').scrollIntoView()")
    before = desk.evaluate(
        "(async () => (await pause(200), frameOf(document.getElementById('throughput')).top))()"
    )
    click(desk, f"label.chip:has({chip[9:]})")
    shown = desk.evaluate("""(async () => {
      await pause(200);
      return {
        sweep: all(".sweep").filter((node) => node.checkVisibility()).length,
        note: document.getElementById("hidden-answer").textContent,
        name: document.querySelector("#throughput .chart").getAttribute("aria-label"),
        top: frameOf(document.getElementById("throughput")).top,
        count: document.querySelector("#throughput .concern .carriers").textContent,
      };
    })()""")
    assert shown["sweep"] == 0
    assert shown["note"].startswith("The answer is about the whole sweep")
    assert shown["name"] == "Throughput, 4 of 11 cases"
    assert shown["count"] == "1"
    assert shown["top"] == pytest.approx(before, abs=2)  # what is read stays where it is
    click(desk, "#clear")
    assert desk.evaluate("document.getElementById('answer').checkVisibility()")
    assert desk.evaluate("document.querySelector('#throughput .chart').ariaLabel") == "Throughput"


def test_failures_are_grouped_by_their_cause(desk: Tab) -> None:
    groups = desk.evaluate("all('.failure > p').map((p) => p.textContent)")
    assert groups[0].startswith("oom 3 runs: CUDA out of memory: tried to allocate 20.00 MiB")
    assert groups[1].startswith("timeout afab")
    assert len(groups) == 2
    click(desk, ".failure summary")
    assert (
        desk.evaluate("all('.failure .member').filter((node) => node.checkVisibility()).length")
        == 3
    )


def test_a_caution_stands_beside_the_charts_that_it_concerns(desk: Tab) -> None:
    click(desk, "#bubble .concern[data-caution=oversubscribed] summary")
    text = "document.querySelector('#bubble .concern[data-caution=oversubscribed]')"
    assert "3 of 11 cases" in " ".join(str(desk.evaluate(f"{text}.innerText")).split())
    assert desk.evaluate(f"{text}.querySelector('p').checkVisibility()")
    assert not desk.evaluate("document.querySelector('#memory .concern') !== null")


def test_an_answer_that_is_not_decided_says_so_first_and_what_to_do(
    browser: Browser, tmp_path: Path
) -> None:
    store, number = Store(tmp_path / "results"), 0
    for schedule, launches in {"afab": (1000, 1010, 991), "1f1b": (1060, 1020, 1111)}.items():
        for launch, speed in enumerate(launches):
            more = {"run_id": f"20260101T000000{number:03d}-abcdef", "sweep_file": "s.toml"}
            more |= {"cautions": "busy_machine", "launch": launch, "tokens_per_s": float(speed)}
            simulated_run(store, number, Case(schedule=schedule), fingerprint="f1", **more)
            number += 1
    page = tmp_path / "page.html"
    write_report(
        page, store, store.runs(), title="mine", command="ppbench sweep s.toml", sweep_text=None
    )
    tab = Tab(browser, page, PHONE, "light", LOOK)
    answer = str(tab.evaluate("document.querySelector('#answer .lead').textContent"))
    assert answer.startswith("Open. 1f1b measured")
    command = "ppbench sweep s.toml --rerun"
    assert command in str(tab.evaluate("document.getElementById('answer').textContent"))
    assert "Use 1f1b" not in str(tab.evaluate("document.body.innerText"))
    bottoms = """[".lead", ".tile:last-child"].map((selector) =>
      frameOf(document.querySelector(`#answer ${selector}`)).bottom)"""
    assert max(tab.evaluate(bottoms)) <= SCREEN_PX  # type: ignore[arg-type]
    assert tab.evaluate("overlaps()[1]") == []
    assert tab.problems() == []
    tab.close()
