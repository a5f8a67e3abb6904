"""Git repositories made by hand, as small as can be, with every date and name fixed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

AUTHOR = "Ann Author"
FIRST_S = 1_767_225_600  # 2026-01-01T00:00:00Z
MAIN = "main"


def git(folder: Path, *arguments: str, at_s: int = FIRST_S) -> str:
    """The output of git, independent of the user's settings, hooks and repository."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    who = {f"GIT_{role}_{what}": value for role in ("AUTHOR", "COMMITTER") for what, value in (
        ("NAME", AUTHOR), ("EMAIL", "ann@example.org"), ("DATE", f"{at_s} +0000"),
    )}  # fmt: skip
    quiet = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        capture_output=True, text=True, check=False, env={**known, **who, **quiet},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.rstrip("\n")


def make_repository(folder: Path) -> Path:
    """An empty one, its branch called main."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "--quiet", f"--initial-branch={MAIN}")
    return folder


def commit(folder: Path, files: Mapping[str, str], subject: str, *, day: int = 0) -> str:
    """Write the files and commit all; the commit's hash. `day` counts from 2026-01-01."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(folder, "add", "--all")
    at_s = FIRST_S + day * 86_400
    git(folder, "commit", "--quiet", "--allow-empty", "--message", subject, at_s=at_s)
    return git(folder, "rev-parse", "HEAD")


def commits(folder: Path, count: int, first: int = 1) -> list[str]:
    """Make so many commits on successive days, each with its number in a file; oldest first."""
    numbers = range(first, first + count)
    return [commit(folder, {"number": f"{n}\n"}, f"Number {n}", day=n) for n in numbers]
