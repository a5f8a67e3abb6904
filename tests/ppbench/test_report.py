"""Figures and pages, from runs and spans made by hand: every expected number is worked out here."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from plotly.offline import get_plotlyjs

from engine.plan.action import Op
from engine.plan.schedules.registry import build_program
from engine.plan.simulate import simulate, uniform
from engine.plan.spans import Span, lane_of
from ppbench.config.case import Case
from ppbench.errors import StoreError
from ppbench.report import figures
from ppbench.report.answer import answer
from ppbench.report.cases import axis_text, varying_axes
from ppbench.report.figures import gantt
from ppbench.report.page import render_report, write_report, write_timeline
from ppbench.report.palette import LIGHTEST, OP_COLORS, ink_on, schedule_colors, tinted
from ppbench.report.summary import summary
from ppbench.report.units import held
from ppbench.store import Store

MS = 1_000_000
ACTIONS = [  # rank, stage, op, microbatch, start ms, end ms; rank 1 posts its receive at 1
    (0, 0, Op.F, 0, 5, 15),
    (0, 0, Op.SEND_F, 0, 15, 17),
    (0, 0, Op.RECV_B, 0, 17, 41),
    (0, 0, Op.B, 0, 41, 61),
    (0, -1, Op.OPT, -1, 61, 65),
    (1, 1, Op.RECV_F, 0, 6, 17),
    (1, 1, Op.F, 0, 17, 27),
    (1, 1, Op.B, 0, 27, 39),
    (1, 1, Op.SEND_B, 0, 39, 41),
    (1, -1, Op.OPT, -1, 39, 43),
]
NASTY = "</script><script>alert(\"1\")</script> & 'ünïcode' <b>bold</b>"


def spans(step: int = 1, late_ms: int = 0) -> pd.DataFrame:
    return pd.DataFrame(
        [
            Span(
                step,
                rank,
                lane_of(op).value,
                stage,
                op.value,
                microbatch,
                (start + late_ms) * MS,
                (end + late_ms) * MS,
                4096 if lane_of(op).value != "compute" else 0,
            )
            for rank, stage, op, microbatch, start, end in ACTIONS
        ]
    )


def traces(figure) -> dict:
    return {trace.name: trace for trace in figure.data if trace.name}


def run_row(number: int, case: Case, **changes: object) -> dict:
    row = {
        "run_id": f"2026010{number // 10}T00000000{number % 10}-abcdef",
        "sweep_id": "s",
        "sweep_name": "demo",
        "sweep_file": "sweeps/demo.toml",
        "case_id": case.case_id,
        "launch": 0,
        "status": "ok",
        "created_at": "2026-01-01T00:00:00+00:00",
        **case.settings(),
        "tokens_per_s": 1000.0,
        "step_ns": 56.0 * MS,
        "bubble_fraction": 0.25,
        "bubble_idle_over_ideal": 1 / 3,
        "bubble_max_stage_span": 0.2,
        "bubble_fraction_theory": 1 / 9,
        "peak_memory_bytes": 100 * 2**20,
        "peak_held_microbatches": 2,
        "last_loss": 4.25,
        "cautions": "",
        "commit": "c0ffee",
        "branch": "main",
        "is_dirty": False,
        "fingerprint": "f1f2",
        "environment": json.dumps({"cpu": "Some <CPU>", "num_cores": 2, "gpus": [], "cuda": None}),
        "ppbench_version": "0.1.0",
    }
    return {**row, **changes}


def store_with(folder: Path, rows: list[dict]) -> Store:
    store = Store(folder)
    for row in rows:
        is_ok = row["status"] == "ok"
        steps = [{"step": n, "step_with_optimizer_ns": n * MS} for n in (1, 2, 3)]
        ranks = [
            {"rank": rank, "peak_memory_bytes": row["peak_memory_bytes"] - rank * 2**20}
            for rank in range(row["world_size"])
        ]
        timed = pd.concat([spans(1), spans(2, 100), spans(3, 200)], ignore_index=True)
        tables = {"steps": pd.DataFrame(steps), "ranks": pd.DataFrame(ranks), "spans": timed}
        store.write_run(row, tables if is_ok else {})
    return store


@pytest.fixture
def demo(tmp_path: Path) -> Store:
    """AFAB and 1F1B at 1 and 2 ranks, one oversubscribed pair, one failure."""
    afab, other = Case(schedule="afab"), Case(schedule="1f1b")
    crowd = {"cautions": "oversubscribed", "tokens_per_s": 9000.0}
    return store_with(
        tmp_path / "results",
        [
            run_row(1, replace(afab, world_size=1), tokens_per_s=600.0),
            run_row(2, afab, tokens_per_s=1000.0, peak_memory_bytes=200 * 2**20),
            run_row(3, replace(afab, world_size=4), **crowd),
            run_row(4, replace(other, world_size=1), tokens_per_s=600.0),
            run_row(5, other, tokens_per_s=1100.0, peak_memory_bytes=100 * 2**20),
            run_row(6, replace(other, world_size=4), **crowd),
            run_row(7, replace(other, seq_len=512), status="oom", error=NASTY + "\nline two"),
        ],
    )


def render(store: Store, **changes) -> str:
    text = {"title": "demo", "command": "ppbench sweep demo.toml", "sweep_text": 'name = "demo"'}
    return render_report(store, store.runs(), **{**text, **changes})


class _Page(HTMLParser):
    """What a browser would make of a page: its elements, its text and what it would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.scripts: list[str] = []
        self._open = ""
        self.feed(page.replace(get_plotlyjs(), "/* plotly.js */"))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open = tag
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self._open == "script":
            self.scripts[-1] += data
        elif self._open != "style":
            self.text += data

    def handle_endtag(self, tag):
        self._open = ""

    def figures(self) -> list[dict]:
        kinds = [attrs.get("type") for tag, attrs in self.tags if tag == "script"]
        pairs = zip(kinds, self.scripts, strict=True)
        return [json.loads(text) for kind, text in pairs if kind == "application/json"]


