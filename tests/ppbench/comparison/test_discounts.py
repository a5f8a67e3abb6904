"""Launches on a disturbed machine: recognised, discounted, and named wherever a verdict is."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence

import pandas as pd
import pytest
from command import printed
from tracked import STEADY, add_launches, slower

from ppbench.commits.series import history
from ppbench.comparison.contrasts import compare_sides
from ppbench.comparison.evidence import slowdowns_by_run
from ppbench.comparison.lines import read_metrics
from ppbench.comparison.sides import Places, find_side
from ppbench.judge.verdicts import Verdict
from ppbench.store import Store

BASE, HEAD = "ba5e" * 10, "4ead" * 10
WORK = "train, version 1, 2 x 1"
QUIET_NS, SLOW_NS = 2_000_000.0, 2_360_000.0


def add(
    store: Store, speeds: Sequence[float], commit: str, references_ns: Sequence[float | None]
) -> list[str]:
    """Launches of a commit with the time of the reference beside each; None: without one."""
    ids = []
    for launch, (speed, time_ns) in enumerate(zip(speeds, references_ns, strict=True)):
        known = {} if time_ns is None else {"reference": WORK, "reference_ns": time_ns}
        ids += add_launches(store, [speed], commit, launch=launch, **known)
    return ids


def with_a_slow_launch(store: Store) -> list[str]:
    """Two equal sides, but the fourth launch of head is slow, and so is its reference."""
    add(store, STEADY, BASE, [QUIET_NS] * 5)
    speeds = [*STEADY[:3], STEADY[3] * 0.85, STEADY[4]]
    return add(store, speeds, HEAD, [*[QUIET_NS] * 3, SLOW_NS, QUIET_NS])


def compared(store: Store):
    places = Places(store, store.folder)
    base, head = (find_side(sha[:8], places) for sha in (BASE, HEAD))
    return compare_sides(base, head, read_metrics(["tokens_per_s"]))


def test_a_launch_whose_reference_was_slow_is_discounted_and_named(store):
    ids = with_a_slow_launch(store)
    result = compared(store)
    (line,) = result.lines
    assert line.change.verdict is Verdict.same
    (discounted,) = line.discounted
    assert (discounted.side, discounted.launch, discounted.run_id) == ("head", 3, ids[3])
    assert discounted.slowdown.fraction == pytest.approx(0.18)
    sentence = next(note for note in result.notes if "launch 3 of head" in note)
    assert "its reference ran 18 % slower than usual" in sentence
    assert ids[3] in sentence
    assert not any("is an outlier" in note for note in result.notes)


def test_a_machine_that_slows_all_launches_of_one_side_makes_no_verdict(store):
    add(store, STEADY, BASE, [QUIET_NS] * 5)
    ids = add(store, slower(0.15), HEAD, [SLOW_NS] * 5)
    (line,) = compared(store).lines
    assert (line.change.verdict, line.change.has_interval) == (Verdict.open, False)
    assert [launch.run_id for launch in line.discounted] == ids


def test_every_format_of_compare_names_the_discounted_launch(store):
    ids = with_a_slow_launch(store)
    how = {
        name: printed("compare", BASE[:8], HEAD[:8], "--results", store.folder, "--format", name)
        for name in ("table", "markdown", "json", "csv")
    }
    for name in ("table", "markdown"):
        assert "launch 3 of head" in how[name].text
        assert "(1 discounted)" in how[name].text
    changes = json.loads(how["json"].text)["changes"]
    (of_speed,) = (c["discounts"] for c in changes if c["metric"] == "tokens_per_s")
    assert [(one["run_id"], one["cause"]) for one in of_speed] == [(ids[3], "reference")]
    rows = list(csv.DictReader(io.StringIO(how["csv"].text)))
    assert json.loads(rows[0]["discounts"]) == of_speed
    assert any("launch 3 of head" in note for note in how["csv"].notes)


def test_the_page_of_a_comparison_names_the_discounted_launch(store, tmp_path):
    with_a_slow_launch(store)
    page = tmp_path / "page.html"
    printed("compare", BASE[:8], HEAD[:8], "--results", store.folder, "-o", page)
    text = page.read_text()
    assert "launch 3 of head" in text
    assert "5, 5 (1 discounted)" in text


def test_a_history_leaves_out_a_launch_beside_a_slow_reference_and_names_it(store):
    for number in range(8):
        add_launches(
            store,
            [1000.0 * (0.85 if number == 4 else 1) + number % 3],
            f"{number:040x}",
            author_date=f"2026-01-0{number + 1}T00:00:00+00:00",
            reference=WORK,
            reference_ns=SLOW_NS if number == 4 else QUIET_NS,
        )
    read = history(results=store.folder)
    (series,) = read.series
    assert series.changes.steps == ()
    assert list(series.discounts.values()) == ["reference"]
    assert any("1 launch discounted" in note for note in read.notes)
    launches = read.frame[read.frame["kind"] == "launch"]
    assert launches["discount"].fillna("").tolist() == ["", "", "", "", "reference", "", "", ""]
    assert launches["slowdown"].iloc[4] == pytest.approx(0.18)
    assert launches["slowdown_cause"].iloc[4] == "reference"


def test_runs_that_failed_show_nothing_of_what_is_usual(store):
    add(store, STEADY[:3], BASE, [QUIET_NS] * 3)
    add_launches(store, [None] * 3, HEAD, status="oom", reference=WORK, reference_ns=1.0)
    by_run = slowdowns_by_run(store.runs())
    assert [slowdown.fraction for slowdown in by_run.values()] == [0, 0, 0]
    assert slowdowns_by_run(pd.DataFrame()) == {}
