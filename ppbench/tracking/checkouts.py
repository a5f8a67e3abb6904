"""Work trees of commits, set up once, and commands run in them with their code and no other.

    results/worktrees/<machine>/<commit>/    while it is needed; what killed processes left there is
                                             cleared away by the next one
    results/locks/worktrees-<machine>.lock   held by the one process that has any

Submodules and what Git LFS keeps elsewhere are left out: `[track] setup` can fetch them.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import ppbench
from ppbench.repository import OF_HOOKS, Repository
from ppbench.run.locks import held, who
from ppbench.tracking import child

MOST_KEPT = 4
"""Each may be large, and to set one up may take long."""
_SOURCES = "src"
_INSTALLED = ("site-packages", "dist-packages")


class SetupError(Exception):
    """`[track] setup` failed; with what it printed."""


class Checkouts:
    """The files of a repository's commits, below the folder of a store."""

    def __init__(
        self, repository: Repository, results: Path, setup: str, on_line: Callable[[str], None]
    ) -> None:
        host = platform.node()
        self._repository = repository
        self._folder = results.resolve() / "worktrees" / host
        self._lock = results / "locks" / f"worktrees-{host}.lock"
        self._setup, self._on_line = setup, on_line
        self._kept: OrderedDict[str, contextlib.ExitStack] = OrderedDict()
        self._held = contextlib.ExitStack()
        self._is_alone = False

    def of(self, sha: str) -> Path:
        """The files of a commit, set up. Waits while another process has any of this store's.

        Raises RepositoryError, SetupError, StoreError.
        """
        self._be_alone()
        if sha not in self._kept:
            while len(self._kept) >= MOST_KEPT:
                self._kept.popitem(last=False)[1].close()
            self._kept[sha] = stack = contextlib.ExitStack()
            try:
                self._set_up(stack.enter_context(self._repository.worktree(sha, self._folder)))
            except BaseException:
                self._kept.pop(sha).close()
                raise
        self._kept.move_to_end(sha)
        return self._folder / sha[:12]

    def _be_alone(self) -> None:
        if not self._is_alone:
            note = who("measuring commits")
            self._held.enter_context(held(self._lock, note, self._tell_who_measures))
            self._is_alone = True
            self._repository.clear_worktrees(self._folder)

    def _tell_who_measures(self, holder: str) -> None:
        self._on_line(f"waiting for {holder or 'another process'}, into the same results")

    def _set_up(self, tree: Path) -> None:
        if not self._setup:
            return
        self._on_line(f"setup: {self._setup}")
        ended = self.run(["/bin/sh", "-c", self._setup], tree, tree)
        if ended.exit_code != 0:
            told = "\n".join(ended.lines)
            raise SetupError(
                f"[track] setup: {self._setup}: ended with exit code {ended.exit_code}\n{told}"
            )
        if Repository(tree).state().is_dirty:  # its runs would not count as those of the commit
            raise SetupError(
                f"[track] setup: {self._setup}: changed files that git tracks; have it write "
                "others, or undo what it changes"
            )

    def run(self, command: Sequence[str], tree: Path, folder: Path) -> child.Ended:
        """A command in a folder of a tree, to its end."""
        environment = self._environment(tree, folder)
        return child.run(command, folder, environment, self._on_line)

    def _environment(self, tree: Path, folder: Path) -> Mapping[str, str]:
        """Ours, in which Python looks for modules in the tree first.

        Also wherever it looks in our own: an editable install names folders in there.
        """
        root = self._repository.root.resolve()
        known = {name: value for name, value in os.environ.items() if name not in OF_HOOKS}
        ours = [Path(name or ".").resolve() for name in sys.path]
        mapped = [tree / one.relative_to(root) for one in ours if one.is_relative_to(root)]
        there = [folder, tree, tree / _SOURCES, *mapped]
        before = known.get("PYTHONPATH", "").split(os.pathsep)
        home = Path(ppbench.__file__).parents[1]  # not installed, if it was found by our folder
        homes = [] if home.name in _INSTALLED else [str(home)]
        names = [*(str(one) for one in there if one.is_dir()), *before, *homes]
        return {**known, "PYTHONPATH": os.pathsep.join(_each_once(names))}

    def close(self) -> None:
        """Remove the work trees."""
        while self._kept:
            self._kept.popitem()[1].close()
        for folder in (self._folder, self._folder.parent):
            with contextlib.suppress(OSError):
                folder.rmdir()
        self._held.close()


def _each_once(names: Iterable[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if name]
