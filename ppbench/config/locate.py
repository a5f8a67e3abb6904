"""On which line of a TOML file a key stands.

The standard parser does not tell, and a second parser could disagree with it. So the parser itself
is asked: the first line after which the text parses and holds the key is the end of the key's
statement. Quadratic in the number of lines, and run only when there is an error to report.
"""

from __future__ import annotations

import tomllib

Path = tuple[str | int, ...]


def line_of(text: str, path: Path) -> int | None:
    """The 1-based line where the statement that sets `path` begins; None if nothing sets it.

    For an element of an array, the line of that element when it can be told apart.
    """
    lines = text.splitlines()
    last_whole = 0
    for end in range(1, len(lines) + 1):
        parsed = _parse("\n".join(lines[:end]))
        if parsed is None:
            continue
        if holds(parsed, path):
            start = _first_content(lines, last_whole)
            return _element_line(lines, start, end, path[-1])
        last_whole = end
    return None


def _parse(text: str) -> dict[str, object] | None:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
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


def _first_content(lines: list[str], start: int) -> int:
    """The next line that is neither blank nor a comment."""
    while start < len(lines) - 1 and (not lines[start].strip() or lines[start].strip()[0] == "#"):
        start += 1
    return start


def _element_line(lines: list[str], start: int, end: int, step: str | int) -> int:
    """Within a statement that spans lines, elements usually stand one to a line."""
    if isinstance(step, int) and end - start > 2:
        content = [i for i in range(start + 1, end) if lines[i].strip() not in ("", "]")]
        if step < len(content) and all(lines[i].count(",") <= 1 for i in content):
            return content[step] + 1
    return start + 1
