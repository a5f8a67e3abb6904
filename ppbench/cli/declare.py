"""Options and arguments, declared as their help shows them.

    Ranks = Annotated[int | None, option("-p --ranks P", "Ranks of the pipeline.")]

The last word stands for the value in the help, unless it is a name: then the type does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

Words = Callable[..., list[str]]
"""What the shell offers; see `completion`."""


def option(shown: str, text: str, words: Words | None = None, **more: Any) -> Any:
    """An option by its names, and what it is for."""
    *names, value = shown.split()
    if value.startswith("-"):
        return typer.Option(*names, value, help=text, autocompletion=words, **more)
    return typer.Option(*names, metavar=value, help=text, autocompletion=words, **more)


def argument(shown: str, text: str, words: Words | None = None, **more: Any) -> Any:
    """An argument by the word that stands for it, and what it is for."""
    return typer.Argument(metavar=shown, help=text, autocompletion=words, **more)
