"""Plants random faults in the code, and counts those that no test notices, room by room.

    python -m benchmarks.mutants before.json [--rooms engine/plan ppbench/judge] [--per-room 10]
    python -m benchmarks.mutants after.json --again before.json

A mutant is one changed expression in a copy of the repository. The tests of the mirrored folder run
until one fails; it survives if all pass, and is open if they take longer than `--limit` seconds.
`--again` plants those that were killed once more, wherever their text has moved to in the room.
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
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.rows import ROOT

PAIRS = {ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.Eq: ast.NotEq, ast.In: ast.NotIn, ast.Is: ast.IsNot}
OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {**PAIRS, **{b: a for a, b in PAIRS.items()}}
UNSEEN = ("debug", "info", "warning", "close", "collect", "unlink")  # nobody need miss these


@dataclass(frozen=True)
class Mutant:
    """A fault: the text that changes, its fate, and the test that killed it."""

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
    code, starts = source.encode(), [0]
    for line in code.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(ast.parse(source)):
        for kind, new in faults(node):
            assert isinstance(node, ast.expr | ast.stmt)
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            text = ast.unparse(new) if isinstance(new, ast.stmt) else f"({ast.unparse(new)})"
            yield kind, ast.unparse(node), (code[:start] + text.encode() + code[end:]).decode()


def files_of(room: str) -> list[Path]:
    """List the sources of a room; of a package's top only those beside it."""
    return sorted((ROOT / room).glob("**/*.py" if "/" in room else "*.py"))


def drawn(room: str, number: int) -> list[Mutant]:
    """Draw mutants of a room, each of its faults as likely as any other."""
    every = {
        Mutant(room, str(file.relative_to(ROOT)), kind, text): None
        for file in files_of(room)
        for kind, text, _ in mutations(file.read_text())
    }
    return random.Random(room).sample(list(every), min(number, len(every)))


def judged(mutant: Mutant, copied: Path, limit_s: float) -> Mutant:
    """Plant a mutant in the copy, run the tests there, take it out, and return it with its fate."""
    files = [ROOT / mutant.file, *files_of(mutant.room)]  # its text may have moved
    found = [
        (file.relative_to(ROOT), source)
        for file in files
        for kind, text, source in mutations(file.read_text() if file.exists() else "")
        if (kind, text) == (mutant.kind, mutant.text)
    ]
    if not found:
        return replace(mutant, fate="gone")
    file, source = found[0]
    folders = [ROOT / "tests" / parent for parent in file.parents]
    mirrored = next(folder for folder in folders if folder.is_dir())
    tests = sorted(mirrored.glob("**/test_*.py" if "/" in mutant.room else "test_*.py"))
    tests.sort(key=lambda test: test.stem != f"test_{file.stem}")
    names = [mutant.killer] * bool(mutant.killer) + [str(test.relative_to(ROOT)) for test in tests]
    (copied / file).write_text(source)
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *names]
    limited = ["timeout", "--signal=KILL", f"{limit_s}", *pytest]  # all processes of the tests
    variables = os.environ | {"PYTHONPATH": str(copied)}
    done = subprocess.run(limited, cwd=copied, env=variables, stdout=subprocess.PIPE, check=False)
    shutil.copy(ROOT / file, copied / file)
    if done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return replace(mutant, fate="open")
    failed = [line.split()[1] for line in done.stdout.decode().splitlines() if line[:6] == "FAILED"]
    fate = "killed" if done.returncode else "survived"
    return replace(mutant, fate=fate, killer=(failed or [""])[0])


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("file", type=Path, help="where the mutants and their fates are written")
    options.add_argument("--again", type=Path, metavar="FILE", help="plant those of this file")
    options.add_argument("--rooms", nargs="+", help="folders to plant mutants in; default: all")
    options.add_argument("--per-room", type=int, default=10)
    options.add_argument("--limit", type=float, default=150.0, help="seconds of tests for a mutant")
    asked, fates = options.parse_args(), list[Mutant]()
    folders = sorted(str(folder.relative_to(ROOT)) for folder in ROOT.glob("[ep]*/*/"))
    rooms = asked.rooms or ["engine", "ppbench", *folders]
    given = json.loads(asked.again.read_text()) if asked.again else []
    mutants = [Mutant(**each) for each in given]
    mutants = mutants or [each for room in rooms for each in drawn(room, asked.per_room)]
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "copy"
        shutil.copytree(ROOT, copied, ignore=shutil.ignore_patterns(".*", "__pycache__", "build"))
        for mutant in mutants:
            is_planted = not asked.again or mutant.fate == "killed"
            fates.append(judged(mutant, copied, asked.limit) if is_planted else mutant)
            asked.file.write_text(json.dumps([asdict(one) for one in fates], indent=1) + "\n")
            print(f"{fates[-1].fate:8} {mutant.file}: {mutant.kind}: {mutant.text!r}", flush=True)
    for room_and_fate, num in sorted(Counter((one.room, one.fate) for one in fates).items()):
        print(f"{num:4} {' '.join(room_and_fate)}")


if __name__ == "__main__":
    main()
