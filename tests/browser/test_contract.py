"""What every page keeps to, in a real browser: it loads, fits, is legible, is reached by all."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from chromium import Browser, Tab
from made_pages import KINDS
from screens import DESK, PHONE, assert_sound, keep, needs_browser

pytestmark = needs_browser
LAPTOP = 1024
PAPER_PX = 688  # of A4, between its margins
FIRST, *OTHERS = ((PHONE, "dark"), (DESK, "light"))
"""A page is loaded on the first and then shown on the others, as on a screen that is turned."""
THOROUGH = [
    pytest.param(screens, marks=pytest.mark.thorough)
    for screens in ([(DESK, "light")], [(LAPTOP, "dark"), (DESK, "dark")], [(PHONE, "light")])
]
MOST_BYTES = 1_200_000
"""Of a page without plotly's own code."""
LOOK = """
const CONTROLS = "a, button, summary, label.chip, input[type=search]";
// What lies on the middle of a control, if it is not the control itself.
const covered = async () => {
  const bad = [];
  for (const node of all(CONTROLS).filter((item) => seen(item) || item.matches("label"))) {
    if (!node.checkVisibility()) continue;
    node.scrollIntoView({ block: "center", behavior: "instant" });
    const box = node.getClientRects()[0];
    const middle = [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
    const hit = document.elementFromPoint(...middle);
    if (hit !== node && !node.contains(hit)) {
      bad.push(`${node.outerHTML.slice(0, 90)} under ${hit?.outerHTML.slice(0, 60)}`);
    }
  }
  scrollTo(0, 0);
  return bad;
};
// Contrast of each text with what is behind it, after WCAG 2; the lowest first.
const channels = (color) => (color.match(/[\\d.]+/g) ?? []).map(Number);
const luminance = (color) => {
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = channels(color).map((c) => linear(c / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (node) => {
  for (let at = node; at; at = at.parentElement) {
    const color = getComputedStyle(at).backgroundColor;
    if ((channels(color)[3] ?? 1) > 0.9) return color;
  }
  return "rgb(255,255,255)";
};
const READ = "#answer *, #contents *, #filters *, section > p, .note, td, th, summary, li";
const isText = (node) => node.nodeType === 3 && node.data.trim();
const hasText = (node) => !node.ariaHidden && [...node.childNodes].some(isText);
const faint = () => all(READ).filter((node) => seen(node) && hasText(node))
  .map((node) => {
    const colors = [getComputedStyle(node).color, behind(node)];
    const [a, b] = colors.map(luminance).sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), node.tagName, node.textContent.trim().slice(0, 40)];
  }).filter(([contrast]) => contrast < 4.5);
const nameless = () => all("button, a, input, select, [role=figure], [role=img], [role=region]")
  .filter((node) => node.checkVisibility() && !node.ariaLabel && !node.textContent.trim())
  .filter((node) => !node.labels?.length).map((node) => node.outerHTML.slice(0, 90));
const unreached = () => all("[tabindex='-1'], [onclick]")
  .filter((node) => node.matches("button, a, summary, input")).length;
"""


@pytest.fixture(scope="module", params=KINDS)
def page(request: pytest.FixtureRequest, page_of: Callable[[str], Path]) -> Path:
    return page_of(request.param)


@pytest.mark.parametrize("screens", [[FIRST, *OTHERS], *THOROUGH], ids=str)
def test_a_page_keeps_to_the_contract(
    screens: list[tuple[int, str]], browser: Browser, page: Path, request: pytest.FixtureRequest
) -> None:
    tab = Tab(browser, page, *screens[0], LOOK)
    for width, scheme in screens:
        tab.show_as(width, scheme)
        tab.evaluate("drawAll()")
        keep(tab, re.sub(r"\W+", "-", f"{request.node.callspec.params['page']} {width} {scheme}"))
        assert_sound(tab, page)
        assert tab.evaluate("overlaps()[1]") == []
        assert tab.evaluate("faint()") == []
        assert tab.evaluate("covered()") == []
        assert tab.evaluate("nameless()") == []
        assert tab.evaluate("unreached()") == 0
    assert tab.evaluate("document.title") != "taken over"
    code = "all('script:not([type])').filter((node) => node.textContent.length > 1e6)"
    num_bytes = tab.evaluate(f"{code}.reduce((sum, node) => sum + node.textContent.length, 0)")
    assert page.stat().st_size - int(str(num_bytes)) < MOST_BYTES
    has_charts = tab.evaluate("all('.chart .plot').length > 0")
    assert tab.evaluate(f"{code}.length") == has_charts
    # Paper is white and has no controls.
    tab.show_as(PAPER_PX, "dark")
    tab.call("Emulation.setEmulatedMedia", media="print")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    tab.evaluate("pause(200)")
    assert tab.evaluate("overlaps()[1]") == []
    assert tab.evaluate("faint()") == []
    assert tab.evaluate("all('.copy, #contents, #find').filter(seen)") == []
    style = "getComputedStyle(document.body)"
    colors = tab.evaluate(f"[{style}.backgroundColor, {style}.color]")
    assert colors == ["rgb(255, 255, 255)", "rgb(0, 0, 0)"]
    assert tab.problems() == []
    tab.close()
