"""On which line of a TOML file a key stands.

The standard parser does not tell, and a second parser could disagree with it. So the parser itself
is asked: the first statement after which the text holds the key is the one that sets it. Where
statements end is told by brackets and quotes alone; of the text up to each end, bisection parses a
few.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_left
from collections.abc import Callable

Path = tuple[str | int, ...]
MAX_PARTS = 100
_TOKEN = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}(?!")'  # a quote or two may stand right before the closing ones
    r"|'''.*?'{3,5}(?!')"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*"
    r"|[\[\]{}.,=\n]",
    re.DOTALL,
)


def line_of(text: str, path: Path) -> int | None:
    """The 1-based line where the statement that sets `path` begins; None if nothing sets it.

    For an element of an array, the line of that element.
    """
    found = _first_statement(text, lambda tree: tree is not None and holds(tree, path))
    if found is None:
        return None
    start, end = found
    return _line_at(text, _place_of_element(text, start, end, path[-1]))


def line_that_fails(text: str) -> int | None:
    """The line where the first statement begins that the parser cannot take."""
    found = _first_statement(text, lambda tree: tree is None)
    return None if found is None else _line_at(text, found[0])


def line_of_long_key(text: str) -> int | None:
    """The line of a dotted key of so many parts that the parser, quadratic in them, would hang."""
    if text.count(".") <= MAX_PARTS:
        return None
    num_dots = 0
    for token in _TOKEN.finditer(text):
        if token[0] == ".":
            num_dots += 1
        elif token[0] in "=,[]{}\n":
            num_dots = 0
        if num_dots > MAX_PARTS:
            return _line_at(text, token.start())
    return None


def holds(tree: object, path: Path) -> bool:
    """Whether a tree of tables and arrays has something at `path`."""
    for step in path:
        if isinstance(tree, dict) and step in tree:
            tree = tree[step]
        elif isinstance(tree, list) and isinstance(step, int):
            if step >= len(tree):
                return False
            tree = tree[step]
        else:
            return False
    return True


def _first_statement(
    text: str, is_reached: Callable[[dict[str, object] | None], bool]
) -> tuple[int, int] | None:
    """Start and end of the first statement with which the text so far is as asked.

    `is_reached` must stay true once it is; it is given None for a text that does not parse.
    """
    ends = _ends_of_statements(text)
    index = bisect_left(ends, True, key=lambda end: is_reached(_parse(text[:end])))
    if index == len(ends):
        return None
    return ends[index - 1] if index else 0, ends[index]


def _ends_of_statements(text: str) -> list[int]:
    """Blank lines and comments count as statements, so each begins on a line of its own."""
    depth, ends = 0, []
    for token in _TOKEN.finditer(text):
        mark = token[0]
        depth += (mark in ("[", "{")) - (mark in ("]", "}"))
        if mark == "\n" and depth <= 0:
            ends.append(token.end())
    return [*ends, len(text)]


def _parse(text: str) -> dict[str, object] | None:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return None


def _place_of_element(text: str, start: int, end: int, step: str | int) -> int:
    """Where in a statement an array's element begins; the statement's start if it is none."""
    if not isinstance(step, int) or "\n" not in text[start : end - 1]:
        return start
    depth, num_before = 0, 0
    for token in _TOKEN.finditer(text, start, end):
        mark = token[0]
        depth += (mark in ("[", "{")) - (mark in ("]", "}"))
        num_before += mark == "," and depth == 1
        if num_before == step and mark[0] not in "\n#" and depth > 0:
            return _next_content(text, token.end() if depth == 1 else token.start(), end)
    return start


def _next_content(text: str, place: int, end: int) -> int:
    """Past white space and comments."""
    found = re.compile(r"(?:\s|#[^\n]*)*").match(text, place, end)
    return place if found is None else found.end()


def _line_at(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1
