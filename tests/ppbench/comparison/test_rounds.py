"""Rounds are paired by the start of their processes and their number."""

import json

import pandas as pd

from ppbench.comparison.rounds import shared_rounds
from ppbench.judge.evidence import Rounds


def run(run_id, start, speeds, first=0):
    rounds = {"round": list(range(first, first + len(speeds))), "tokens_per_s": speeds}
    return {"run_id": run_id, "process_start": start, "rounds": json.dumps(rounds)}


def test_rounds_that_both_sides_had_in_one_start_are_paired():
    base = pd.DataFrame([run("1", "p", [1.0, 2.0, 3.0]), run("2", "q", [4.0, 5.0])])
    head = pd.DataFrame([run("3", "q", [50.0], first=1), run("4", "p", [10.0, 20.0])])
    assert shared_rounds(base, head, "tokens_per_s") == (
        Rounds((1.0, 2.0), (10.0, 20.0)),
        Rounds((5.0,), (50.0,)),
    )


def test_sides_of_other_starts_and_metrics_without_rounds_are_not_paired():
    base, head = (pd.DataFrame([run(name, name, [1.0, 2.0])]) for name in "pq")
    assert shared_rounds(base, head, "tokens_per_s") == ()
    assert shared_rounds(base, base, "peak_memory_bytes") == ()
    assert shared_rounds(base.drop(columns="rounds"), base, "tokens_per_s") == ()


def test_a_round_without_a_figure_is_left_out():
    base = pd.DataFrame([run("1", "p", [1.0, None, 3.0])])
    head = pd.DataFrame([run("2", "p", [2.0, 4.0, 6.0])])
    assert shared_rounds(base, head, "tokens_per_s") == (Rounds((1.0, 3.0), (2.0, 6.0)),)
