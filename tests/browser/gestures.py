"""What a reader does to a page: mouse, wheel, fingers and keys, as the browser itself gets them."""

from __future__ import annotations

from collections.abc import Sequence

from chromium import Tab

SHIFT = 8
KEYS = {"Enter": "\r", "Escape": "", "ArrowLeft": "", "ArrowRight": "", "ArrowUp": "", "Tab": ""}
Point = tuple[float, float]


def mouse(tab: Tab, kind: str, at: Point, modifiers: int = 0, **more: object) -> None:
    x, y = at
    tab.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, modifiers=modifiers, **more)


def click(tab: Tab, at: Point, count: int = 1) -> None:
    mouse(tab, "Moved", at)
    for number in range(1, count + 1):
        for kind in ("Pressed", "Released"):
            mouse(tab, kind, at, button="left", clickCount=number)
    settle(tab)


def drag(tab: Tab, points: Sequence[Point], modifiers: int = 0) -> None:
    """Press at the first point, move over the others, and release at the last."""
    mouse(tab, "Pressed", points[0], modifiers, button="left", clickCount=1)
    for point in points[1:]:
        mouse(tab, "Moved", point, modifiers, button="left", buttons=1)
    mouse(tab, "Released", points[-1], modifiers, button="left", clickCount=1)
    settle(tab)


def wheel(tab: Tab, at: Point, down: float, across: float = 0, modifiers: int = 0) -> None:
    mouse(tab, "Wheel", at, modifiers, deltaX=across, deltaY=down)
    settle(tab)


def touch(tab: Tab, moves: Sequence[Sequence[Point]]) -> None:
    """Put fingers down at the first places, move them to the others, and lift them."""

    def fingers(points: Sequence[Point]) -> list[dict[str, float]]:
        return [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(points)]

    for number, points in enumerate(moves):
        kind = "touchMove" if number else "touchStart"
        tab.call("Input.dispatchTouchEvent", type=kind, touchPoints=fingers(points))
    tab.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    settle(tab)


def key(tab: Tab, name: str, modifiers: int = 0) -> None:
    text = name if len(name) == 1 else KEYS.get(name, "")
    common = {"key": name, "modifiers": modifiers}
    tab.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
    tab.call("Input.dispatchKeyEvent", type="keyUp", **common)
    settle(tab)


def typed(tab: Tab, text: str) -> None:
    tab.call("Input.insertText", text=text)
    settle(tab)


def settle(tab: Tab) -> None:
    """Wait until what was done is on the screen."""
    tab.evaluate(
        "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))"
    )
