"""The command `ppbench`: it finds a command by its name, runs it, and words what it refuses.

`ppbench --help` imports no command, since names, groups and sentences are in `commands.py`; the
command `show` imports the file of `show` alone, which in turn imports what it needs.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from ppbench import __version__
from ppbench.cli import process
from ppbench.cli.commands import COMMANDS
from ppbench.console import print_notes
from ppbench.errors import ExitCode, UsageError, encodable

_ENTRIES = {entry.name: entry for entry in COMMANDS}


class _Command(TyperCommand):
    """A command whose help shows a flag as a flag: without a type, as it takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types_of_flags(super().get_params(ctx))


class _Group(TyperGroup):
    """A group of commands whose help shows flags like that of a command."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types_of_flags(super().get_params(ctx))


def _without_types_of_flags(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and getattr(parameter, "metavar", None) is None:
            parameter.metavar = ""
    return parameters


class _Commands(Mapping[str, Any]):
    """Every command by its name; each is imported when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_ENTRIES)

    def __len__(self) -> int:
        return len(_ENTRIES)


@functools.cache
def _command(name: str) -> Any:
    entry = _ENTRIES[name]
    module = importlib.import_module(f"ppbench.cli.{entry.module}")
    own = typer.Typer(
        name=name, cls=_Group, add_completion=False, no_args_is_help=True, help=entry.sentence
    )
    for below, function in entry.functions.items():
        own.command(below or name, cls=_Command)(getattr(module, function))
    return typer.main.get_command(own) if "" in entry.functions else typer.main.get_group(own)


class _Ppbench(_Group):
    """The group of all commands. Its help, and the completion of names, import no command."""

    def __init__(self, **attributes: object) -> None:
        super().__init__(**attributes)  # type: ignore[arg-type]  # they are the library's own
        self.commands = _Commands()  # type: ignore[assignment]  # nothing is added to it

    def list_commands(self, _: Any) -> list[str]:
        return list(_ENTRIES)

    def get_command(self, _: Any, cmd_name: str) -> TyperCommand | None:
        """Return the command without its options, which is enough for help and completion."""
        if (entry := _ENTRIES.get(cmd_name)) is None:
            return None
        return TyperCommand(cmd_name, help=entry.sentence, rich_help_panel=entry.group)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else self.commands[name], rest


app = typer.Typer(
    cls=_Ppbench,
    help="Benchmark and profile pipeline-parallel training in PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> NoReturn:
    """Run the command line, and end the process with its exit code."""
    process.run(_invoke)


def _invoke() -> int:
    """Run the command of `sys.argv`. Raises UsageError for arguments that cannot be parsed."""
    for option in ("--results", "--reports", "--output", "-o"):
        values = [value for name, value in itertools.pairwise(sys.argv) if name == option]
        start = f"{option}="
        values += [word.removeprefix(start) for word in sys.argv if word.startswith(start)]
        for value in values:
            if not value:  # as from an unset variable; it would mean the working directory
                raise UsageError(f"{option}: is empty; expected a path")
            if option == "--results" and encodable(value) != value:  # pyarrow cannot open it
                raise UsageError(
                    f"{option}: {encodable(value)}: is not UTF-8; expected a UTF-8 path"
                )
    try:
        code = typer.main.get_command(app)(prog_name="ppbench", standalone_mode=False)
    except UnicodeEncodeError:
        odd = [word for word in map(encodable, sys.argv[1:]) if word not in sys.argv]
        if not odd:
            raise
        raise UsageError(f'argument "{odd[0]}": is not UTF-8; only paths may be so') from None
    except Exception as refusal:
        if not hasattr(refusal, "format_message"):  # no error of the library about arguments
            raise
        text = " ".join(str(refusal.format_message()).split())
        if not text:  # the help was printed instead
            return ExitCode.usage
        text = text.removeprefix("Invalid value for ").replace(": Value error, ", ": ", 1)
        context = getattr(refusal, "ctx", None)
        where = "ppbench" if context is None else str(context.command_path)
        text = f"{text[0].lower()}{text[1:]}".rstrip(".")
        text = text.replace(". Did you mean ", "; did you mean ")
        see = " See" if text.endswith("?") else "; see"
        raise UsageError(f"{where}: {text}{see}: {where} --help") from None
    return code if isinstance(code, int) else ExitCode.ok


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"ppbench {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[  # noqa: ARG001  # shown by its callback
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    print_notes()
