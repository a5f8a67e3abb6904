from __future__ import annotations

import json
from dataclasses import replace

import pytest
from command import Printed, printed
from tracked import CASE, STEADY, add_launches, in_one_file, scattered, slower

from ppbench.commits.comparison import compare
from ppbench.comparison.contrasts import compare_sides
from ppbench.comparison.lines import SHOWN, Comparison, read_metrics
from ppbench.comparison.sides import Places, find_side
from ppbench.display.changes import moved_sentences
from ppbench.display.formats import Format
from ppbench.judge.verdicts import Verdict
from ppbench.store import Store

AFAB = replace(CASE, schedule="afab")
BASE, HEAD = "ba5e" * 10, "4ead" * 10
ONE_SESSION = "rests on one session: what drifts between sessions is not in it"


def compared(store: Store, *metrics: str) -> Comparison:
    in_one_file(store)
    places = Places(store, store.folder)
    base, head = (find_side(sha[:8], places) for sha in (BASE, HEAD))
    return compare_sides(base, head, read_metrics(metrics))


def printed_by(store: Store, *names: str, how: Format = Format.table) -> Printed:
    in_one_file(store)
    return printed("compare", *names, "--results", store.folder, "--format", how.value)


def verdicts(result: Comparison) -> dict[tuple[str, str, str], str]:
    return {
        (line.series.text, line.series.fingerprint, line.metric.name): line.change.verdict
        for line in result.lines
    }


def test_each_case_has_a_line_per_metric(store):
    for case in (CASE, AFAB):
        add_launches(store, STEADY, BASE, case)
    add_launches(store, STEADY, HEAD, CASE)
    add_launches(store, slower(0.08), HEAD, AFAB, bubble_fraction=0.29, peak_memory_bytes=9 * 2**20)
    result = compared(store)
    assert result.axes == ("schedule",)
    assert verdicts(result) == {
        ("1f1b", "f1f2", "tokens_per_s"): Verdict.same,
        ("1f1b", "f1f2", "bubble_fraction"): Verdict.same,
        ("1f1b", "f1f2", "peak_memory_bytes"): Verdict.same,
        ("afab", "f1f2", "tokens_per_s"): Verdict.slower,
        ("afab", "f1f2", "bubble_fraction"): Verdict.slower,
        ("afab", "f1f2", "peak_memory_bytes"): Verdict.faster,
    }
    assert [one.text for one in result.changed()] == ["afab"]
    assert result.notes == (ONE_SESSION,)


def test_fingerprints_are_never_mixed(store):
    add_launches(store, STEADY, BASE)
    add_launches(store, slower(0.5), BASE, fingerprint="slow")
    add_launches(store, STEADY, HEAD)
    add_launches(store, slower(0.5), HEAD, fingerprint="slow")
    add_launches(store, slower(0.7), HEAD, AFAB, fingerprint="third")
    add_launches(store, slower(0.7), BASE, AFAB)
    result = compared(store, "tokens_per_s")
    assert verdicts(result) == {
        ("1f1b", "f1f2", "tokens_per_s"): Verdict.same,
        ("1f1b", "slow", "tokens_per_s"): Verdict.same,
    }
    for side, other in (("base", "head"), ("head", "base")):
        why = f"only {side} has afab: the nearest case of {other} differs in the machine too"
        assert any(note.startswith(why) for note in result.notes)


def test_two_runs_of_other_schedules_are_pointed_to_the_schedule(store):
    first, second = (add_launches(store, [1000.0], BASE, case)[0] for case in (CASE, AFAB))
    result = compare(first, second, results=store.folder)
    assert not result.lines
    words = f"ppbench compare {first} {second} --across schedule --results {store.folder}"
    assert result.notes[0] == (
        f"base and head differ in schedule; they are compared along it by: {words}"
    )
    assert compare(across="schedule", runs=[first, second], results=store.folder).lines
    further = replace(AFAB, num_microbatches=2 * AFAB.num_microbatches)
    (third,) = add_launches(store, [1000.0], BASE, further)
    notes = compare(first, third, results=store.folder).notes
    assert not any("--across" in note for note in notes)
    assert any("differs in schedule and " in note for note in notes)


