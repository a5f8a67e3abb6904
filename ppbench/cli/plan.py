"""`ppbench plan`: which pipeline to run, and how sure that is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from ppbench.cli.options import Columns, HowToPrint, Overrides, Sort, SweepFile, print_text
from ppbench.display.formats import Format
from ppbench.display.tables import EVERYTHING, View, render

if TYPE_CHECKING:
    from ppbench.planning.search import OnProgress

Effort = Annotated[
    float,
    typer.Option(
        "--effort", metavar="X", min=0.01, max=100, help="How much is searched; 2 is twice as much."
    ),
]


def plan(
    file: SweepFile,
    overrides: Overrides = None,
    effort: Effort = 1.0,
    how: HowToPrint = Format.table,
    columns: Columns = None,
    sort: Sort = None,
) -> None:
    """Find the best pipeline for a model, devices and memory, and say how sure that is."""
    from ppbench.planning.words import SHOWN, as_dict
    from ppbench.recommendation import plan as make_plan

    view = View.of(columns, sort)
    with _progress() as on_progress:
        found = make_plan(file, overrides or (), effort=effort, on_progress=on_progress)
    if how is Format.json and view == EVERYTHING:
        print(json.dumps(as_dict(found), indent=2, allow_nan=False))
        return
    table = render(found.frame, how, SHOWN, view)
    if how in (Format.json, Format.csv):
        print(table)
    else:
        print_text("\n\n".join([table, "\n".join(found.sentences)]), how)


@contextmanager
def _progress() -> Iterator[OnProgress]:
    """Show on a terminal what a plan is doing; elsewhere nothing."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    with console.status("reading the sweep file") as status:

        def show(what: str, done: int, num: int) -> None:
            share = f" ({done + 1} of {num})" if num > 1 else ""
            status.update(escape(f"{what}{share}"))

        yield show
