"""The sweeps that ship with ppbench, which commands take by name: `ppbench sweep quick`.

Their source is `sweeps/` of the repository; a wheel has a copy of it inside the package.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from ppbench.config.toml import printable
from ppbench.errors import UsageError, nearest


def shipped_sweeps() -> dict[str, Path]:
    """Each sweep by its name, in order of name."""
    package = Path(str(files("ppbench")))
    folder = next((f for f in (package / "sweeps", package.parent / "sweeps") if f.is_dir()), None)
    return {} if folder is None else {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find_sweep(file: Path) -> Path:
    """The file itself or, if there is none and it is a bare name, the shipped sweep of that name.

    Raises UsageError, with the shipped sweeps, if neither is there.
    """
    try:
        is_there = file.exists()
    except (OSError, ValueError):
        return file  # reading it will say what is wrong
    name, shipped = file.name.removesuffix(".toml"), shipped_sweeps()
    if str(file) in shipped and not file.is_file():
        return from_here(shipped[str(file)])
    if is_there or "\0" in str(file):
        return file
    raise UsageError(
        f"{printable(str(file))}: cannot read the sweep file: No such file or directory, and no "
        f"sweep of this name ships with ppbench{nearest(name, shipped)}"
    )


def from_here(path: Path) -> Path:
    """The path relative to the working directory, if it is below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
