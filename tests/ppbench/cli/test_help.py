"""The help of every command, and what it costs."""

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from ppbench.cli.app import app
from ppbench.cli.commands import COMMANDS

NAMES = [entry.name for entry in COMMANDS]


def commands_of(group, words=()):
    for name, command in group.commands.items():
        yield (*words, name), command
        yield from commands_of(command, (*words, name)) if hasattr(command, "commands") else ()


ALL = dict(commands_of(typer.main.get_command(app)))


def test_every_command_of_the_catalogue_is_read_and_says_its_own_sentence():
    assert len(NAMES) == len({*NAMES}) == 25
    for entry in COMMANDS:
        command = ALL[entry.name,]
        assert " ".join(command.help.split("\n\n")[0].split()) == entry.sentence


def test_the_help_imports_no_command():
    script = (
        "import sys; from typer.testing import CliRunner; from ppbench.cli.app import app;"
        "CliRunner().invoke(app, ['--help']); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    imported = done.stdout.split()
    assert "ppbench.cli.commands" in imported
    for name in (
        "pandas",
        "numpy",
        "ppbench.cli.runs",
        "ppbench.display.tables",
        "importlib.metadata",
    ):
        assert name not in imported


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_a_flag_has_a_no_only_where_there_is_one_and_takes_no_value(words):
    shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "100"}).stdout
    flags = [option for option in ALL[words].params if getattr(option, "is_flag", False)]
    for flag in flags:
        assert bool(flag.secondary_opts) == (flag.opts[0] in ("--overlap", "--page"))
    assert "<bool>" not in shown
