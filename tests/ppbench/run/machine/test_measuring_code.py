"""The identity of the measuring code depends on what the code does, and on nothing else."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from ppbench.run.machine import measuring_code
from ppbench.run.machine.measuring_code import (
    MEASURING,
    ROOT,
    VERIFYING,
    code_hash,
    files_in,
    identity_of,
)

FILES = sorted(files_in(ROOT / place for place in MEASURING))
EXECUTOR = ROOT / "engine" / "run" / "executor.py"
ONE_PLACE = ("engine/run/executor.py",)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def reworded(source: bytes) -> bytes:
    """The same code with other docstrings, without its comments, formatted otherwise."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Expr(ast.Constant("Says something else."))
        elif isinstance(node, ast.FunctionDef):
            node.body.insert(0, ast.Expr(ast.Constant("Has a docstring now.")))
    return ast.unparse(ast.fix_missing_locations(tree)).encode()


def moved(source: bytes) -> bytes:
    """The same code, as it is when every module of ours that it imports lies elsewhere."""
    text = source.decode()
    for room in ("engine.run.", "engine.model.", "ppbench.run.", "ppbench.analysis."):
        text = text.replace(f"from {room}", f"from engine.elsewhere.{room}")
        text = text.replace(f'"{room}', f'"engine.elsewhere.{room}')
    lines = text.splitlines(keepends=True)
    imports = [line for line in lines if line.startswith("from engine") and "(" not in line]
    others = [line for line in lines if line not in imports]
    at = next((i for i, line in enumerate(others) if line.startswith("from __future__")), -1) + 1
    return "".join([*others[:at], *reversed(imports), *others[at:]]).encode()


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            marks=() if number % 5 == 0 or path == EXECUTOR else pytest.mark.thorough,
            id=str(path.relative_to(ROOT)),
        )
        for number, path in enumerate(FILES)
    ],
)
def test_words_formatting_and_places_are_no_part_of_it(path):
    source = path.read_bytes()
    assert identity_of([reworded(source)]) == identity_of([source])
    assert identity_of([moved(source)]) == identity_of([source])
    assert identity_of([b"# a comment\n\n" + source]) == identity_of([source])


def test_neither_is_the_order_of_the_files():
    sources = [path.read_bytes() for path in FILES[:9]]
    assert identity_of(reversed(sources)) == identity_of(sources)
    assert identity_of([*sources[1:], sources[0]]) == identity_of(sources)


@pytest.mark.parametrize(
    ("source", "other"),
    [
        ("x = 1\n", "x = 2\n"),
        ("x = True\n", "x = False\n"),
        ("x = 'one'\n", "x = 'two'\n"),
        ("x = a\n", "x = b\n"),
        ("x = a < b\n", "x = a <= b\n"),
        ("x = a + b\n", "x = a - b\n"),
        ("f()\n", "f(1)\n"),
        ("x = 1\ny = 2\n", "y = 2\nx = 1\n"),
    ],
)
def test_whatever_else_is_changed_changes_it(source, other):
    assert identity_of([source.encode()]) != identity_of([other.encode()])


def test_a_name_that_is_imported_under_another_changes_it():
    source = b"from engine.run.clock import HostClock\n"
    assert identity_of([source]) == identity_of([b"from engine.other import HostClock\n"])
    assert identity_of([source]) != identity_of([b"from engine.run.clock import Other\n"])
    assert identity_of([source]) != identity_of([source.replace(b"\n", b" as Clock\n")])
    assert identity_of([b"from torch import a\n"]) != identity_of([b"from numpy import a\n"])


def test_every_place_is_there_and_the_executor_is_among_them():
    assert all((ROOT / place).exists() for place in VERIFYING)
    assert EXECUTOR in FILES
    assert not any("report" in path.parts for path in FILES)


def test_what_turns_spans_into_figures_is_listed_whole():
    figures = re.compile(r"^from (ppbench\.(?:analysis|statistics)\.\w+) import", re.MULTILINE)
    imported = {name for path in FILES for name in figures.findall(path.read_text())}
    assert imported
    assert {ROOT / f"{name.replace('.', '/')}.py" for name in imported} <= set(FILES)


@pytest.mark.parametrize("has_home", [True, False])
def test_where_nothing_can_be_cached_it_costs_time_alone(tmp_path, monkeypatch, has_home):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file") if has_home else "")
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("no home directory")))
    (tmp_path / "file").touch()
    code_hash.cache_clear()
    assert code_hash(ONE_PLACE) == identity_of([EXECUTOR.read_bytes()])
    code_hash.cache_clear()


def test_what_is_cached_is_not_parsed_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code_hash.cache_clear()
    expected = code_hash(ONE_PLACE)
    code_hash.cache_clear()
    monkeypatch.setattr(measuring_code, "identity_of", pytest.fail)
    assert code_hash(ONE_PLACE) == expected
    code_hash.cache_clear()
