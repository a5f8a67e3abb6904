"""Costs in a store: what is stored is found, and what is damaged is not taken."""

import dataclasses
import math
import random

import pandas as pd
import pytest
from command import inside
from stored_runs import demo_store

from engine.plan.model_costs import LayerCosts, LinkCosts, ModelCosts
from ppbench.errors import StoreError, UsageError
from ppbench.planning.costs import CostSet, Setting, Wanted, store_costs, stored_cost_set
from ppbench.results import load
from ppbench.store import Store
from ppbench.store.sql import query

WANTED = Wanted("m", "float32", 128, "adamw", "cpu")


def layer(number):
    return LayerCosts(
        *(1e6 + number, 2e6 / 3, 1.5e6, 7e5, 0.01),
        *(2**20 + number, 2**19, 2**18, 2**33 + number, 4096, 12345.678),
    )


def model(first, num_layers=3):
    layers = tuple(layer(first + number) for number in range(num_layers))
    return ModelCosts(layer(1000), layers, layer(2000), 12.5)


def costs_like(**changes):
    settings = {Setting(1, False): model(0), Setting(4, True): model(100)}
    given = ("m", "float32", 128, "adamw", "cpu", "measured", settings, LinkCosts(3e4, 2e9, 0.1))
    return dataclasses.replace(CostSet(*given, "Some CPU"), **changes)


@pytest.mark.parametrize("link", [LinkCosts(3e4, 2e9, 0.1), LinkCosts(0.0, math.inf)])
@pytest.mark.parametrize("device_name", ["Some CPU", ""])
def test_what_is_stored_is_found(tmp_path, link, device_name):
    costs = costs_like(link=link, device_name=device_name)
    store_costs(Store(tmp_path), costs)
    assert stored_cost_set(Store(tmp_path, pytest.fail), WANTED) == costs


def test_an_empty_store_has_none(tmp_path):
    assert stored_cost_set(Store(tmp_path / "none"), WANTED) is None


@pytest.mark.parametrize(
    "other",
    [
        {"model": "n"},
        {"dtype": "bfloat16"},
        {"seq_len": 64},
        {"optimizer": "sgd"},
        {"device": "cuda"},
        {"settings": (Setting(1, False), Setting(2, False))},
        {"code": "new"},
        {"fingerprint": "other"},
    ],
)
def test_costs_of_something_else_are_not_taken(tmp_path, other):
    store = Store(tmp_path)
    store_costs(store, costs_like(), fingerprint="this", code="old")
    fits = dataclasses.replace(WANTED, fingerprint="this", code="old")
    settings = (Setting(4, True), Setting(1, False))
    assert stored_cost_set(store, dataclasses.replace(fits, settings=settings)) == costs_like()
    assert stored_cost_set(store, dataclasses.replace(fits, **other)) is None


def test_the_newest_is_taken_and_only_what_was_measured(tmp_path):
    store = Store(tmp_path)
    older, newer = costs_like(), costs_like(by_setting={Setting(1, False): model(7)})
    store_costs(store, older)
    store_costs(store, newer)
    store_costs(store, costs_like(origin="file cluster.toml"))
    assert stored_cost_set(store, WANTED) == newer
    needs_more = dataclasses.replace(WANTED, settings=(Setting(4, True),))
    assert stored_cost_set(store, needs_more) == older


def test_compaction_keeps_them_beside_runs(tmp_path):
    demo_store(tmp_path)
    store = Store(tmp_path, pytest.fail)
    for number in range(3):
        store_costs(store, costs_like(by_setting={Setting(1, False): model(number)}))
    before = store.every_row("costs")
    done = {one.table: one for one in store.compact(pytest.fail)}
    assert (done["costs"].files_before, done["costs"].files_after) == (3, 1)
    after = Store(tmp_path, pytest.fail)
    pd.testing.assert_frame_equal(after.every_row("costs"), before)
    newest = costs_like(by_setting={Setting(1, False): model(2)})
    assert stored_cost_set(after, WANTED) == newest
    store_costs(after, costs_like())
    assert stored_cost_set(after, WANTED) == costs_like()


