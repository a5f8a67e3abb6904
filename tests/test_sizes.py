"""Functions fit a screen, classes a few, and the top of the package one list."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LONGEST_FUNCTION = 50
LONGEST_CLASS = 250
MOST_AT_THE_TOP = 12
SOURCES = sorted(
    file
    for package in ("engine", "ppbench", "benchmarks")
    for file in (ROOT / package).rglob("*.py")
)


def _too_long(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            limit = LONGEST_CLASS if isinstance(node, ast.ClassDef) else LONGEST_FUNCTION
            if length > limit:
                yield f"{node.name}, line {node.lineno}: {length} lines, at most {limit}"


@pytest.mark.parametrize("limit", ["function", "class"])
def test_what_is_too_long_is_found(limit):
    head = "def name():" if limit == "function" else "class Name:"
    most = LONGEST_FUNCTION if limit == "function" else LONGEST_CLASS
    fits, exceeds = (ast.parse(head + "\n    pass" * lines) for lines in (most - 1, most))
    assert list(_too_long(fits)) == []
    assert len(list(_too_long(exceeds))) == 1


def test_no_function_and_no_class_is_too_long():
    long = {
        str(file.relative_to(ROOT)): lines
        for file in SOURCES
        if (lines := list(_too_long(ast.parse(file.read_bytes()))))
    }
    assert len(SOURCES) > 200
    assert long == {}


def test_the_top_of_the_package_is_one_short_list():
    assert len(list((ROOT / "ppbench").glob("*.py"))) <= MOST_AT_THE_TOP
