from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from command import printed
from tracked import (
    CASE,
    STEADY,
    add_launches,
    in_one_file,
    num_written,
    scattered,
    slower,
)

from ppbench.commits.comparison import compare
from ppbench.comparison.axes import find_axis
from ppbench.comparison.lines import Comparison
from ppbench.display.changes import BY_AXIS, moved_sentences
from ppbench.errors import UsageError
from ppbench.judge.verdicts import Verdict, holm
from ppbench.store import Store

COMMIT = "c0de" * 10
AFAB = replace(CASE, schedule="afab")
INTERLEAVED = replace(CASE, schedule="interleaved_1f1b", stages_per_rank=2)
SWEEP = 'name = "mine"\ndevice = "cpu"\n[grid]\nschedule = ["1f1b", "afab"]\n'


def add(store: Store, case, speeds=STEADY, commit=COMMIT, **changes: object) -> list[str]:
    usual = {
        "position": num_written(store),
        "sweep_name": "mine",
        "sweep_id": "5eed",
        "code": "c0de",
    }
    return add_launches(store, speeds, commit, case, **{**usual, **changes})


def across(store: Store, axis: str = "schedule", *runs: str, **how: object) -> Comparison:
    in_one_file(store)
    return compare(across=axis, runs=runs, results=store.folder, **how)


def pairs(result: Comparison) -> list[str]:
    return [series.text for series in result.series()]


def verdicts(result: Comparison, metric: str = "tokens_per_s") -> dict[str, str]:
    return {
        line.series.text: str(line.change.verdict)
        for line in result.lines
        if line.metric.name == metric
    }


def test_each_pair_of_cases_that_differ_in_the_axis_alone_has_a_line_per_figure(store):
    for ranks in (2, 4):
        add(store, replace(AFAB, world_size=ranks))
        speeds = slower(-0.05) if ranks == 2 else STEADY
        add(store, replace(CASE, world_size=ranks), speeds, bubble_fraction=0.2)
    result = across(store)
    assert (result.base_value, result.axis_values) == ("afab", ("afab", "1f1b"))
    assert verdicts(result) == {"2 ranks": Verdict.faster, "4 ranks": Verdict.same}
    assert verdicts(result, "bubble_fraction") == dict.fromkeys(
        ("2 ranks", "4 ranks"), Verdict.faster
    )
    (note,) = result.notes
    assert note.startswith("rests on one session")
    assert repr(result) == "<Comparison across schedule (afab, 1f1b): 3 faster, 3 same>"
    frame = result.frame
    assert list(frame["case"].unique()) == ["2 ranks", "4 ranks"]
    assert set(frame["base_value"]) == {"afab"}


def test_the_drift_between_two_days_is_in_the_interval_of_cases_that_they_part(store):
    """FAULT 5: two schedules of different days had a verdict without it."""
    days = [{"created_at": f"2026-01-0{day}T10:00:00+00:00"} for day in (1, 4)]
    for day, speeds in zip(days, (STEADY, slower(0.03)), strict=True):
        add(store, AFAB, speeds, "01d" * 13, sweep_id="01d", **day)
    for case, day in ((AFAB, 0), (CASE, 1)):
        add(store, case, slower(0.03) if day else STEADY, sweep_id="apart", **days[day])
        add(store, case, slower(0.03) if day else STEADY, sweep_id="alike", **days[1])
    apart, alike = (across(store, "schedule", sweep) for sweep in ("apart", "alike"))
    assert verdicts(apart) == {"afab -> 1f1b": Verdict.open}
    assert any("so the drift between sessions is in their difference" in n for n in apart.notes)
    assert verdicts(alike) == {"afab -> 1f1b": Verdict.slower}


