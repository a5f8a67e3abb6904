"""The catalogue of commands, read from the files beside this one: a new command is a new file.

A command is a function that is declared with its name, its group and its place in the group:

    @answers("simulate", PLAN, 2)
    def simulate(...) -> Result:
        \"\"\"Predict makespan, bubble and peak activations of a schedule, or of all.\"\"\"

A name of two words is a command of a group such as `ppbench schedules`, whose sentence is that of
the file. The declarations are read as text, so that the help of all commands imports none of them.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from ppbench.errors import UsageError, nearest

if TYPE_CHECKING:
    from ppbench.display.document import Result

MEASURE, LOOK, COMPARE = "Measure", "Look at runs", "Compare commits"
PLAN, EXCHANGE = "Plan", "Exchange with other tools"
_GROUPS = {"MEASURE": MEASURE, "LOOK": LOOK, "COMPARE": COMPARE, "PLAN": PLAN, "EXCHANGE": EXCHANGE}
_DECLARED = re.compile(
    r'@answers\("(?P<name>\w+) ?(?P<below>\w*)", (?P<group>[A-Z]+), (?P<place>\d+).*\)\n'
    r'def (?P<function>\w+)\([^"]*(?:"(?!"")[^"]*)*"""(?P<sentence>.+?)(?:\n\n|"""\n)',
    re.DOTALL,
)


@dataclass
class Entry:
    """A command in the help: where it is, and what answers it."""

    group: str
    place: int
    name: str
    sentence: str
    module: str
    functions: dict[str, str]
    """The function by the name of the command below this one; that of a command alone by ""."""


def _found() -> list[Entry]:
    """Every command, in the order of `ppbench --help`."""
    entries: dict[str, Entry] = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        for part in text.split("\n@answers(")[1:]:
            found = _DECLARED.match("@answers(" + part)
            if found is None:
                continue
            name, below = found["name"], found["below"]
            sentence = " ".join(found["sentence"].split())
            entry = entries.setdefault(
                name,
                Entry(
                    _GROUPS[found["group"]],
                    int(found["place"]),
                    name,
                    text[3:].partition('"""')[0] if below else sentence,
                    path.stem,
                    {},
                ),
            )
            entry.functions[below] = found["function"]
    groups = [*_GROUPS.values()]
    return sorted(entries.values(), key=lambda entry: (groups.index(entry.group), entry.place))


COMMANDS = _found()


def answer(command: str, *arguments: object, **options: object) -> Result:
    """Return the answer of a command; a notebook shows it as the command would.

    `answer("simulate", "all", ranks=4, microbatches=8)`

    Raises UsageError if there is no such command.
    """
    known = {
        f"{entry.name} {below}".strip(): (entry.module, function)
        for entry in COMMANDS
        for below, function in entry.functions.items()
    }
    if command not in known:
        raise UsageError(f'unknown command "{command}"{nearest(command, known)}')
    module, function = known[command]
    found = getattr(importlib.import_module(f"ppbench.cli.{module}"), function)
    bound = inspect.signature(found.answer, eval_str=True).bind(*arguments, **options)
    for key, value in bound.arguments.items():  # a path may be given as text, as in a shell
        kind = bound.signature.parameters[key].annotation
        if isinstance(value, str) and Path in {*_types_in(kind)}:
            bound.arguments[key] = Path(value)
    return found.answer(*bound.args, **bound.kwargs)  # type: ignore[no-any-return]


def _types_in(annotation: object) -> Iterator[object]:
    """Yield the types that an annotation such as `Annotated[Path | None, ...]` is made of."""
    yield annotation
    for part in get_args(annotation):
        yield from _types_in(part)
