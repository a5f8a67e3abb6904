"""`python -m` of the package and of its command line; cautions for stages without parameters."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ppbench.config.case import Case
from ppbench.run.records import bare_stages


@pytest.mark.parametrize("module", ["ppbench", "ppbench.cli"])
def test_the_module_runs_the_command(module):
    command = [sys.executable, "-m", module, "show", "nothing", "--results", "nowhere"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: ")


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
