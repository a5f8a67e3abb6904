"""Failed runs in a real browser: drawn up to their end, explained by rank, text escaped.

Pictures of the pages are kept where they are wanted; see `screens.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
from chromium import Browser, Tab
from screens import DESK, PHONE, READER, keep, needs_browser

from engine.plan.action import Action, parse_action
from engine.plan.lower import lower
from engine.plan.program import Program
from engine.plan.schedules.registry import build_program
from engine.plan.simulate import TransferModel, simulate, uniform
from ppbench.config.case import Case
from ppbench.report.pages.report import write_report
from ppbench.report.pages.timeline import write_timeline
from ppbench.run.failures.post_mortem import RankState, flight_rows, post_mortem
from ppbench.store import Store

pytestmark = needs_browser
MS = 1_000_000
UNTIL_NS = 30_000 * MS
OPEN = ("0B1", "1B1", "2F2", "3F2")
"""By rank: where each is when rank 2 is stopped in 2F2 and the others have gone on."""
STOPPED = 2
NASTY = "</script><script>document.title = 'taken over'</script> & <b>bold</b>"
LOOK = (
    READER
    + """
const isDrawn = (div) => div?.timeline?.drawn != null;
"""
)
# Right after the start of the first bar of a trace: its end is far off to the right.
START = """(() => {
  const { timeline } = div;
  const kind = timeline.kinds.findIndex((one) => one.name === "%s");
  const { x, y, height } = timeline.boxOfSpan({ kind, n: 0 });
  const canvas = timeline.canvas.getBoundingClientRect();
  return [canvas.left + x + 30, canvas.top + y + height / 2];
})()"""


def cut(spans: pd.DataFrame, lowered: Program) -> tuple[pd.DataFrame, list[RankState]]:
    """The spans finished before the open actions, and the state of each rank then."""
    actions = [
        Action(*key) for key in zip(spans["stage"], spans["op"], spans["microbatch"], strict=True)
    ]
    finished, records = [], []
    for rank, text in enumerate(OPEN):
        row, action = lowered.actions[rank], parse_action(text)
        before = set(row[: row.index(action)])
        mine = spans[[one in before for one in actions]]
        finished.append(mine)
        is_stopped = rank == STOPPED
        since_ns = int(mine.loc[mine["op"].isin(["F", "B"]), "end_ns"].max())
        process = "stopped" if is_stopped else "alive"
        record = RankState(rank, "node", process, "steps", 3, action, not is_stopped, since_ns)
        records.append(record)
    return pd.concat(finished), records


def write_pages(folder: Path) -> tuple[Path, Path]:
    """A report on a run that is ok and one whose rank 2 was stopped, and the latter's timeline."""
    store = Store(folder / "results")
    case = Case(schedule="1f1b", world_size=4, num_microbatches=8)
    program = build_program("1f1b", 4, 8)
    durations = uniform(program.placement, 10 * MS, 10 * MS, 10 * MS)
    transfers = TransferModel(latency_ns=MS, message_bytes=4096)
    spans = pd.DataFrame(simulate(program, durations, transfers).spans()).assign(step=3)
    finished, records = cut(spans, lower(program))
    diagnosis = post_mortem(records, lower(program), UNTIL_NS)
    run = {"launch": 0, "cautions": "", "case_id": case.case_id, **case.settings()}
    run |= {"sweep_id": "s", "environment": "{}", "model_preset": NASTY}
    figures = {"step_ns": 120 * MS, "tokens_per_s": 1000.0, "bubble_fraction": 0.2}
    steps = pd.DataFrame([{"step": 3, "step_with_optimizer_ns": 120 * MS, "step_ns": 120 * MS}])
    ok = {"run_id": "20260101T000000001-abcdef", "status": "ok", "resume_key": "a", **figures}
    store.write_run({**run, **ok}, {"steps": steps, "spans": spans})
    hung = {"run_id": "20260101T000000002-abcdef", "status": "timeout", "resume_key": "b"}
    told = {
        "error": f"{diagnosis.verdict}\n{NASTY}",
        "error_rank": diagnosis.rank,
        "num_microbatches": 16,
    }
    tables = {"flight": flight_rows(diagnosis, UNTIL_NS), "spans": finished}
    store.write_run({**run, **hung, **told}, tables)
    report, line = folder / "failures.html", folder / "failed-timeline.html"
    write_report(report, store, store.runs(), title="demo", command="ppbench", sweep_text=None)
    write_timeline(line, store, store.runs().iloc[[1]].reset_index(drop=True))
    return report, line


