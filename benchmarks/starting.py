"""The start-up time of commands and imports, over a Python process that does nothing.

    python -m benchmarks.starting [--rounds 20]

Processes run in turn, each from its start to its end: Python with nothing to do; `ppbench --help`;
`ppbench ls` in a store of 20 runs; `import ppbench`; `import engine.plan…`, which plans and
simulates; `import torch`, which none of these needs. The ratio to Python alone is the user's
waiting time; the ratio to `import torch` compares it with the least time it would take if torch
were imported.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.made_up import rows
from benchmarks.outcome import Ratio, parser, write
from benchmarks.surroundings import ROOT, read_surroundings
from benchmarks.turns import Turns, timed_in_turns
from ppbench.store import Store

NUM_RUNS = 20
NOTHING, TORCH = "python -c pass", "import torch"
PPBENCH = "from ppbench.cli import main; main()"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=20)
    settings, surroundings = options.parse_args(), read_surroundings()
    with tempfile.TemporaryDirectory(prefix="ppbench-starting-") as folder:
        store = Store(Path(folder))
        for row in rows(NUM_RUNS):
            store.write_run(row, {})
        turns = timed_in_turns(_arms(folder), settings.rounds)
    write("starting", settings, surroundings, _ratios(turns), turns.figures())


def _arms(store: str) -> dict[str, Callable[[], object]]:
    return {
        NOTHING: _process("pass"),
        "ppbench --help": _process(PPBENCH, "--help"),
        "ppbench ls": _process(PPBENCH, "ls", "--results", store),
        "import ppbench": _process("import ppbench"),
        "import engine.plan.predict": _process("import engine.plan.predict"),
        TORCH: _process("import torch"),
    }


def _process(code: str, *arguments: str) -> Callable[[], object]:
    command: Sequence[str] = [sys.executable, "-c", code, *arguments]
    return lambda: subprocess.run(command, check=True, capture_output=True, cwd=ROOT)


def _ratios(turns: Turns) -> list[Ratio]:
    ours = [name for name in turns.values if name not in {NOTHING, TORCH}]
    return [
        turns.ratio(f"`{name}` over `{beside}`", name, beside)
        for beside in (NOTHING, TORCH)
        for name in ours
    ]


if __name__ == "__main__":
    main()
