"""The command line as people run it: a process, its exit code and its words."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import typer
from typer.testing import CliRunner

from ppbench.cli.app import app

PATIENCE_S = 180
TINY = """
[model]
preset = "llama-tiny"

[measure]
warmup_steps = 1
max_warmup_steps = 1
"""
"""The last tables of a sweep that is soon over, to which a test adds its steps."""
EMULATED_SWEEP = f"""
device = "emulated"
num_microbatches = 2
seq_len = 8
emulated = {{F_ms = 20, I_ms = 1, W_ms = 1}}
{TINY}"""
"""A sweep of two ranks of a tiny model; a test adds its steps, and its grid."""


def words_of(*arguments: str) -> list[str]:
    """The words of a command for a process of its own."""
    return [sys.executable, "-c", "from ppbench.cli import main; main()", *arguments]


def ppbench(
    *arguments: str, folder: Path, patience_s: float = PATIENCE_S, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own."""
    words = words_of(*arguments)[1:]
    return python(*words, folder=folder, patience_s=patience_s, **environment)


def python(
    *words: str, folder: Path, patience_s: float = PATIENCE_S, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=patience_s,
        check=False,
    )


@dataclass(frozen=True)
class Printed:
    """The output of a command."""

    text: str
    exit_code: int
    notes: list[str]


def printed(*words: object) -> Printed:
    """Run a command in this process and folder; errors of ours are raised."""
    words = tuple(map(str, words))
    with mock.patch.object(sys, "argv", ["ppbench", *words]):
        done = CliRunner().invoke(app, words)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    sys.stderr.write(done.stderr)
    notes = [line.removeprefix("note: ") for line in done.stderr.splitlines()]
    return Printed(done.stdout.removesuffix("\n"), done.exit_code, notes)


def inside(*arguments: str, folder: Path) -> str:
    """A command that only reads, in this process: its start is most of what it takes."""
    with contextlib.chdir(folder):
        done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def output_of(command: Callable[..., None], *arguments: object, **options: object) -> str:
    """The standard output of a command's function, called as typer calls it."""
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(typer.Exit):
        command(*arguments, **options)
    return output.getvalue().rstrip("\n")
