"""Prints the answer of a command, in the format, the columns and the order that are asked for.

A command that answers with a `Result` is declared with `answers`. Nothing else reads the options
`--format`, `--columns`, `--sort` and `-o`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from ppbench.cli import completion
from ppbench.cli.browser import open_page
from ppbench.cli.declare import option
from ppbench.cli.options import REPORTS, with_options
from ppbench.console import note
from ppbench.display.document import Code, Result, render, seen_blocks
from ppbench.display.formats import Format
from ppbench.display.rows import AS_IT_IS, Record, View
from ppbench.files import check_suffix, is_stream, write_file

HowToPrint = Annotated[Format, option("--format", "Output format.")]
Columns = Annotated[
    list[str] | None,
    option("--columns A,B,...", "Show these columns, by their names.", completion.columns),
]
Sort = Annotated[
    str | None,
    option("--sort [-]COLUMN", "Sort by a column; with - the other way.", completion.columns),
]
Also = Annotated[
    Path | None, option("-o --output FILE", "Also write it: as a page (.html), .md, .json or .csv.")
]
_OPTIONS = {
    "how": (HowToPrint, Format.table),
    "columns": (Columns, None),
    "sort": (Sort, None),
    "output": (Also, None),
}
SUFFIXES = {
    ".html": None,
    ".json": Format.json,
    ".csv": Format.csv,
    ".md": Format.markdown,
    ".txt": Format.table,
}
"""The endings of files that `-o` writes, and their formats; a page has none."""


def answers(
    name: str,  # noqa: ARG001  # read from the source with group and place; see `commands.py`
    group: str,  # noqa: ARG001
    place: int,  # noqa: ARG001
    known: Callable[[], Iterable[str]] | None = None,
) -> Callable[[Callable[..., Result]], Callable[..., None]]:
    """Declare a command of a name, in its place in a group: it prints what it returns.

    `known` returns the columns that the rows can have. A command that measures says them, so that
    no other is asked for in vain. A command that writes a file has an option `-o` of its own, and
    no rows to choose from.
    """

    def declare(command: Callable[..., Result]) -> Callable[..., None]:
        given_here = set(inspect.signature(command).parameters)
        if "output" in given_here:
            given_here |= {"columns", "sort"}
        added = {key: one for key, one in _OPTIONS.items() if key not in given_here}

        @functools.wraps(command)
        def run(*given: Any, **options: Any) -> None:
            asked = {key: options.pop(key, default) for key, (_, default) in added.items()}
            how, output = asked.get("how", Format.table), asked.get("output")
            view = View.of(asked.get("columns"), asked.get("sort"))
            if known is not None and view != AS_IT_IS:
                names = list(known())
                view.names(names)
                view.order(names)
            if output is not None and not is_stream(output):
                check_suffix(output, tuple(SUFFIXES))
            result = command(*given, **options)
            emit(result, how, view, output)
            if result.exit_code:
                raise typer.Exit(result.exit_code)

        run.answer = command  # type: ignore[attr-defined]
        return with_options(run, command, added)

    return declare


def catalogue() -> list[str]:
    """The columns of runs, and those that commands compute."""
    from ppbench.store.columns import COMPUTED, TABLES

    every = [TABLES["runs"], *COMPUTED.values()]
    return list(dict.fromkeys(column.name for columns in every for column in columns))


def emit(
    result: Result,
    how: Format = Format.table,
    view: View = AS_IT_IS,
    output: Path | None = None,
) -> None:
    """Print a result, and write it into a file too if one is given."""
    text, asides = render(result, how, view), list(result.asides)
    output = output or result.page
    if output is not None:
        asides.append(_written(result, view, output))
    if text and not result.is_printed:
        print(text)
    if how is Format.csv:
        for line in result.notes:
            note(f"note: {line}")
    is_below = how is Format.table and not (output is not None and is_stream(output))
    for line in asides:
        print(line, file=sys.stdout if is_below else sys.stderr)
    if output is not None and result.is_opened:
        open_page(output)


def _written(result: Result, view: View, output: Path) -> str:
    """Write a result as the ending of the file says, a page where it has none."""
    if (how := SUFFIXES.get(output.suffix)) is not None:
        write_file(output, [f"{render(result, how, view)}\n"])
        return f"saved: {output}"
    from ppbench.report.pages.provenance import ANSWER, About
    from ppbench.report.pages.templates import listed, page, write_page

    folder = REPORTS if result.page is None else result.page.parent
    with listed(output, folder):  # a page in the folder of reports is added to their index
        if result.own_page is not None:
            write_page(output, result.own_page())
        else:
            seen = dataclasses.replace(result, blocks=seen_blocks(result, view))
            write_page(output, page(seen, About(ANSWER, output.stem)))
    return f"page: {output}"


def file_written(path: Path) -> Result:
    """The answer of a command that wrote a file: where it is, unless others read it right now."""
    if is_stream(path):
        note(str(path))
        return Result(is_printed=True)
    return Result([Code(str(path))], Record({"path": str(path)}), key="")
