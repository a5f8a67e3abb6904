"""The command line: parse, call, render, return an exit code. One file per command."""

from __future__ import annotations

from typing import NoReturn


def main() -> NoReturn:
    """Run the command line, and end the process with its exit code."""
    from ppbench.cli import app

    app.main()