# Gantt


def test_a_gantt_has_one_bar_trace_per_op_whatever_the_number_of_spans() -> None:
    many = pd.concat([spans().assign(microbatch=n) for n in range(300)], ignore_index=True)
    few = figures.gantt(spans(), "few")
    assert len(figures.gantt(many, "many").data) == len(few.data)
    ops = {figures.OP_WORDS[op] for _, _, op, *_ in ACTIONS}
    assert set(traces(few)) == ops | {"idle"}
    assert {trace.type for trace in few.data} == {"bar"}
    assert not few.layout.shapes
    assert not few.layout.annotations


def test_gantt_bars_start_and_last_as_measured_in_ms_since_the_first_action() -> None:
    forward = traces(figures.gantt(spans(), ""))["forward"]
    np.testing.assert_array_equal(forward.base, [0.0, 12.0])
    np.testing.assert_array_equal(forward.x, [10.0, 10.0])
    backward = traces(figures.gantt(spans(late_ms=700), ""))["backward"]
    np.testing.assert_array_equal(backward.base, [36.0, 22.0])
    np.testing.assert_array_equal(backward.x, [20.0, 12.0])
    np.testing.assert_array_equal(backward.customdata[:, 5], [20.0, 12.0])  # for hovering


def test_a_transfer_begins_when_both_sides_are_ready() -> None:
    drawn = traces(figures.gantt(spans(), ""))
    receive, send = drawn["receive activations"], drawn["send activations"]
    assert receive.base[0] == send.base[0] == 10.0  # posted at 1, but sent at 10
    assert receive.x[0] == 2.0
    assert receive.customdata[0][3] == 9.0  # ms that the receiver had waited
    assert send.customdata[0][3] == 0.0


