"""Checks of architectures: how the ranks are followed, and what becomes of those that die.

What the ranks do is the engine's to test; here a module that only writes its lines stands in.
"""

import dataclasses

import pytest

from ppbench.errors import LaunchError, UsageError
from ppbench.run.sweep.model_check import check_architectures

pytestmark = pytest.mark.usefixtures("warm_starts")

RANKS = """\
import json, os, sys

path, *names = sys.argv[1:]
known = ["good", "poor", "deadly", "last"]
unknown = [name for name in names if name not in known]
if unknown:
    print(f"unknown architecture: {unknown[0]}", file=sys.stderr)
    sys.exit(2)

def say(name, status, **more):
    with open(path, "a") as file:
        print(json.dumps({"architecture": name, "status": status, **more}), file=file)

for name in names or known:
    say(name, "planned")
for name in names or known:
    say(name, "started")
    if name == "deadly":
        open(path, "a").write('{"architecture": ')
        os._exit(3)
    say(name, "wrong" if name == "poor" else "exact", dtype="float64", gradient_difference=0.0,
        loss_difference=0.0, num_parameters=7, seconds=0.5, reason="")
"""
ONE_RANK = 'import os\nif os.environ["RANK"] != "0": raise SystemExit\n'


def check(tmp_path, monkeypatch, code, *names):
    (tmp_path / "stand_in.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    progress = []
    checks = check_architectures(names, progress.append, module="stand_in")
    assert [one.check for one in progress] == checks
    return checks, [one.text for one in progress]


def test_an_architecture_that_takes_the_ranks_down_costs_itself_alone(tmp_path, monkeypatch):
    checks, told = check(tmp_path, monkeypatch, ONE_RANK + RANKS)
    assert told == [
        "1 of 4: good exact", "2 of 4: poor wrong", "3 of 4: deadly error", "4 of 4: last exact",
    ]  # fmt: skip
    assert [one.has_failed for one in checks] == [False, True, True, False]
    assert dataclasses.astuple(checks[0]) == ("good", "exact", "float64", 0.0, 0.0, 7, 0.5, "", "")
    assert checks[2].reason == "the ranks died"


def test_a_name_that_is_not_known_is_one_clear_error(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"^unknown architecture: x$"):
        check(tmp_path, monkeypatch, RANKS, "good", "x")


def test_ranks_that_never_begin_are_shown_with_what_they_said(tmp_path, monkeypatch):
    with pytest.raises(LaunchError, match=r"(?s)without checking anything.*no such luck"):
        check(tmp_path, monkeypatch, "raise RuntimeError('no such luck')")
