"""The identity of what a case is measured with besides ppbench: sources, texts, model folders.

Nothing here is remembered: a file that was edited between two sweeps of one notebook is another
input.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from engine.model.local_files import local_files
from engine.model.presets import PRESETS

_OURS = ("engine", "ppbench")


def hashes_of_text(source: str) -> list[str]:
    """Hash the local files of a data source: another text of the same name is another workload."""
    hashes = []
    for path in local_files(source):
        with path.open("rb") as file:
            hashes.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashes


def identity_of_model(name: str) -> list[tuple[str, str]]:
    """The sources of a factory with their hashes, or the files of a checkpoint with their stamps.

    The contents of a checkpoint are too large to be read: their sizes and times stand for them. The
    last of the times is the kernel's own, which programs cannot set back.
    """
    if name in PRESETS:
        return []
    if ":" in name:
        return [
            (str(file), hashlib.sha256(file.read_bytes()).hexdigest())
            for file in sources_of(name.partition(":")[0])
        ]
    folder = Path(name)
    if not folder.is_dir() and name.count("/") == 1:
        from huggingface_hub import try_to_load_from_cache

        with contextlib.suppress(ValueError):  # no hub id
            cached = try_to_load_from_cache(name, "config.json")
            folder = Path(cached).parent if isinstance(cached, str) else folder
    files = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    stats = [(path.name, path.stat()) for path in files]
    return [(name, f"{s.st_size} {s.st_mtime_ns} {s.st_ctime_ns}") for name, s in stats]


def sources_of(module: str) -> list[Path]:
    """The files that a module may depend on, in order of path: its own, and what they import.

    Imports are read from the sources, so that nothing of them is run. Python's files, ppbench's and
    those of installed packages are left out, whose versions are known; of an installed package that
    the module is in, all are in. A file that the module does not use costs at most another run.
    """
    found: dict[Path, None] = {}
    waiting = list(_files_of(module, installed=True))
    own = module.partition(".")[0]
    for file in waiting:
        if _is_installed(file):
            package = next((folder for folder in file.parents if folder.name == own), None)
            found |= dict.fromkeys([file] if package is None else package.rglob("*.py"))
    while waiting:
        file = waiting.pop()
        if file not in found:
            found[file] = None
            waiting += _imported_by(file)
    return sorted(found)


def _imported_by(file: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # its import says what is wrong with it
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files_of(alias.name)
        elif isinstance(node, ast.ImportFrom):
            names = [".".join(filter(None, [node.module, alias.name])) for alias in node.names]
            if node.level:
                root = file.parents[node.level - 1]
                names = [name for name in names if name] or [""]
                for name in names:
                    yield from _files_below(root, name)
            else:
                for name in names:
                    yield from _files_of(name)


def _files_of(module: str, *, installed: bool = False) -> Iterator[Path]:
    """The files that importing a module would run: of the first place that has it."""
    if module.partition(".")[0] in (*_OURS, *sys.stdlib_module_names):
        return
    for place in dict.fromkeys([str(Path.cwd()), *sys.path]):
        files = list(_files_below(Path(place), module))
        if files:
            if installed or not _is_installed(files[0]):
                yield from files
            return


def _files_below(root: Path, module: str) -> Iterator[Path]:
    """The packages on the way to a module, and itself; a last part that is no module is a name."""
    folder = root
    for part in module.split("."):
        for file in (folder / part / "__init__.py", folder / f"{part}.py"):
            if file.is_file():
                yield file
                break
        folder = folder / part


def _is_installed(file: Path) -> bool:
    paths = sysconfig.get_paths()
    places = (paths["stdlib"], paths["platstdlib"])
    is_listed = not {"site-packages", "dist-packages"}.isdisjoint(file.parts)
    return is_listed or any(file.is_relative_to(place) for place in places)
