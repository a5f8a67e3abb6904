"""Shows what a command is doing: a line that is replaced on a terminal, notes elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from ppbench.console import note


class ShowStatus(Protocol):
    """Shows what is being done: `text` on a terminal, elsewhere `line` if there is one."""

    def __call__(self, text: str, line: str = "") -> None: ...


@contextmanager
def live_status() -> Iterator[ShowStatus]:
    """A status on standard error, from the start of the ranks on."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("starting the ranks") as status:

        def show(text: str, line: str = "") -> None:
            status.update(text)
            if line and not console.is_terminal:
                note(line)

        yield show
