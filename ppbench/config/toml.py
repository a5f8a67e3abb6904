"""The text of a TOML file, and the line of each key.

The standard parser gives no lines, and a second parser could disagree with it. So the standard
parser is used to find them: the statement that sets a key is the first one after which the text so
far has that key. Brackets and quotes alone say where statements end, and bisection over these ends
needs to parse only a few prefixes.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import json
import re
import tomllib
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ppbench.errors import SweepFileError, UsageError, nearest

T = TypeVar("T")
Tree = dict[str, object]
Place = tuple[str | int, ...]
"""A path from the top of a file: keys, and indices of arrays."""
SYNONYMS = {"ranks": "world_size", "microbatches": "num_microbatches"}
"""Other words for settings, taken wherever a person names one; what is stored keeps one name."""
MAX_BYTES = 1_048_576
"""Largest size of a file; 100,000 values take less."""
MAX_SHOWN = 60
_TYPE_NAMES = {
    bool: "a boolean",
    int: "an integer",
    float: "a float",
    str: "a string",
    list: "an array",
    dict: "a table",
    dt.date: "a date",
    dt.time: "a time",
    dt.datetime: "a date and time",
}
_BARE_KEY = re.compile(r"[A-Za-z0-9_.-]+")


def shown(value: object) -> str:
    """A value as TOML would write it, with its type, cut to a readable length."""
    return f"{brief(value)} ({_TYPE_NAMES.get(type(value), 'a ' + type(value).__name__)})"


def brief(value: object) -> str:
    """A value as TOML would write it, on one line, cut to a readable length."""
    return cut(as_toml(value))


def as_toml(value: object) -> str:
    """A value as TOML on one line; `...` for a table too deep for Python to write."""
    try:
        return _written(value)
    except RecursionError:
        return "..."


def _written(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return quoted(value)
        case list() | tuple():
            return f"[{', '.join(map(_written, value))}]"
        case int() if abs(value) >= 10**MAX_SHOWN:  # too long to write in decimals
            return hex(value)
        case dict():
            return f"{{{', '.join(f'{key_text(k)} = {_written(v)}' for k, v in value.items())}}}"
        case _:
            return str(value)


def quoted(text: str) -> str:
    """Quote a text and escape what would break a line or control a terminal."""
    escaped = json.dumps(text, ensure_ascii=False)
    return printable(escaped)


def printable(text: str) -> str:
    """Escape what cannot be printed on one line."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def key_text(key: str) -> str:
    """A key, quoted where TOML requires it."""
    return key if _BARE_KEY.fullmatch(key) else quoted(key)


def cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def setting_named(key: str) -> str:
    """The key of a sweep file that a word means: itself, unless it is a synonym."""
    return SYNONYMS.get(key, key)


def column_named(name: str) -> str:
    """The column of `runs` that a word or a dotted key means, as far as it is one."""
    return setting_named(name).replace(".", "_")


def unknown_key(key: str, value: object, known: Iterable[str]) -> str:
    return f"unknown key, set to {shown(value)}{nearest_key(key, known)}"


def nearest_key(key: str, known: Iterable[str]) -> str:
    """A hint like `nearest`'s, for dotted keys.

    A key of the same name in another section is the nearest, and only dotted keys of the same
    section are listed.
    """
    names = list(known)
    section, leaf = key.partition(".")[0], key.rpartition(".")[2]
    namesake = next((name for name in names if name.rpartition(".")[2] == leaf), key)
    same = [name for name in names if name.startswith(f"{section}.")]
    sections = dict.fromkeys(f"{n.partition('.')[0]}.KEY" for n in names if "." in n)
    names += [word for word, meant in SYNONYMS.items() if meant in names]
    return nearest(namesake, names, same or [*(n for n in names if "." not in n), *sections])


@dataclass(frozen=True)
class Source:
    """A file as the user sees it, for messages: `file:line: key: problem`."""

    file: str
    text: str

    @functools.cached_property
    def tree(self) -> Tree:
        return tomllib.loads(self.text)

    def error(self, place: Place, problem: str) -> SweepFileError:
        """An error at a place; one that the file lacks is reported on the line of its table."""
        present = (place[:length] for length in range(len(place), 0, -1))
        found = next((some for some in present if holds(self.tree, some)), None)
        line = None if found is None else line_of(self.text, found)
        return SweepFileError(self.file, line, text_of(place), problem)

    def read(self, owner: type[T], table: object, place: Place) -> T:
        """Read a table into a dataclass whose fields are declared by `ppbench.config.case.setting`.

        Raises SweepFileError for a table that is none, and for keys that are unknown, missing or
        set to what they cannot have.
        """
        if not isinstance(table, dict):
            raise self.error(place, f"expected a table; got {shown(table)}")
        fields = dataclasses.fields(owner)  # type: ignore[arg-type]
        declared = {field.name: field for field in fields if "setting" in field.metadata}
        for key, value in table.items():  # a key that is misspelt explains one that is missing
            if key not in declared:
                raise self.error((*place, key), unknown_key(key, value, declared))
        values = {}
        for key, field in declared.items():
            if key in table:
                values[key] = self.checked(
                    field.metadata["setting"].kind, table[key], (*place, key)
                )
            elif field.default is field.default_factory is dataclasses.MISSING:
                raise self.error((*place, key), "is missing")
        return owner(**values)

    def checked(self, kind: Any, value: object, place: Place) -> object:
        """Check a value. Raises SweepFileError."""
        try:
            return kind.check(value)
        except ValueError as error:
            raise self.error(place, str(error)) from None

    def tables(self, value: object, place: Place) -> list[tuple[object, Place]]:
        """The tables of an array in double brackets, each with its place. Raises SweepFileError."""
        if not isinstance(value, list):
            raise self.error(place, f"expected [[{text_of(place)}]], an array of tables")
        return [(table, (*place, index)) for index, table in enumerate(value)]


