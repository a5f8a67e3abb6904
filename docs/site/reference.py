"""The parts of the reference that are made from code when the site is built.

A page says where such a part belongs with a comment, `<!-- made: NAME -->`; `PARTS` has the
function of each name. The line below the comment is for readers of the file itself: it says how to
see the part, and is replaced with the comment.
"""

from __future__ import annotations

import itertools
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import typer.main

from engine.device_variables import DEVICE_VARIABLES
from engine.model.presets import sizes_table
from ppbench import errors
from ppbench.cautions import Caution
from ppbench.cli.app import app
from ppbench.cli.commands import COMMANDS
from ppbench.config.case import SETTINGS
from ppbench.config.shipped import shipped_sweeps
from ppbench.config.toml import column_named
from ppbench.display.markup import escaped
from ppbench.errors import ExitCode, PpbenchError
from ppbench.store.columns import COMPUTED, SCHEMA_VERSION, TABLES, Column

_MARK = re.compile(r"^<!-- made: ([\w-]+) -->(?:\nMade from the code: .*)?$", re.MULTILINE)
Words = tuple[str, ...]


def with_parts(page: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """A page with every mark replaced by the part that it names."""
    return _MARK.sub(lambda mark: parts[mark[1]](), page)


def table(header: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def commands() -> str:
    """Every command with its arguments and options, by group and in the order of `--help`."""
    program: Any = typer.main.get_command(app)
    known = program.commands
    parts = []
    for group, entries in itertools.groupby(COMMANDS, key=lambda entry: entry.group):
        parts.append(f"## {group}\n")
        for entry in entries:
            below = _below_command(("ppbench", entry.name), known[entry.name])
            parts += [_command(words, command) for words, command in below]
    return "\n".join(parts)


def _below_command(words: Words, command: Any) -> Iterator[tuple[Words, Any]]:
    """The command itself, or those of a group."""
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from _below_command((*words, name), inner)
    elif not command.hidden:
        yield words, command


def _command(words: Words, command: Any) -> str:
    name = " ".join(words)
    context = typer.Context(command, info_name=name)
    usage = " ".join(command.collect_usage_pieces(context))
    text = textwrap.dedent(command.help or "").strip().replace("\b\n", "\n")
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    tables = []
    for heading, parameters in (("argument", arguments), ("option", options)):
        records = [record for p in parameters if (record := p.get_help_record(context))]
        rows = ((code(first.strip()), escaped(" ".join(rest.split()))) for first, rest in records)
        if records:
            tables.append(table((heading, "meaning"), rows))
    return "\n\n".join((f"### `{name}`", text, f"```\n{name} {usage}\n```", *tables)) + "\n"


def code(text: str) -> str:
    """Code in a cell of a table."""
    return f"`{text.replace('|', chr(92) + '|')}`"


def settings() -> str:
    """Every key of a sweep file: its values, default and meaning, and whether it may be an axis."""
    rows: dict[str, list[Sequence[str]]] = {}
    for key, declared in SETTINGS.items():
        cells = (
            f"`{key}`",
            escaped(declared.kind.values),
            f"`{json.dumps(declared.default)}`",
            "–" if declared.shared else "yes",
            declared.meaning,
        )
        rows.setdefault(key.rpartition(".")[0], []).append(cells)
    header = ("key", "values", "default", "axis", "meaning")
    parts = [
        f"### {f'[{section}]' if section else 'Top level'}\n\n{table(header, iter(of_section))}"
        for section, of_section in rows.items()
    ]
    return "\n".join(parts)


def shipped() -> str:
    """The sweeps that ship, each with the comment at its head."""
    rows = ((f"`{name}`", _head_of(path.read_text())) for name, path in shipped_sweeps().items())
    return table(("sweep", "what it is for"), rows)


def _head_of(text: str) -> str:
    lines = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    return escaped(" ".join(line.removeprefix("#").strip() for line in lines))


def columns() -> str:
    """Every column once, below its table: its name and heading, the unit shown, its meaning."""
    settings = {column_named(key) for key in SETTINGS}
    seen: set[str] = set()
    parts = []
    for title, declared in {**TABLES, **COMPUTED}.items():
        shown = [one for one in declared if one.name not in settings | (seen - {"source"})]
        seen |= {one.name for one in shown}
        heading = f"`{title}`" if title in TABLES else title
        table_of = table(("column", "unit", "meaning"), map(_described, shown))
        parts.append(f"### {heading}\n\n{table_of}")
    return "\n".join(parts)


def _described(column: Column) -> Sequence[str]:
    words = column.name.replace("_", " ")
    heading = "" if column.heading == words else f" ({escaped(column.heading)})"
    return f"`{column.name}`{heading}", column.unit or "–", escaped(column.meaning)


def schema_version() -> str:
    return f"The columns below are those of schema {SCHEMA_VERSION}."


def cautions() -> str:
    """Every caution with its remedy."""
    return "".join(f"### `{caution.name}`\n\n{caution.remedy}\n\n" for caution in Caution)


def device_variables() -> str:
    """Every variable of an accelerator that a run sets or refuses, with the reason."""
    rows = (
        (
            f"`{variable.name}`",
            "stays unset" if variable.value is None else f"`{variable.value}`",
            variable.reason,
        )
        for variable in DEVICE_VARIABLES
    )
    return table(("variable", "value in a run", "with another"), rows)


def exit_codes() -> str:
    """Every exit code, and the errors that end with it."""
    kinds: dict[int, list[str]] = {}
    for kind in _below(PpbenchError):
        kinds.setdefault(int(kind.exit_code), []).append(f"`{kind.__name__}`")
    rows = ((str(int(code)), code.name.replace("_", " "), ", ".join(kinds.get(int(code), ["–"])))
            for code in ExitCode)  # fmt: skip
    return table(("code", "name", "errors"), rows)


def error_kinds() -> str:
    """Every kind of error with its meaning."""
    rows = (
        (f"`{kind.__name__}`", str(int(kind.exit_code)), escaped((kind.__doc__ or "").strip()))
        for kind in _below(PpbenchError)
    )
    return table(("error", "exit code", "meaning"), rows)


def _below(kind: type[PpbenchError]) -> Iterator[type[PpbenchError]]:
    yield kind
    for inner in kind.__subclasses__():
        if inner.__module__ == errors.__name__:
            yield from _below(inner)


PARTS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "settings": settings,
    "shipped": shipped,
    "columns": columns,
    "schema-version": schema_version,
    "cautions": cautions,
    "device-variables": device_variables,
    "exit-codes": exit_codes,
    "error-kinds": error_kinds,
    "presets": sizes_table,
}
