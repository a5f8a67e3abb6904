"""The files and commands of a page of the documentation, in the order in which a reader meets them.

Save this as `mine.toml`:          ->  File("mine.toml", ...)
```toml ... ```
```sh ... ``` and `$ ...` in ```console ... ```   ->  Line("ppbench sweep mine.toml")
<!-- exit: 2 --> before a block: its last command ends with that code
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    "README.md": ROOT / "README.md",
    **{str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md"))},
}
_FENCE = re.compile(r"^```([\w-]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"[Ss]ave (?:this|it) as\s+`([\w./-]+)`")
_EXIT = re.compile(r"<!-- exit: (\d+) -->")
_PROMPT = "$ "
ANYTHING = "…"
"""A line that stands for any number of lines of a transcript."""


@dataclass(frozen=True)
class File:
    """A file that a page asks its reader to save."""

    name: str
    text: str


@dataclass(frozen=True)
class Line:
    """A command line of a page; `shown` is its output there, None where the page shows none."""

    text: str
    exit_code: int = 0
    shown: str | None = None


def steps_of(page: Path) -> Iterator[File | Line]:
    """The files to save and the commands to run, from top to bottom."""
    return steps_in(page.read_text())


def steps_in(text: str) -> Iterator[File | Line]:
    """The same of a part of a page."""
    end = 0
    for fence in _FENCE.finditer(text):
        before = text[end : fence.start()]
        end = fence.end()
        language, content = fence[1], fence[2]
        names = _NAME.findall(before)
        code = int(codes[-1]) if (codes := _EXIT.findall(before)) else 0
        if language in ("sh", "bash"):
            lines = list(_commands(content))
            yield from (Line(line) for line in lines[:-1])
            yield Line(lines[-1], code)
        elif language == "console":
            yield from _transcript(content, code)
        elif names:
            yield File(names[-1], content)


def parts_of(page: Path, headings: Sequence[str]) -> Iterator[str]:
    """A page cut before each of these headings."""
    rest = page.read_text()
    for heading in headings:
        part, found, below = rest.partition(f"\n## {heading}\n")
        assert found, f"{page.name}: has no heading {heading!r}"
        yield part
        rest = f"{found}{below}"
    yield rest


def _commands(script: str) -> Iterator[str]:
    for line in script.replace("\\\n", " ").splitlines():
        command = re.sub(r"\s+#\s.*$", "", line).strip()
        if command and not command.startswith("#"):
            yield command


def _transcript(content: str, code: int) -> Iterator[Line]:
    """Each `$ command` with the lines below it."""
    parts = re.split(rf"^{re.escape(_PROMPT)}", content, flags=re.MULTILINE)[1:]
    for number, part in enumerate(parts):
        command, _, output = part.partition("\n")
        yield Line(command.strip(), code if number == len(parts) - 1 else 0, output)


def matches(shown: str, printed: str) -> bool:
    """Whether a transcript shows what was printed, where `…` may stand for some lines."""
    parts = [re.escape(part) for part in trimmed(shown).split(f"{ANYTHING}\n")]
    return re.fullmatch("(?:.*\n)*?".join(parts), trimmed(printed)) is not None


def trimmed(text: str) -> str:
    """A text without blanks at the ends of its lines, and without empty lines around it."""
    return "".join(f"{line.rstrip()}\n" for line in text.strip("\n").splitlines())