def test_runs_that_differ_in_more_are_named_with_what_they_differ_in(store):
    add(store, AFAB)
    add(store, CASE)
    add(store, replace(CASE, schedule="zb_h1", seq_len=64, num_microbatches=4))
    add(store, replace(CASE, world_size=4), fingerprint="f9")
    add(store, replace(AFAB, world_size=4))
    notes = across(store).notes
    assert len(notes) == 4
    assert notes[0].startswith("not compared: zb_h1, 2 ranks, 4 microbatches, 64 tokens: ")
    assert notes[0].endswith("the nearest case with afab differs in microbatches and seq len too")
    assert "1f1b, 4 ranks" in notes[1]
    assert notes[1].endswith("differs in the machine too")
    assert notes[-1].startswith("rests on one session")


def test_how_runs_were_measured_counts_as_a_difference(store):
    add(store, AFAB, measure_steps=10)
    add(store, CASE, measure_steps=5)
    result = across(store)
    assert result.lines == ()
    assert all(note.endswith("differs in measure.steps too") for note in result.notes)


def test_the_stages_per_rank_that_come_with_a_schedule_are_no_difference(store):
    for case in (CASE, INTERLEAVED):
        add(store, case)
    assert pairs(across(store)) == ["1f1b -> interleaved_1f1b"]
    add(store, replace(INTERLEAVED, stages_per_rank=4))
    result = across(store)
    assert not result.lines
    assert "differs in stages per rank too" in result.notes[0]


def test_of_an_edited_program_file_the_newest_content_is_compared(store):
    mine = replace(CASE, schedule="csv:mine.csv", program_digest="0ld")
    for case in (CASE, mine, replace(mine, program_digest="ne3")):
        add(store, case)
    result = across(store, "schedule", "mine")
    assert pairs(result) == ["1f1b -> csv:mine.csv"]
    edited, session = result.notes
    assert edited == "csv:mine.csv was edited: 5 runs of its older content left out"
    assert session.startswith("rests on one session")
    assert result.contrasts[0].head["program_digest"].unique() == ["ne3"]
    edits = across(store, "program_digest", "mine", base="0ld")
    assert not any("was edited" in note for note in edits.notes)
    assert set(edits.axis_values) == {"", "0ld", "ne3"}


def test_the_base_is_the_value_with_the_most_partners_then_the_smallest_or_first(store):
    for ranks in (4, 2, 8):
        add(store, replace(CASE, world_size=ranks))
    assert across(store, "ranks").base_value == 2
    assert pairs(across(store, "ranks")) == ["2 ranks -> 4 ranks", "2 ranks -> 8 ranks"]
    for ranks in (4, 8):
        add(store, replace(AFAB, world_size=ranks))
    assert across(store, "ranks").base_value == 4
    assert pairs(across(store, "ranks", base="8"))[0] == "8 ranks -> 2 ranks, 1f1b"
    every = pairs(across(store, "ranks", all_pairs=True))
    assert len(every) == 4
    assert "4 ranks -> 8 ranks, afab" in every
    with pytest.raises(UsageError, match=r"--base 16: no run .* Known: 2, 4, 8"):
        across(store, "ranks", base=16)
    with pytest.raises(UsageError, match="leave --base out"):
        across(store, "ranks", base=2, all_pairs=True)


def test_pairs_are_corrected_together_be_they_shown_or_not(store):
    for n, schedule in enumerate(("1f1b", "afab", "zb_h1", "zb_h2")):
        add(store, replace(CASE, schedule=schedule), slower(0.002 * n))
    all_pairs = across(store, all_pairs=True, metrics=["tokens_per_s"])
    found = [line.change for line in all_pairs.lines]
    assert len(found) == 6
    assert [change.p for change in found] == pytest.approx(holm([c.exact.p for c in found]))
    shown = across(store, base="1f1b", metrics=["tokens_per_s"]).lines
    assert [line.change for line in shown] == found[:3]


def test_a_row_whose_axis_changes_the_work_is_corrected_by_itself(store):
    for length in (64, 128, 256):
        for schedule in ("1f1b", "afab"):
            add(store, replace(CASE, seq_len=length, schedule=schedule), scattered(0.01))
    found = across(store, "seq_len", all_pairs=True, metrics=["tokens_per_s"]).lines
    assert len(found) == 6
    of_row = [line.change for line in found if "afab" in line.series.text]
    assert [change.p for change in of_row] == pytest.approx(holm([c.exact.p for c in of_row]))
    assert all(line.evidence.noise is None for line in found)  # other work has other noise


