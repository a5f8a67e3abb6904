"""A page of every kind, from runs made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
from histories import CASE, OTHER, CommitFacts, Runs, five
from stored_runs import rewrite, run_row, simulated_spans, store_failed, store_with
from toy_plan import toy_page
from tracked import CASE as COMPARED
from tracked import STEADY, add_launches, slower, store_in

from ppbench.analysis.metrics import run_figures, step_figures, windows
from ppbench.cli import schedules as planning
from ppbench.cli.comparison import compared, page_of
from ppbench.commits.comparison import compare
from ppbench.commits.series import history
from ppbench.config.case import Case
from ppbench.display.document import Code, Result
from ppbench.display.metrics import METRICS
from ppbench.report.pages.history import HistoryPage, render_history
from ppbench.report.pages.plan import render_plan
from ppbench.report.pages.provenance import REPORT, About
from ppbench.report.pages.report import write_report
from ppbench.report.pages.templates import Live, page, write_index, write_page
from ppbench.report.pages.timeline import write_timeline
from ppbench.store import Store

NASTY = "</script><script>document.title = 'taken over'</script> & \"ünïcode\" <b>bold</b>"
NUM, BAD = 10, 6
"""The commits of the history, and the one that is slower."""


def simulated_run(store: Store, number: int, case: Case, **changes: object) -> None:
    """Store a run whose spans are those that the program predicts."""
    spans = simulated_spans(case.schedule, case.world_size, case.num_microbatches, latency_ms=1)
    tokens_of_step = dict.fromkeys(spans["step"], case.max_tokens_per_step)
    steps = step_figures(spans, windows(spans, case.world_size), tokens_of_step)
    figures = {**run_figures(steps), "peak_memory_bytes": 2**20 * case.num_microbatches}
    cautions = "oversubscribed" if case.world_size > 2 else ""
    run = run_row(number, case, **{**figures, "cautions": cautions, **changes})
    ranks = [{"rank": r, "peak_memory_bytes": 2**20} for r in range(case.world_size)]
    store.write_run(run, {"steps": steps, "ranks": pd.DataFrame(ranks), "spans": spans})


def demo_page(folder: Path) -> Path:
    """A report on two schedules × 1, 2, 4 ranks × two sequence lengths, and one failure."""
    store = Store(folder / "results")
    cases = [
        Case(schedule=schedule, world_size=p, num_microbatches=4, seq_len=t)
        for schedule in ("afab", "1f1b")
        for p in (1, 2, 4)
        for t in (128, 256)
    ]
    for number, case in enumerate(cases):
        simulated_run(store, number, case)
    simulated_run(store, 99, cases[-1], status="error", error=NASTY, tokens_per_s=None)
    page = folder / "page.html"
    write_report(page, store, store.runs(), title="demo", command="ppbench", sweep_text=None)
    return page


def answered_page(folder: Path) -> Path:
    """A report with a clear answer, others, cautions, and failures of two causes."""
    store = Store(folder / "results")
    speeds = {"afab": 1000.0, "1f1b": 1100.0, "zb_h1": 1230.0}
    number = 0
    for ranks in (2, 4):
        for schedule, speed in speeds.items():
            for num in (4, 8) if ranks == 2 else (4,):
                case = Case(schedule=schedule, world_size=ranks, num_microbatches=num)
                for launch in range(3 if ranks == 2 else 1):
                    simulated_run(
                        store,
                        number,
                        case,
                        run_id=f"20260101T000000{number:03d}-abcdef",
                        launch=launch,
                        tokens_per_s=speed * (1 + num / 40) * (1 + launch / 1000),
                        cautions="oversubscribed" if ranks == 4 else "coarse_clock",
                        fingerprint="f1",
                    )
                    number += 1
    long = Case(schedule="1f1b", world_size=2, seq_len=4096)
    for launch in range(3):
        error = f"CUDA out of memory: tried to allocate {20 + launch}.00 MiB on rank {launch % 2}"
        row = run_row(100 + launch, long, launch=launch, status="oom", error=f"{error}\nits trace")
        store.write_run(row, {})
    store_failed(store, run_row(200, Case(schedule="afab", world_size=2, seq_len=4096)))
    page = folder / "page.html"
    write_report(page, store, store.runs(), title="schedules", command="ppbench", sweep_text="a=1")
    return page


def failure_pages(folder: Path) -> tuple[Path, Path]:
    """A report on a run that is ok and one whose rank 1 was stopped, and the latter's timeline."""
    store = store_with(folder / "results", [run_row(1, Case(), model_preset=NASTY)])
    run = store_failed(store, run_row(2, Case(num_microbatches=4), model_preset=NASTY))
    rewrite(store, pd.Series({**run, "error": f"{run['error']}\n{NASTY}"}), {})
    report, line = folder / "failures.html", folder / "failed-timeline.html"
    write_report(report, store, store.runs(), title="demo", command="ppbench", sweep_text=None)
    write_timeline(line, store, store.runs().iloc[[1]].reset_index(drop=True))
    return report, line


