"""`python -m benchmarks.gpu`: which checks run, what becomes of those that fail, and the page."""

import itertools

import pytest

from benchmarks.gpu import CHECKS, Check
from benchmarks.gpu import __main__ as command
from benchmarks.gpu.__main__ import CheckError, findings_of, measure_aside, module_of, write
from benchmarks.gpu.findings import Bound, Finding, Verdict
from benchmarks.gpu.products import Measurements
from engine.run import device as devices


def test_without_a_gpu_it_says_so_and_writes_nothing(monkeypatch, capsys):
    monkeypatch.setattr(devices, "count", lambda: 0)
    monkeypatch.setattr(command, "write", None)
    assert command.main([]) == 0
    assert "no GPU here" in capsys.readouterr().out


def test_every_check_has_a_module_that_measures_and_judges():
    for check in CHECKS:
        module = module_of(check.name)
        assert callable(module.measure)
        assert callable(module.judge)
        assert module.__doc__


def good(_check, _limit_s):
    return Measurements("H100", 0.8, 1.0)


def test_a_check_of_two_gpus_is_not_run_with_one():
    checks = [Check("products", 10), Check("products", 10, num_gpus=2)]
    one, two = findings_of(checks, 1, good, lambda: 0.0)
    assert one.verdict is Verdict.HELD
    assert (two.verdict, two.note) == (Verdict.NOT_RUN, "needs 2 GPUs; there is 1")


def test_a_check_that_fails_stops_no_other():
    def measure(check, _limit_s):
        if check.limit_s == 1:
            raise CheckError("took longer than 1 s")
        return good(check, 0)

    first, second = findings_of([Check("products", 1), Check("products", 2)], 1, measure, lambda: 0)
    assert (first.verdict, first.note) == (Verdict.NOT_RUN, "took longer than 1 s")
    assert second.verdict is Verdict.HELD


def test_what_would_begin_after_the_time_is_not_run():
    now = itertools.count(0, 250)
    limits = []

    def measure(check, limit_s):
        limits.append(limit_s)
        return good(check, limit_s)

    found = list(findings_of([Check("products", 300)] * 4, 1, measure, lambda: next(now)))
    assert [finding.verdict for finding in found] == ["held", "held", "not run", "not run"]
    assert limits == [300, 100]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A check of any code; its process finds it where this one does."""

    def make(code):
        path = command.ROOT / "benchmarks" / "gpu"
        assert path.exists()
        monkeypatch.setattr(command, "ROOT", tmp_path)
        package = tmp_path / "benchmarks" / "gpu"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package.parent / "__init__.py").write_text("")
        (package / "__main__.py").write_text(code)

    return make


def test_a_check_that_hangs_is_ended(module):
    module("import time; time.sleep(1000)")
    with pytest.raises(CheckError, match="made_up took longer than 1 s"):
        measure_aside(Check("made_up", 1), 1)


def test_a_check_that_dies_tells_its_last_words(module):
    module("raise ValueError('no such event')")
    with pytest.raises(CheckError, match=r"exit code 1: .*no such event"):
        measure_aside(Check("made_up", 60), 60)


def test_the_page_has_every_figure_bound_and_verdict(tmp_path):
    findings = [
        Finding.of("clock", "off by", 0.002, Bound(at_most=0.005), error=0.0001),
        Finding.of("memory", "peak | ratio", 2.0, Bound(at_most=1.0), unit="GiB"),
        Finding.not_run("messages", "needs 2 GPUs"),
    ]
    write("1 x H100", findings, tmp_path)
    page = (tmp_path / "gpu.md").read_text("utf-8")
    assert "1 x H100: 1 held, 1 missed, 1 not run." in page
    assert "| clock | off by | 0.002 ± 0.0001 | ≤ 0.005 | held |  |" in page
    assert "| memory | peak \\| ratio | 2.000 GiB | ≤ 1 | **missed** |  |" in page
    assert "| messages | messages |  |  | not run | needs 2 GPUs |" in page
    assert (tmp_path / "gpu.json").exists()