@pytest.mark.parametrize(
    ("base", "head", "words"),
    [
        (
            [*STEADY[:3], *(0.9 * value for value in STEADY[3:])],
            [0.9 * value for value in STEADY],
            "two levels",
        ),
        (STEADY, [*STEADY[:3], 0.8 * STEADY[3], 0.75 * STEADY[4]], "many more launches lie apart"),
    ],
)
def test_why_a_narrow_interval_decides_nothing_is_said(store, base, head, words):
    add_launches(store, base, BASE)
    add_launches(store, head, HEAD)
    result = compared(store, "tokens_per_s")
    assert result.lines[0].change.verdict is Verdict.open
    (note,) = [note for note in result.notes if words in note]
    assert note.startswith("open: tokens/s of 1f1b")


def test_more_launches_are_advised_with_the_names_that_are_known(store):
    for sha in (BASE, HEAD):
        add_launches(store, STEADY[:2], sha, CASE)
    result = compare(BASE[:8], HEAD[:8], results=store.folder)
    (note,) = [note for note in result.notes if "measure more" in note]
    assert f"ppbench compare {BASE[:8]} {HEAD[:8]} " in note
    assert f" --run --results {store.folder}" in note


def test_the_noise_of_other_launches_hides_a_change_that_is_smaller(store):
    add_launches(store, scattered(0.05), "0" * 40)
    add_launches(store, STEADY, BASE)
    add_launches(store, slower(0.04), HEAD)
    line = compared(store).lines[0]
    assert line.evidence.noise.deviation == pytest.approx(0.05, rel=0.01)
    assert line.change.verdict is not Verdict.slower


@pytest.mark.parametrize(("commit", "changes"), [("0" * 40, {"case_id": "another"}), (BASE, {})])
def test_launches_that_are_compared_or_of_another_case_are_no_noise(store, commit, changes):
    add_launches(store, STEADY, BASE)
    add_launches(store, scattered(0.05), commit, **changes)
    add_launches(store, slower(0.04), HEAD)
    line = compared(store).lines[0]
    assert line.evidence.noise is None


def test_times_of_a_file_of_costs_are_no_part_of_a_case_and_it_has_no_peak(store):
    case = replace(CASE, device="emulated", emulated_costs="costs.toml", emulated_F_ms=(1.0,))
    for sha, ms in ((BASE, 1.0), (HEAD, 2.0)):
        for schedule in ("1f1b", "afab"):
            own = replace(case, schedule=schedule, emulated_F_ms=(ms,))
            add_launches(store, STEADY, sha, own, peak_memory_bytes=None)
    lines = compared(store).lines
    assert {line.series.text for line in lines} == {"1f1b", "afab"}
    assert {line.metric.name for line in lines} == set(SHOWN[:2])


def test_notes_tell_what_a_reader_must_know(store):
    add_launches(store, STEADY[:2], BASE, code="01d")
    add_launches(store, STEADY, BASE, AFAB, code="01d")
    add_launches(store, STEADY, HEAD, code="4ew", cautions="busy_machine")
    add_launches(store, [None], HEAD, AFAB, status="oom", error="too big\nmore", code="4ew")
    add_launches(store, STEADY, HEAD, replace(CASE, world_size=4), code="4ew")
    told = "\n".join(compared(store).notes)
    assert "only head has 1f1b, 4 ranks" in told
    assert "afab, 2 ranks: 1 launch failed at head, oom: too big (ppbench show 2026" in told
    assert "differ in the code that was measured too: 1f1b, 2 ranks (ppbench); measure" in told
    assert "5 of 7 runs carry the caution busy_machine: Other processes" in told
    assert "a verdict needs 3 launches a side, better 5: 1f1b, 2 ranks (2 at base, 5 at" in told
    assert "; measure more with: ppbench compare" in told


def test_a_launch_that_stands_apart_is_told_and_hides_no_stage_that_moved(store):
    add_launches(store, STEADY, BASE, stretch={})
    disturbed = [*slower(0.05)[:-1], 0.6 * STEADY[0]]
    ids = add_launches(store, disturbed, HEAD, stretch={(1, "F"): 1.08, (1, "B"): 1.1})
    result = compared(store)
    assert result.lines[0].change.verdict is Verdict.slower
    (discount,) = result.lines[0].change.discounts
    assert (discount.side, discount.index) == ("head", 4)
    (note,) = [note for note in result.notes if "counts for nothing" in note]
    assert note.startswith("launch 4 of head counts for nothing")
    assert note.endswith(f"(run {ids[-1]})")
    (one,) = result.break_down(result.changed())
    assert moved_sentences(one.moved)[0].startswith("compute of stage 1 changed: B 12.0 -> 13.2 ms")


