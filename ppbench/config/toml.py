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
from collections.abc import Callable, Iterable, Sequence
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
        match value:
            case None:  # in a condition on stored runs
                return "null"
            case bool():
                return str(value).lower()
            case str():
                return quoted(value)
            case list() | tuple():
                return f"[{', '.join(map(as_toml, value))}]"
            case int() if abs(value) >= 10**MAX_SHOWN:  # too long to write in decimals
                return hex(value)
            case dict():
                each = (f"{key_text(key)} = {as_toml(one)}" for key, one in value.items())
                return f"{{{', '.join(each)}}}"
            case _:
                return str(value)
    except RecursionError:
        return "..."


def quoted(text: str) -> str:
    """Quote a text and escape what would break a line or control a terminal."""
    return printable(json.dumps(text, ensure_ascii=False))


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
    """Say what is wrong with a key; one that is set to a table may be meant for a section."""
    hint = nearest_key(key, known, is_table=isinstance(value, dict))
    return f"unknown key, set to {shown(value)}{hint}"


def nearest_key(key: str, known: Iterable[str], *, is_table: bool = False) -> str:
    """A hint like `nearest`'s, for dotted keys.

    A key of the same name in another section is the nearest, and only dotted keys of the same
    section are listed. What is set to a table may be a section, such as `launch.slurm`.
    """
    names = list(known)
    section, leaf = key.partition(".")[0], key.rpartition(".")[2]
    namesake = next((name for name in names if name.rpartition(".")[2] == leaf), key)
    same = [name for name in names if name.startswith(f"{section}.")]
    sections = dict.fromkeys(n.rpartition(".")[0] for n in names if "." in n)
    listed = dict.fromkeys(f"{section.partition('.')[0]}.KEY" for section in sections)
    names += [word for word, meant in SYNONYMS.items() if meant in names]
    shown_names = same or [*(name for name in names if "." not in name), *listed]
    return nearest(namesake, [*names, *sections] if is_table else names, shown_names)


@dataclass(frozen=True)
class Source:
    """A TOML file as the user sees it, for messages: `file:line: key: problem`."""

    file: str
    text: str

    @functools.cached_property
    def tree(self) -> Tree:
        """Raises SweepFileError for a text that is not TOML."""
        try:
            return tomllib.loads(self.text)
        except tomllib.TOMLDecodeError as error:
            raise self._syntax_error(str(error)) from None
        except RecursionError:
            problem = "nested too deeply"
        except ValueError:  # the only other exception of the parser
            problem = "a number has too many digits"
        raise SweepFileError(self.file, self._line_that_fails(), None, problem)

    def line_of(self, place: Place) -> int | None:
        """The 1-based line of the statement that sets a place; None if nothing sets it.

        For an element of an array that has lines of its own, the line where that element ends.
        """
        found = _first(
            _ends_of_statements(self.text), lambda end: holds(_tree(self.text[:end]), place)
        )
        if found is None:
            return None
        start, end = found
        if isinstance(place[-1], int):
            ends = [start + match.end() for match in re.finditer("\n", self.text[start:end])]
            element = _first(ends, lambda end: holds(_tree(self.text[:end] + "]"), place))
            start = start if element is None else max(start, element[0])
        return self.text.count("\n", 0, start) + 1

    def error(self, place: Place, problem: str) -> SweepFileError:
        """An error at a place; one that the file lacks is reported on the line of its table."""
        present = (place[:length] for length in range(len(place), 0, -1))
        found = next((some for some in present if holds(self.tree, some)), None)
        line = None if found is None else self.line_of(found)
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
                kind = field.metadata["setting"].kind
                values[key] = self.checked(kind, table[key], (*place, key))
            elif field.default is field.default_factory is dataclasses.MISSING:
                raise self.error((*place, key), "is missing")
        return owner(**values)

    def checked(self, kind: Any, value: object, place: Place) -> Any:
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

    def _line_that_fails(self) -> int:
        """The line where the first statement begins that does not parse."""
        found = _first(_ends_of_statements(self.text), lambda end: _tree(self.text[:end]) is None)
        return 1 if found is None else self.text.count("\n", 0, found[0]) + 1

    def _syntax_error(self, reason: str) -> SweepFileError:
        """An error with the line where parsing fails, and the one where its statement begins."""
        message, _, place = reason.rpartition(" (at ")
        lines, numbers = self.text.split("\n"), re.findall(r"\d+", place)
        if len(numbers) == 2:
            number, at = int(numbers[0]), f"at column {numbers[1]}"
        else:
            number, at = len(self.text.rstrip().split("\n")), "at the end of the file"
        start, content = self._line_that_fails(), printable(lines[number - 1].strip())
        begun = f" (in the statement that begins on line {start})" if start < number else ""
        names = re.sub(r"\('(.*?)',?\)", lambda match: match[1].replace("', '", "."), message)
        shown_line = f": {cut(content)}" if content else ""
        problem = f"not valid TOML: {names[:1].lower()}{names[1:]} {at}{begun}{shown_line}"
        return SweepFileError(self.file, number, None, problem)


def text_of(place: Place) -> str:
    """The dotted key of a place, without indices."""
    return cut(".".join(key_text(step) for step in place if isinstance(step, str)))


def read_source(file: Path, what: str = "the sweep file") -> Source:
    """Read a TOML file. Raises UsageError, SweepFileError."""
    name = printable(str(file))
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{name}: cannot read {what}: {error.strerror}") from error
    except ValueError:  # a null byte in the name
        raise UsageError(f"{name}: not a valid file name") from None
    if len(content) > MAX_BYTES:
        raise UsageError(f"{name}: too large for {what} (at most 1 MiB)")
    try:
        text = content.decode("utf-8-sig")  # a byte order mark is no mistake
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem = f"not a text file in UTF-8: {error.reason} at byte {error.start}"
        raise SweepFileError(str(file), line, None, problem) from None
    return Source(str(file), text.replace("\r\n", "\n"))


_TOKEN = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}(?!")'  # one or two quotes may precede the closing ones
    r"|'''.*?'{3,5}(?!')"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*"
    r"|[\[\]{}\n]",
    re.DOTALL,
)


def holds(tree: Any, place: Place) -> bool:
    """Whether a tree of tables and arrays has something at a place."""
    for step in place:
        is_index = isinstance(tree, list) and isinstance(step, int) and step < len(tree)
        if not is_index and not (isinstance(tree, dict) and step in tree):
            return False
        tree = tree[step]
    return True


def _tree(text: str) -> Tree | None:
    """The tree of a text; None if it is not TOML."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return None


def _ends_of_statements(text: str) -> list[int]:
    """Where statements end. Blank lines and comments count, so each begins on its own line."""
    depth, ends = 0, []
    for token in _TOKEN.finditer(text):
        mark = token[0]
        depth += (mark in ("[", "{")) - (mark in ("]", "}"))
        if mark == "\n" and depth <= 0:
            ends.append(token.end())
    return [*ends, len(text)]


def _first(ends: Sequence[int], is_reached: Callable[[int], bool]) -> tuple[int, int] | None:
    """The first end at which it holds, after the end before; it must stay true once it is."""
    index = bisect_left(ends, True, key=is_reached)
    return None if index == len(ends) else (ends[index - 1] if index else 0, ends[index])
