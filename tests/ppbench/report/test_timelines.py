"""Which steps a timeline shows, under which titles, and what it says when it cannot."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from command import output_of
from html_pages import Page
from packed_columns import Bars, columns_of
from stored_runs import (
    MS,
    SLOW,
    run_row,
    spans,
    store_failed,
    store_of_replicas,
    store_with,
)

from ppbench.analysis.metrics import step_figures, windows
from ppbench.cli.report import timeline as print_timeline
from ppbench.cli.schedules import draw
from ppbench.config.case import Case
from ppbench.errors import StoreError, UsageError
from ppbench.report.charts.levels import memory_over_time
from ppbench.report.pages.timeline import timeline_of_runs
from ppbench.report.timeline.timelines import Timeline, steps_of, timeline, timelines
from ppbench.store import Store


def two_runs(folder: Path) -> Store:
    """AFAB and 1F1B; steps 1, 2 and 3 take 1, 2 and 3 ms by their rows."""
    afab = Case(schedule="afab")
    return store_with(
        folder, [run_row(1, afab), run_row(2, replace(afab, schedule="1f1b"), tokens_per_s=1100.0)]
    )


def titles(store: Store, **changes) -> list[str]:
    runs = [run for _, run in store.runs().iterrows()]
    line = timeline(store, runs, ["afab", "1f1b"], **changes)
    return [step["title"] for step in line.packed.meta["steps"]]


@pytest.mark.parametrize(
    ("choice", "told"),
    [("median", "step 2, the median one"), ("slowest", "step 3, the slowest"), ("1", "step 1 ")],
)
def test_the_step_is_the_median_the_slowest_or_the_one_asked_for(tmp_path, choice, told) -> None:
    for title in titles(two_runs(tmp_path), choice=choice):
        assert told in title


def test_a_run_without_a_plan_says_how_to_get_one(tmp_path) -> None:
    with pytest.raises(UsageError, match="leave --planned out, or measure it again"):
        titles(two_runs(tmp_path), has_plan=True)


def test_a_run_without_spans_is_left_out_and_the_others_are_drawn(tmp_path) -> None:
    store = two_runs(tmp_path)
    damaged, sound = (run for _, run in store.runs().iterrows())
    (tmp_path / "spans" / f"{damaged['run_id']}.parquet").unlink()
    with pytest.raises(StoreError, match="its spans are not in the store"):
        timeline(store, [damaged], ["afab"])
    assert timeline(store, [damaged, sound], ["afab", "1f1b"]).run_ids == (sound["run_id"],)
    _, (group,) = timelines(store, store.runs(), ("schedule",))
    assert group.timeline.name == "1f1b"


def test_a_group_shows_the_launch_of_median_throughput(tmp_path) -> None:
    case = Case(schedule="afab")
    speeds = (900.0, 1100.0, 1000.0)
    rows = [run_row(n, case, launch=n, tokens_per_s=s) for n, s in enumerate(speeds)]
    store = store_with(tmp_path, rows)
    _, (group,) = timelines(store, store.runs(), ())
    assert group.timeline.run_ids == (rows[2]["run_id"],)


def test_pages_of_other_choices_have_other_names(tmp_path) -> None:
    store = two_runs(tmp_path / "results")
    first = store.runs().iloc[0]["run_id"]

    def written(*names: str, choice: str = "median") -> str:
        reports = tmp_path / "reports"
        return timeline_of_runs(store, names, None, reports, choice=choice).name

    names = {written(first), written(first, "last"), written("last", first)}
    names |= {written(first, choice="slowest")}
    assert len(names) == 4
    assert f"timeline-{first}.html" in names


def test_runs_that_differ_in_nothing_are_told_apart_by_their_ids(tmp_path) -> None:
    store = store_with(tmp_path, [run_row(n, Case()) for n in (1, 2)])
    ids = store.runs()["run_id"].tolist()
    text = output_of(print_timeline, ids, terminal=True, results=tmp_path)
    assert all(run_id in text for run_id in ids)
    assert text.count("rank 0") == 2


def in_a_row(folder: Path, after_pause: Collection[int] = (1,)) -> tuple[Store, pd.Series]:
    """A run whose steps 1, 2 and 3 begin 100 ms after each other."""
    store, numbers = Store(folder), (1, 2, 3)
    timed = pd.concat([spans(step, 100 * (step - 1)) for step in numbers], ignore_index=True)
    steps = step_figures(timed, windows(timed, 2, after_pause), dict.fromkeys(numbers, 64))
    store.write_run(run_row(1, Case()), {"steps": steps, "spans": timed})
    return store, store.runs().iloc[0]


def test_a_step_in_a_row_is_drawn_between_those_beside_it(tmp_path) -> None:
    store, run = in_a_row(tmp_path)
    (step,) = steps_of(store, [run], ["1f1b"], choice="2")
    assert [each.name for each in (step, *step.beside)] == ["step 2", "step 1", "step 3"]
    assert step.period_ns == 100 * MS
    # Ranks end step 1 at 65 and 43 ms; step 2 begins its first computation at 105 ms.
    begins, ends = (((ns - step.origin_ns) // MS).tolist() for ns in step.windows_ns)
    assert (begins, ends) == ([-40, -62], [60, 38])
    idle = [0, 0]  # of a window of 100 ms, in which a rank computes and optimizes
    for marks in step.marks:
        for rank in (0, 1) if marks.kind.is_idle else ():
            idle[rank] += int(marks.width_ns[marks.row == rank].sum()) // MS
    assert idle == [100 - 34, 100 - 26]
    line = timeline(store, [run], ["1f1b"], choice="2")
    forwards = [bars(line, "forward", beside) for beside in (0, -1, 1)]
    assert [sorted(own.begin) for own in forwards] == [[0, 12], [-100, -88], [100, 112]]
    assert [own.kind["opacity"] == 1 for own in forwards] == [True, False, False]
    assert forwards[2].kind["lines"][-1] == "step 3"


def test_steps_with_a_pause_between_them_are_not_drawn_beside_each_other(tmp_path) -> None:
    def beside(after_pause: Collection[int], choice: str = "2") -> list[str]:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        store, run = in_a_row(folder, after_pause)
        (step,) = steps_of(store, [run], ["1f1b"], choice=choice)
        return [each.name for each in step.beside]

    assert beside((1, 2, 3)) == []
    assert beside((1, 2)) == ["step 3"]
    assert beside((1, 3)) == ["step 1"]
    assert beside((1,), "3") == ["step 2"]


def failed_store(folder: Path, **changes) -> Store:
    store = store_with(folder, [run_row(1, Case(schedule="afab"))])
    store_failed(store, run_row(2, Case()), **changes)
    return store


def failed_line(store: Store):
    return timeline(store, [store.runs().iloc[-1]], ["1f1b"])


def bars(line: Timeline, name: str, beside: int = 0) -> Bars:
    return columns_of(line.packed.meta, line.packed.columns)[name, beside]


def test_a_run_that_hung_is_drawn_with_what_was_never_finished(tmp_path) -> None:
    line = failed_line(failed_store(tmp_path))
    assert line.is_failed
    assert line.name == "1f1b: timeout"
    assert line.facts.startswith(
        "failed at rank 1 · step 1 · rank 1 is stopped (SIGSTOP or a debug"
    )
    assert len(bars(line, "forward").begin) == 2
    stopped, waiting = bars(line, "stopped"), bars(line, "waiting at the end")
    # In ms since the first computation, at 5 ms; up to the end at 10,027 ms.
    assert (stopped.begin[0], stopped.width[0]) == pytest.approx((22, 10_000))
    assert (waiting.begin[0], waiting.width[0]) == pytest.approx((12, 10_010))
    assert [own.kind["labels"] for own in (stopped, waiting)] == [["1B0"], ["0B0"]]
    assert "waits in 0B0 of step 1 for 1B0 of rank 1" in waiting.phrases[0]
    assert [own.kind["hatch"] for own in (stopped, waiting)] == ["x", "/"]
    assert line.packed.meta["path"] == []
    names = [kind["name"] for kind in line.packed.meta["kinds"]]
    assert "idle: no work left" not in names


def test_a_long_wait_does_not_hide_what_came_before_it_and_a_short_one_is_drawn_whole(
    tmp_path,
) -> None:
    def end_ms(line) -> float:
        return line.packed.meta["last"]

    line = failed_line(failed_store(tmp_path / "long"))
    assert end_ms(line) == pytest.approx(22 * 1.5, rel=0.01)
    assert line.facts.endswith("ended 10.0 s after the last event, beyond the right edge")
    short = failed_line(failed_store(tmp_path / "short", until_ms=30))
    assert end_ms(short) == pytest.approx(25, rel=0.01)
    assert "beyond the right edge" not in short.facts


def test_ranks_that_finished_nothing_are_drawn_by_their_open_actions_alone(tmp_path) -> None:
    line = failed_line(failed_store(tmp_path, last_ms=0))
    waiting, stopped = (bars(line, name) for name in ("waiting at the end", "stopped"))
    assert (waiting.begin[0], stopped.begin[0]) == (0, 10)


def test_a_run_that_failed_stands_beside_one_that_did_not(tmp_path) -> None:
    store = failed_store(tmp_path)
    assert [title.split(" · ")[0] for title in titles(store)] == ["afab", "1f1b: timeout"]


@pytest.fixture(scope="module")
def line_of_replicas(tmp_path_factory):
    store = store_of_replicas(tmp_path_factory.mktemp("replicas"))
    return timeline(store, [store.runs().iloc[0]], ["1f1b"], choice="1")


def test_of_replicas_the_slowest_is_in_sight_and_the_others_lie_below(line_of_replicas) -> None:
    assert f"replica {SLOW} of 4, the slowest" in line_of_replicas.facts
    forward = bars(line_of_replicas, "forward")
    own = {row: set(forward.width[forward.row == row]) for row in range(8)}
    assert own == {row: {15.0 if row < 2 else 10.0} for row in range(8)}


def test_a_collective_waits_for_the_slowest_replica_in_a_lighter_part(line_of_replicas) -> None:
    moving = bars(line_of_replicas, "reduce gradients")
    waiting = bars(line_of_replicas, "reduce gradients, waiting")
    assert set(moving.width.round(6)) == {4.0}
    assert set(waiting.colors) != set(moving.colors)
    assert len(moving.width) == 8
    assert (waiting.row > 1.5).all()  # the slowest waits for nobody
    assert "waiting for the slowest replica" in waiting.kind["lines"][0]
    assert bars(line_of_replicas, "gather parameters").kind["lane"] == "collective"


def test_idle_time_until_the_last_reduction_is_named(line_of_replicas) -> None:
    last = bars(line_of_replicas, "idle: last collective")
    assert len(last.width) == 8
    (own,) = last.width[last.row == 0].round(6)
    assert own == 4.0  # of the slowest replica the bytes alone


@pytest.mark.parametrize(
    ("options", "unit", "last"),
    [({}, " s", 25.5 + 24), ({"cost": "F=0.01,I=0.01,W=0.01"}, " ms", 495)],
)
def test_the_page_of_a_planned_step_says_so_and_has_every_action(tmp_path, options, unit, last):
    """The step after it ends so much later as a period without a bubble takes, 8 x 3 s."""
    draw("zbv", 4, 8, output=tmp_path / "plan.html", **options)
    page = Page((tmp_path / "plan.html").read_text())
    text = "planned by simulation, not measured · 4 ranks, 8 stages, 8 microbatches"
    for fact in (text, "0.0588", "0.0625", "0.0000", "arXiv 2401.10241"):
        assert fact in page.text
    (meta,) = page.timelines()
    own = {kind["name"]: kind["count"] for kind in meta["kinds"] if not kind["beside"]}
    words = ("forward", "input gradient", "weight gradient")
    assert [own[name] for name in words] == [8 * 8] * 3
    assert (meta["unit"], meta["steps"][0]["end"]) == (unit, pytest.approx(last))


def test_the_memory_of_replicas_is_that_of_the_fullest() -> None:
    levels = pd.DataFrame({"replica": [0, 1], "rank": [0, 0], "time_ns": [0, 0]})
    ranks = levels.assign(predicted_peak_memory_bytes=[5 * 2**10, 7 * 2**10])
    picture = memory_over_time(levels.assign(num_bytes=[4 * 2**10, 6 * 2**10]), ranks)
    (panel,) = picture.panels
    assert [trace["y"] for trace in panel["data"]] == [[6], [7, 7]]
    assert "replica 1" in panel["layout"]["yaxis"]["title"]["text"]