def test_an_axis_has_every_name_of_its_setting():
    assert find_axis("ranks") == find_axis("world_size") == find_axis("grid.world_size")
    assert find_axis("microbatches") == "num_microbatches"
    assert find_axis("partition") == find_axis("model.partition") == "model_partition"
    assert find_axis("train.recompute") == find_axis("recompute") == "train_recompute"


def test_a_single_value_is_refused_with_what_gives_two(store):
    add(store, CASE)
    with pytest.raises(UsageError) as caught:
        across(store)
    assert "all have 1f1b" in str(caught.value)
    assert 'ppbench sweep sweeps/demo.toml --set \'schedule=["1f1b", "afab"]\'' in str(caught.value)
    add(store, AFAB, [None], status="oom", error="too big")
    with pytest.raises(UsageError, match="runs with afab failed"):
        across(store)
    add(store, AFAB, sweep_id="other", sweep_name="other")
    add(store, CASE, sweep_id="new")
    with pytest.raises(UsageError, match="has runs with afab: name their sweeps"):
        across(store)


def test_runs_are_named_by_sweep_file_name_id_and_run(store, tmp_path):
    first = add(store, AFAB)
    add(store, CASE, sweep_id="5eed2", sweep_name="yours")
    (tmp_path / "mine.toml").write_text(SWEEP)
    with pytest.raises(UsageError, match="all have 1f1b"):
        across(store)  # the last sweep
    with contextlib.chdir(tmp_path):
        for names in (("mine", "yours"), ("5eed", "5eed2"), ("mine.toml",), (*first[:3], "yours")):
            result = across(store, "schedule", *names)
            assert pairs(result) == ["afab -> 1f1b"], names
        assert result.lines[0].change.num_base == 3
    with pytest.raises(UsageError, match=r'"min": not .*did you mean "mine"'):
        across(store, "schedule", "min")


def test_of_a_named_sweep_each_case_counts_at_its_newest_commit_and_a_note_says_if_they_differ(
    store,
):
    add(store, AFAB, slower(0.5))
    add(store, AFAB, STEADY[:3], commit="b" * 40, changes="c4")
    add(store, CASE)
    (line, *_), notes = (found := across(store, "schedule", "mine")).lines, found.notes
    assert (line.change.num_base, line.change.base) == (3, 1000.0)
    assert notes[0].startswith("these pairs differ in the code that was measured too")


def test_failures_cautions_and_few_launches_are_noted(store):
    add(store, AFAB, STEADY[:2], cautions="busy_machine")
    add(store, CASE, [*STEADY[:4], 500.0])
    add(store, replace(CASE, schedule="zb_h1"), [None], status="oom", error="too big\nmore")
    text = "\n".join(across(store).notes)
    for words in (
        "zb_h1: 1 launch failed, oom: too big",
        "2 of 7 runs carry the caution busy_machine",
        "a verdict needs 3 launches a side, better 5: afab -> 1f1b (2, 5)",
        "ppbench sweep sweeps/demo.toml --budget 10m",
    ):
        assert words in text


def test_a_note_says_where_the_change_of_rounds_is_not_that_of_the_figures(store):
    """Medians say 10 % less, the rounds of launches 20 %, 1 % and 33 % less."""
    for start, speeds in enumerate([(1000.0, 800.0), (910.0, 900.0), (1350.0, 900.0)]):
        for case, speed in zip((AFAB, CASE), speeds, strict=True):
            rounds = {"round": [0, 1, 2, 3], "tokens_per_s": [speed] * 4}
            more = {"process_start": f"{start}", "rounds": json.dumps(rounds)}
            key = f"{case.schedule} {start}"
            add(store, case, [speed], launch=start, resume_key=key, **more)
    result = across(store, metrics=["tokens_per_s"])
    (line,) = result.lines
    assert (line.change.base, line.change.head) == (1000.0, 900.0)
    assert line.change.ratio.estimate == pytest.approx((0.8 * 900 / 910 * 2 / 3) ** (1 / 3))
    (note,) = [note for note in result.notes if "rounds in turns" in note]
    assert note.endswith("whose ratio is another: tokens/s of afab -> 1f1b")


