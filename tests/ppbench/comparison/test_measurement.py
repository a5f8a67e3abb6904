"""What is said of a measurement beforehand, at its looks and at its end; nothing is launched."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest

from ppbench.cli.options import until_of
from ppbench.comparison.lines import Stopped
from ppbench.comparison.measurement import measure_until_decided, stop_text
from ppbench.errors import UsageError
from ppbench.judge.looks import Looks
from ppbench.judge.verdicts import LEVEL


def test_the_end_says_how_many_looks_it_took_and_what_they_spent():
    planned, level = tuple(range(3, 13)), f"{LEVEL:.2%}".replace("%", " %")
    first = stop_text(Stopped(Looks(planned[:1], 12), is_decided=True))
    assert first.startswith("stopped: decided after 3 launches of each side (1 look; 0.")
    assert first.endswith(f" % chance of a false claim so far, {level} at most)")
    last = stop_text(Stopped(Looks(planned, 12), is_decided=False))
    reached = "stopped: --max-launches 12 reached, and not decided"
    assert last == f"{reached} (10 looks; {level} chance of a false claim so far, {level} at most)"


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
    assert until_of(None, None, "90s", is_run=True) == (None, 12, 90.0)
    assert until_of(5, None, None, is_run=True) == (5, None, 0.0)
    assert until_of(5, None, None, is_run=False) == (None, None, 0.0)
    for launches, is_run in ((None, False), (5, True)):
        with pytest.raises(UsageError, match=r"--budget: bounds the launches .* add --run"):
            until_of(launches, None, "90s", is_run=is_run)
    with pytest.raises(UsageError, match="expected a time such as 90s or 10m, got soon"):
        until_of(None, None, "soon", is_run=True)


def test_too_few_launches_for_a_verdict_are_refused():
    with pytest.raises(UsageError, match="--max-launches 2 launches; a verdict needs 3"):
        measure_until_decided(2, pytest.fail, pytest.fail, (), pytest.fail)
