"""A sweep file as its author sees it: its text, what it parses to, the line of a mistake."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ppbench.config.locate import MAX_PARTS, holds, line_of, line_of_long_key, line_that_fails
from ppbench.config.locate import Path as Place
from ppbench.config.problems import cut, key_text, printable
from ppbench.errors import SweepFileError, UsageError

Tree = dict[str, object]
MAX_BYTES = 1_048_576
"""Of a sweep file. 100,000 values take less; what is larger is something else."""


@dataclass(frozen=True)
class Source:
    """The file as the user sees it, for messages."""

    file: str
    text: str
    overridden: frozenset[str]

    @functools.cached_property
    def tree(self) -> Tree:
        """Before overrides; asked for only when there is an error to report."""
        return tomllib.loads(self.text)

    def error(self, path: Place, problem: str) -> SweepFileError:
        steps = [step for step in path if isinstance(step, str)]
        key = cut(".".join(map(key_text, steps)))
        if self.is_overridden(path):
            return SweepFileError("--set", None, key, problem)
        standing = next((end for end in _shortened(path) if holds(self.tree, end)), None)
        line = None if standing is None else line_of(self.text, standing)
        return SweepFileError(self.file, line, key, problem)

    def error_of(
        self, key: str, axes: Mapping[str, object], others: Sequence[str], problem: str
    ) -> SweepFileError:
        """About a key that may have been left at its default, by the line of what asks for more."""
        path = self.path_of(key, axes)
        if self.is_overridden(path) or holds(self.tree, path[:1]):
            return self.error(path, problem)
        paths = (self.path_of(other, axes) for other in others)
        there = next((one for one in paths if holds(self.tree, one)), None)
        line = None if there is None else line_of(self.text, there)
        return SweepFileError(self.file, line, key, problem)

    def path_of(self, key: str, axes: Mapping[str, object]) -> Place:
        return self.path_in(("grid",) if key in axes else (), key)

    def is_overridden(self, path: Place) -> bool:
        key = ".".join(step for step in path if isinstance(step, str))
        return key in self.overridden or key.removeprefix("grid.") in self.overridden

    def path_in(self, table: Place, key: str) -> Place:
        """The path of a dotted key, which may be written quoted or as nested tables."""
        quoted = (*table, key)
        return quoted if holds(self.tree, quoted) else (*table, *key.split("."))


def _shortened(path: Place) -> Iterable[Place]:
    """The path, then its parents: an absent key is reported where its table stands."""
    return (path[:length] for length in range(len(path), 0, -1))


def read_text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{file}: cannot read the sweep file: {error.strerror}") from error
    except ValueError:  # a null byte in the name
        raise UsageError(f"{printable(str(file))}: no file can have this name") from None
    if len(content) > MAX_BYTES:
        raise UsageError(f"{file}: larger than {MAX_BYTES:,} bytes; no sweep file is")
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")  # a byte order mark is no mistake
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem = f"not a text file in UTF-8: {error.reason} at byte {error.start}"
        raise SweepFileError(str(file), line, None, problem) from None


def parse(file: Path, text: str) -> Tree:
    if line := line_of_long_key(text):
        problem = f"nested too deeply: a key of more than {MAX_PARTS} parts"
        raise SweepFileError(str(file), line, None, problem)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(file, text, str(error)) from None
    except RecursionError:
        problem = "nested too deeply"
    except ValueError:  # the one other thing that the parser raises
        problem = "a number has too many digits"
    raise SweepFileError(str(file), line_that_fails(text), None, problem)


def _syntax_error(file: Path, text: str, told: str) -> SweepFileError:
    """With the line that the parser stumbles on, and the one where its statement begins."""
    message, _, place = told.rpartition(" (at ")
    lines = text.split("\n")
    numbers = [int(number) for number in re.findall(r"\d+", place)]
    number, column = numbers if len(numbers) == 2 else (len(text.rstrip().split("\n")), None)
    content = printable(lines[number - 1].strip())
    at = f" at column {column}" if column else " at the end of the file"
    start = line_that_fails(text)
    begun = f" (in what begins on line {start})" if start and start < number else ""
    names = re.sub(r"\('(.*?)',?\)", lambda found: found[1].replace("', '", "."), message)
    problem = f"not valid TOML: {names[:1].lower()}{names[1:]}{at}{begun}"
    return SweepFileError(
        str(file), number, None, f"{problem}: {cut(content)}" if content else problem
    )