def test_rank_0_is_on_top_and_transfers_lie_in_thin_lanes_below_compute() -> None:
    figure = figures.gantt(spans(), "")
    low, high = figure.layout.yaxis.range
    assert low > high  # y grows downwards, so rank 0 is on top
    words = [re.sub("<.*?>", "", text) for text in figure.layout.yaxis.ticktext]
    assert words == ["rank 0", "send", "recv", "rank 1", "send", "recv"]
    drawn = traces(figure)
    compute, send, recv = (
        drawn[name].y[0] for name in ("forward", "send activations", "receive gradients")
    )
    assert compute < send < recv < compute + 1
    assert drawn["send activations"].width < drawn["forward"].width / 2


def test_the_grey_left_uncovered_is_the_step_without_its_optimizer() -> None:
    idle = traces(figures.gantt(spans(), ""))["idle"]
    np.testing.assert_array_equal(idle.x, [56.0, 56.0])


def test_compute_bars_carry_their_microbatch_and_hovering_tells_the_rest() -> None:
    drawn = traces(figures.gantt(spans(), ""))
    assert list(drawn["forward"].text) == ["0", "0"]
    assert drawn["optimizer"].text is None
    for word in ("rank", "stage", "microbatch", "start", "duration"):
        assert word in drawn["forward"].hovertemplate
    assert "KiB" in drawn["send gradients"].hovertemplate
    assert drawn["send gradients"].customdata[0][4] == 4.0
    assert "stage" not in drawn["optimizer"].hovertemplate


def test_a_single_rank_without_transfers_is_drawn() -> None:
    alone = spans()
    alone = alone[(alone["rank"] == 0) & (alone["lane"] == "compute")]
    assert set(traces(figures.gantt(alone, ""))) == {"forward", "backward", "optimizer", "idle"}


def test_arrays_are_typed_so_that_thousands_of_spans_stay_small() -> None:
    text = figures.gantt(spans(), "").to_json(engine="json")
    assert all("bdata" in trace["x"] for trace in json.loads(text)["data"])


# Colours


def test_every_op_has_its_own_colour_and_readable_ink() -> None:
    assert set(OP_COLORS) == set(Op)
    assert len(set(OP_COLORS.values())) == len(Op)
    assert ink_on("#0072B2") == "#ffffff"
    assert ink_on("#F0E442") == "#000000"


def test_a_schedule_keeps_its_colour_whatever_else_is_shown() -> None:
    alone, together = schedule_colors(["1f1b"]), schedule_colors(["zz", "1f1b", "aa"])
    assert alone["1f1b"] == together["1f1b"]
    assert len({together[name] for name in ("afab", "1f1b", "aa", "zz")}) == 4


# Charts


def bars_of(figure, name: str) -> list[tuple[float, float]]:
    return [
        (float(x), float(y))
        for trace in figure.data
        if trace.name == name and trace.x[0] is not None
        for x, y in zip(trace.x, trace.y, strict=True)
    ]


def test_charts_put_ranks_on_x_and_schedules_side_by_side(demo: Store) -> None:
    runs = demo.runs()
    figure = figures.throughput(runs, ("schedule", "world_size"))
    assert list(figure.layout.xaxis.ticktext) == ["1 rank", "2 ranks", "4 ranks"]
    afab, other = bars_of(figure, "afab"), bars_of(figure, "1f1b")
    assert [y for _, y in afab] == [600.0, 1000.0, 9000.0]
    assert [round(x) for x, _ in other] == [0, 1, 2]
    assert all(a < b for (a, _), (b, _) in zip(afab, other, strict=True))


def test_theory_stands_on_the_bar_it_belongs_to(demo: Store) -> None:
    figure = figures.bubble(demo.runs(), ("schedule", "world_size"))
    measured = bars_of(figure, "afab") + bars_of(figure, "1f1b")
    theory = bars_of(figure, "theory")
    assert sorted(x for x, _ in theory) == sorted(x for x, _ in measured)
    assert {y for _, y in theory} == {1 / 9}


