"""Reads git repositories: the checked-out state, the meaning of names, work trees of other commits.

It runs git's command line: every machine with a repository has it, and no library reads all that
git writes (worktrees, shallow clones, partial clones).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ppbench.console import warn
from ppbench.errors import RepositoryError, first_line

_TIMEOUT_S = 120
_SHA = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHOW = ("show", "--no-patch", "--no-show-signature", "--format=%H%n%aI%n%P%n%s")
_DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--binary", "HEAD")
"""Git's own diff, whatever programs the user has configured for it."""
OF_HOOKS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
"""Variables that git sets for its hooks; if ppbench runs in one, they would misdirect our git."""
_NO_HOOKS = ("-c", f"core.hooksPath={os.devnull}")
"""The user's git hooks must not run for our checkouts."""
_QUIETLY = {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_LFS_SKIP_SMUDGE": "1"}
_MAIN_BRANCHES = ("origin/HEAD", "origin/main", "origin/master", "main", "master")


@dataclass(frozen=True)
class Commit:
    """A commit, or with `is_dirty` a work tree that differs from it."""

    commit: str
    branch: str | None = None  # None: none is checked out
    is_dirty: bool = False
    changes: str = ""  # hash of the uncommitted changes to tracked files, empty when clean
    author_date: str | None = None  # ISO 8601
    parent: str | None = None  # the first one; known even in a shallow clone
    subject: str | None = None  # first line of its message


def read_commit(folder: Path) -> Commit | None:
    """Return the state of the work tree around `folder`; None without a commit or without git.

    Also None if git fails, with one warning: no commit is better than a wrong one.
    """
    try:
        repository = Repository.around(folder)
        return repository.state() if repository.has_commits() else None
    except RepositoryError as error:
        if any((parent / ".git").exists() for parent in (folder, *folder.resolve().parents)):
            _warn(f"commit and changes are not stored with the runs: {error}")
        return None


_warn = functools.cache(warn)  # each problem once


class Repository:
    """The git repository of a work tree; every method raises RepositoryError."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def around(cls, folder: Path) -> Repository:
        """Return the repository whose work tree holds `folder`."""
        return cls(Path(_git(folder, "rev-parse", "--show-toplevel", where=f"{folder}")))

    def has_commits(self) -> bool:
        return self._commit_called("HEAD") is not None

    def state(self, excluded: Iterable[str] = ()) -> Commit:
        """Return the work tree's commit and changes, except those in `excluded` paths."""
        head = self.describe(self.resolve("HEAD"))
        changes = self._changes(excluded)
        digest = hashlib.sha256(changes.encode()).hexdigest()[:12] if changes else ""
        branch = self._try("symbolic-ref", "--short", "HEAD")
        described = (head.author_date, head.parent, head.subject)
        return Commit(head.commit, branch, bool(changes), digest, *described)

    def path_of(self, file: Path) -> str | None:
        """Return the path of a file that git tracks, from the root; None for any other."""
        listed = ("--literal-pathspecs", "ls-files", "--full-name", "--error-unmatch", "--")
        return self._try(*listed, str(file.absolute()))

    def hash_of_files(self, state: Commit, excluded: Iterable[str]) -> str:
        """Return a hash of a commit's files and changes, except those in `excluded` paths.

        `state` is what is checked out, or a commit without changes.
        """
        left_out = tuple(excluded)
        listed = self._run("ls-tree", state.commit).splitlines()
        files = [line for line in listed if line.partition("\t")[2] not in left_out]
        changes = self._changes(left_out) if state.is_dirty else ""
        return hashlib.sha256("\n".join([*files, changes]).encode()).hexdigest()[:12]

    def _changes(self, excluded: Iterable[str]) -> str:
        """The differences between HEAD and the work tree, staged or not."""
        others = [f":(top,exclude){path}" for path in excluded]
        return self._run(*_DIFF, "--", ":/", *others)

    def describe(self, sha: str) -> Commit:
        """Return a commit with its date, parent and subject."""
        shown = self._run(*_SHOW, f"{sha}^{{commit}}", "--")
        commit, date, _, *subject = [*shown.split("\n"), "", "", ""][:4]
        # `%P` leaves out a parent that a shallow clone lacks; the commit itself names it.
        raw = self._run("cat-file", "commit", commit)
        parents = re.findall(r"^parent (\w+)$", raw.partition("\n\n")[0], flags=re.MULTILINE)
        return Commit(commit, None, False, "", date, next(iter(parents), None), subject[0])

    def resolve(self, name: str) -> str:
        """Return the full hash of a revision, branch or tag."""
        sha = self._commit_called(name)
        if sha is None:
            raise RepositoryError(
                f'"{name}": no such revision in {self.root}{self._shallow_hint()}'
            )
        return sha

    def _commit_called(self, name: str) -> str | None:
        quietly = ("rev-parse", "--verify", "--quiet", "--end-of-options")
        return self._try(*quietly, f"{name}^{{commit}}")

    def merge_base(self, one: str, other: str) -> str:
        """Return the newest commit that both descend from."""
        sha = self._try("merge-base", one, other)
        if sha is None:
            raise RepositoryError(
                f"{one} and {other}: have no common commit in {self.root}{self._shallow_hint()}"
            )
        return sha

    def is_ancestor(self, one: str, other: str) -> bool:
        """Whether `other` is `one` or descends from it; False if either is not in the clone."""
        return self._try("merge-base", "--is-ancestor", one, other) is not None

    def between(self, good: str, bad: str) -> list[str]:
        """Return the commits after `good` up to `bad` along first parents, oldest first.

        These are the states that the branch has had; a merged branch counts as its merge.
        """
        first, last = self.resolve(good), self.resolve(bad)
        if first == last:
            raise RepositoryError(f"{good} and {bad}: are the same commit; name two")
        path = self._run("rev-list", "--first-parent", "--reverse", f"{first}..{last}").split()
        if not path or self.describe(path[0]).parent != first:
            if not path and self.is_ancestor(last, first):
                raise RepositoryError(f"{good}: is newer than {bad}; swap them")
            ancestors = set(self._run("rev-list", first).split())
            shared = [commit for commit in self.line(last) if commit in ancestors]
            nearest = shared[-1][:12] if shared else f"{last[:12]}~1"
            raise RepositoryError(
                f"{good}: does not lie on the first-parent line of {bad} in {self.root}"
                f"{self._shallow_hint()}; name a commit that does, such as {nearest}"
            )
        return path

    def line(self, tip: str) -> list[str]:
        """Return the first-parent line up to a commit, oldest first, as far as the clone has it."""
        return self._run("rev-list", "--first-parent", "--reverse", self.resolve(tip)).split()

    def positions(self, shas: Iterable[str]) -> dict[str, int]:
        """Return each commit's place in one order, parents first; unknown ones are missing."""
        wanted = {sha for sha in shas if _SHA.fullmatch(sha)}
        kinds = self._run("cat-file", "--batch-check", text="\n".join(wanted)).splitlines()
        here = [line.split()[0] for line in kinds if line.split()[1:2] == ["commit"]]
        if not here:
            return {}
        listing = ("rev-list", "--topo-order", "--reverse", "--stdin")
        order = self._run(*listing, text="\n".join(here)).split()
        return {sha: place for place, sha in enumerate(order) if sha in wanted}

    def default_base(self, tip: str | None = None) -> str:
        """Return the commit to compare with: where `tip` left the main branch, or its parent.

        Without a `tip` it is the work tree's base; on the main branch that is HEAD itself if there
        are uncommitted changes.
        """
        head = self.resolve(tip or "HEAD")
        base = self.merge_base(self._main_tip(), head)
        if base != head or (tip is None and self.state().is_dirty):
            return base
        parent = self.describe(head).parent
        if parent is None:
            raise RepositoryError(
                f"{self.root}: {tip or 'HEAD'} is its first commit; name a base with --base"
            )
        return self.resolve(parent)

    def _main_tip(self) -> str:
        """Tip of the first main branch found; later names may be leftovers of a rename.

        A repository's only branch is its main one, whatever its name.
        """
        tips = (self._commit_called(name) for name in _MAIN_BRANCHES)
        first = next((tip for tip in tips if tip is not None), None)
        if first is not None:
            return first
        fetched = self._try("config", "--get-regexp", r"remote\..*\.fetch")
        if fetched and "*" not in fetched:
            raise RepositoryError(
                f"{self.root}: is a clone of one branch or tag, so that its main branch is not "
                "known; name a base with --base, or fetch it, as with: "
                "git fetch origin main:refs/remotes/origin/main"
            )
        listing = ("for-each-ref", "--format=%(refname)", "refs/heads", "refs/remotes")
        references = self._run(*listing).splitlines()
        names = {re.sub(r"^refs/(heads|remotes/[^/]+)/", "", name) for name in references}
        if len(names) != 1:
            raise RepositoryError(
                f"{self.root}: none of its {len(names)} branches is known to be the main one; "
                f"name a base with --base, or: git remote set-head origin --auto"
                f"{self._shallow_hint()}"
            )
        return self.resolve(references[-1])

    @contextlib.contextmanager
    def worktree(self, sha: str, folder: Path) -> Iterator[Path]:
        """Check out a commit below `folder` for the duration of the `with` block.

        The leftovers of a killed process are removed first.
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
        """Remove the work trees that killed processes have left below a folder."""
        if folder.is_dir():
            for path in folder.resolve().iterdir():
                self._clear(path)

    def _clear(self, path: Path) -> None:
        """Remove one work tree; others are not pruned, as their disks may not be mounted."""
        forget = ("worktree", "remove", "--force", "--force", str(path))
        self._try(*forget)
        if path.exists():  # git does not know it, or its files have changed
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
    """Run git with `text` as its input, and return what it prints."""
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
        # Git's error, with its advice if the files belong to another user, as in containers.
        advice = [line.strip() for line in done.stderr.splitlines() if "safe.directory" in line]
        problem = "; ".join(filter(None, [first_line(done.stderr), *advice[-1:]]))
        problem = problem or f"ended with {done.returncode}"
        raise RepositoryError(f"{where}: git {arguments[0]}: {problem}")
    return done.stdout.rstrip("\n")
