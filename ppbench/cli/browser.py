"""Opens a page that was written in the browser of the user, where there is one."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

from ppbench.cli.declare import option
from ppbench.console import note

Open = Annotated[bool, option("--open", "Open the page in the browser.")]


def open_page(path: Path) -> None:
    """Open a page, or say where it is if this machine shows none; that is no failure.

    A machine without a display may still have a browser for terminals, which would take over the
    one that the command runs in; `BROWSER` asks for it.
    """
    has_display = not sys.platform.startswith("linux") or any(
        map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
    )
    if not (has_display and webbrowser.open(path.resolve().as_uri())):
        note(f"note: no browser can be opened here; the page is {path.resolve()}")
