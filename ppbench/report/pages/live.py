"""The report of a running sweep, rewritten as cases end, by a process of its own.

    python -m ppbench.report.pages.live          its page and its states come by standard input

The process has the lowest priority, and is stopped while ranks warm up or measure: it works while
they start, connect, build and store. So a page may be a case late, and disturbs no measurement. A
page is written aside and renamed, so that whoever is killed leaves the last whole one.

A page that is open looks every few seconds at a small file beside it, which says when there is a
newer one; a page that is not in sight does not look.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ppbench.display.formats import Assets
from ppbench.errors import PpbenchError
from ppbench.files import whole_file
from ppbench.report.pages.provenance import REPORT, About
from ppbench.report.pages.report import render_report
from ppbench.report.pages.templates import Live, render, write_page
from ppbench.run.launch import lifetime
from ppbench.store import Store, newest_of

_LOWEST = 19
_PATIENCE_S = 20.0
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class LivePage:
    """The page of a sweep, whatever its state."""

    path: str
    results: str
    title: str
    command: str
    sweep_text: str
    assets: str


class LiveReport:
    """The process that writes the page, seen from the sweep."""

    def __init__(self, page: LivePage) -> None:
        self._process = subprocess.Popen(
            [*_nicely(), *lifetime.command(__name__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the sweep, which ends this process
        )
        self._is_held, self._is_ready = False, False
        self._send(dataclasses.asdict(page))

    def show(self, run_ids: Sequence[str], done: str) -> None:
        """Have the page written of these runs, when there is time."""
        self._send({"run_ids": list(run_ids), "done": done})

    def hold(self) -> None:
        """Stop writing: something is measured.

        A process that is only starting is left to: stopped, it would outlive a sweep that is
        killed.
        """
        if not self._is_held and self._has_started():
            self._is_held = True
            self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Write on, if there is something to be written."""
        if self._is_held:
            self._is_held = False
            self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End the process, when it has written what it is writing."""
        self.go_on()
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
            if self._process.stdout is not None:
                self._process.stdout.close()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _has_started(self) -> bool:
        pipe = self._process.stdout
        if not self._is_ready and pipe is not None and _has_data(pipe.fileno()):
            self._is_ready = True
        return self._is_ready

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _send(self, message: dict[str, object]) -> None:
        """Write a line; a page that cannot be written must not end the sweep."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.write(f"{json.dumps(message)}\n".encode())
                self._process.stdin.flush()


def _nicely() -> list[str]:
    """The beginning of a command that runs at the lowest priority, its imports too."""
    nice = shutil.which("nice")
    return [] if nice is None else [nice, "-n", str(_LOWEST)]


def beside(path: Path) -> Path:
    """The file that says when the page beside it was written."""
    return path.with_name(f"{path.stem}.live.js")


def forget(path: Path) -> None:
    """Remove the file beside a page: an open page loads the last one, and looks no more."""
    with contextlib.suppress(OSError):
        beside(path).unlink()


def main() -> None:
    """Write the page whenever a newer state has come, until standard input ends."""
    print("ready", flush=True)
    lines = _newest_lines(sys.stdin.fileno())
    page = LivePage(**json.loads(next(lines)))
    for line in lines:
        state = json.loads(line)
        with contextlib.suppress(PpbenchError):  # the report at the end says what is wrong
            write_live(page, state["run_ids"], state["done"])


def _has_data(descriptor: int) -> bool:
    """Return whether a pipe can be read at once: it holds data, or its other end is closed."""
    poll = select.poll()  # unlike select, for descriptors above 1023 too
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _newest_lines(descriptor: int) -> Iterator[str]:
    """Yield the first line, then always the newest: states that have passed are left out."""
    held, is_first = b"", True
    while True:
        while b"\n" not in held or (not is_first and _has_data(descriptor)):
            data = os.read(descriptor, _READ_BYTES)
            if not data:
                break
            held += data
        if b"\n" not in held:
            return
        if is_first:
            line, _, held = held.partition(b"\n")
        else:
            whole, _, held = held.rpartition(b"\n")
            line = whole.rpartition(b"\n")[2]
        is_first = False
        yield line.decode()


def write_live(page: LivePage, run_ids: Sequence[str], done: str) -> None:
    """Write the page of these runs, and then the file beside it. Raises StoreError."""
    path, assets = Path(page.path), Assets(page.assets)
    live = Live(done, datetime.now(UTC).isoformat(), beside(path).name)
    write_page(path, _text(page, run_ids, live, assets), "--reports", assets)
    with whole_file(beside(path), "--reports") as file:
        file.write(f"ppbenchLive({json.dumps(live.stamp)});\n".encode())


def write_stopped(page: LivePage, run_ids: Sequence[str]) -> None:
    """Write the page of a sweep that was stopped, if any of its runs has ended; it is not live."""
    with contextlib.suppress(PpbenchError):  # the sweep's own error is what is reported
        path, assets = Path(page.path), Assets(page.assets)
        if run_ids:
            write_page(path, _text(page, run_ids, None, assets), "--reports", assets)
        else:
            path.unlink(missing_ok=True)
        forget(path)


def _text(page: LivePage, run_ids: Sequence[str], live: Live | None, assets: Assets) -> str:
    if run_ids:
        store = Store(Path(page.results))
        runs = newest_of(store.table("runs", run_ids)).sort_values("position", kind="stable")
        if len(runs):
            return render_report(
                store,
                runs,
                title=page.title,
                command=page.command,
                sweep_text=page.sweep_text,
                assets=assets,
                live=live,
            )
    about = About(kind=REPORT, title=page.title)
    return render("waiting.html", title=page.title, about=about, live=live, command=page.command)


if __name__ == "__main__":
    main()
