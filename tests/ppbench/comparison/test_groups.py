"""Which cases do the same work: those that a user may choose between."""

import pandas as pd
import pytest

from ppbench.comparison.groups import groups_of
from ppbench.config.case import EMULATED

AXES = ("schedule", "num_microbatches", "train_microbatch_size", "emulated_F_ms", "emulated_I_ms")


def emulated(schedule, size, forward, backward):
    return {
        "schedule": schedule,
        "device": EMULATED,
        "num_microbatches": 32 // size,
        "train_microbatch_size": size,
        "emulated_F_ms": forward,
        "emulated_I_ms": backward,
        "tokens_per_s": 1.0,
        "is_not_finite": False,
        "is_oversubscribed": False,
    }


@pytest.mark.parametrize(
    ("times", "num_groups"),
    [
        (("[10.0]", "[15.0]"), 1),  # half as long for half as many sequences
        (("[15.0]", "[15.0]"), 2),
        (("[10.0, 10.0]", "[15.0]"), 2),
    ],
)
def test_emulated_cases_do_the_same_work_if_a_sequence_takes_as_long(times, num_groups):
    rows = [emulated("1f1b", 2, "[20.0]", "[30.0]"), emulated("dualpipe", 1, *times)]
    assert len(groups_of(pd.DataFrame(rows), AXES)) == num_groups
