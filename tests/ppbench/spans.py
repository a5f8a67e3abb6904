"""Spans written by hand."""

import pandas as pd

from engine.plan.spans import COLUMNS


def frame(*rows, step=5):
    """Rows of (rank, op, stage, microbatch, start, end), all of one step."""
    return pd.DataFrame(
        [
            (step, rank, "?", stage, op, m, start, end, 0, 0)
            for rank, op, stage, m, start, end in rows
        ],
        columns=list(COLUMNS),
    )


TWO_RANKS = frame(
    (0, "F", 0, 0, 100, 200),
    (0, "SEND_F", 0, 0, 200, 210),
    (1, "RECV_F", 1, 0, 90, 210),
    (1, "F", 1, 0, 210, 310),
    (1, "B", 1, 0, 310, 410),
    (1, "SEND_B", 1, 0, 410, 440),
    (0, "RECV_B", 0, 0, 205, 440),
    (0, "B", 0, 0, 440, 590),
    (1, "OPT", -1, -1, 415, 435),
    (0, "OPT", -1, -1, 590, 640),
)
"""AFAB with one microbatch."""
