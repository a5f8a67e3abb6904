"""Runs the benchmarks, each in a process of its own, and makes the page of their results.

    python -m benchmarks [--only NAME...] [--max-rounds N]

If a benchmark fails to run, its last lines are printed, the others continue, and the exit code is
1. A missed goal is a result, not a failure. With `--max-rounds`, those that can (`MEASURED_ON`)
measure on while a goal is not decided.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import BENCHMARKS, MEASURED_ON, page
from benchmarks.outcome import MAX_ROUNDS, RESULTS, Outcome, Standing
from benchmarks.surroundings import ROOT

LAST_LINES = 20


@dataclass(frozen=True)
class Ended:
    """A benchmark that has ended: its duration, exit code and output."""

    name: str
    took_s: float
    exit_code: int
    output: str

    def in_words(self) -> str:
        """One line; for a failure, also the last lines of the output."""
        start = f"{self.name:12} {int(self.took_s) // 60:3}:{int(self.took_s) % 60:02}  "
        if self.exit_code != 0:
            last = "\n    ".join(self.output.splitlines()[-LAST_LINES:])
            return f"{start}FAILED with exit code {self.exit_code}\n    {last}"
        return start + _goals(self.name)


def main() -> int:
    arguments = _arguments()
    names = arguments.only or BENCHMARKS
    console = Console(highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="ppbench-benchmarks-") as folder:
        failed = _run_all(names, console, Path(folder), arguments.max_rounds)
    page.main()
    if failed:
        console.print(f"failed: {', '.join(failed)}", markup=False)
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, metavar="NAME")
    parser.add_argument("--max-rounds", type=int, default=0, metavar="N", help=MAX_ROUNDS)
    return parser.parse_args()


def _run_all(names: Sequence[str], console: Console, folder: Path, max_rounds: int) -> list[str]:
    """Run them and return the names of those that failed; shows progress as a bar or as lines."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    failed = []
    with Progress(
        *columns,
        console=console,
        refresh_per_second=1,  # drawing takes time on the cores that are measured
        disable=not console.is_terminal,
    ) as progress:
        bar = progress.add_task("", total=len(names))
        for name in names:
            progress.update(bar, description=name)
            if not console.is_terminal:
                console.print(f"{name} ...", markup=False)
            ended = _run(name, folder / name, max_rounds)
            progress.advance(bar)
            progress.console.print(ended.in_words(), markup=False)
            if ended.exit_code != 0:
                failed.append(name)
    return failed


def _run(name: str, log: Path, max_rounds: int = 0) -> Ended:
    """Run one benchmark with its output in a file: a full pipe would stop it."""
    began = time.monotonic()
    command = [sys.executable, "-m", f"benchmarks.{name}"]
    if max_rounds and name in MEASURED_ON:
        command += ["--max-rounds", str(max_rounds)]
    with (
        log.open("w") as output,
        subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT) as child,
    ):
        try:
            exit_code = child.wait()
        except BaseException:
            child.terminate()
            raise
    return Ended(name, time.monotonic() - began, exit_code, log.read_text(errors="replace"))


def _goals(name: str) -> str:
    outcome = Outcome.from_json((RESULTS / f"{name}.json").read_text("utf-8"))
    counts = Counter(ratio.standing for ratio in outcome.ratios if ratio.standing is not None)
    goals = ", ".join(f"{counts[standing]} {standing}" for standing in Standing)
    of_goals = f"; of {counts.total()} goals {goals}" if counts else ""
    return f"{len(outcome.ratios)} ratios{of_goals}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
