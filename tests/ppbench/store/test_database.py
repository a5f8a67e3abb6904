"""A signal while DuckDB is imported waits until it is."""

from __future__ import annotations

import subprocess
import sys

IMPORTING = """\
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "_duckdb":
            os.kill(os.getpid(), signal.SIGINT)
            print("sent", flush=True)

sys.meta_path.insert(0, Interrupting())
try:
    from ppbench.store.database import duckdb
except KeyboardInterrupt:
    print("raised", "_duckdb" in sys.modules)
"""


def test_an_interrupt_is_raised_after_the_import():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == ["sent", "raised True"], done.stderr
