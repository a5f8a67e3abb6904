"""What starts decide is estimated from launches beside those that are judged."""

import json

import numpy as np
import pandas as pd
import pytest
from stored_runs import run_row

from ppbench.comparison.evidence import with_columns
from ppbench.comparison.rounds import starts_in
from ppbench.config.case import Case

CASES = [Case(schedule=name) for name in ("afab", "1f1b", "zb_h1", "zbv")]


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
    found = starts_in(with_columns(pd.DataFrame(rows)))
    assert found.deviation == pytest.approx(deviation * 2**0.5, rel=0.2)
    most = 2 * 59  # two pairs of arms in each start
    assert most / 2 < found.freedom <= most


def test_too_few_starts_tell_nothing():
    rows = launches(np.random.default_rng(5), 2, 0.01)
    assert starts_in(with_columns(pd.DataFrame(rows))) is None


def test_launches_without_rounds_tell_nothing():
    rows = [run_row(0, case, rounds=None, process_start=None) for case in CASES]
    assert starts_in(with_columns(pd.DataFrame(rows))) is None
