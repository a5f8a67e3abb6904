"""`python -m` of the package and of its command line; cautions for stages without parameters."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ppbench.config.case import Case
from ppbench.run.records import bare_stages


def ran(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", ["ppbench", "ppbench.cli"])
def test_the_module_runs_the_command(module):
    drawn = ran(module, "schedules", "draw", "1f1b", "-p", "2", "-m", "3")
    assert (drawn.returncode, drawn.stderr) == (0, "")
    assert "2" in drawn.stdout
    refused = ran(module, "show", "nothing", "--results", "nowhere")
    assert refused.returncode != 0
    assert refused.stderr.startswith("error: ")
    assert "history" in ran(module, "--help").stdout  # what other modules add to it, too


@pytest.mark.parametrize(
    ("partition", "sizes", "expected"),
    [
        ("uniform", [10, 0, 0, 5], [1, 2]),
        ("parameters", [10, 5], []),
        ((2, 0), [10, 0], []),  # as asked for
    ],
)
def test_stages_without_parameters_are_found_unless_they_were_asked_for(partition, sizes, expected):
    case = Case(model_partition=partition)
    assert bare_stages(case, {"parameters_per_stage": json.dumps(sizes)}) == expected
