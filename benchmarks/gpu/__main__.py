"""Runs every check that this machine has the GPUs for, and makes the page `benchmarks/gpu.md`.

    python -m benchmarks.gpu [--only NAME...]

Without a GPU it says so, writes nothing and ends with exit code 0. A missed bound is a result, not
a failure. A check that hangs is ended after its time, and none begins after ten minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks import page
from benchmarks.__main__ import run_all
from benchmarks.claims import GPU_CHECKS
from benchmarks.rows import RESULTS
from engine.run import device as devices


def main(arguments: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [check.part for check in GPU_CHECKS]
    options.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    asked = options.parse_args(arguments)
    if not devices.count():
        print("no GPU here: nothing is measured, and no page is written")
        return 0
    chosen = [check for check in GPU_CHECKS if check.part in asked.only]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        run_all(chosen, RESULTS, log, last_begin_s=600, beyond_s=0)
    return page.main(page.GPU_PAGE)


if __name__ == "__main__":
    sys.exit(main())
