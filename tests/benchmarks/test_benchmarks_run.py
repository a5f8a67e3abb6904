"""`python -m benchmarks`: failures and hangs stop no other part, and arms come in turns."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.__main__ import run_all
from benchmarks.claims import Claim
from benchmarks.gpu import __main__ as on_gpu
from benchmarks.loop import in_turns, sides, within
from benchmarks.rows import ROOT
from engine.run import device as devices
from ppbench.judge.evidence import Rounds

MADE_UP = Claim("made_up", "part", 1, "made up")


def test_a_failure_is_told_with_its_last_lines_and_the_next_one_runs(tmp_path, capsys):
    old = tmp_path / "made_up.part.json"
    old.write_text("of an earlier commit")
    claims = [MADE_UP, replace(MADE_UP, part="other")]
    failed = run_all(claims, tmp_path, tmp_path / "log", is_quick=True)
    assert failed == ["made_up.part", "made_up.other"]
    assert not old.exists()
    printed = capsys.readouterr().out
    assert "FAILED with exit code 1" in printed
    assert "No module named benchmarks.made_up" in printed


def test_what_hangs_is_ended_and_what_would_begin_late_is_not_run(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "made_up.py").write_text("import time; time.sleep(1000)")
    monkeypatch.setattr("benchmarks.__main__.ROOT", tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert run_all([MADE_UP], tmp_path, tmp_path / "log", beyond_s=0) == ["made_up.part"]
    assert "exit code -9" in capsys.readouterr().out
    assert run_all([MADE_UP], tmp_path, tmp_path / "log", most_s=0) == ["made_up.part"]
    assert "no time is left" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-m", "benchmarks", "--only", "nosuch"), "--only nosuch: no such benchmark"),
        (("-m", "benchmarks.planning", "nosuch"), "nosuch: no such part; expected solver"),
    ],
)
def test_an_unknown_name_is_wrong_usage(words, said):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert said in done.stderr


def test_without_a_gpu_it_says_so_and_writes_nothing(monkeypatch, capsys):
    monkeypatch.setattr(devices, "count", lambda: 0)
    monkeypatch.setattr(on_gpu, "run_all", None)
    assert on_gpu.main() == 0
    assert "no GPU here" in capsys.readouterr().out


def test_warm_up_is_not_kept_and_values_pair_by_round():
    calls = []

    def arm(name):
        return lambda: calls.append(name) or float(len(calls))

    turns = in_turns({"a": arm("a"), "b": arm("b")}, range(2))
    assert calls == ["a", "b", "b", "a", "b", "a"]  # the third round begins with the other one
    assert sides(turns, "a", "b") == Rounds((4.0, 6.0), (3.0, 5.0))


def test_items_are_begun_within_a_time_and_the_fewest_in_any_case():
    assert list(within(0, itertools.count(), fewest=3)) == [0, 1, 2]
    assert list(within(1e9, range(5))) == [0, 1, 2, 3, 4]