def test_peak_memory_shows_every_rank_on_its_bar(demo: Store) -> None:
    runs = demo.runs()
    ranks = demo.table("ranks", runs["run_id"])
    figure = figures.peak_memory(runs, ranks, ("schedule", "world_size"))
    assert figure.layout.yaxis.title.text == "MiB"
    assert [y for _, y in bars_of(figure, "afab")] == [100.0, 200.0, 100.0]
    assert len(bars_of(figure, "each rank")) == 2 * (1 + 2 + 4)
    assert {y for _, y in bars_of(figure, "each rank")} == {200.0, 199.0, 100.0, 99.0, 98.0, 97.0}


def test_oversubscribed_cases_are_hatched_and_say_why(demo: Store) -> None:
    figure = figures.bubble(demo.runs(), ("schedule", "world_size"))
    (afab,) = [trace for trace in figure.data if trace.name == "afab"]
    assert list(afab.marker.pattern.shape) == ["", "", "/"]
    assert "says nothing about the schedule" in afab.customdata[2][1]
    assert "oversubscribed" in traces(figure)


def test_a_case_shows_the_median_over_its_launches(tmp_path: Path) -> None:
    rows = [
        run_row(n, Case(), launch=n, tokens_per_s=speed)
        for n, speed in enumerate([100.0, 300.0, 900.0])
    ]
    figure = figures.throughput(store_with(tmp_path, rows).runs(), ())
    assert [y for _, y in bars_of(figure, "1f1b")] == [300.0]
    assert "median of 3 launches" in figure.data[0].customdata[0][1]


def test_sixty_cases_become_panels_that_share_one_scale(tmp_path: Path) -> None:
    cases = [
        Case(schedule=s, world_size=p, num_microbatches=m, seq_len=t)
        for s in ("afab", "1f1b")
        for p in (1, 2, 4)
        for m in (4, 8)
        for t in (64, 128, 256, 512, 1024)
    ]
    runs = pd.DataFrame([run_row(n, case) for n, case in enumerate(cases)])
    figure = figures.throughput(runs, varying_axes(runs))
    titles = [annotation.text for annotation in figure.layout.annotations]
    assert len(titles) == 10
    assert titles[0] == "4 microbatches, 64 tokens"
    assert figure.layout.yaxis10.matches == "y"
    arrangements = figure.layout.meta["arrangements"]
    assert set(arrangements) == {"1", "2", "3", "4"}
    assert arrangements["1"]["height"] > arrangements["4"]["height"]


def test_settings_are_called_by_words(tmp_path: Path) -> None:
    assert axis_text("seq_len", 64) == "64 tokens"
    assert axis_text("seq_len", "variable") == "variable length"
    assert axis_text("train_recompute", np.True_) == "recompute"
    assert axis_text("train_compile", value=False) == "no compile"
    assert axis_text("model_split_points", '["a.1"]') == 'split points ["a.1"]'


def test_a_variable_length_is_a_word_in_every_label(tmp_path: Path) -> None:
    cases = [Case(seq_len=length) for length in (512, "variable", 64)]
    store = store_with(tmp_path, [run_row(n, case) for n, case in enumerate(cases)])
    runs = store.runs()
    figure = figures.throughput(runs, varying_axes(runs))
    assert list(figure.layout.xaxis.ticktext) == ["512 tokens", "variable length", "64 tokens"]
    lengths = summary(runs, ("seq_len",))
    assert lengths.columns[0].is_number
    assert [(row[0].text, row[0].number) for row in lengths.rows] == [
        ("512", 512.0), ("variable", 0.0), ("64", 64.0),
    ]  # fmt: skip
    assert "variable length" in _Page(render(store)).text


def test_switches_are_axes_with_words_on_them(tmp_path: Path) -> None:
    cases = [Case(train_recompute=on, schedule=s) for on in (False, True) for s in ("afab", "1f1b")]
    runs = store_with(tmp_path, [run_row(n, case) for n, case in enumerate(cases)]).runs()
    figure = figures.throughput(runs, varying_axes(runs))
    assert list(figure.layout.xaxis.ticktext) == ["no recompute", "recompute"]
    assert "no recompute" in answer(runs, varying_axes(runs))[0]