def sha(number: int) -> str:
    return f"{number:x}" * 40


def history_page(folder: Path) -> Path:
    """The seventh of ten commits makes one case slower and leaves the other; one did not run."""
    runs = Runs(folder / "results")
    for number in range(NUM):
        told = CommitFacts(sha(number), number, NASTY if number == BAD else f"change {number}")
        level = 1000.0 if number < BAD else 900.0
        runs.add_launches(told, CASE, [None] if number == 2 else five(level, number)[:2])
    for number in range(2):
        runs.add_launches(CommitFacts(sha(number), number), OTHER, five(2000.0, number)[:2])
    metric = METRICS["tokens_per_s"]
    found = history(results=runs.store.folder)
    told_page = HistoryPage(metric, found.series, found.notes, found.line, "ppbench history")
    write_page(folder / "page.html", render_history(runs.store, told_page))
    return folder / "page.html"


def comparison_page(folder: Path) -> Path:
    """1F1B is faster on two ranks, about as fast on four, and slower on eight."""
    store = store_in(folder)
    for ranks, by in ((2, -0.04), (4, 0.0), (8, 0.06)):
        for schedule, speeds in (("afab", STEADY), ("1f1b", slower(by))):
            case = replace(COMPARED, schedule=schedule, world_size=ranks)
            stretch = {(1, "B"): 1.0 + (by if schedule == "1f1b" else 0)}
            add_launches(store, speeds, "c0de" * 10, case, stretch=stretch, position=ranks)
    result = compare(across="schedule", results=store.folder)
    write_page(folder / "page.html", page_of(result, compared(result), "ppbench compare"))
    return folder / "page.html"


def runs_with_plans(folder: Path, ranks: int, microbatches: int) -> Store:
    """AFAB and 1F1B as simulated, each with its plan."""
    store = Store(folder)
    for number, schedule in enumerate(("afab", "1f1b")):
        spans = simulated_spans(schedule, ranks, microbatches, 1).assign(step=3)
        figures = {"step_ns": spans["end_ns"].max(), "bubble_fraction": 0.2}
        case = Case(schedule=schedule, world_size=ranks, num_microbatches=microbatches)
        run = run_row(number, case, model_preset=NASTY, **figures)
        steps = pd.DataFrame([{"step": 3, **figures}])
        planned = spans.drop(columns="num_bytes").assign(step=0)
        store.write_run(run, {"steps": steps, "spans": spans, "planned": planned})
    return store


def timeline_page(folder: Path) -> Path:
    """The measured and the planned steps of two runs."""
    store = runs_with_plans(folder / "results", 4, 8)
    write_timeline(folder / "timeline.html", store, store.runs(), has_plan=True)
    return folder / "timeline.html"


def plan_page(folder: Path) -> Path:
    write_page(folder / "page.html", render_plan(toy_page()))
    return folder / "page.html"


def planned_page(folder: Path) -> Path:
    """The simulated step of a schedule."""
    planning.draw("zbv", 4, 8, output=folder / "page.html")
    return folder / "page.html"


def waiting_page(folder: Path) -> Path:
    """A sweep of which no case has ended."""
    live, about = Live("0 cases", "10:00:00"), About(kind=REPORT, title="demo")
    text = page(Result([Code("ppbench")]), about, "No case has ended yet.", live=live)
    write_page(folder / "page.html", text)
    return folder / "page.html"


def index_page(folder: Path) -> Path:
    for name, make in (("plan", plan_page), ("comparison", comparison_page)):
        (folder / name).mkdir()
        make(folder / name).rename(folder / f"{name}.html")
    write_index(folder)
    return folder / "index.html"


KINDS = {
    "report": demo_page,
    "answered": answered_page,
    "failures": lambda folder: failure_pages(folder)[0],
    "failed timeline": lambda folder: failure_pages(folder)[1],
    "timeline": timeline_page,
    "planned timeline": planned_page,
    "history": history_page,
    "comparison": comparison_page,
    "plan": plan_page,
    "waiting": waiting_page,
    "index": index_page,
}
