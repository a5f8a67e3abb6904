"""Rows from what ranks report: hand-written spans, exact expected figures."""

import pandas as pd
import pytest

from engine.plan.spans import COLUMNS
from ppbench.config.case import Case, Measure
from ppbench.run.durations import durations_of, simulated
from ppbench.run.job import Item, Job
from ppbench.run.rows import CaseResult, RankResult, write_result
from ppbench.store import Store

NS_OF_STEP = 1000
NUM_TOKENS = [7, 100, 300, 500]  # the first step is a warm-up


def result(*, facts):
    """One rank, three measured steps of a microsecond each."""
    spans = [
        (step, 0, "compute", 0, "F", 0, step * NS_OF_STEP, (step + 1) * NS_OF_STEP, 0)
        for step in (1, 2, 3)
    ]
    columns = {name: [span[i] for span in spans] for i, name in enumerate(COLUMNS)}
    rank = {"peak_memory_bytes": 1, "peak_held_microbatches": 1}
    return CaseResult([RankResult(rank, columns, [4.0, 3.0, 2.0, 1.0], NUM_TOKENS)], facts)


def write(tmp_path, case, **facts):
    item = Item(case, Measure(warmup_steps=1, steps=3), 0, "key")
    job = Job(str(tmp_path), "s", "name", "file.toml", None, (item,))
    write_result(job, item, "a", result(facts=facts))
    store = Store(tmp_path)
    return store.find("a"), store.table("steps", ["a"])


def test_every_step_has_its_own_tokens_and_the_run_their_median(tmp_path):
    run, steps = write(tmp_path, Case(seq_len="variable", world_size=1))
    assert list(steps["num_tokens"]) == [100, 300, 500]
    assert list(steps["tokens_per_s"]) == pytest.approx([100e6, 300e6, 500e6])
    assert (run["seq_len"], run["tokens_per_step"]) == ("variable", 300)
    assert run["tokens_per_s"] == pytest.approx(300e6)


def test_what_the_partition_gave_to_each_stage_is_in_the_row(tmp_path):
    shares = {"parameters_per_stage": "[9]", "stage_shares": "[1.0]", "layers_per_stage": "[4]"}
    run, _ = write(tmp_path, Case(world_size=1), **shares)
    assert {name: run[name] for name in shares} == shares


def emulated(schedule, **settings):
    times = {f"emulated_{op}_ms": (2.0,) for op in "FIW"}
    case = {"world_size": 4, "num_microbatches": 8, "device": "emulated", **times, **settings}
    return Case(schedule=schedule, **case)


def test_an_emulated_run_has_no_memory_and_its_theory_is_what_was_emulated(tmp_path):
    case = emulated("1f1b", world_size=1, num_microbatches=1, emulated_W_ms=(1.0,))
    item = Item(case, Measure(warmup_steps=1, steps=3), 0, "key")
    measured = result(facts={})
    measured.ranks[0].facts["peak_memory_bytes"] = None
    measured.ranks[0].losses[:] = [None] * 4
    write_result(Job(str(tmp_path), "s", "name", "f.toml", None, (item,)), item, "a", measured)
    run = Store(tmp_path).find("a")
    assert run["planned_step_ns"] == 5_000_000
    assert (run["emulated_F_ms"], run["emulated_W_ms"]) == ("[2.0]", "[1.0]")
    assert pd.isna(run["peak_memory_bytes"])
    assert pd.isna(run["last_loss"])


@pytest.mark.parametrize(
    ("schedule", "bubble"), [("1f1b", 3 / 11), ("zb_h1", 3 / 27), ("zbv", 1.5 / 25.5)]
)
def test_theory_is_simulated_with_equal_halves_where_nothing_is_emulated(schedule, bubble):
    v = 2 if schedule == "zbv" else 1
    case = Case(schedule=schedule, world_size=4, num_microbatches=8, stages_per_rank=v)
    assert simulated(case).bubble_fraction == pytest.approx(bubble)


def test_a_number_is_the_time_of_a_rank_and_a_list_has_the_times_of_stages():
    durations = durations_of(emulated("zbv", stages_per_rank=2, emulated_I_ms=tuple(range(8))))
    assert durations.forward_ns == (1_000_000,) * 8
    assert durations.input_ns == tuple(range(0, 8_000_000, 1_000_000))
