"""Makes work trees of commits, and runs commands in them with the commit's code and no other.

    results/worktrees/<machine>/<commit>/    while it is needed; leftovers of a killed process are
                                             removed by the next one
    results/locks/worktrees-<machine>.lock   held by the one process that has work trees

Submodules and Git LFS files are not fetched: `[track] setup` can fetch them.

A command has a session of its own: Ctrl-C reaches this process alone, which ends the command and
waits for it, so that it can close its runs before its work tree is removed. The last lines that it
prints are kept for error messages.
"""

from __future__ import annotations

import collections
import contextlib
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import ppbench
from ppbench.files import hold_lock, lock_note
from ppbench.git import OF_HOOKS, Repository

MOST_KEPT = 4
"""Work trees kept at a time: each may be large, and may take long to set up."""
_SOURCES = "src"
_INSTALLED = ("site-packages", "dist-packages")


class SetupError(Exception):
    """`[track] setup` failed; the message holds its output."""


class Checkouts:
    """The files of a repository's commits, below the folder of a store, whose lock it holds."""

    def __init__(
        self, repository: Repository, results: Path, setup: str, on_line: Callable[[str], None]
    ) -> None:
        """Blocks while another process has work trees there. Raises StoreError."""
        host = platform.node()
        self._repository = repository
        self._folder = results.resolve() / "worktrees" / host
        self._setup, self._on_line = setup, on_line
        self._kept: dict[str, contextlib.ExitStack] = {}  # the one used last is the last
        self._held = contextlib.ExitStack()
        lock, text = results / "locks" / f"worktrees-{host}.lock", lock_note("measuring commits")

        def show_holder(holder: str) -> None:
            on_line(f"waiting for {holder or 'another process'}, which uses the same results")

        self._held.enter_context(hold_lock(lock, text, show_holder))
        repository.clear_worktrees(self._folder)

    def of(self, sha: str) -> Path:
        """Return the work tree of a commit, set up. Raises RepositoryError, SetupError."""
        kept = self._kept.pop(sha, None)
        if kept is None:
            while len(self._kept) >= MOST_KEPT:
                self._kept.pop(next(iter(self._kept))).close()
            with contextlib.ExitStack() as stack:
                tree = stack.enter_context(self._repository.worktree(sha, self._folder))
                if self._setup:
                    self._set_up(tree)
                kept = stack.pop_all()
        self._kept[sha] = kept
        return self._folder / sha[:12]

    def _set_up(self, tree: Path) -> None:
        self._on_line(f"setup: {self._setup}")
        ended = self.run(["/bin/sh", "-c", self._setup], tree, tree)
        if ended.exit_code != 0:
            output = "\n".join(ended.lines)
            raise SetupError(
                f"[track] setup: {self._setup}: ended with exit code {ended.exit_code}\n{output}"
            )
        if Repository(tree).state().is_dirty:  # its runs would not count as the commit's
            raise SetupError(
                f"[track] setup: {self._setup}: changed files that git tracks; have it write "
                "others, or undo what it changes"
            )

    def run(self, command: Sequence[str], tree: Path, folder: Path) -> Ended:
        """Run a command in a folder of a tree, to its end, with the tree first on Python's path."""
        start = start_in(self._repository.root, command, tree, folder)
        return run([start], self._on_line)[0]

    def close(self) -> None:
        """Remove the work trees."""
        for kept in self._kept.values():
            kept.close()
        for folder in (self._folder, self._folder.parent):
            with contextlib.suppress(OSError):
                folder.rmdir()
        self._held.close()


MOST_LINES = 30
PATIENCE_S = 60.0
POLL_S = 0.2


@dataclass(frozen=True)
class Ended:
    """How a command ended, and the last lines that it printed."""

    exit_code: int  # negative: killed by that signal
    lines: tuple[str, ...]

    def error_text(self) -> str:
        """The error: one line, then the lines that were kept.

        An error of ppbench begins with `error: `; the last line of a traceback is the error.
        """
        starts = [n for n, line in enumerate(self.lines) if line.startswith("error: ")]
        if starts:
            return "\n".join(self.lines[starts[-1] :]).removeprefix("error: ")
        how = f"ended with exit code {self.exit_code}"
        if self.exit_code < 0:
            how = f"was killed by signal {-self.exit_code}"
        last = next((line.strip() for line in reversed(self.lines) if line.strip()), "")
        return "\n".join([last or f"it {how}, and printed nothing", *self.lines])


@dataclass(frozen=True)
class Start:
    """A command, the folder that it runs in, and its environment."""

    command: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str]


def start_in(
    root: Path,
    command: Sequence[str],
    tree: Path,
    folder: Path,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Start:
    """Describe a command in a folder of a tree of `root`, with the tree first on Python's path.

    Every folder below the root on the module path, as of an editable install, is replaced by the
    same folder of the tree.
    """
    root = root.resolve()
    known = {name: value for name, value in os.environ.items() if name not in OF_HOOKS}
    paths = [Path(name or ".").resolve() for name in sys.path]
    mapped = [tree / path.relative_to(root) for path in paths if path.is_relative_to(root)]
    first = [folder, tree, tree / _SOURCES, *mapped]
    before = known.get("PYTHONPATH", "").split(os.pathsep)
    home = Path(ppbench.__file__).parents[1]  # if not installed, it was found through the path
    homes = [] if home.name in _INSTALLED else [str(home)]
    names = [*(str(path) for path in first if path.is_dir()), *before, *homes]
    path = os.pathsep.join(dict.fromkeys(filter(None, names)))
    return Start(tuple(command), folder, {**known, **variables, "PYTHONPATH": path})


def run(
    starts: Sequence[Start],
    on_line: Callable[[str], None],
    on_end: Callable[[int], None] = lambda _: None,
) -> list[Ended]:
    """Run commands at the same time, to their ends; KeyboardInterrupt ends them first.

    `on_end` is given the place of each that has ended, in a thread of its own.
    """
    ended: dict[int, Ended] = {}
    children: list[subprocess.Popen[str]] = []
    failures: list[BaseException] = []

    def follow(place: int, child: subprocess.Popen[str]) -> None:
        lines: collections.deque[str] = collections.deque(maxlen=MOST_LINES)
        try:
            assert child.stdout is not None
            with child.stdout:
                for line in child.stdout:
                    lines.append(line.rstrip("\n"))
                    on_line(lines[-1])
            ended[place] = Ended(child.wait(), tuple(lines))
        except BaseException as error:  # raised again by the caller's own thread
            failures.append(error)
        finally:
            on_end(place)

    def wait(threads: Sequence[threading.Thread]) -> None:
        while any(thread.is_alive() for thread in threads) and not failures:
            for thread in threads:
                thread.join(POLL_S)
        if failures:
            raise failures[0]

    try:
        threads = []
        for place, start in enumerate(starts):
            children.append(
                subprocess.Popen(
                    start.command,
                    cwd=start.folder,
                    env=dict(start.environment),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    encoding="utf-8",
                    errors="replace",
                    start_new_session=True,
                )
            )
            threads.append(threading.Thread(target=follow, args=(place, children[-1]), daemon=True))
            threads[-1].start()
        wait(threads)
        return [ended[place] for place in range(len(starts))]
    except BaseException:
        # End the commands and all that they started: with SIGTERM first, then SIGKILL.
        for child in children:
            _signal_all(child, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            until_s = time.monotonic() + PATIENCE_S
            for child in children:
                child.wait(max(0.0, until_s - time.monotonic()))
        for child in children:
            _signal_all(child, signal.SIGKILL)
            child.wait()
        raise


def _signal_all(child: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)
