"""A pair of cases has one verdict in a report, along an axis and between commits."""

import pandas as pd
import pytest
from stored_runs import run_row, store_with

from ppbench.commits.comparison import compare
from ppbench.comparison.evidence import (
    FORBIDDING,
    FORBIDDING_IN_TURNS,
    Background,
    comparable_pairs,
    evidence_of,
    with_columns,
)
from ppbench.config.case import Case
from ppbench.display.cases import varying_axes
from ppbench.display.metrics import METRICS
from ppbench.judge.verdicts import Verdict
from ppbench.report.pages.judgement import judge

SPEED = METRICS["tokens_per_s"]
SCHEDULES = ("1f1b", "afab", "zb_h1")
SPEEDS = {"1f1b": 1000.0, "afab": 900.0, "zb_h1": 1003.0}
WOBBLE = (1.0, 1.002, 0.998, 1.001, 0.999)


def rows_of(schedule, **changes):
    case = Case(schedule=schedule)
    begin = {"1f1b": 0, "afab": 1, "zb_h1": 2}[schedule]
    return [
        run_row(
            0,
            case,
            run_id=f"20260101T{launch:02}{begin:02}00000-{schedule:0>6.6}",
            launch=launch,
            tokens_per_s=SPEEDS[schedule] * WOBBLE[(launch + begin) % 5],
            **changes,
        )
        for launch in range(5)
    ]


def rows_with(num_cautioned=0, caution="busy_machine", **changes):
    rows = [row for schedule in SCHEDULES for row in rows_of(schedule, **changes)]
    for row in rows[5 : 5 + num_cautioned]:
        row["cautions"] = caution
    return rows


def said(tmp_path, rows):
    """The verdicts of a report and of `compare --across`, by head and base."""
    store = store_with(tmp_path / "results", rows)
    runs = store.runs()
    judged = judge(runs, varying_axes(runs), [store])
    how = {"all_pairs": True, "metrics": ["tokens_per_s"], "results": store.folder}
    found = compare(across="schedule", runs=["demo"], **how)
    pairs = [(line.series.head_key[0], line.series.base_key[0]) for line in found.lines]
    return [judged.verdict(*pair) for pair in pairs], found


def test_a_report_and_a_comparison_say_the_same_of_each_pair(tmp_path):
    verdicts, found = said(tmp_path, rows_with())
    assert verdicts == [line.change.verdict for line in found.lines]
    assert verdicts == [Verdict.slower, Verdict.same, Verdict.faster]


def test_a_pair_has_the_verdict_of_a_report_where_ranks_are_a_choice_too():
    rows = [
        {
            **row,
            "run_id": f"{ranks}{row['run_id']}",
            "case_id": f"{ranks}{row['case_id']}",
            "world_size": ranks,
            "tokens_per_s": ranks * row["tokens_per_s"],
        }
        for ranks in (2, 4)
        for row in rows_with()
    ]
    runs = pd.DataFrame(rows)
    report, plan = (
        judge(runs, varying_axes(runs), are_ranks_free=is_free) for is_free in (False, True)
    )
    assert (len(report.judgements), len(plan.judgements)) == (2, 1)
    found = plan.judgements[0].lead.changes
    assert len(found) == 6 * 5
    for judgement in report.judgements:
        ids = judgement.arms
        for place, other in ((0, 1), (0, 2), (1, 2)):
            at = [plan.judgements[0].arms.index(ids[one]) for one in (place, other)]
            own, free = judgement.change(place, other), plan.judgements[0].change(*at)
            assert (free.verdict, free.p) == (own.verdict, pytest.approx(own.p))


def test_two_commits_have_no_verdict_that_a_caution_forbids(tmp_path):
    rows = [
        {**row, "run_id": f"{name}{row['run_id'][1:]}", "commit": name * 40, "sweep_id": name}
        for name, by in (("1", 1.0), ("2", 0.8))
        for row in (
            {**one, "tokens_per_s": by * one["tokens_per_s"]}
            for one in rows_with(5 * (name == "2"))
        )
    ]
    store = store_with(tmp_path / "results", rows)
    found = compare("1", "2", metrics=["tokens_per_s"], results=store.folder)
    verdicts = {line.series.text: line.change.verdict for line in found.lines}
    expected = {"1f1b": Verdict.slower, "afab": Verdict.open, "zb_h1": Verdict.slower}
    assert verdicts == expected


@pytest.mark.parametrize("caution", FORBIDDING)
def test_what_slows_a_machine_slows_both_in_their_turns(caution):
    rounds = '{"round": [0, 1, 2, 3], "tokens_per_s": [10.0, 10.1, 10.2, 10.1]}'
    for more in ({}, {"rounds": rounds, "process_start": "s"}):
        arms = {name: pd.DataFrame(rows_of(name, cautions=caution, **more)) for name in SCHEDULES}
        background = Background(with_columns(pd.concat(arms.values())))
        arms = {name: with_columns(own) for name, own in arms.items()}
        found = evidence_of(SPEED, arms, comparable_pairs(arms), background, shares_noise=True)
        assert len(found) == 3
        is_forbidden = not more or caution in FORBIDDING_IN_TURNS
        assert {one.cautions for one in found.values()} == {(caution,) if is_forbidden else ()}


def test_the_evidence_of_a_pair_is_the_same_whichever_of_the_two_is_the_base():
    """The two drift by different amounts between three sessions, and were not in the same ones."""
    arms = {}
    for name, drift, days in (("1f1b", 0.01, (1, 2, 3)), ("afab", 0.05, (2, 3, 4))):
        rows = [
            {
                **row,
                "run_id": f"202601{day:02}T{row['run_id'][9:]}",
                "created_at": f"2026-01-{day:02}T09:00:00+00:00",
                "tokens_per_s": row["tokens_per_s"] * (1 + drift * day),
            }
            for day in days
            for row in rows_of(name)
        ]
        arms[name] = with_columns(pd.DataFrame(rows))
    background = Background(pd.concat(arms.values()))
    found = [
        evidence_of(SPEED, arms, [pair], background, shares_noise=True)[pair]
        for pair in (("1f1b", "afab"), ("afab", "1f1b"))
    ]
    assert found[0].drift == found[1].drift is not None


def test_cases_of_two_machines_are_no_pair_but_two_devices_are():
    arms = {
        "here": pd.DataFrame(rows_of("1f1b")),
        "there": pd.DataFrame(rows_of("afab", fingerprint="other")),
        "device": pd.DataFrame(rows_of("zb_h1", fingerprint="gpu", device="cuda")),
    }
    assert comparable_pairs(arms) == [("here", "device"), ("there", "device")]
