"""Runs the parts of all benchmarks, each in a process of its own, and makes the page.

    python -m benchmarks [--only NAME...] [--quick]

A name is that of a module, or MODULE.PART. A part that fails is told with its last lines, the
others go on, and the exit code is 1. A missed goal is a result, not a failure. A part is ended
five minutes after its own time, and all within an hour. `--quick` tries every part with its
smallest settings; it keeps no results.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import page
from benchmarks.claims import CLAIMS, OTHERS, Claim
from benchmarks.rows import RESULTS, ROOT

LAST_LINES, MOST_S = 20, 60 * 60
BEYOND_S = 300  # what has begun is ended by itself, and what hangs after so much more


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--only", nargs="+", default=[], metavar="NAME")
    options.add_argument("--quick", action="store_true", help="smallest settings, no results")
    asked = options.parse_args()
    every = (*CLAIMS, *OTHERS)
    known = {claim.module for claim in every} | {claim.name for claim in every}
    for name in asked.only:
        if name not in known:
            options.error(f"--only {name}: no such benchmark; expected {', '.join(sorted(known))}")
    wanted = asked.only or known
    chosen = [claim for claim in every if claim.module in wanted or claim.name in wanted]
    with tempfile.TemporaryDirectory(prefix="ppbench-benchmarks-") as folder:
        results = Path(folder) if asked.quick else RESULTS
        failed = run_all(chosen, results, Path(folder) / "log", is_quick=asked.quick)
    if failed:
        print(f"failed: {', '.join(failed)}")
    has_page = asked.quick or page.main() == 0
    return 1 if failed or not has_page else 0


def run_all(
    claims: Sequence[Claim],
    results: Path,
    log: Path,
    *,
    most_s: float = MOST_S,
    beyond_s: float = BEYOND_S,
    is_quick: bool = False,
) -> list[str]:
    """Run these parts; returns the names of those that failed, or had no time."""
    began, failed = time.monotonic(), list[str]()
    for claim in claims:  # what an earlier commit measured is gone, whatever happens
        (results / f"{claim.name}.json").unlink(missing_ok=True)
    for number, claim in enumerate(claims, start=1):
        passed_s = time.monotonic() - began
        start = f"{passed_s / 60:4.1f} min  {number}/{len(claims)} {claim.name}"
        limit_s = min(claim.seconds + beyond_s, most_s - passed_s)
        if limit_s <= 0 and not is_quick:
            print(f"{start}: no time is left", flush=True)
            failed.append(claim.name)
            continue
        print(start, flush=True)
        exit_code = _run(claim, results, log, None if is_quick else limit_s)
        lines = log.read_text(errors="replace").splitlines()
        if exit_code:
            failed.append(claim.name)
            print(f"  FAILED with exit code {exit_code}")
            print("\n".join(f"    {line}" for line in lines[-LAST_LINES:]), flush=True)
        else:
            print("\n".join(line for line in lines if line.startswith("  ")), flush=True)
    return failed


def _run(claim: Claim, results: Path, log: Path, limit_s: float | None) -> int:
    """Run one part with its output in a file: a full pipe would stop it. No limit: a quick try."""
    command = [sys.executable, *claim.command.split()[1:], "--results", str(results)]
    command += ["--seconds", "0"] if limit_s is None else []
    with (
        log.open("w") as output,
        subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        ) as child,
    ):
        try:
            return child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL
        finally:
            if child.returncode is None:  # also when this is stopped from the keyboard
                os.killpg(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
