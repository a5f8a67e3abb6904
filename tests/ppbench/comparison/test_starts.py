"""What starts decide is estimated from launches beside those that are judged."""

import json

import numpy as np
import pandas as pd
import pytest
from stored_runs import run_row

from ppbench.comparison.starts import starts_beside
from ppbench.config.case import Case

CASES = [Case(schedule=name) for name in ("afab", "1f1b", "zb_h1", "zbv")]


class Stored:
    """A store that holds these rows."""

    folder = "stored"

    def __init__(self, rows):
        self._rows = pd.DataFrame(rows)

    def runs(self, columns):
        return self._rows.reindex(columns=columns)


def launches(draw, num, deviation, first=0, num_rounds=60, **more):
    """Launches of all cases; each start slows or speeds up each case, and each round too."""
    rows = []
    for number in range(first, first + num):
        for case in CASES:
            speeds = 1000 * np.exp(draw.normal(0, deviation) + draw.normal(0, 0.02, num_rounds))
            rounds = {"round": list(range(num_rounds)), "tokens_per_s": speeds.tolist()}
            values = {"process_start": f"{number:04}", "rounds": json.dumps(rounds), **more}
            values["run_id"] = f"{number:04}{case.schedule}"
            rows.append(run_row(0, case, launch=number, **values))
    return rows


@pytest.mark.parametrize("deviation", [0.005, 0.02])
def test_the_deviation_of_differences_between_starts_is_found(deviation):
    rows = launches(np.random.default_rng(5), 60, deviation)
    found = starts_beside(pd.DataFrame(rows[:4]), [Stored(rows)])
    assert found.deviation == pytest.approx(deviation * 2**0.5, rel=0.2)
    most = 2 * 58  # two pairs of arms in each start, but the first
    assert most / 2 < found.freedom <= most


def test_launches_that_are_judged_do_not_count():
    rows = launches(np.random.default_rng(5), 8, 0.01)
    assert starts_beside(pd.DataFrame(rows), [Stored(rows)]) is None


def test_other_machines_and_too_few_starts_tell_nothing():
    draw = np.random.default_rng(5)
    judged = launches(draw, 1, 0.01)
    far = launches(draw, 20, 0.01, first=1, fingerprint="another")
    few = launches(draw, 2, 0.01, first=30)
    assert starts_beside(pd.DataFrame(judged), [Stored([*judged, *far, *few])]) is None


def test_a_store_without_rounds_tells_nothing():
    rows = [run_row(0, case, run_id=case.schedule) for case in CASES]
    assert starts_beside(pd.DataFrame(rows), [Stored(rows)]) is None
