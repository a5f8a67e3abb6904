"""What is said of a measurement beforehand, at its looks and at its end; nothing is launched."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from command import printed
from measured import around
from stored_runs import run_row, store_together
from tracked import scattered

from ppbench.comparison.known import Known, known_of
from ppbench.comparison.lines import Stopped
from ppbench.comparison.measurement import measure_until_decided, reach_text, stop_text
from ppbench.config.reader import read_sweep
from ppbench.errors import ExitCode, UsageError
from ppbench.judge.evidence import Noise
from ppbench.judge.looks import Looks
from ppbench.judge.verdicts import LEVEL
from ppbench.run.machine.environment import read_environment
from ppbench.store import Store

SWEEP = """\
name = "two"
device = "cpu"

[model]
preset = "llama-tiny"

[grid]
schedule = ["afab", "1f1b"]
"""


@pytest.fixture
def sweep(tmp_path):
    file = tmp_path / "two.toml"
    file.write_text(SWEEP)
    return file


def machine_of(case):
    return read_environment().fingerprint(case.device, case.world_size, 1)


def test_more_launches_find_smaller_changes_and_a_few_of_them_are_named():
    text = reach_text(Noise(0.01, 20), tuple(range(3, 13)), 1)
    parts = text.partition("a change of ")[2].split(", ")
    changes = [float(part.split(" %")[0]) for part in parts]
    assert [part.split(" with ")[1] for part in parts] == ["3", "6", "9", "12"]
    assert changes == sorted(changes, reverse=True)


def test_the_end_says_how_many_looks_it_took_and_what_they_spent():
    planned, level = tuple(range(3, 13)), f"{LEVEL:.2%}".replace("%", " %")
    first = stop_text(Stopped(Looks(planned[:1], 12), is_decided=True))
    assert first.startswith("stopped: decided after 3 launches of each side (1 look; 0.")
    assert first.endswith(f" % of {level} spent on false claims)")
    last = stop_text(Stopped(Looks(planned, 12), is_decided=False))
    reached = "stopped: --max-launches 12 reached, and not decided"
    assert last == f"{reached} (10 looks; {level} of {level} spent on false claims)"


def test_too_few_launches_for_a_verdict_are_refused():
    with pytest.raises(UsageError, match="--max-launches 2 launches; a verdict needs 3"):
        measure_until_decided(2, pytest.fail, pytest.fail, pytest.fail, (), Known(1), pytest.fail)


def test_nothing_is_known_of_cases_that_were_never_launched(sweep, tmp_path):
    known = known_of(read_sweep(sweep, [], "cpu"), tmp_path / "results", num_sides=2)
    assert (known.num_cases, known.noise, known.round_s) == (2, None, None)


def test_the_noisiest_case_and_the_time_between_launches_are_known_from_the_store(sweep, tmp_path):
    read = read_sweep(sweep, [], "cpu")
    speeds = [scattered(deviation) for deviation in (0.004, 0.011)]
    begun, rows = datetime(2026, 1, 1, tzinfo=UTC), []
    for launch in range(12):  # a launch every 20 s, of runs of 3 s
        for place, ((case, measure), own) in enumerate(zip(read.cases, speeds, strict=True)):
            start = begun + timedelta(seconds=20 * launch + 4 * place)
            row = {
                **run_row(0, case),
                **measure.settings(),
                "tokens_per_s": own[launch],
                "run_id": f"{start:%Y%m%dT%H%M%S}000-abcdef",
                "created_at": (start + timedelta(seconds=3)).isoformat(),
                "fingerprint": machine_of(case),
                "launch": launch,
            }
            rows.append((row, {}))
    store_together(Store(tmp_path), rows)
    known = known_of(read, tmp_path, num_sides=2)
    assert known.noise.deviation == pytest.approx(0.011, rel=0.01)
    assert known.round_s == pytest.approx(40)


def test_cases_of_a_sweep_are_compared_along_a_setting_until_decided(sweep, tmp_path, monkeypatch):
    """The launches are in the store already, so none is made."""
    monkeypatch.chdir(tmp_path)
    read = read_sweep(sweep, [], "cpu")
    monkeypatch.setattr("ppbench.comparison.across.run_sweep", _nothing_missing)
    now, rows = datetime.now(UTC) - timedelta(seconds=60), []
    for place, ((case, measure), middle) in enumerate(
        zip(read.cases, (1000.0, 1100.0), strict=True)
    ):
        for launch, speed in enumerate(around(middle, 5)):
            start = now + timedelta(seconds=2 * launch + place)
            row = {
                **run_row(place, case),
                **measure.settings(),
                "run_id": f"{start:%Y%m%dT%H%M%S}{place:03d}-abcdef",
                "created_at": start.isoformat(),
                "fingerprint": machine_of(case),
                "launch": launch,
                "tokens_per_s": speed,
            }
            rows.append((row, {}))
    store_together(Store(tmp_path / "results"), rows)
    words = ["compare", "--across", "schedule", sweep, "--run", "--format", "json"]
    done = printed(*words)
    found = json.loads(done.text)
    assert done.exit_code == ExitCode.ok
    assert found["looks"]["launches"] == [3]
    (speed,) = [one for one in found["changes"] if one["metric"] == "tokens_per_s"]
    assert (speed["verdict"], speed["num_base"], speed["num_head"]) == ("faster", 3, 3)
    fixed = json.loads(printed(*words, "--launches", 4).text)
    assert "looks" not in fixed
    assert {one["num_base"] for one in fixed["changes"]} == {4}


class _Done:
    class plan:  # stands for an attribute
        missing = ()


def _nothing_missing(*_arguments):
    return _Done
