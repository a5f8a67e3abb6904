"""Plants random faults in the code and counts, room by room, those that no test notices.

    python -m benchmarks.mutants before.json                        # about 200 faults
    python -m benchmarks.mutants after.json --again before.json

`mutants.json` beside this file has those of d33be92, of every room.

A mutant is one changed expression: a flipped comparison, a dropped call, a number off by one, two
swapped arguments, a value that is not returned. It is planted in a copy of the repository. There
the tests of the mirrored folder run until one fails, the module's own first. A mutant survives if
all of them pass. It is open if they take longer than `--limit` seconds.

`--again` plants those of an earlier file once more, wherever their text has moved to in the room.
Survivors are not planted a second time: only a mutant that was killed can newly survive. The test
that killed it runs first. At the end, every test that killed runs on the unchanged code too: one
that fails there has shown nothing.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]

OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.Gt: ast.LtE,
    ast.Eq: ast.NotEq,
    ast.In: ast.NotIn,
    ast.Is: ast.IsNot,
}
OPPOSITES |= {opposite: op for op, opposite in OPPOSITES.items()}
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
    encoded = source.encode()
    starts = [0]
    for line in encoded.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(ast.parse(source)):
        for kind, new in faults(node):
            assert isinstance(node, ast.expr | ast.stmt)
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            text = ast.unparse(new) if isinstance(new, ast.stmt) else f"({ast.unparse(new)})"
            mutated = encoded[:start] + text.encode() + encoded[end:]
            yield kind, ast.unparse(node), mutated.decode()


def files_of(room: str) -> list[Path]:
    """List the sources of a room: those of its folder, of a package's top only those beside it."""
    return sorted((ROOT / room).glob("*.py" if room in ("engine", "ppbench") else "**/*.py"))


def drawn(room: str, number: int, excluded: Sequence[str], seed: int) -> list[Mutant]:
    """Draw mutants of a room: as many of each kind, each fault of a kind as likely as any other."""
    every = {
        Mutant(room, str(file.relative_to(ROOT)), kind, text)
        for file in files_of(room)
        if not any(word in str(file.relative_to(ROOT)) for word in excluded)
        for kind, text, _ in mutations(file.read_text())
    }
    ordered = sorted(every, key=lambda mutant: (mutant.file, mutant.kind, mutant.text))
    random.Random(f"{seed} {room}").shuffle(ordered)
    place = Counter[str]()
    turns = {mutant: place.update([mutant.kind]) or place[mutant.kind] for mutant in ordered}
    return sorted(ordered, key=lambda mutant: turns[mutant])[:number]


def planted(mutant: Mutant) -> tuple[Path, str] | None:
    """Find the text in the mutant's file, else in its room; return that file and its new source."""
    for file in [ROOT / mutant.file, *files_of(mutant.room)]:
        for kind, text, source in mutations(file.read_text()) if file.exists() else ():
            if (kind, text) == (mutant.kind, mutant.text):
                return file.relative_to(ROOT), source
    return None


def judged(mutant: Mutant, copied: Path, limit_s: float) -> Mutant:
    """Plant a mutant in the copy, run the tests there, take it out, and return it with its fate."""
    if (found := planted(mutant)) is None:
        return replace(mutant, fate="gone")
    file, source = found
    mirrored = ROOT / "tests" / file.parent
    while not mirrored.is_dir():
        mirrored = mirrored.parent
    is_top = mutant.room in ("engine", "ppbench")
    tests = sorted(mirrored.glob("test_*.py" if is_top else "**/test_*.py"))
    module = ".".join(file.with_suffix("").parts)
    own = [test for test in tests if test.stem == f"test_{file.stem}"]
    near = [test for test in tests if test not in own and module in test.read_text()]
    groups = [own, near, [test for test in tests if test not in own and test not in near]]
    names = [[str(test.relative_to(ROOT)) for test in group] for group in groups if group]
    ends = time.monotonic() + limit_s
    (copied / file).write_text(source)
    try:
        if mutant.killer and run(copied, [mutant.killer], limit_s)[0] == 1:
            return mutant
        for group in names:
            exit_code, failed = run(copied, group, max(ends - time.monotonic(), 1.0))
            if exit_code != 0:
                fate = "open" if exit_code is None else "killed"
                return replace(mutant, fate=fate, killer=failed)
    finally:
        shutil.copy(ROOT / file, copied / file)
    return replace(mutant, fate="survived", killer="")


def run(copied: Path, tests: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Run tests in the copy until one fails: the exit code, None at the limit, and which failed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
        cwd=copied,
        env=os.environ | {"PYTHONPATH": str(copied)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None, ""
    failed = [
        line.partition(" ")[2].partition(" - ")[0]
        for line in output.splitlines()
        if line.startswith(("FAILED ", "ERROR "))
    ]
    return process.returncode, (failed or [tests[0]])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="where the mutants and their fates are written")
    parser.add_argument("--again", type=Path, metavar="FILE", help="plant the mutants of this file")
    parser.add_argument("--per-room", type=int, default=10)
    parser.add_argument("--rooms", nargs="+", help="folders to plant mutants in; default: all")
    parser.add_argument("--exclude", nargs="*", default=[], help="words of files to leave out")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of tests for a mutant")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    rooms = ["engine", "ppbench", *(str(f.relative_to(ROOT)) for f in ROOT.glob("[ep]*/*/"))]
    if asked.again:
        mutants = [Mutant(**fields) for fields in json.loads(asked.again.read_text())]
    else:
        rooms = asked.rooms or sorted(rooms)
        each = [drawn(room, asked.per_room, asked.exclude, asked.seed) for room in rooms]
        mutants = [mutant for mutants_of_room in each for mutant in mutants_of_room]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for job in map(str, range(asked.jobs)):
            ignored = shutil.ignore_patterns(".*", "__pycache__", "build")
            shutil.copytree(ROOT, Path(folder, job), ignore=ignored)
            copies.put(Path(folder, job))

        def decide(mutant: Mutant) -> Mutant:
            if asked.again and mutant.fate != "killed":
                return mutant
            copied = copies.get()
            decided = judged(mutant, copied, asked.limit)
            copies.put(copied)
            where = f"{decided.file}: {decided.kind}: {decided.text[:80]!r}"
            print(f"{decided.fate:8} {where} {decided.killer}", flush=True)
            return decided

        fates = []
        for decided in pool.map(decide, mutants):
            fates.append(decided)
            asked.file.write_text(json.dumps([asdict(mutant) for mutant in fates], indent=1) + "\n")
        for killer in sorted({mutant.killer for mutant in fates if mutant.fate == "killed"}):
            if run(Path(folder, "0"), [killer], asked.limit)[0] != 0:
                print(f"{killer} fails without a mutant too")
    for room in sorted({mutant.room for mutant in fates}):
        count = Counter(mutant.fate for mutant in fates if mutant.room == room)
        of = f"{count['killed']:3} of {count['killed'] + count['survived']:3} killed"
        print(f"{room:24} {of}; {count['open']} open, {count['gone']} gone")


if __name__ == "__main__":
    main()