def text_of(place: Place) -> str:
    """The dotted key of a place, without indices."""
    return cut(".".join(key_text(step) for step in place if isinstance(step, str)))


def read_text(file: Path) -> str:
    name = printable(str(file))
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{name}: cannot read the sweep file: {error.strerror}") from error
    except ValueError:  # a null byte in the name
        raise UsageError(f"{name}: not a valid file name") from None
    if len(content) > MAX_BYTES:
        raise UsageError(f"{name}: too large for a sweep file (at most 1 MiB)")
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")  # a byte order mark is no mistake
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem = f"not a text file in UTF-8: {error.reason} at byte {error.start}"
        raise SweepFileError(str(file), line, None, problem) from None


def parse(file: Path, text: str) -> Tree:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(file, text, str(error)) from None
    except RecursionError:
        problem = "nested too deeply"
    except ValueError:  # the only other exception of the parser
        problem = "a number has too many digits"
    raise SweepFileError(str(file), line_that_fails(text), None, problem)


def _syntax_error(file: Path, text: str, reason: str) -> SweepFileError:
    """An error with the line where parsing fails, and the one where its statement begins."""
    message, _, place = reason.rpartition(" (at ")
    lines = text.split("\n")
    numbers = [int(number) for number in re.findall(r"\d+", place)]
    number, column = numbers if len(numbers) == 2 else (len(text.rstrip().split("\n")), None)
    content = printable(lines[number - 1].strip())
    at = f" at column {column}" if column else " at the end of the file"
    start = line_that_fails(text)
    begun = f" (in the statement that begins on line {start})" if start and start < number else ""
    names = re.sub(r"\('(.*?)',?\)", lambda match: match[1].replace("', '", "."), message)
    problem = f"not valid TOML: {names[:1].lower()}{names[1:]}{at}{begun}"
    return SweepFileError(
        str(file), number, None, f"{problem}: {cut(content)}" if content else problem
    )


_FILLING = re.compile(r"(?:\s|#[^\n]*)*")
"""White space and comments."""
_TOKEN = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}(?!")'  # one or two quotes may precede the closing ones
    r"|'''.*?'{3,5}(?!')"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*"
    r"|[\[\]{}.,=\n]",
    re.DOTALL,
)


def line_of(text: str, path: Place) -> int | None:
    """The 1-based line where the statement that sets `path` begins; None if nothing sets it.

    For an element of an array, the line of that element.
    """
    statement = _first_statement(text, lambda tree: tree is not None and holds(tree, path))
    if statement is None:
        return None
    start, end = statement
    return _line_at(text, _place_of_element(text, start, end, path[-1]))


def line_that_fails(text: str) -> int | None:
    """The line where the first statement begins that does not parse."""
    statement = _first_statement(text, lambda tree: tree is None)
    return None if statement is None else _line_at(text, statement[0])


def holds(tree: Any, path: Place) -> bool:
    """Whether a tree of tables and arrays has something at `path`."""
    for step in path:
        is_index = isinstance(tree, list) and isinstance(step, int) and step < len(tree)
        if not is_index and not (isinstance(tree, dict) and step in tree):
            return False
        tree = tree[step]
    return True


def _first_statement(
    text: str, is_reached: Callable[[dict[str, object] | None], bool]
) -> tuple[int, int] | None:
    """Start and end of the first statement after which `is_reached` holds for the text so far.

    `is_reached` must stay true once it is; it gets None for a text that does not parse.
    """

    def is_reached_at(end: int) -> bool:
        try:
            return is_reached(tomllib.loads(text[:end]))
        except (ValueError, RecursionError):
            return is_reached(None)

    # Blank lines and comments count as statements, so each begins on its own line.
    depth, ends = 0, []
    for token in _TOKEN.finditer(text):
        mark = token[0]
        depth += (mark in ("[", "{")) - (mark in ("]", "}"))
        if mark == "\n" and depth <= 0:
            ends.append(token.end())
    ends.append(len(text))
    index = bisect_left(ends, True, key=is_reached_at)
    if index == len(ends):
        return None
    return ends[index - 1] if index else 0, ends[index]


def _place_of_element(text: str, start: int, end: int, step: str | int) -> int:
    """The start of an array's element in a statement; else the statement's start."""
    if not isinstance(step, int) or "\n" not in text[start : end - 1]:
        return start
    depth, num_before = 0, 0
    for token in _TOKEN.finditer(text, start, end):
        mark = token[0]
        depth += (mark in ("[", "{")) - (mark in ("]", "}"))
        num_before += mark == "," and depth == 1
        if num_before == step and mark[0] not in "\n#" and depth > 0:
            before = token.end() if depth == 1 else token.start()
            filling = _FILLING.match(text, before, end)
            return before if filling is None else filling.end()
    return start


def _line_at(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1
