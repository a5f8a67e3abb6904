"""Which steps a timeline shows, under which titles, and what it says when it cannot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from stored_runs import MS, run_row, spans, store_with

from ppbench import commands
from ppbench.config.case import Case
from ppbench.errors import StoreError, UsageError
from ppbench.report.timelines import groups, timeline
from ppbench.store import Store


def shown(*names: str, choice: str = "median", has_plan: bool = False) -> commands.Shown:
    return commands.Shown(names, choice, has_plan)


def two_runs(folder: Path) -> Store:
    """AFAB and 1F1B; steps 1, 2 and 3 take 1, 2 and 3 ms by their rows."""
    afab = Case(schedule="afab")
    return store_with(
        folder, [run_row(1, afab), run_row(2, replace(afab, schedule="1f1b"), tokens_per_s=1100.0)]
    )


def titles(store: Store, **changes) -> list[str]:
    runs = [run for _, run in store.runs().iterrows()]
    line = timeline(store, runs, ["afab", "1f1b"], **changes)
    return [annotation.text for annotation in line.figure.layout.annotations]


@pytest.mark.parametrize(
    ("choice", "told"),
    [("median", "step 2, the median one"), ("slowest", "step 3, the slowest"), ("1", "step 1 ")],
)
def test_the_step_is_the_median_the_slowest_or_the_one_asked_for(tmp_path, choice, told) -> None:
    for title in titles(two_runs(tmp_path), choice=choice):
        assert told in title


def test_a_step_that_was_not_measured_is_refused_with_those_that_were(tmp_path) -> None:
    for choice in ("7", "fastest"):
        with pytest.raises(UsageError, match="expected median, slowest or one of 1 to 3"):
            titles(two_runs(tmp_path), choice=choice)


def test_the_plan_stands_under_each_measured_step(tmp_path) -> None:
    store = two_runs(tmp_path)
    for _, run in store.runs().iterrows():
        planned = spans(0).drop(columns="num_bytes")
        store.write_run(dict(run), {"planned": planned})
    words = [
        title.split(",")[0].split(" · ")[0].removeprefix("<b>")
        for title in titles(store, has_plan=True)
    ]
    assert words == ["afab", "afab", "1f1b", "1f1b"]


def test_a_run_without_a_plan_says_how_to_get_one(tmp_path) -> None:
    with pytest.raises(UsageError, match="leave --planned out, or measure it again"):
        titles(two_runs(tmp_path), has_plan=True)


def test_a_run_without_spans_is_left_out_of_a_report_and_refused_by_name(tmp_path) -> None:
    store = two_runs(tmp_path)
    (tmp_path / "spans" / f"{store.runs().iloc[0]['run_id']}.parquet").unlink()
    with pytest.raises(StoreError, match="its spans are not in the store"):
        titles(store)
    (group,) = groups(store, store.runs(), ("schedule",))
    assert group.timeline.name == "1f1b"


def test_a_group_shows_the_launch_of_median_throughput(tmp_path) -> None:
    case = Case(schedule="afab")
    speeds = (900.0, 1100.0, 1000.0)
    rows = [run_row(n, case, launch=n, tokens_per_s=s) for n, s in enumerate(speeds)]
    store = store_with(tmp_path, rows)
    (group,) = groups(store, store.runs(), ())
    assert group.timeline.run_ids == (rows[2]["run_id"],)


def test_pages_of_other_choices_have_other_names(tmp_path) -> None:
    store = two_runs(tmp_path / "results")
    first = store.runs().iloc[0]["run_id"]

    def written(what: commands.Shown) -> str:
        return commands.timeline(what, None, store.folder, tmp_path / "reports").name

    names = {written(shown(first)), written(shown(first, "last")), written(shown("last", first))}
    names |= {written(shown(first, choice="slowest"))}
    assert len(names) == 4
    assert f"timeline-{first}.html" in names


def test_runs_that_differ_in_nothing_are_told_apart_by_their_ids(tmp_path) -> None:
    store = store_with(tmp_path, [run_row(n, Case()) for n in (1, 2)])
    ids = store.runs()["run_id"].tolist()
    text = commands.timeline_text(shown(*ids), tmp_path)
    assert all(run_id in text for run_id in ids)
    assert text.count("rank 0") == 2


def test_a_failed_run_has_no_timeline(tmp_path) -> None:
    store_with(tmp_path, [run_row(1, Case(), status="oom", error="out of memory")])
    with pytest.raises(UsageError, match="status is oom; it has no timeline"):
        commands.timeline_text(shown("last"), tmp_path)


def test_a_title_tells_the_step_it_shows_and_not_the_run(tmp_path) -> None:
    store = two_runs(tmp_path)
    for _, run in store.runs().iterrows():
        steps = pd.DataFrame(
            {
                "step": n,
                "step_with_optimizer_ns": n * MS,
                "step_ns": n * MS,
                "bubble_fraction": 0.1 * n,
            }
            for n in (1, 2, 3)
        )
        store.write_run(dict(run), {"steps": steps})
    assert "3.0 ms · bubble 30.0 % · theory 11.1 %" in titles(store, choice="slowest")[0]
