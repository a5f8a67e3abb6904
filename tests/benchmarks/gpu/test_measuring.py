"""Checks measured on the CPU: the code that a GPU will run, and the bounds that hold here too."""

import pytest
import torch

from benchmarks.gpu import CHECKS
from benchmarks.gpu.__main__ import measure_aside, module_of
from benchmarks.gpu.findings import Verdict

CPU = torch.device("cpu")
PATIENCE_S = 300
OPEN_HERE = {
    "ahead": {Verdict.MISSED},  # the CPU has done what was issued
    "energy": {Verdict.NOT_DECIDED},
    "identity": {Verdict.NOT_DECIDED},
    "overhead": set(Verdict),
    "receives": set(Verdict),
    "spans": {Verdict.HELD, Verdict.NOT_DECIDED},
    "streams": set(Verdict),
    "attached": {Verdict.HELD},
    "failures": {Verdict.HELD},
    "memory_full": {Verdict.HELD},
    "synchronisation": {Verdict.HELD},
    "turns": set(Verdict),
    "exactness": {Verdict.HELD},
}
"""The verdicts that a check may come to on the CPU, where times mean nothing."""


def verdicts_of(name, measured):
    found = module_of(name).judge(measured)
    assert found
    assert {finding.check for finding in found} == {name}
    return {finding.verdict for finding in found}


@pytest.mark.parametrize("name", ["ahead", "spans", "streams", "turns"])
def test_a_check_of_one_process_is_measured(name):
    assert verdicts_of(name, module_of(name).measure(CPU)) <= OPEN_HERE[name]


ASIDE = [
    *("attached", "exactness", "failures", "memory_full"),
    *("overhead", "receives", "synchronisation"),
]


@pytest.mark.parametrize(
    "name", ["identity", *(pytest.param(name, marks=pytest.mark.thorough) for name in ASIDE)]
)
def test_a_check_in_a_process_of_its_own_is_measured(name):
    (check,) = (check for check in CHECKS if check.name == name)
    assert verdicts_of(name, measure_aside(check, PATIENCE_S, "cpu")) <= OPEN_HERE[name]


def test_energy_is_not_known_where_there_is_no_gpu():
    energy = module_of("energy")
    assert verdicts_of("energy", energy.measure(CPU, window_s=0.3)) == {Verdict.NOT_DECIDED}
