"""Pages and their words, from runs and spans made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from html_pages import Page
from stored_runs import (
    MS,
    NASTY,
    SLOW,
    concluded,
    demo_store,
    rewrite,
    run_row,
    store_failed,
    store_of_replicas,
    store_with,
)

from ppbench.analysis.collectives import collective_figures, collectives
from ppbench.analysis.transfers import edges, messages
from ppbench.config.case import Case
from ppbench.display.cases import axis_text, varying_axes
from ppbench.display.units import held
from ppbench.report.charts.canvas import Measured
from ppbench.report.charts.throughput import throughput
from ppbench.report.pages.report import render_report, write_report
from ppbench.report.pages.tables import flight_of, summary, value_text
from ppbench.report.pages.timeline import write_timeline
from ppbench.report.scripts import library
from ppbench.report.timeline.gantt import gantt
from ppbench.report.timeline.timelines import steps_of
from ppbench.store import Store, write_sweep_note

TEXT = {"title": "demo", "command": "ppbench sweep demo.toml", "sweep_text": 'name = "demo"'}


def render(store: Store, **changes) -> str:
    return render_report(store, store.runs(), **{**TEXT, **changes})


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """One for all tests: pages are made from it, and none writes to it."""
    return demo_store(tmp_path_factory.mktemp("demo") / "results")


@pytest.fixture(scope="module")
def html(demo: Store) -> str:
    return render(demo)


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


# Colours


def test_a_variable_length_is_a_word_in_every_label(tmp_path: Path) -> None:
    cases = [Case(seq_len=length) for length in (512, "variable", 64)]
    store = store_with(tmp_path, [run_row(n, case) for n, case in enumerate(cases)])
    runs = store.runs()
    drawing = throughput(Measured.of(store, runs, varying_axes(runs)))
    figure = drawing.panels[0]
    assert list(figure["layout"]["xaxis"]["ticktext"]) == [
        "512 tokens",
        "variable length",
        "64 tokens",
    ]
    lengths = summary(runs, ("seq_len",), {})
    assert lengths.columns["seq_len"].is_number
    assert lengths.rows.read(["seq_len"]).cells == [(512,), ("variable",), (64,)]
    assert "variable length" in Page(render(store)).text


def test_settings_are_called_by_words_and_one_that_a_run_does_not_have_is_none() -> None:
    assert axis_text("seq_len", 64) == "64 tokens"
    assert axis_text("seq_len", "variable") == "variable length"
    assert axis_text("train_recompute", np.True_) == "recompute"
    assert axis_text("train_compile", value=False) == "no compile"
    assert axis_text("model_split_points", '["a.1"]') == 'split points ["a.1"]'
    texts = [value_text(value) for value in ("[]", None, np.True_, 4, "a")]
    assert texts == ["none", "none", "yes", "4", "a"]


# The answer in words


def test_the_answer_is_about_cases_that_were_not_oversubscribed(demo: Store) -> None:
    conclusions = concluded(demo.runs())
    answer = conclusions.sentence
    assert answer.text == (
        "With 2 ranks, 128 tokens: use 1f1b for its memory: it needs 50 % less memory than afab. "
        "Throughput is open: a single launch cannot decide it."
    )
    assert answer.command == "ppbench sweep sweeps/demo.toml --set measure.launches=5"
    assert conclusions.smaller == (
        "No case that does the same work needs much less memory than 1f1b.",
    )


def test_a_report_of_named_runs_advises_the_command_of_their_sweep(tmp_path: Path) -> None:
    store = store_with(tmp_path, [run_row(1, Case(schedule="afab")), run_row(2, Case())])
    wanted = "ppbench sweep quick --set device=emulated --set measure.launches=5"
    assert wanted not in render(store, command="ppbench report demo")
    command = "ppbench sweep quick --set device=emulated"
    write_sweep_note(store.folder, "s", "20260101T000000000-aa", "abc", command)
    assert wanted in render(store, command="ppbench report demo")


# The page


def test_a_report_shows_runs_failures_cautions_charts_and_how_to_reproduce(page: Page) -> None:
    for text in (
        "Open.",
        "ranks took turns",
        "2 of 7 cases",
        "line two",
        "1,100",
        "bubble_idle_over_ideal",
        "ppbench sweep demo.toml",
        'name = "demo"',
        "c0ffee on main",
        "Some <CPU>",
    ):
        assert text in page.text
    sections = [attrs["id"] for _, attrs in page.tags if attrs.get("class") == "figure"]
    assert sections[:1] == ["throughput"]
    assert {"bubble", "memory"} < set(sections)
    assert len(sections) + 1 == len(page.figures())  # one is on the first screen
    rows = [attrs for tag, attrs in page.tags if tag == "tr"]
    assert len([row for row in rows if row.get("class") == "detail"]) == 6  # of the ok runs
    assert len([row for row in rows if "data-cases" in row]) == 7 + 6  # runs; definitions


def test_a_timeline_of_a_run_is_in_the_page_once_and_packed(page: Page) -> None:
    openers = {attrs["data-timeline"] for _, attrs in page.tags if "data-timeline" in attrs}
    stored = [attrs["id"] for tag, attrs in page.tags if tag == "script" and "id" in attrs]
    assert sorted(stored) == sorted(["cases", *openers, *(f"{name}-columns" for name in openers)])
    assert len(page.timelines()) == len(openers)
    assert all(meta["kinds"] for meta in page.timelines())


def test_filters_offer_every_value_of_every_varying_axis(demo: Store, page: Page) -> None:
    boxes = [a for tag, a in page.tags if tag == "input" and "data-axis" in a]
    assert [(box["data-axis"], box["value"]) for box in boxes] == [
        ("schedule", "afab"), ("schedule", "1f1b"),
        ("world_size", "1"), ("world_size", "2"), ("world_size", "4"),
        ("seq_len", "128"), ("seq_len", "512"),
    ]  # fmt: skip
    cases = page.cases()
    assert {case["case_id"] for case in cases} == set(demo.runs()["case_id"])
    assert cases[0]["axes"] == {"schedule": "afab", "world_size": "1", "seq_len": "128"}


def test_names_settings_commits_and_machines_are_text_wherever_they_stand(tmp_path: Path) -> None:
    machine = json.dumps({"hostname": NASTY, "cpu": NASTY})
    told = {"commit": NASTY, "branch": NASTY, "environment": machine, "sweep_file": NASTY}
    odd = {"sweep_name": NASTY, "cautions": NASTY, "fingerprint": NASTY, "created_at": NASTY}
    cases = [Case(model_preset=name) for name in (NASTY, "llama-8m")]
    store = store_with(tmp_path, [run_row(n, case, **told, **odd) for n, case in enumerate(cases)])
    page = Page(render(store, title=NASTY, command=NASTY, sweep_text=NASTY))
    assert page.text.count('alert("1")') > 8 + 4  # its filter among them
    assert_harmless(page)
    assert json.loads(page.about())["title"] == NASTY
    assert page.cases()[0]["axes"] == {"model_preset": NASTY}
    assert json.loads(page.about())["commit"].startswith("</script>")
    values = [attrs["value"] for tag, attrs in page.tags if tag == "input" and "value" in attrs]
    assert values == [NASTY, "llama-8m"]
    assert (
        "&lt;b&gt;bold&lt;/b&gt;"
        in page.figures()[0]["panels"][0]["layout"]["xaxis"]["ticktext"][0]
    )


def assert_harmless(page: Page) -> None:
    assert not [tag for tag, _ in page.tags if tag == "b"]
    assert [attrs.get("type") for tag, attrs in page.tags if tag == "script"].count(None) == 2
    assert not any("<" in text for text in page.blocks("application/json"))
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]


def test_a_page_loads_nothing_and_forbids_loading(demo: Store, html: str, tmp_path: Path) -> None:
    write_timeline(tmp_path / "one.html", demo, demo.runs().iloc[[1]])
    timeline = (tmp_path / "one.html").read_text(encoding="utf-8")
    for text, num_libraries in ((html, 1), (timeline, 0)):  # a timeline needs none
        page = Page(text)
        loads = [
            value
            for _, attrs in page.tags
            for name, value in attrs.items()
            if name in ("src", "href") and not value.startswith("#")
        ]
        assert not loads
        assert "url(" not in text[: text.index("</style>")]
        (policy,) = [a["content"] for _, a in page.tags if "http-equiv" in a]
        assert "default-src 'none'" in policy
        assert text.count(library()) == num_libraries


def test_the_pairs_worth_comparing_come_first_and_are_open(demo: Store, page: Page) -> None:
    opened = [
        a["data-cases"]
        for tag, a in page.tags
        if tag == "details" and "open" in a and "data-cases" in a
    ]
    runs = demo.runs()
    pair = runs[(runs["world_size"] == 2) & (runs["status"] == "ok")]
    first = " ".join(opened).split()
    assert first[:2] == list(pair["case_id"])


def test_one_case_alone_makes_a_report(tmp_path: Path) -> None:
    page = Page(render(store_with(tmp_path, [run_row(1, Case())])))
    assert "1f1b, 2 ranks, 8 microbatches, 128 tokens reaches 1,000 tokens/s" in page.text
    assert page.figures()
    assert page.timelines()
    assert not [attrs for _, attrs in page.tags if attrs.get("id") == "failures"]
    assert {"id": "filters", "hidden": None, "aria-label": "Filters"} in [a for _, a in page.tags]


def test_failures_alone_make_a_report(tmp_path: Path) -> None:
    row = run_row(1, Case(), status="crash", error=None, environment=None, commit=None)
    page = Page(render(store_with(tmp_path, [row])))
    assert "no error was recorded" in page.text
    assert not page.figures()


def test_a_report_is_written_whole_into_new_folders_and_the_same_bytes_every_time(
    demo: Store, html: str, tmp_path: Path
) -> None:
    path = tmp_path / "deep" / "er" / "report.html"
    write_report(path, demo, demo.runs(), **TEXT)
    assert path.read_text(encoding="utf-8") == html
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_failures_are_counted_and_tell_what_each_rank_was_doing(tmp_path: Path) -> None:
    store = store_with(
        tmp_path,
        [run_row(1, Case()), run_row(2, Case(seq_len=512), status="oom", error=NASTY)],
    )
    hung = store_failed(store, run_row(3, Case(num_microbatches=4)))
    again = store_failed(store, run_row(4, Case(num_microbatches=4), launch=1))
    page = Page(render(store))
    text = page.text
    assert "3 of 4 runs failed: 2 timeout, 1 oom." in text
    assert "rank 1 is stopped (SIGSTOP or a debugger) in 1B0 of step 1" in text
    assert "1B0 of rank 1" in text
    assert "rank 1: last lines of its log" in text
    for run in (hung, again):  # drawn in the failures and in the row of the table, stored once
        name = f"timeline-{run['run_id']}"
        assert [attrs.get("data-timeline") for _, attrs in page.tags].count(name) == 2
        assert [attrs.get("id") for _, attrs in page.tags].count(name) == 1
        assert f"ppbench show {run['run_id']}" in text
    assert "--planned" in text  # of the run that succeeded
    assert f"ppbench explain {hung['run_id']}" not in text


def test_of_many_replicas_the_one_that_failed_is_listed_and_the_others_below(tmp_path) -> None:
    store = store_with(tmp_path, [])
    run = store_failed(store, run_row(1, Case(replicas=12)))
    flight = store.table("flight", [run["run_id"]]).drop(columns=["run_id"])
    every = pd.concat([flight.assign(process="alive", replica=n) for n in range(12)])
    every.loc[(every["replica"] == 7) & (every["rank"] == 1), "process"] = "stopped"
    rewrite(store, store.runs().iloc[0], {"flight": every})
    found = flight_of(store, store.runs().iloc[0])
    table, others = found
    places = [table.rows.columns.index(name) for name in ("replica", "rank")]
    assert [tuple(str(row[n]) for n in places) for row in table.rows.cells] == [
        ("7", "0"), ("7", "1"),
    ]  # fmt: skip
    assert len(others.blocks[0].rows.cells) == 22
    text = render(store)
    assert "22 ranks of the other replicas" in text
    assert "failed at rank 1 · replica 7" in text


def test_what_ranks_left_behind_is_text(tmp_path: Path) -> None:
    store = store_with(tmp_path, [run_row(1, Case())])
    run = store_failed(store, run_row(2, Case()))
    flight = store.table("flight", [run["run_id"]]).drop(columns=["run_id"])
    nasty = flight.assign(hostname=[NASTY, "b"], phase=NASTY, account=NASTY, action=NASTY)
    store.write_run({**run, "error": NASTY}, {"flight": nasty})
    page = Page(render(store))
    assert_harmless(page)
    kinds = [kind for meta in page.timelines() for kind in meta["kinds"]]
    (stopped,) = [kind for kind in kinds if kind["name"] == "stopped"]
    assert (stopped["words"], stopped["labels"]) == ([NASTY], [NASTY])  # as text nodes
    for step in steps_of(store, [store.runs().iloc[1]], ["a"]):
        (bar,) = [trace for trace in gantt([step]).data if trace.name == "stopped"]
        assert "&lt;b&gt;bold&lt;/b&gt;" in bar.hovertext[0]
        assert "&lt;b&gt;bold&lt;/b&gt;" in bar.text[0]


def test_held_is_told_in_shares_of_a_rank_however_many_stages_it_has():
    case = Case(schedule="zbv", world_size=2, stages_per_rank=2)
    assert held(pd.Series(run_row(0, case, peak_held_microbatches=3, num_stages=4))) == "1.5"
    assert held(pd.Series(run_row(0, case, peak_held_microbatches=3))) == "3"
    assert held(pd.Series(run_row(0, case, peak_held_microbatches=None))) == "–"


def test_a_report_says_and_shows_who_slows_the_replicas_down(tmp_path: Path) -> None:
    store = store_of_replicas(tmp_path)
    parts = ("structure", "imbalance", "transfer", "collective", "skew", "jitter", "launch_gap")
    figures = {f"bubble_{part}": 0.05 for part in parts} | {"bubble_mean": 0.35}
    costs = {"F": [11 * MS] * 2, "B": [11 * MS] * 2}
    modelled = {
        "following": '{"optimizer_ns": [0, 0], "meets": false}',
        "op_costs_ns": json.dumps(costs),
        "replica_costs_ns": json.dumps([costs] * int(store.runs()["replicas"].iloc[0])),
        "modelled_step_ns": 120.0 * MS,
        "model_residual": 0.0,
    }
    run = dict(store.runs().iloc[0]) | figures | modelled
    spans = store.table("spans", [run["run_id"]])
    moved = collective_figures(collectives(spans))
    store.write_run(run, {"spans": spans, "edges": edges(messages(spans)), "collectives": moved})
    text = render(store)
    assert f"Replica {SLOW} is slow: with its times like the others" in text
    assert f"ppbench stragglers {run['run_id']}" in text
    assert "Who slows the replicas down" in text
    assert "free collectives" in text
    assert "replica&#39;s own mean costs" in text
    assert "has a menu of the others" in text