def test_runs_of_an_older_version_and_newer_ones_make_one_report(tmp_path: Path) -> None:
    store = store_with(tmp_path, [run_row(1, Case(schedule="afab")), run_row(2, Case())])
    added = {"model_split", "data_shuffle", "train_clip_norm", "num_tokens", "stage_shares"}
    for path in tmp_path.glob("*/2026010000000000001*.parquet"):
        table = pq.read_table(path)
        pq.write_table(table.select([n for n in table.column_names if n not in added]), path)
    assert varying_axes(store.runs()) == ("schedule",)
    assert "Fastest of 2 cases" in _Page(render(store)).text


# The answer in words


def test_the_answer_names_the_fastest_case_that_is_not_oversubscribed(demo: Store) -> None:
    runs = demo.runs()
    sentences = answer(runs, ("schedule", "world_size"))
    assert sentences[0].startswith("Fastest of 4 cases: 1f1b, 2 ranks. It reaches 1,100 tokens/s")
    assert "10 % more throughput than afab" in sentences[1]
    assert "50 % less peak memory than" in sentences[1]
    assert "throughput of 1f1b is 1.10 times, and its peak memory 0.50 times" in sentences[2]
    assert "2 oversubscribed cases" in sentences[3]
    assert "launched only once" in sentences[4]


def test_the_answer_without_a_single_success_says_so(demo: Store) -> None:
    runs = demo.runs()
    assert "No run succeeded" in answer(runs[runs["status"] == "oom"], ())[0]


# The page