def test_the_timelines_of_what_changed_are_those_of_launches_in_the_middle(store, tmp_path):
    base = add_launches(store, STEADY, BASE, stretch={})
    speeds = slower(0.05)
    head = add_launches(store, speeds, HEAD, stretch={(1, "F"): 1.08})
    page = tmp_path / "page.html"
    printed("compare", BASE[:8], HEAD[:8], "--results", store.folder, "-o", page)
    middle = [STEADY.index(sorted(STEADY)[2]), speeds.index(sorted(speeds)[2])]
    assert f"ppbench timeline {base[middle[0]]} {head[middle[1]]} --results" in page.read_text()


def test_where_only_waiting_moved_it_is_said_to_be_no_cause(store):
    add_launches(store, STEADY, BASE, stretch={})
    add_launches(store, slower(0.05), HEAD, stretch={(0, "RECV_B"): 1.0, (-1, "late"): 9})
    result = compared(store)
    (one,) = result.break_down(result.changed())
    told = moved_sentences(one.moved)
    assert told[0] == "no compute, optimizer, transfer or collective time changed"


def test_one_launch_a_side_shows_what_moved_as_untested(store):
    add_launches(store, STEADY[:1], BASE, stretch={})
    add_launches(store, STEADY[:1], HEAD, stretch={(1, "F"): 1.08})
    result = compared(store)
    assert result.changed() == []
    (one,) = result.break_down(result.series())
    told = moved_sentences(one.moved)
    assert told[0] == "not tested, which takes 3 launches per side; the largest differences:"
    assert told[1].startswith(
        "compute of stage 1 differs: F 10.0 -> 10.8 ms per microbatch, +8.0 %;"
    )


def test_what_moved_is_told_of_a_case_whose_step_changed(store):
    add_launches(store, STEADY, BASE, step_ns=5e7)
    for ns in (5.5e7, 5.501e7, 5.499e7):
        add_launches(store, STEADY[:1], HEAD, step_ns=ns, fingerprint="f1f2", launch=int(ns))
    assert [one.case_id for one in compared(store, "step_ns").changed()] == [CASE.case_id]
    assert compared(store, "bubble_fraction").changed() == []


def test_what_was_measured_over_other_steps_replaces_nothing_and_is_a_line_of_its_own(store):
    long, short = {"measure_steps": 50, "measure_verify": True}, {"measure_steps": 1}
    for sha in (BASE, HEAD):
        add_launches(store, STEADY, sha, **long)
    add_launches(store, slower(0.2)[:3], HEAD, **short)
    result = compared(store, "tokens_per_s")
    (line,) = result.lines
    assert (line.change.verdict, line.change.num_head) == (Verdict.same, 5)
    assert result.notes[0].startswith(
        "only head has 1f1b, 2 ranks, 8 microbatches, 128 tokens: the nearest case of base differs "
        "in measure.steps and measure.verify too"
    )
    add_launches(store, STEADY[:3], BASE, **short)
    first, second = compared(store, "tokens_per_s").lines
    assert (first.change.verdict, second.change.verdict) == (Verdict.same, Verdict.slower)
    assert "measure.steps=50" in first.series.text
    assert "measure.steps=1," in second.series.text


def test_a_comparison_is_data_for_a_notebook_or_not_enough(store, monkeypatch, tmp_path):
    add_launches(store, STEADY[:2], BASE)
    add_launches(store, slower(0.08), HEAD)
    monkeypatch.chdir(tmp_path)
    assert printed_by(store, BASE, HEAD).exit_code == 3
    add_launches(store, STEADY, BASE)
    assert printed_by(store, BASE, HEAD).exit_code == 0
    comparison = compare(BASE, HEAD, metrics=["tokens_per_s"], results=store.folder)
    rows = json.loads(printed_by(store, BASE, HEAD, how=Format.json).text)["changes"]
    assert list(comparison.frame) == list(rows[0])
    assert list(comparison.frame["verdict"]) == ["slower"]
    assert repr(comparison) == f"<Comparison of {BASE} with {HEAD}: 1 slower>"


def test_sides_that_were_measured_at_other_times_are_told_apart(store):
    add_launches(store, STEADY, BASE, created_at="2026-01-01T10:00:00+00:00")
    add_launches(store, STEADY[:4], HEAD, created_at="2026-01-01T10:50:00+00:00")
    (note,) = compared(store).notes
    assert note.startswith("rests on one session: ")
    add_launches(store, STEADY, HEAD, created_at="2026-01-04T10:00:00+00:00")
    (drift,) = compared(store).notes
    assert drift.startswith("base and head were never measured in one session, so the drift ")