@pytest.mark.parametrize(
    ("axis", "values", "words"),
    [
        ("seq_len", (64, 128), "seq_len changes the work of a step: tokens/s"),
        ("microbatches", (4, 8), "tokens/s are compared, not steps"),
        ("model", ("llama-8m", "llama-tiny"), "changes the work of a step"),
    ],
)
def test_a_note_says_what_is_compared_where_the_work_differs(store, axis, values, words):
    for value in values:
        add(store, replace(CASE, **{find_axis(axis): value}))
    assert words in across(store, axis).notes[0]


def test_noise_of_both_cases_is_the_larger_one_and_of_one_is_none(store):
    for case, by in ((AFAB, 0), (CASE, 0.04)):
        add(store, case, slower(by))
    for num, case in enumerate((AFAB, CASE)):
        add(store, case, scattered(0.03 + num / 50), "0" * 40, sweep_id="other")
        noise = across(store, "schedule", "5eed").lines[0].evidence.noise
        assert (noise is not None) == bool(num)
    assert noise.deviation == pytest.approx(0.05, rel=0.01)


def test_what_moved_is_told_by_stage_and_over_all_where_stages_differ(store):
    add(store, AFAB, stretch={})
    add(store, CASE, slower(0.05), stretch={(1, "B"): 1.1})
    add(store, INTERLEAVED, slower(0.05), stretch={(1, "B"): 1.1})
    result = across(store)
    one, other = (
        moved_sentences(breakdown.moved, BY_AXIS)
        for breakdown in result.break_down(result.changed())
    )
    assert one[0].startswith("compute of stage 1 changed: B 12.0 -> 13.2 ms per microbatch")
    assert other[0].startswith("compute of all stages changed: B 32.0 -> 33.2 ms per step")


def test_rows_are_sorted_by_the_change_itself_and_each_names_its_case(store, monkeypatch):
    monkeypatch.chdir(store.folder.parent)
    for ranks, by in ((2, 0.02), (4, 0.3), (8, -0.05)):
        add(store, replace(AFAB, world_size=ranks))
        add(store, replace(CASE, world_size=ranks), slower(by))
    in_one_file(store)
    words = ("compare", "--across", "schedule", "--metric", "tokens_per_s", "--sort")

    def ranks_in(text):
        return [int(line.split()[0]) for line in text.splitlines() if " ranks" in line[:10]]

    assert ranks_in(printed(*words, "change").text) == [4, 2, 8]
    assert ranks_in(printed(*words, "-change").text) == [8, 2, 4]
    assert ranks_in(printed(*words, "-case").text) == [8, 4, 2]
    rows = printed(*words, "-ratio", "--format", "csv").text.splitlines()
    assert [row.split(",")[3] for row in rows[1:]] == ["8 ranks", "2 ranks", "4 ranks"]
    with pytest.raises(UsageError, match='--sort: unknown column "chance"'):
        printed(*words, "chance")


def test_the_page_is_one_small_file_and_says_the_result_first(store, monkeypatch):
    monkeypatch.chdir(store.folder.parent)
    add(store, AFAB, stretch={})
    add(store, CASE, slower(-0.05), stretch={(1, "B"): 0.8})
    done = printed("compare", "--across", "schedule", "-o", "page.html")
    assert done.text.splitlines()[-1] == "page: page.html"
    text = Path("page.html").read_text()
    assert "1f1b is faster than afab: +5.1 %" in text
    assert "compute of stage 1 changed" in text
    assert "Plotly" not in text
    assert len(text) < 100_000
    printed("compare", "--across", "schedule", "-o", "reports/mine.html")
    assert "mine.html" in Path("reports/index.html").read_text()
