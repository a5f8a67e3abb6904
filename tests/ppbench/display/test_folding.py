"""A job of hundreds of ranks stays readable: replicas are folded, and the worst one is shown."""

import json

import pandas as pd
import pytest
from command import output_of
from stored_runs import MS, run_row

from ppbench.cli.runs import RunTable, show
from ppbench.config.case import Case
from ppbench.display.formats import Format
from ppbench.display.replicas import MOST_ROWS, REPLICA, folded, folding_note
from ppbench.store import Store

REPLICAS, RANKS = 64, 8
SLOW = 17  # replica, whose rank 3 computes twice as long


def job(num_replicas=REPLICAS, world_size=RANKS):
    return pd.DataFrame(
        [
            {
                "replica": replica,
                "rank": rank,
                "compute_ns": (20 if (replica, rank) == (SLOW, 3) else 10) * MS + replica,
                "idle_fraction": 0.25,
                "hostname": f"node{replica}",
                "device": "cuda:0",
            }
            for replica in range(num_replicas)
            for rank in range(world_size)
        ]
    )


COLUMNS = ["rank", "device", "hostname", "compute_ns"]


def test_each_rank_has_the_median_of_its_replicas_and_the_worst_one():
    rows, columns = folded(job(), "rank", COLUMNS, "compute_ns")
    assert columns == ["rank", REPLICA, "device", "hostname", "compute_ns"]
    assert len(rows) == 2 * RANKS
    assert rows["rank"].tolist() == [rank for rank in range(RANKS) for _ in range(2)]
    third = rows[rows["rank"] == 3]
    assert third[REPLICA].tolist() == ["median", str(SLOW)]
    assert third["compute_ns"].tolist() == [10 * MS + 32.5, 20 * MS + SLOW]
    assert third["hostname"].tolist() == ["64 different", f"node{SLOW}"]
    assert third["device"].tolist() == ["cuda:0", "cuda:0"]
    assert rows[rows["rank"] == 4][REPLICA].tolist() == ["median", str(REPLICAS - 1)]


def test_few_ranks_are_all_shown_and_one_replica_is_not_named():
    few = job(num_replicas=MOST_ROWS // 2, world_size=2)
    rows, columns = folded(few, "rank", COLUMNS, "compute_ns")
    assert (len(rows), folding_note(few, "rank")) == (MOST_ROWS, None)
    assert rows[REPLICA].tolist()[:2] == ["0", "1"]
    one = job(num_replicas=1)
    rows, columns = folded(one, "rank", COLUMNS, "compute_ns")
    assert rows is one
    assert columns == COLUMNS


def test_a_figure_that_no_rank_has_names_no_worst_replica():
    unknown = job().assign(compute_ns=None)
    rows, _ = folded(unknown, "rank", COLUMNS, "compute_ns")
    assert rows[REPLICA].tolist() == ["median"] * RANKS


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A store with one run of 64 replicas of 8 ranks."""
    folder = tmp_path_factory.mktemp("results")
    row = run_row(1, Case(world_size=RANKS, replicas=REPLICAS))
    Store(folder).write_run(row, {"ranks": job()})
    return folder


def test_show_of_512_ranks_fits_a_screen_and_names_the_slow_replica(stored):
    shown = output_of(show, "last", stored)
    tables = [line for line in shown.splitlines() if line.lstrip().startswith(("3 ", "│ 3"))]
    assert any(f" {SLOW} " in line and "20.0" in line for line in tables), shown
    assert "Of each rank: the median of 64 replicas, and the worst one" in shown
    assert len(shown.splitlines()) < 140


def test_the_rest_is_shown_on_demand(stored):
    every = json.loads(output_of(show, "last", stored, how=Format.json))
    assert len(every["ranks"]) == REPLICAS * RANKS
    asked = output_of(show, "last", stored, table=RunTable.ranks, columns=["compute_ns"])
    assert len(asked.splitlines()) >= REPLICAS * RANKS
