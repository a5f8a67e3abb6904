"""Git repositories: what is checked out, what names mean, work trees of other commits.

The only user of git, by its command: every machine that has a repository has it, and no library
reads all of what it writes (worktrees, shallow clones, partial clones).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ppbench.errors import RepositoryError, first_line

_TIMEOUT_S = 120
_SHA = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHOW = ("show", "--no-patch", "--no-show-signature", "--format=%H%n%aI%n%P%n%s")
_DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--binary", "HEAD")
"""As git itself has it, whatever programs the user has for it."""
OF_HOOKS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
"""Set by git for its hooks, of which this may be run: they would name another repository."""
_OF_OWNERS = "safe.directory"
"""The setting that lets git use what another user owns, as is usual in containers."""
_NO_HOOKS = ("-c", f"core.hooksPath={os.devnull}")
"""Those of a user are for what the user checks out."""
_QUIETLY = {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_LFS_SKIP_SMUDGE": "1"}
_MAIN_BRANCHES = ("origin/HEAD", "origin/main", "origin/master", "main", "master")


@dataclass(frozen=True)
class Commit:
    """A commit; with `is_dirty` the state of a work tree that differs from it."""

    commit: str
    branch: str | None = None  # None: none is checked out
    is_dirty: bool = False
    changes: str = ""  # hash of the uncommitted changes to tracked files, empty when clean
    author_date: str | None = None  # ISO 8601
    parent: str | None = None  # the first one; known in a shallow clone too
    subject: str | None = None  # first line of its message


def read_commit(folder: Path) -> Commit | None:
    """The state of the work tree around `folder`; None where no commit, or no git, is there.

    Also where git fails: none is better than a wrong one. This is said, once.
    """
    try:
        found = Repository.around(folder)
        return found.state() if found.has_commits() else None
    except RepositoryError as error:
        if any((one / ".git").exists() for one in (folder, *folder.resolve().parents)):
            _warn(f"commit and changes are not stored with the runs: {error}")
        return None


@functools.cache
def _warn(problem: str) -> None:
    print(f"warning: {problem}", file=sys.stderr)


class Repository:
    """The git repository of a work tree. Every method raises RepositoryError."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def around(cls, folder: Path) -> Repository:
        """The one whose work tree holds `folder`."""
        return cls(Path(_git(folder, "rev-parse", "--show-toplevel", where=f"{folder}")))

    def has_commits(self) -> bool:
        return self._commit_called("HEAD") is not None

    def state(self, apart_from: Iterable[str] = ()) -> Commit:
        """What is checked out, with what was changed since; not counting paths from the root."""
        found = self.describe(self.resolve("HEAD"))
        others = [f":(top,exclude){path}" for path in apart_from]
        changes = self._run(*_DIFF, "--", ":/", *others)  # what is staged is in it like what is not
        digest = hashlib.sha256(changes.encode()).hexdigest()[:12] if changes else ""
        branch = self._try("symbolic-ref", "--short", "HEAD")
        described = (found.author_date, found.parent, found.subject)
        return Commit(found.commit, branch, bool(changes), digest, *described)

    def describe(self, sha: str) -> Commit:
        """Who came before a commit, when it was written and what it says."""
        told = self._run(*_SHOW, f"{sha}^{{commit}}", "--")
        commit, date, _, *subject = [*told.split("\n"), "", "", ""][:4]
        # `%P` leaves out a parent that a shallow clone lacks; the commit itself names it.
        raw = self._run("cat-file", "commit", commit)
        parents = re.findall(r"^parent (\w+)$", raw.partition("\n\n")[0], flags=re.MULTILINE)
        return Commit(commit, None, False, "", date, next(iter(parents), None), subject[0])

    def resolve(self, name: str) -> str:
        """The full hash of a revision, branch or tag."""
        found = self._commit_called(name)
        if found is None:
            raise RepositoryError(
                f'"{name}": no such revision in {self.root}{self._shallow_hint()}'
            )
        return found

    def _commit_called(self, name: str) -> str | None:
        quietly = ("rev-parse", "--verify", "--quiet", "--end-of-options")
        return self._try(*quietly, f"{name}^{{commit}}")

    def merge_base(self, one: str, other: str) -> str:
        """The newest commit that both descend from."""
        found = self._try("merge-base", one, other)
        if found is None:
            raise RepositoryError(
                f"{one} and {other}: have no common commit in {self.root}{self._shallow_hint()}"
            )
        return found

    def is_ancestor(self, one: str, other: str) -> bool:
        """Whether `other` descends from `one`, or is it; False for what is not here."""
        return self._try("merge-base", "--is-ancestor", one, other) is not None

    def between(self, good: str, bad: str) -> list[str]:
        """The commits after `good` up to `bad`, oldest first: what was merged counts as its merge.

        Along first parents, since those are what the branch has been at one time.
        """
        first, last = self.resolve(good), self.resolve(bad)
        if first == last:
            raise RepositoryError(f"{good} and {bad}: are the same commit; name two")
        path = self._run("rev-list", "--first-parent", "--reverse", f"{first}..{last}").split()
        if not path or self.describe(path[0]).parent != first:
            if not path and self.is_ancestor(last, first):
                raise RepositoryError(f"{good}: is newer than {bad}; swap them")
            raise RepositoryError(
                f"{good}: does not lie on the first-parent line of {bad} in {self.root}"
                f"{self._shallow_hint()}; name a commit that does, such as "
                f"{self._nearest_on_line(first, last)}"
            )
        return path

    def line(self, tip: str) -> list[str]:
        """The first-parent line up to a commit, oldest first; as far as a shallow clone has it."""
        return self._run("rev-list", "--first-parent", "--reverse", self.resolve(tip)).split()

    def _nearest_on_line(self, sha: str, tip: str) -> str:
        """The newest commit of the tip's first-parent line that the other one has as well."""
        both = set(self._run("rev-list", sha).split())
        found = [one for one in self.line(tip) if one in both]
        return found[-1][:12] if found else f"{tip[:12]}~1"

    def positions(self, shas: Iterable[str]) -> dict[str, int]:
        """Places in one order of all commits, parents first; of what is not here none."""
        wanted = {sha for sha in shas if _SHA.fullmatch(sha)}
        told = self._run("cat-file", "--batch-check", text="\n".join(wanted)).splitlines()
        here = [line.split()[0] for line in told if line.split()[1:2] == ["commit"]]
        if not here:
            return {}
        listing = ("rev-list", "--topo-order", "--reverse", "--stdin")
        order = self._run(*listing, text="\n".join(here)).split()
        return {sha: place for place, sha in enumerate(order) if sha in wanted}

    def default_base(self, of: str | None = None) -> str:
        """What a commit is compared with: where it left the main branch, or its parent.

        By default it is the work tree: if that has uncommitted changes, on the main branch its
        base is HEAD itself.
        """
        head = self.resolve(of or "HEAD")
        base = self.merge_base(self._main_tip(), head)
        if base != head or (of is None and self.state().is_dirty):
            return base
        parent = self.describe(head).parent
        if parent is None:
            raise RepositoryError(
                f"{self.root}: {of or 'HEAD'} is its first commit; name a base with --base"
            )
        return self.resolve(parent)

    def _main_tip(self) -> str:
        """Of the first main branch that there is: another may be what an old name has left.

        A repository's only branch is its main one, whatever it is called.
        """
        tips = (self._commit_called(name) for name in _MAIN_BRANCHES)
        found = next((tip for tip in tips if tip is not None), None)
        if found is not None:
            return found
        listing = ("for-each-ref", "--format=%(refname)", "refs/heads", "refs/remotes")
        references = self._run(*listing).splitlines()
        names = {re.sub(r"^refs/(heads|remotes/[^/]+)/", "", name) for name in references}
        if len(names) != 1:
            raise RepositoryError(
                f"{self.root}: which of its {len(names)} branches is the main one is not known; "
                f"name a base with --base, or: git remote set-head origin --auto"
                f"{self._shallow_hint()}"
            )
        return self.resolve(references[-1])

    @contextlib.contextmanager
    def worktree(self, sha: str, folder: Path) -> Iterator[Path]:
        """The files of a commit, below `folder` until this is left.

        What a killed process left there is cleared away first.
        """
        path = folder.resolve() / sha[:12]
        self._clear(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RepositoryError(f"{path.parent}: cannot be made: {error}") from None
        self._run("worktree", "add", "--detach", "--force", "--quiet", str(path), sha)
        try:
            yield path
        finally:
            self._clear(path)
            with contextlib.suppress(OSError):
                path.parent.rmdir()

    def clear_worktrees(self, folder: Path) -> None:
        """Remove those below a folder, which killed processes have left."""
        if folder.is_dir():
            for path in folder.resolve().iterdir():
                self._clear(path)

    def _clear(self, path: Path) -> None:
        """With git's note of it alone: other work trees may lie on disks that are away."""
        forget = ("worktree", "remove", "--force", "--force", str(path))
        self._try(*forget)
        if path.exists():  # git does not know it, or not how it is now
            shutil.rmtree(path, ignore_errors=True)
            self._try(*forget)

    def is_shallow(self) -> bool:
        return self._try("rev-parse", "--is-shallow-repository") == "true"

    def _shallow_hint(self) -> str:
        return "; the clone is shallow: git fetch --unshallow" if self.is_shallow() else ""

    def _run(self, *arguments: str, text: str = "") -> str:
        return _git(self.root, *arguments, where=str(self.root), text=text)

    def _try(self, *arguments: str) -> str | None:
        try:
            return self._run(*arguments)
        except RepositoryError:
            return None


def _git(folder: Path, *arguments: str, where: str, text: str = "") -> str:
    """What git prints, given `text` to read."""
    command = ["git", *_NO_HOOKS, "-C", str(folder), *arguments]
    known = {name: value for name, value in os.environ.items() if name not in OF_HOOKS}
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
            env={**known, **_QUIETLY},
        )
    except FileNotFoundError:
        raise RepositoryError(f"{where}: git was not found; install it, or name runs") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RepositoryError(f"{where}: git {arguments[0]}: {error}") from None
    if done.returncode != 0:
        told = _told(done.stderr) or f"ended with {done.returncode}"
        raise RepositoryError(f"{where}: git {arguments[0]}: {told}")
    return done.stdout.rstrip("\n")


def _told(stderr: str) -> str:
    """What went wrong; and what git advises where the files belong to someone else."""
    advice = [line.strip() for line in stderr.splitlines() if _OF_OWNERS in line][-1:]
    return "; ".join(filter(None, [first_line(stderr), *advice]))
