"""Plants random faults in the code and counts, room by room, those that no test notices.

    python -m benchmarks.mutants before.json [--rooms engine/plan ppbench/judge] [--per-room 10]
    python -m benchmarks.mutants after.json --again before.json

A mutant is one changed expression: a flipped comparison, a dropped call, a number off by one, two
swapped arguments, a value that is not returned. It is planted in a copy of the repository, where
the tests of the mirrored folder run until one fails, the module's own first. A mutant survives if
all pass, and is open if they take longer than `--limit` seconds. `--again` plants those that were
killed once more, wherever their text has moved to in the room: only these can newly survive.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.rows import ROOT

PAIRS = {ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.Eq: ast.NotEq, ast.In: ast.NotIn, ast.Is: ast.IsNot}
OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {**PAIRS, **{b: a for a, b in PAIRS.items()}}
UNSEEN = ("debug", "info", "warning", "close", "collect", "unlink")  # calls that nobody need miss


@dataclass(frozen=True)
class Mutant:
    """A fault: its room and file, the text that changes, its fate, and the test that killed it."""

    room: str
    file: str
    kind: str
    text: str
    fate: str = ""  # killed, survived, open (the limit came first), gone (the text is no more)
    killer: str = ""


def faults(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield every fault of a node: its kind, and what stands in the node's place."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in OPPOSITES:
            yield "flip", ast.Compare(node.left, [OPPOSITES[type(op)]()], node.comparators)
        case ast.Expr(value=ast.Call(func=function)) if not ast.unparse(function).endswith(UNSEEN):
            yield "drop", ast.Pass()
        case ast.BinOp(left, ast.Add() | ast.Sub() as op, ast.Constant(value=int()) as right):
            other = ast.Sub() if isinstance(op, ast.Add) else ast.Add()
            yield "off by one", ast.BinOp(left, other, right)
        case ast.Subscript(slice=ast.Constant(value=int() as place), ctx=ast.Load()):
            yield "off by one", ast.Subscript(node.value, ast.Constant(place + 1), node.ctx)
        case ast.Call(args=[ast.Name() as first, ast.Name() as second, *rest]):
            yield "swap", ast.Call(node.func, [second, first, *rest], node.keywords)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "return", ast.Return(ast.Constant(None))


def mutations(source: str) -> Iterator[tuple[str, str, str]]:
    """Yield every mutant of a source: its kind, the text that changes, and the whole new source."""
    encoded, starts = source.encode(), [0]
    for line in encoded.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(ast.parse(source)):
        for kind, new in faults(node):
            assert isinstance(node, ast.expr | ast.stmt)
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            text = ast.unparse(new) if isinstance(new, ast.stmt) else f"({ast.unparse(new)})"
            yield (
                kind,
                ast.unparse(node),
                (encoded[:start] + text.encode() + encoded[end:]).decode(),
            )


def files_of(room: str) -> list[Path]:
    """List the sources of a room: those of its folder, of a package's top only those beside it."""
    return sorted((ROOT / room).glob("*.py" if room in ("engine", "ppbench") else "**/*.py"))


def drawn(room: str, number: int, seed: int) -> list[Mutant]:
    """Draw mutants of a room: as many of each kind, each fault of a kind as likely as any other."""
    every = [
        Mutant(room, str(file.relative_to(ROOT)), kind, text)
        for file in files_of(room)
        for kind, text, _ in mutations(file.read_text())
    ]
    ordered = list(dict.fromkeys(every))
    random.Random(f"{seed} {room}").shuffle(ordered)
    place = Counter[str]()
    turns = {mutant: place.update([mutant.kind]) or place[mutant.kind] for mutant in ordered}
    return sorted(ordered, key=lambda mutant: turns[mutant])[:number]


