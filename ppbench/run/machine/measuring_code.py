"""Identity of the code that measures: its behaviour, whatever its wording and its place.

A stored run counts as done, and two launches as measured alike, only under the same code. The
commit that is tracked does not identify it: ppbench mostly lives in another repository.

A reworded docstring, a comment, other formatting and a file of another name change no figure, so
they do not change the identity: it is a hash of the parsed files, without docstrings, positions and
names of our own modules. Parsing takes half a second, so the result is cached in the user's folder
under the hash of the files' bytes.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from ppbench.errors import StoreError
from ppbench.files import whole_file

ROOT = Path(__file__).parents[3]
MEASURING = (
    "engine",
    "ppbench/analysis/attribution.py",
    "ppbench/analysis/collectives.py",
    "ppbench/analysis/costs.py",
    "ppbench/analysis/job_times.py",
    "ppbench/analysis/metrics.py",
    "ppbench/analysis/mfu.py",
    "ppbench/analysis/pairs.py",
    "ppbench/analysis/reference.py",
    "ppbench/analysis/replicas.py",
    "ppbench/analysis/running.py",
    "ppbench/analysis/transfers.py",
    "ppbench/config/programs.py",
    "ppbench/judge/differences.py",
    "ppbench/run/conductor.py",
    "ppbench/run/launch/local.py",
    "ppbench/run/launch/supervisor.py",
    "ppbench/run/machine/counters.py",
    "ppbench/run/machine/gpus.py",
    "ppbench/run/machine/placement.py",
    "ppbench/run/machine/sampler.py",
    "ppbench/run/machine/telemetry.py",
    "ppbench/run/records.py",
    "ppbench/run/rounds.py",
    "ppbench/run/runtimes",
    "ppbench/run/verification/losses.py",
    "ppbench/run/worker",
    "ppbench/statistics/step_times.py",
)
"""The files, and folders of files, whose code a stored figure depends on."""
SOLVING = ("ppbench/planning", "ppbench/run/costs.py", "ppbench/run/sweep/automatic.py")
"""The code that the program of schedule auto depends on besides."""
OF_COSTS = ("ppbench/planning/cost_measurement.py",)
"""The code that measured costs of layers depend on besides."""
VERIFYING = (*MEASURING, "ppbench/run/verification")
"""The files and folders whose code the result of a verification depends on."""
_OURS = ("engine", "ppbench")
_OUR_MODULE = re.compile(rf"(?:{'|'.join(_OURS)})(?:\.\w+)+")
_VERSION = "1"  # raised when the stripping changes, so that cached hashes are not used


@functools.cache
def code_hash(places: tuple[str, ...] = MEASURING) -> str:
    """Return a short hash of the code in these places, which wording and layout do not change."""
    files = sorted(set(files_in(ROOT / place for place in places)))
    raw = hashlib.sha256(f"{_VERSION} {sys.version_info[:2]}".encode())
    for file in files:
        raw.update(hashlib.sha256(file.read_bytes()).digest())
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # there is no home
        return identity_of(file.read_bytes() for file in files)
    cached = cache / "ppbench" / "code" / raw.hexdigest()
    with contextlib.suppress(OSError):  # it is not there yet
        return cached.read_text()
    identity = identity_of(file.read_bytes() for file in files)
    with contextlib.suppress(StoreError), whole_file(cached) as opened:
        opened.write(identity.encode())
    return identity


def files_in(places: Iterable[Path]) -> Iterable[Path]:
    """Yield the files themselves, and all Python sources that are in folders."""
    for place in places:
        yield from place.rglob("*.py") if place.is_dir() else [place]


def identity_of(sources: Iterable[bytes]) -> str:
    """Hash the parsed sources; their order, places and file names do not change the result."""
    parsed = sorted(_parsed(source) for source in sources)
    return hashlib.sha256("\n".join(parsed).encode()).hexdigest()[:12]


def _parsed(source: bytes) -> str:
    stripper = _Stripper()
    tree = stripper.visit(ast.parse(source))
    imported = sorted(stripper.imported)
    return hashlib.sha256(f"{imported} {ast.dump(tree)}".encode()).hexdigest()


class _Stripper(ast.NodeTransformer):
    """Removes from parsed code everything that does not change its behaviour."""

    def __init__(self) -> None:
        self.imported: set[tuple[str, str]] = set()
        """Names imported from our own modules, each with its local name."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:  # ast's name
        """Remove docstrings, those of attributes too: a string as a statement of its own."""
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        """Keep the imported names of our modules, and drop the module and the place of the line."""
        if not node.level and (node.module or "").partition(".")[0] not in _OURS:
            return node
        self.imported |= {(name.name, name.asname or name.name) for name in node.names}
        return None

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """Replace the name of one of our modules, by which a process is started."""
        if isinstance(node.value, str) and _OUR_MODULE.fullmatch(node.value):
            return ast.Constant("ours")
        return node