@dataclass(frozen=True)
class Opened:
    """A page whose `div` is the chart of the run that failed."""

    tab: Tab
    page: Path


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pages(tmp_path_factory.mktemp("failures"))


@pytest.fixture(
    params=[
        (0, DESK, "light"),
        pytest.param((0, PHONE, "dark"), marks=pytest.mark.thorough),
        pytest.param((1, DESK, "dark"), marks=pytest.mark.thorough),
        (1, PHONE, "light"),
    ],
    ids=["report-desk", "report-phone", "timeline-desk", "timeline-phone"],
    scope="module",
)
def opened(request: pytest.FixtureRequest, browser: Browser, pages: tuple[Path, Path]) -> Opened:
    """The page, opened; in a report, the failure's chart is unfolded first."""
    number, width, scheme = request.param
    tab = Tab(browser, pages[number], width, scheme)
    tab.evaluate(LOOK)
    tab.evaluate("""(async () => {
      all("#failures details").forEach((details) => { details.open = true; });
      globalThis.div = all("#failures .chart, section.timeline .chart")[0];
      div.scrollIntoView();
      await until(() => isDrawn(div));
    })()""")
    keep(tab, f"{pages[number].stem}-{width}-{scheme}")
    return Opened(tab, pages[number])


def test_a_failed_run_is_drawn_without_an_error_and_fits(opened: Opened) -> None:
    assert opened.tab.evaluate("isDrawn(div)")
    assert opened.tab.problems() == []
    assert opened.tab.requests() == [opened.page.as_uri()]
    assert opened.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_what_was_never_finished_is_hatched_and_told_from_what_was(opened: Opened) -> None:
    names = opened.tab.evaluate("div.timeline.kinds.map((kind) => kind.name)")
    assert {"forward", "backward", "waiting at the end", "stopped"} <= set(names)
    hatched = opened.tab.evaluate("div.timeline.kinds.filter((kind) => kind.isHatched).length")
    assert hatched >= 2
    labels = opened.tab.evaluate("div.timeline.texts")
    assert set(OPEN) <= set(labels)


def test_hovering_tells_for_whom_a_rank_waited_and_for_how_long(opened: Opened) -> None:
    tab = opened.tab
    tab.evaluate("div.scrollIntoView({ block: 'center' })")
    x, y = tab.evaluate(START % "stopped")
    for dx in (2, 0):
        tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + dx, y=y)
        tab.evaluate("pause()")
    assert tab.evaluate("until(() => !div.timeline.tip.hidden)")
    told = tab.evaluate("[...div.timeline.tip.children].map((line) => line.textContent)")
    assert told[:2] == [
        "stopped",
        "rank 2 is stopped (SIGSTOP or a debugger) in 2F2 of step 3, since 29.9 s",
    ]
    assert "duration 29,916.000 ms" in told


def test_the_page_tells_the_verdict_the_ranks_and_the_whole_error_as_text(opened: Opened) -> None:
    text = str(opened.tab.evaluate("document.body.innerText"))
    assert "ranks 0, 1 and 3 wait for it" in text
    assert "1B1 of rank 1" in text
    assert "2F2 of rank 2" in text
    assert NASTY in text
    assert opened.tab.evaluate("document.title") != "taken over"


def test_the_report_opens_the_row_of_a_failed_run(
    browser: Browser, pages: tuple[Path, Path]
) -> None:
    tab = Tab(browser, pages[0], DESK, "light")
    tab.evaluate(LOOK)
    shown = tab.evaluate("""(async () => {
      const rows = all("#runs tbody tr:not(.detail)");
      const row = rows.find((one) => one.textContent.includes("timeout"));
      row.querySelector(".opener").click();
      const div = row.nextElementSibling.querySelector(".chart");
      div.scrollIntoView();
      await until(() => isDrawn(div));
      return [isDrawn(div), row.nextElementSibling.textContent];
    })()""")
    assert shown[0]
    assert "ppbench show 20260101T000000002-abcdef" in shown[1]
    assert tab.problems() == []
