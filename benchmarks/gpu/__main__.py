"""Runs every check that this machine has the GPUs for, and makes the page `benchmarks/gpu.md`.

    python -m benchmarks.gpu

Without a GPU it says so, and writes nothing. A missed bound is a result, not a failure. A check
that hangs is ended after its time, and all within ten minutes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks import page
from benchmarks.__main__ import run_all
from benchmarks.claims import GPU_CHECKS
from benchmarks.rows import RESULTS
from engine.run import device as devices


def main() -> int:
    if not devices.count():
        print("no GPU here: nothing is measured, and no page is written")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        run_all(GPU_CHECKS, RESULTS, Path(folder) / "log", most_s=600, beyond_s=0)
    return page.main(page.GPU_PAGE)


if __name__ == "__main__":
    sys.exit(main())
