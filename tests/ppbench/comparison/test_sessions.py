"""Sessions are launches close in time, whatever the clock on the wall says."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pandas as pd
import pytest
from tracked import CASE, add_launches, slower, store_in

from ppbench.comparison.sessions import (
    BREAK,
    LONGEST,
    drift_in,
    moments_of,
    noise_in,
    number_sessions,
)
from ppbench.display.metrics import METRICS
from ppbench.judge.evidence import UNKNOWN

START = datetime(2026, 3, 29, 0, 30, tzinfo=UTC)
SPEED = METRICS["tokens_per_s"]


def after(*hours: float) -> list[datetime]:
    return [START + timedelta(hours=hour) for hour in hours]


def test_a_break_ends_a_session_and_the_break_itself_belongs_to_none():
    hours = BREAK.total_seconds() / 3600
    assert number_sessions(after(0, 1, 1 + hours)) == [0, 0, 0]
    assert number_sessions(after(0, 1, 1 + hours + 0.001)) == [0, 0, 1]
    assert number_sessions(after(0, 1, 30, 31, 32)) == [0, 0, 1, 1, 1]


def test_launches_without_a_break_are_no_single_session_for_longer_than_half_a_day():
    numbers = number_sessions(after(*range(0, 48, 2)))
    assert numbers == sorted(numbers)
    assert [numbers.count(number) for number in range(4)] == [7, 7, 7, 3]  # 12 hours, 2 apart
    assert timedelta(hours=2 * (7 - 1)) == LONGEST


@pytest.mark.parametrize("zone", ["Europe/Berlin", "Asia/Kolkata"])
def test_neither_a_time_zone_nor_summer_time_makes_a_session(zone):
    local = [moment.astimezone(ZoneInfo(zone)) for moment in after(0, 0.4, 0.9, 3.5, 9)]
    assert number_sessions(local) == [0, 0, 0, 0, 1]
    runs = pd.DataFrame({"created_at": [moment.isoformat() for moment in local]})
    assert moments_of(runs) == after(0, 0.4, 0.9, 3.5, 9)


def test_a_clock_that_was_set_back_makes_no_session_of_its_own():
    assert number_sessions(after(0, 0.2, 0.1, 0.3, -0.5)) == [0] * 5
    assert number_sessions(after(0, 0.2, -24, -23.9)) == [1, 1, 0, 0]


def test_a_launch_whose_time_is_not_known_is_in_no_session():
    runs = pd.DataFrame({"created_at": ["2026-01-01T00:00:00+00:00", None, "yesterday"]})
    assert number_sessions(moments_of(runs)) == [0, UNKNOWN, UNKNOWN]
    assert number_sessions([]) == []


@pytest.mark.parametrize("drifts", [(0.0, 0.02), (0.0, 0.02, -0.02)])
def test_drift_and_noise_are_estimated_within_states_of_the_code(tmp_path, drifts):
    store = store_in(tmp_path)
    for sha, level in (("ba5e" * 10, 0.0), ("4ead" * 10, 0.3)):
        for day, drift in enumerate(drifts, 1):
            at = f"2026-01-{day:02d}T09:00:00+00:00"
            add_launches(store, slower(level + drift), sha, CASE, created_at=at)
    runs = store.runs()
    if len(drifts) == 3:
        found = drift_in(runs, SPEED)
        assert 0.01 < found.deviation < 0.04
        assert found.freedom == 2
        return
    noise = noise_in(runs, SPEED)
    assert 0.001 < noise.deviation < 0.004  # neither 2 % of drift nor 30 % of change
    assert noise.freedom == 16  # four groups of five have a mean each
    assert noise_in(runs[:10], SPEED) is None
    assert noise_in(runs[:0], SPEED) is None
