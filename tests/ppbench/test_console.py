"""Prose at a terminal: wrapped at words with a hanging indent, and untouched in a pipe."""

import io

import pytest

from ppbench.console import wrapped

TEXT = "note: the launches of before are from another machine, so no noise is known from them"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("COLUMNS", "40")
    return Terminal()


def test_long_lines_are_wrapped_at_words_with_a_hanging_indent(terminal: Terminal) -> None:
    first, *rest = wrapped(TEXT, terminal).splitlines()
    assert rest
    assert all(len(line) <= 40 for line in (first, *rest))
    assert all(line.startswith("  ") for line in rest)
    assert " ".join([first, *(line.strip() for line in rest)]) == TEXT


def test_lines_that_fit_keep_their_blanks(terminal: Terminal) -> None:
    table = " case   step (ms)\n ────────────────\n a         1,000.0"
    assert wrapped(table, terminal) == table


def test_a_command_is_not_broken(terminal: Terminal) -> None:
    command = "ppbench sweep a-long-name.toml --set measure.launches=7"
    lines = wrapped(f"To decide it, measure 7 launches of each: {command}", terminal).splitlines()
    assert lines[-1].strip() == command
    assert wrapped(command, terminal) == command


def test_a_sentence_that_begins_like_a_command_is_wrapped(terminal: Terminal) -> None:
    text = "ppbench check: regression: 2 metrics regressed beyond their thresholds"
    assert len(wrapped(text, terminal).splitlines()) == 2


def test_a_pipe_gets_one_line() -> None:
    assert wrapped(TEXT, io.StringIO()) == TEXT