def judged(mutant: Mutant, copied: Path, limit_s: float) -> Mutant:
    """Plant a mutant in the copy, run the tests there, take it out, and return it with its fate."""
    for file in [ROOT / mutant.file, *files_of(mutant.room)]:
        for kind, text, source in mutations(file.read_text()) if file.exists() else ():
            if (kind, text) == (mutant.kind, mutant.text):
                return _planted(mutant, file.relative_to(ROOT), source, copied, limit_s)
    return replace(mutant, fate="gone")


def _planted(mutant: Mutant, file: Path, source: str, copied: Path, limit_s: float) -> Mutant:
    mirrored = ROOT / "tests" / file.parent
    while not mirrored.is_dir():
        mirrored = mirrored.parent
    is_top = mutant.room in ("engine", "ppbench")
    tests = sorted(mirrored.glob("test_*.py" if is_top else "**/test_*.py"))
    module = ".".join(file.with_suffix("").parts)
    tests.sort(key=lambda test: (test.stem != f"test_{file.stem}", module not in test.read_text()))
    names = [mutant.killer] * bool(mutant.killer) + [str(test.relative_to(ROOT)) for test in tests]
    (copied / file).write_text(source)
    try:
        exit_code, killer = run(copied, names, limit_s)
    finally:
        shutil.copy(ROOT / file, copied / file)
    fate = "open" if exit_code is None else "killed" if exit_code else "survived"
    return replace(mutant, fate=fate, killer=killer)


def run(copied: Path, tests: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Run tests in the copy until one fails: the exit code, None at the limit, and which failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    variables, both = os.environ | {"PYTHONPATH": str(copied)}, subprocess.STDOUT
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        cwd=copied,
        env=variables,
        text=True,
        stdout=pipe,
        stderr=both,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, ""
    failed = [
        line.split()[1] for line in output.splitlines() if line.startswith(("FAILED", "ERROR "))
    ]
    return process.returncode, (failed or [""])[0]


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("file", type=Path, help="where the mutants and their fates are written")
    options.add_argument(
        "--again", type=Path, metavar="FILE", help="plant the mutants of this file"
    )
    options.add_argument("--rooms", nargs="+", help="folders to plant mutants in; default: all")
    options.add_argument("--per-room", type=int, default=10)
    options.add_argument("--limit", type=float, default=150.0, help="seconds of tests for a mutant")
    options.add_argument("--seed", type=int, default=1)
    asked = options.parse_args()
    rooms = asked.rooms or [
        "engine",
        "ppbench",
        *(str(f.relative_to(ROOT)) for f in ROOT.glob("[ep]*/*/")),
    ]
    mutants = [each for room in rooms for each in drawn(room, asked.per_room, asked.seed)]
    if asked.again:
        mutants = [Mutant(**fields) for fields in json.loads(asked.again.read_text())]
    fates, began = list[Mutant](), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "copy"
        shutil.copytree(ROOT, copied, ignore=shutil.ignore_patterns(".*", "__pycache__", "build"))
        for mutant in mutants:
            is_known = asked.again and mutant.fate != "killed"
            fates.append(mutant if is_known else judged(mutant, copied, asked.limit))
            asked.file.write_text(json.dumps([asdict(one) for one in fates], indent=1) + "\n")
            text = f"{fates[-1].file}: {fates[-1].kind}: {fates[-1].text[:80]!r}"
            print(f"{time.monotonic() - began:5.0f} s {fates[-1].fate:8} {text}", flush=True)
        for killer in sorted({one.killer for one in fates if one.fate == "killed"} - {""}):
            if run(copied, [killer], asked.limit)[0]:  # it has shown nothing
                print(f"{killer} fails without a mutant too")
    for room in dict.fromkeys(mutant.room for mutant in fates):
        num = Counter(mutant.fate for mutant in fates if mutant.room == room)
        of = f"{num['killed']} of {num['killed'] + num['survived']} killed"
        print(f"{room:24} {of}; {num['open']} open, {num['gone']} gone")


if __name__ == "__main__":
    main()