def test_a_report_shows_runs_failures_cautions_charts_and_how_to_reproduce(demo: Store) -> None:
    html = render(demo)
    page = _Page(html)
    for text in (
        "Fastest of 4 cases",
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
    charts = [attrs for tag, attrs in page.tags if attrs.get("class") == "chart"]
    assert len(charts) == len(page.figures()) == 3 + 6  # a timeline for every ok run
    rows = [tag for tag, _ in page.tags if tag == "tr"]
    assert len(rows) == (1 + 7) + (1 + 6)


def test_what_users_write_appears_as_text(demo: Store) -> None:
    html = render(demo, title=NASTY, command=NASTY, sweep_text=NASTY)
    page = _Page(html)
    assert page.text.count('alert("1")') == 6  # title, heading, headline, error, command, file
    assert not [tag for tag, _ in page.tags if tag == "b"]
    assert not any("alert(" in script for script in page.scripts)


def test_names_inside_figures_are_text_too(tmp_path: Path) -> None:
    cases = [Case(model_preset=name) for name in (NASTY, "llama-8m")]
    store = store_with(tmp_path, [run_row(n, case) for n, case in enumerate(cases)])
    page = _Page(render(store))
    ticks = page.figures()[0]["layout"]["xaxis"]["ticktext"]
    assert "&lt;b&gt;bold&lt;/b&gt;" in ticks[0]
    assert page.figures()


def test_a_report_is_the_same_bytes_every_time(demo: Store) -> None:
    assert render(demo) == render(demo)


def test_a_page_loads_nothing_and_forbids_loading(demo: Store, tmp_path: Path) -> None:
    write_timeline(tmp_path / "one.html", demo, demo.runs().iloc[1])
    for html in (render(demo), (tmp_path / "one.html").read_text(encoding="utf-8")):
        page = _Page(html)
        loads = [
            value
            for _, attrs in page.tags
            for name, value in attrs.items()
            if name in ("src", "href")
        ]
        assert not loads
        assert "url(" not in html[: html.index("</style>")]
        (policy,) = [a["content"] for _, a in page.tags if "http-equiv" in a]
        assert "default-src 'none'" in policy
        assert html.count(get_plotlyjs()) == 1


def test_the_pairs_worth_comparing_are_open_and_share_their_time_axis(demo: Store) -> None:
    page = _Page(render(demo))
    opened = [a["id"] for tag, a in page.tags if tag == "details" and "open" in a]
    runs = demo.runs()
    pair = runs[(runs["world_size"] == 2) & (runs["status"] == "ok")]
    assert opened[:2] == [f"run-{run_id}" for run_id in pair["run_id"]]
    ranges = [figure["layout"]["xaxis"]["range"] for figure in page.figures()[3:5]]
    assert ranges[0] == ranges[1]


def test_one_case_alone_makes_a_report(tmp_path: Path) -> None:
    page = _Page(render(store_with(tmp_path, [run_row(1, Case())])))
    assert "1f1b, 2 ranks, 8 microbatches, 128 tokens. It reaches 1,000 tokens/s" in page.text
    assert len(page.figures()) == 3 + 1


def test_failures_alone_make_a_report(tmp_path: Path) -> None:
    row = run_row(1, Case(), status="crash", error=None, environment=None, commit=None)
    page = _Page(render(store_with(tmp_path, [row])))
    assert "no error was recorded" in page.text
    assert not page.figures()


def test_a_report_is_written_whole_into_new_folders(demo: Store, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "report.html"
    text = {"title": "demo", "command": "c", "sweep_text": None}
    write_report(path, demo, demo.runs(), **text)
    assert path.read_text(encoding="utf-8") == render_report(demo, demo.runs(), **text)
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_a_report_that_cannot_be_written_says_where_and_what_to_do(
    demo: Store, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "report.html"
    with pytest.raises(StoreError, match=r"report\.html: cannot be written: .*-o FILE"):
        write_timeline(path, demo, demo.runs().iloc[1])


def test_a_timeline_of_a_failed_run_says_why_there_is_none(demo: Store, tmp_path: Path) -> None:
    failed = demo.runs().iloc[-1]
    with pytest.raises(StoreError, match="its spans are not in the store"):
        write_timeline(tmp_path / "x.html", demo, failed)


def test_emulated_cases_are_never_compared_with_measured_ones():
    real, emulated = Case(schedule="1f1b"), Case(schedule="zbv", device="emulated")
    runs = pd.DataFrame(
        [run_row(0, real), run_row(1, emulated, tokens_per_s=9e9, peak_memory_bytes=None)]
    )
    sentences = answer(runs, ("schedule",))
    assert sentences[0].startswith("1f1b. It reaches 1,000 tokens/s")
    assert "Emulated cases are left out of these comparisons" in " ".join(sentences)
    assert "zbv" not in " ".join(sentences)


def test_held_is_told_in_shares_of_a_rank_however_many_stages_it_has():
    case = Case(schedule="zbv", world_size=2, stages_per_rank=2)
    assert held(pd.Series(run_row(0, case, peak_held_microbatches=3, num_stages=4))) == "1.5"
    assert held(pd.Series(run_row(0, case, peak_held_microbatches=3))) == "3"
    assert held(pd.Series(run_row(0, case, peak_held_microbatches=None))) == "–"


def test_many_schedules_are_compared_with_the_first_in_one_sentence():
    names = ("afab", "1f1b", "zb_h1", "zb_h2")
    runs = pd.DataFrame(
        [run_row(n, Case(schedule=s), tokens_per_s=1000.0 * (n + 1)) for n, s in enumerate(names)]
    )
    text = " ".join(answer(runs, ("schedule",)))
    assert "as a multiple of afab's, over one pair of cases" in text
    assert "zb_h2 4.00, zb_h1 3.00, 1f1b 2.00" in text


def test_each_further_stage_of_a_rank_is_drawn_in_a_lighter_colour():
    program = build_program("zbv", 2, 4)
    spans = pd.DataFrame(simulate(program, uniform(program.placement, MS, MS, MS)).spans())
    (forward,) = [bar for bar in gantt(spans, "").data if bar.name == "forward"]
    stages = forward.customdata[:, 1]
    by_stage = {int(s): c for s, c in zip(stages, forward.marker.color, strict=True)}
    assert by_stage[0] == by_stage[1] == tinted(OP_COLORS[Op.F], 0)
    assert by_stage[2] == by_stage[3] == tinted(OP_COLORS[Op.F], LIGHTEST)
