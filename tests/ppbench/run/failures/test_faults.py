"""The fault campaign in small: random kills, and a sweep that comes to its end all the same."""

import re
import sys
from pathlib import Path

import pytest
from command import python

from engine.flight import Phase

pytestmark = pytest.mark.usefixtures("warm_starts")

ROOT = Path(__file__).parents[4]
PATIENCE_S = 900


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes under /proc")
def test_random_kills_lose_repeat_and_leave_nothing(tmp_path, is_thorough):
    num = 12 if is_thorough else 2
    words = ("-m", "benchmarks.faults", "--kills", str(num), "--cases", "4", "--seed", "2")
    kept = ("--keep", str(tmp_path), "--results", str(tmp_path / "rows"))
    done = python(*words, *kept, folder=ROOT, patience_s=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^{num} kills in \d+ s$", done.stdout, re.MULTILINE)
    assert "held: one ok run per case" in done.stdout
    phases = re.findall(r"while rank 0 (.+) \(", done.stdout)
    assert len(phases) == num
    assert set(phases) <= {"starts", "is between cases", *(phase.words for phase in Phase)}
    if is_thorough:  # two kills at random moments may well come in one phase
        assert len(set(phases)) > 1
