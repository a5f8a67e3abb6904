"""What is said of a measurement beforehand, at its looks and at its end; nothing is launched."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import ClassVar

import pytest
from command import printed
from measured import around
from stored_runs import run_row, store_together

from ppbench.cli.options import budget_of
from ppbench.comparison.lines import Stopped
from ppbench.comparison.measurement import measure_until_decided, stop_text
from ppbench.config.reader import read_sweep
from ppbench.errors import ExitCode, UsageError
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


def test_the_end_says_how_many_looks_it_took_and_what_they_spent():
    planned, level = tuple(range(3, 13)), f"{LEVEL:.2%}".replace("%", " %")
    first = stop_text(Stopped(Looks(planned[:1], 12), is_decided=True))
    assert first.startswith("stopped: decided after 3 launches of each side (1 look; 0.")
    assert first.endswith(f" % of {level} spent on false claims)")
    last = stop_text(Stopped(Looks(planned, 12), is_decided=False))
    reached = "stopped: --max-launches 12 reached, and not decided"
    assert last == f"{reached} (10 looks; {level} of {level} spent on false claims)"


@dataclass(frozen=True)
class Open:
    """A comparison that is never decided."""

    stopped: Stopped | None = None
    lines: ClassVar = (
        SimpleNamespace(
            change=SimpleNamespace(is_decided=False, has_interval=False),
            metric=SimpleNamespace(name="a"),
        ),
    )


def test_no_launch_is_begun_that_would_end_after_the_budget(monkeypatch):
    now_s, numbers, said = [0.0], [], []

    def bring_to(num_launches):
        made = num_launches - (numbers[-1] if numbers else 0)
        numbers.append(num_launches)
        now_s[0] += 20.0 * made
        return made

    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr("ppbench.comparison.measurement.time", clock)
    stopped = measure_until_decided(
        12, bring_to, lambda _: Open(), {"a"}, said.append, 105.0
    ).stopped
    assert numbers == [3, 4, 5]
    assert said[-1].startswith("stopped: --budget is spent after 5 launches of each side, and not")
    assert stopped.as_dict()["stop"] == "budget spent"
    assert stopped.to_decide == {"measure.budget": "3m"}  # 1.5 times 105 s, more than 6 launches
    numbers.clear()
    stopped = measure_until_decided(6, bring_to, lambda _: Open(), {"a"}, said.append).stopped
    assert (numbers[-1], stopped.as_dict()["stop"]) == (6, "most launches reached")
    assert stopped.to_decide == {"measure.launches": "7"}


def test_a_budget_bounds_launches_and_is_a_time():
    assert budget_of("90s", 12) == 90.0
    assert budget_of(None, None) == 0.0
    with pytest.raises(UsageError, match=r"--budget: bounds the launches .* add --run"):
        budget_of("90s", None)
    with pytest.raises(UsageError, match="expected a time such as 90s or 10m, got soon"):
        budget_of("soon", 12)


def test_too_few_launches_for_a_verdict_are_refused():
    with pytest.raises(UsageError, match="--max-launches 2 launches; a verdict needs 3"):
        measure_until_decided(2, pytest.fail, pytest.fail, (), pytest.fail)


def test_cases_of_a_sweep_are_compared_along_a_setting_until_decided(sweep, tmp_path, monkeypatch):
    """The launches are in the store already, so none is made."""
    monkeypatch.chdir(tmp_path)
    read = read_sweep(sweep, [], "cpu")
    monkeypatch.setattr("ppbench.commits.comparison.run_sweep", _nothing_missing)
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
