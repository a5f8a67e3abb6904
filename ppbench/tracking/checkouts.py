"""Work trees of commits, set up once, and commands run in them with their code and no other.

    results/worktrees/<commit>/      while it is needed; what a killed process left is cleared away

Submodules and what Git LFS keeps elsewhere are left out: `[track] setup` can fetch them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import ppbench
from ppbench.repository import OF_HOOKS, Repository
from ppbench.tracking import child

MOST_KEPT = 4
"""Each may be large, and to set one up may take long."""
_SOURCES = "src"
_INSTALLED = ("site-packages", "dist-packages")


class SetupError(Exception):
    """`[track] setup` failed; with what it printed."""


class Checkouts:
    """The files of a repository's commits, below `folder`."""

    def __init__(
        self, repository: Repository, folder: Path, setup: str, on_line: Callable[[str], None]
    ) -> None:
        self._repository, self._folder = repository, folder.resolve()
        self._setup, self._on_line = setup, on_line
        self._kept: OrderedDict[str, contextlib.ExitStack] = OrderedDict()

    def of(self, sha: str) -> Path:
        """The files of a commit, set up. Raises RepositoryError, SetupError."""
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


def _each_once(names: Iterable[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if name]