def test_a_compaction_that_was_killed_leaves_each_set_once(tmp_path):
    store = Store(tmp_path)
    store_costs(store, costs_like())
    (file,) = (tmp_path / "costs").glob("*.parquet")
    content = file.read_bytes()
    store.compact(pytest.fail)
    file.write_bytes(content)
    again = Store(tmp_path, pytest.fail)
    assert len(again.every_row("costs")) == 10
    assert stored_cost_set(again, WANTED) == costs_like()


def test_every_way_to_read_a_table_reads_costs(tmp_path):
    demo_store(tmp_path)
    store_costs(Store(tmp_path), costs_like())
    text = "SELECT place, count(*) n FROM costs GROUP BY place ORDER BY place"
    found = query(tmp_path, text, pytest.fail)
    assert found.to_dict("list") == {"place": ["after", "before", "layer"], "n": [2, 2, 6]}
    assert len(load(tmp_path).table("costs")) == 10
    at = ("--format", "csv", "--results", str(tmp_path))
    exported = inside("export", "--table", "costs", *at, folder=tmp_path)
    assert exported.count("Some CPU") == 10


def test_impossible_costs_are_not_stored(tmp_path):
    bad = dataclasses.replace(model(0), action_ns=math.nan)
    with pytest.raises(UsageError, match=r"action_ns .*; they are not stored"):
        store_costs(Store(tmp_path), costs_like(by_setting={Setting(1, False): bad}))
    assert not (tmp_path / "costs").exists()


def rows_stored(tmp_path):
    store_costs(Store(tmp_path), costs_like())
    return Store(tmp_path).every_row("costs")


FLAWS = {
    "a layer is missing": lambda rows: rows[~rows["layer"].eq(1)],
    "nothing stands before": lambda rows: rows[rows["place"] != "before"],
    "a part is there twice": lambda rows: pd.concat([rows, rows.iloc[:1]]),
    "a layer is there twice": lambda rows: pd.concat([rows, rows.iloc[1:2]]),
    "settings have other layers": lambda rows: rows.drop(
        rows[rows["train_microbatch_size"].eq(4) & rows["layer"].eq(2)].index
    ),
    "a time is missing": lambda rows: rows.assign(
        backward_ns=rows["backward_ns"].where(rows["layer"].ne(2))
    ),
    "a time is infinite": lambda rows: rows.assign(forward_ns=math.inf),
    "a time is negative": lambda rows: rows.assign(weight_ns=-1.0),
    "all take no time": lambda rows: rows.assign(
        forward_ns=0.0, backward_ns=0.0, input_ns=0.0, weight_ns=0.0
    ),
    "bytes are negative": lambda rows: rows.assign(transient_bytes=-5),
    "the link has no bandwidth": lambda rows: rows.assign(link_bytes_per_s=0.0),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_set_that_is_not_whole_is_passed_over(tmp_path, flaw):
    rows = rows_stored(tmp_path / "sound").drop(columns=["run_id", "schema_version"])
    store = Store(tmp_path / "flawed", lambda _problem: None)
    older = costs_like(by_setting={Setting(1, False): model(50)})
    store_costs(store, older)
    store.write_rows("costs", FLAWS[flaw](rows))
    assert stored_cost_set(store, WANTED) == older


def test_damaged_bytes_never_become_costs(tmp_path):
    store_costs(Store(tmp_path), costs_like())
    (file,) = (tmp_path / "costs").glob("*.parquet")
    content, whole = file.read_bytes(), stored_cost_set(Store(tmp_path), WANTED)
    numbers = random.Random(3)
    for _ in range(40):
        damaged = bytearray(content)
        if numbers.random() < 0.3:
            del damaged[numbers.randrange(len(damaged)) :]
        else:
            damaged[numbers.randrange(len(damaged))] ^= 1 << numbers.randrange(8)
        file.write_bytes(bytes(damaged))
        told = []
        try:
            found = stored_cost_set(Store(tmp_path, told.append), WANTED)
        except StoreError as error:  # its version was hit
            found = None
            told.append(str(error))
        assert found in (None, whole)
        assert found == whole or any(str(file) in problem for problem in told)
