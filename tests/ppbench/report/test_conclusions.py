"""The answer of a report and what follows from it, from runs made by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from leads import lead
from stored_runs import concluded, run_row

from ppbench.cautions import Caution
from ppbench.comparison.evidence import FORBIDDING
from ppbench.config.case import Case
from ppbench.display.cases import varying_axes
from ppbench.display.metrics import METRICS
from ppbench.display.units import duration
from ppbench.judge.evidence import Evidence, Rounds
from ppbench.report.charts.pareto import pareto_front
from ppbench.report.pages.conclusions import Sentence
from ppbench.report.pages.judgement import SCATTER, Judgement, Peaks, by_choice, judge

MIB = 2**20
AFAB, OTHER = Case(schedule="afab"), Case(schedule="1f1b")
SLOW, FAST = [1000.0, 1004.0, 1002.0], [1200.0, 1203.0, 1201.0]


def launches(case: Case, speeds: list[float], **changes: object) -> list[dict]:
    return [
        run_row(0, case, launch=n, tokens_per_s=speed, run_id=f"{case.case_id}{n}", **changes)
        for n, speed in enumerate(speeds)
    ]


def answer(rows: list[dict]) -> Sentence:
    return concluded(rows).sentence


def judged(rows: list[dict]) -> Judgement:
    runs = pd.DataFrame(rows)
    first = judge(runs, varying_axes(runs)).first
    assert first is not None
    return first


def test_the_front_holds_what_nothing_else_equals_in_both_and_betters_in_one() -> None:
    memory = [100.0, 200.0, 300.0, 250.0, 100.0, 300.0]
    speed = [10.0, 20.0, 30.0, 15.0, 9.0, 30.0]
    assert pareto_front(memory, speed) == [0, 1, 2]
    assert pareto_front([], []) == []


# How sure the sentence is


def test_a_clear_lead_names_the_winner_its_lead_and_its_interval() -> None:
    sentence = answer(launches(AFAB, SLOW) + launches(OTHER, FAST))
    welch = scipy.stats.ttest_ind(np.log(FAST), np.log(SLOW), equal_var=False)
    low, high = ((np.exp(end) - 1) * 100 for end in welch.confidence_interval(0.95))
    lead = (np.exp(np.mean(np.log(FAST)) - np.mean(np.log(SLOW))) - 1) * 100
    assert sentence.text == (
        f"Use 1f1b: 1,201 tokens/s, faster than afab (+{lead:.1f} %, between "
        f"+{low:.1f} % and +{high:.1f} %)."
    )
    assert (sentence.advice, sentence.command) == ("", "")


def test_launches_that_overlap_decide_nothing_and_more_of_them_are_advised() -> None:
    apart = [1000.0, 1060.0, 1120.0]
    sentence = answer(launches(AFAB, [940.0, 1000.0, 1060.0]) + launches(OTHER, apart))
    assert sentence.grade == "open"
    assert "1f1b measured 1,060 tokens/s, 6.0 % more than afab; 1f1b and afab differ by +6.0 %" in (
        sentence.text
    )
    assert "afab could be faster by up to " in sentence.text
    assert "Use" not in sentence.text
    num = int(sentence.command.rpartition("=")[2])
    assert num > 5
    assert sentence.command == f"ppbench sweep sweeps/demo.toml --set measure.launches={num}"


def test_a_bound_beyond_the_interval_that_is_shown_says_its_own_level() -> None:
    """The interval of 95 % ends at 39 %, that of 99 % which decides beyond 100 %."""
    rows = launches(AFAB, [4000.0, 6600.0, 9300.0]) + launches(OTHER, [6450.0, 9600.0, 10600.0])
    text = answer(rows).text
    shown = re.search(r"differ by \+.* %, between (-.*) % and \+.* % \(at 95 %\)", text)
    assert shown is not None
    assert 1 / (1 + float(shown[1]) / 100) < 2
    assert text.endswith("but afab could be more than twice as fast (at 99 %).")


def test_a_difference_of_means_beside_medians_of_another_says_that_it_is_one() -> None:
    rows = launches(AFAB, [700.0, 990.0, 1000.0]) + launches(OTHER, [1000.0, 1010.0, 1300.0])
    text = answer(rows).text
    assert "measured 1,010 tokens/s, 2.0 % more than afab; " in text
    assert "; on average over launches, 1f1b and afab differ by +23" in text


def test_the_time_that_more_launches_take_is_beside_their_number() -> None:
    """FAULT 58: it was 27 launches, and not how long they take."""
    rows = launches(AFAB, [940.0, 1000.0, 1060.0]) + launches(OTHER, [1000.0, 1060.0, 1120.0])
    for row in rows:
        row["created_at"] = f"2026-01-01T10:{4 * row['launch']:02d}:30+00:00"
    sentence = answer(rows)
    num = int(sentence.command.rpartition("=")[2])
    took = duration(240 * (num - 3))
    expected = f"To decide it, measure {num} launches of each, which takes about {took} more:"
    assert sentence.advice == expected


def test_a_lead_that_no_sensible_number_of_launches_would_show_is_left_to_memory() -> None:
    sentence = answer(
        launches(AFAB, [900.0, 1000.0, 1110.0]) + launches(OTHER, [890.0, 1001, 1120])
    )
    assert sentence.advice.endswith("take either, or choose by memory.")
    assert sentence.command == ""


def test_cases_that_memory_does_not_hold_at_once_are_said_to_share_no_rounds() -> None:
    def started(case: Case, rounds: list[int]) -> list[dict]:
        text = json.dumps({"round": rounds, "tokens_per_s": [1000.0] * len(rounds)})
        return launches(case, [1000.0], process_start="one", rounds=text)

    first, shared, other = (replace(AFAB, num_microbatches=num) for num in (2, 4, 8))
    rows = started(shared, [0, 1, 2, 3]) + started(first, [0, 1])
    assert not any("Memory does not hold" in note for note in concluded(rows).notes)
    (note,) = (n for n in concluded(rows + started(other, [2, 3])).notes if "Memory does" in n)
    assert note.startswith("Memory does not hold all cases at once: they took turns in groups")


def test_of_equally_fast_cases_the_one_that_needs_less_memory_is_taken() -> None:
    small = {"peak_memory_bytes": 70 * MIB}
    rows = launches(AFAB, [1001.0] * 3) + launches(OTHER, [1000.0] * 3, **small)
    assert answer(rows).text == (
        "Use 1f1b: 1,000 tokens/s, as fast as afab (-0.1 %, between -0.1 % and -0.1 %). "
        "1f1b needs 30 % less memory."
    )


def test_a_third_case_that_cannot_be_told_from_the_best_is_named_and_what_is_known() -> None:
    third = launches(replace(OTHER, schedule="zb_h1"), [600.0, 1100.0, 2000.0])
    sentence = answer(launches(AFAB, SLOW) + launches(OTHER, FAST) + third)
    assert sentence.grade == "open"
    assert "zb_h1" in sentence.text
    assert "Use" not in sentence.text


def test_of_two_that_may_be_best_both_are_named_with_what_they_beat() -> None:
    """FAULT 58: the headline said "not decided" of all, while compare had one of them faster."""
    first, second = [1070.0, 1075.0, 1065.0], [1072.0, 1040.0, 1100.0]
    rows = launches(AFAB, SLOW) + launches(replace(OTHER, schedule="zb_h1"), first)
    rows += launches(replace(OTHER, schedule="interleaved_1f1b"), second)
    sentence = answer(rows)
    assert sentence.grade == "open"
    assert "afab" not in sentence.name
    assert set(sentence.name.split(" or ")) == {"zb_h1", "interleaved_1f1b"}
    assert " beats afab by " in sentence.text


def test_a_failed_launch_does_not_count() -> None:
    rows = launches(AFAB, SLOW) + launches(OTHER, FAST[:2])
    rows += [{**launches(OTHER, [1200.0], status="failed")[0], "run_id": "failed"}]
    sentence = answer(rows)
    assert sentence.grade == "open"
    assert "but 2 launches cannot decide it" in sentence.text


# What to do, and memory beside it


COMMAND = "ppbench sweep quick --set device=emulated --set measure.launches=1 --results 'a store'"


def advised(rows: list[dict]) -> tuple[str, str]:
    sentence = concluded(rows, COMMAND).sentence
    return sentence.advice, sentence.command


def test_two_cautions_with_one_remedy_and_a_single_launch_make_one_advice_and_command() -> None:
    cautions = "busy_machine,noisy_steps"
    rows = launches(AFAB, [1000.0], cautions=cautions) + launches(OTHER, [1200.0])
    advice, command = advised(rows)
    assert advice == "To decide it, stop other work on the machine and measure 5 launches of each:"
    assert command == (
        "ppbench sweep quick --set device=emulated --results 'a store' "
        "--set measure.launches=5 --rerun"
    )


def test_with_launches_enough_a_disturbed_measurement_is_only_repeated() -> None:
    rows = launches(AFAB, SLOW, cautions="busy_machine,throttled") + launches(OTHER, FAST)
    advice, command = advised(rows)
    assert advice == (
        "To decide it, see to cooling, power limits or the CPU quota, stop other work on the "
        "machine and measure again:"
    )
    assert command == f"{COMMAND} --rerun"


def test_settings_that_a_caution_asks_for_are_in_the_command() -> None:
    cautions = "unsettled_steps,few_steps,no_warmup"
    asked = {"cautions": cautions, "measure_warmup_steps": 0, "measure_max_warmup_steps": 30}
    advice, command = advised(launches(AFAB, [1000.0], **asked) + launches(OTHER, [1200.0]))
    assert advice == (
        "To decide it, set measure.max_warmup_steps to 60, set measure.steps to 3, "
        "set measure.warmup_steps to 1 and measure 5 launches of each:"
    )
    assert "--rerun" not in command  # runs of other settings are other runs
    for setting in ("max_warmup_steps=60", "steps=3", "warmup_steps=1", "launches=5"):
        assert command.count(f"--set measure.{setting}") == 1


@pytest.mark.parametrize("caution", ["oversubscribed", "behind_plan"])
def test_no_command_is_given_where_these_cases_cannot_decide_it(caution: str) -> None:
    cautions = {"cautions": f"busy_machine,{caution}"}
    rows = launches(AFAB, SLOW, **cautions) + launches(OTHER, FAST, **cautions)
    advice, command = advised(rows)
    assert command == ""
    assert advice.endswith(".")
    assert "measure again" not in advice


@pytest.mark.parametrize("cautions", ["", "busy_machine,noisy_steps"])
def test_memory_is_said_where_every_launch_shows_it_and_throughput_is_not_decided(
    cautions: str,
) -> None:
    rows = launches(AFAB, [1000.0] * 2, cautions=cautions)
    rows += launches(OTHER, [1010.0] * 2, cautions=cautions, peak_memory_bytes=57 * MIB)
    sentence = answer(rows)
    assert sentence.grade == "open"
    assert ("1f1b needs" if cautions else "it needs") + " 43 % less memory" in sentence.text
    rows[-1]["peak_memory_bytes"] = 98 * MIB
    assert "memory" not in answer(rows).text
    rows[-1]["peak_memory_bytes"] = None  # of one launch it is not known
    assert " needs 43 % less memory" in answer(rows).text


def test_the_slower_case_may_be_the_one_that_needs_less_memory() -> None:
    rows = launches(AFAB, [1010.0]) + launches(OTHER, [1000.0], peak_memory_bytes=57 * MIB)
    assert answer(rows).text == (
        "Use 1f1b for its memory: it needs 43 % less memory than afab. Throughput is open: a "
        "single launch cannot decide it."
    )
    rows = launches(AFAB, [1010.0]) + launches(OTHER, [700.0], peak_memory_bytes=57 * MIB)
    text = answer(rows).text  # it may cost more than memory is worth
    assert text.startswith("Open. afab measured")
    assert text.endswith(". 1f1b needs 43 % less memory.")


# Cautions


@pytest.mark.parametrize("caution", FORBIDDING)
def test_nothing_is_fastest_where_every_case_carries_a_caution_that_forbids_it(
    caution: str,
) -> None:
    rows = launches(AFAB, SLOW, cautions=caution) + launches(OTHER, FAST, cautions=caution)
    conclusions = concluded(rows)
    assert conclusions.sentence.grade == "open"
    assert f"({caution})" in conclusions.sentence.text
    assert conclusions.sentence.advice.startswith("To decide it, ")
    texts = [conclusions.sentence.text, *conclusions.smaller]
    assert not [text for text in texts if "Use " in text or "decided faster" in text]


def test_every_caution_is_forbidding_scatter_or_of_no_weight() -> None:
    of_no_weight = {"not_finite", "coarse_clock", "bare_stage"}  # the first is left out before
    assert {*FORBIDDING, *SCATTER, *of_no_weight} == set(Caution.__members__)


def test_a_caution_of_scatter_forbids_a_single_launch_only() -> None:
    apart = [
        {"tokens_per_s_low": speed * 0.99, "tokens_per_s_high": speed * 1.01}
        for speed in (1000.0, 1200.0)
    ]
    for caution in SCATTER:
        single = launches(AFAB, [1000.0], **apart[0])
        single += launches(OTHER, [1200.0], cautions=caution, **apart[1])
        assert not judged(single).is_decided
        several = launches(AFAB, SLOW) + launches(OTHER, FAST, cautions=caution)
        assert judged(several).is_decided


def test_a_caution_on_one_of_three_launches_forbids_nothing_and_on_two_it_does() -> None:
    rows = launches(AFAB, SLOW) + launches(OTHER, FAST)
    rows[0]["cautions"] = "busy_machine,coarse_clock"
    assert judged(rows).is_decided
    rows[1]["cautions"] = "busy_machine"
    assert not judged(rows).is_decided
    assert "other processes kept the machine busy" in answer(rows).text


def test_oversubscribed_cases_are_left_out_beside_others() -> None:
    crowd = launches(replace(OTHER, num_microbatches=4), [9000.0] * 3, cautions="oversubscribed")
    conclusions = concluded(launches(AFAB, SLOW) + launches(OTHER, FAST) + crowd)
    assert conclusions.sentence.text.startswith("Use 1f1b")
    assert any("Left out: 1 oversubscribed case" in note for note in conclusions.notes)


def test_figures_of_two_machines_are_not_compared() -> None:
    rows = launches(AFAB, SLOW) + launches(OTHER, FAST, fingerprint="another")
    assert answer(rows).text.endswith("but they were measured on different machines.")


# Which cases compete


@pytest.mark.parametrize(("size", "word"), [("world_size", "ranks"), ("replicas", "replicas")])
def test_cases_that_do_other_work_or_on_more_ranks_are_judged_on_their_own(size, word) -> None:
    rows = []
    for number in (2, 4):
        for case, speeds in ((AFAB, SLOW), (OTHER, FAST)):
            rows += launches(replace(case, **{size: number}), speeds)
    conclusions = concluded(rows)
    assert [other.where for other in conclusions.others] == [f"With {n} {word}: " for n in (4, 2)]
    assert conclusions.others[0].text.startswith(f"With 4 {word}: use 1f1b")


def over_settings(*changes: float, noise: float = 0.001, peaks: tuple[int, int] = (100, 100)):
    """Launches of both schedules in a setting for each change of 1f1b over afab."""
    rows = []
    for number, change in enumerate(changes):
        for case, factor, peak in zip((AFAB, OTHER), (1.0, 1 + change), peaks, strict=True):
            speeds = [1000 * factor * (1 + noise * at) for at in (-1, 0, 1)]
            own = replace(case, seq_len=32 * (number + 1))
            rows += launches(own, speeds, peak_memory_bytes=peak * MIB)
    return rows


def test_the_answer_to_a_grid_is_the_mean_over_its_settings() -> None:
    sentence = answer(over_settings(0.05, 0.07, 0.06))
    assert sentence.text.startswith("Use 1f1b: faster than afab over 3 settings (+6.0 %, between")
    assert answer(over_settings(0.0, 0.001, 0.0)).text.startswith("Use ")
    assert "as fast as" in answer(over_settings(0.0, 0.001, 0.0)).text


def test_the_answer_to_a_grid_names_the_settings_in_which_another_case_is_faster() -> None:
    rows = over_settings(0.08, -0.05, 0.08)
    assert answer(rows).text.endswith(" In 64 tokens, another is faster.")


def test_of_cases_as_fast_over_a_grid_the_one_with_less_memory_is_taken() -> None:
    rows = over_settings(-0.001, 0.0, -0.001, peaks=(100, 60))
    sentence = answer(rows)
    assert sentence.text.startswith("Use 1f1b: as fast as afab over 3 settings")
    assert sentence.text.endswith(" 1f1b needs 40 % less memory.")


@pytest.mark.parametrize("num_settings", [1, 3])
def test_a_case_is_taken_for_its_memory_unless_that_seems_to_cost_speed(num_settings) -> None:
    known = answer(over_settings(*[0.0] * num_settings, noise=0.02, peaks=(100, 60)))
    assert known.grade == "open"
    assert known.text.startswith("Use 1f1b for its memory: it needs 40 % less memory than afab")
    unknown = answer(over_settings(*[-0.3] * num_settings, noise=0.4, peaks=(100, 60)))
    assert unknown.text.startswith("Open. ")
    assert "1f1b needs 40 % less memory." in unknown.text
    assert unknown.advice


def test_a_case_may_save_memory_in_some_settings_if_it_needs_more_in_none() -> None:
    rows = over_settings(0.0, 0.0, noise=0.02, peaks=(100, 80))
    for row in rows:
        if row["seq_len"] == 32:
            row["peak_memory_bytes"] = 100 * MIB
    text = answer(rows).text
    assert text.startswith("Use 1f1b for its memory: it needs up to 20.0 % less memory than afab. ")
    assert "Throughput is open: its speed differs by +0.0 %, between -" in text
    rows[-1]["peak_memory_bytes"] = rows[-2]["peak_memory_bytes"] = None
    for row in rows:
        if row["seq_len"] == 32 and row["schedule"] == "1f1b":
            row["peak_memory_bytes"] = 102 * MIB
    assert answer(rows).text.startswith("Open. ")


def test_emulated_cases_are_judged_on_their_own_after_measured_ones() -> None:
    rows = launches(AFAB, SLOW) + launches(OTHER, FAST)
    for case, speeds in ((AFAB, SLOW), (OTHER, FAST)):
        rows += launches(replace(case, world_size=4, device="emulated"), [9 * s for s in speeds])
    conclusions = concluded(rows)
    assert conclusions.sentence.text.startswith("With 2 ranks, cpu: use 1f1b: 1,201")
    assert any("Judged on their own: 2 emulated cases" in note for note in conclusions.notes)
    (emulated,) = conclusions.others
    assert emulated.text.startswith("With 4 ranks, emulated: use 1f1b: 10,809")


def test_ranks_compete_where_no_two_cases_have_as_many() -> None:
    rows = launches(replace(OTHER, world_size=1), SLOW) + launches(OTHER, FAST)
    assert answer(rows).text.startswith("Use 2 ranks")
    emulated = [{**row, "device": "emulated"} for row in rows]
    assert answer(emulated).grade == "nothing to compare"  # more emulated ranks do more work


def test_cases_of_which_no_two_do_the_same_work_have_no_fastest() -> None:
    rows = launches(OTHER, SLOW) + launches(replace(OTHER, seq_len=512), FAST)
    conclusions = concluded(rows)
    assert conclusions.sentence.grade == "nothing to compare"
    assert any("No two cases do the same work" in note for note in conclusions.notes)
    assert len(conclusions.tiles) == 3


# The figures beside it


def test_each_tile_has_the_figure_of_the_rival() -> None:
    speed, memory, bubble = concluded(launches(AFAB, SLOW) + launches(OTHER, FAST)).tiles
    assert (speed.value, speed.rival) == ("1,201 tokens/s", "afab: 1,002 tokens/s")
    assert (memory.value, memory.rival) == ("100.0 MiB", "afab: 100.0 MiB")
    assert (bubble.value, bubble.detail) == ("25.0 %", "theory 11.1 %")
    assert bubble.rival == "afab: 25.0 %, theory 11.1 %"
    rows = launches(AFAB, SLOW, peak_memory_bytes=None)
    rows += launches(OTHER, FAST, peak_memory_bytes=None)
    assert concluded(rows).tiles[1].value == "not measured"


def test_smaller_cases_are_listed_down_the_front() -> None:
    figures = [  # schedule, microbatches, tokens/s, MiB
        ("afab", 16, 1000.0, 400),
        ("1f1b", 16, 990.0, 396),  # on the front, but it saves a per cent only
        ("afab", 8, 900.0, 300),
        ("1f1b", 8, 800.0, 100),
        ("afab", 4, 700.0, 200),  # slower and bigger than the one before
    ]
    rows = [
        row
        for schedule, num, speed, mib in figures
        for row in launches(
            Case(schedule=schedule, num_microbatches=num), [speed], peak_memory_bytes=mib * MIB
        )
    ]
    assert concluded(rows).smaller == (
        (
            "With less memory: afab, 8 microbatches needs 300.0 MiB and measured 10.0 % fewer "
            "tokens/s; 1f1b, 8 microbatches needs 100.0 MiB and measured 20.0 % fewer tokens/s."
        ),
    )


@pytest.mark.parametrize(
    ("peaks", "order"),
    [
        ([[100.0, 80.0, 60.0]], (1, 0, 2)),  # the third needs least, and is slower
        ([[100.0, 97.0, 60.0]], (0, 1, 2)),  # hardly less
        ([[100.0, 80.0, 60.0], [100.0, 120.0, 60.0]], (0, 1, 2)),  # less in one setting alone
    ],
)
def test_of_arms_as_fast_the_one_with_clearly_less_memory_is_taken(peaks, order):
    draw = np.random.default_rng(3)
    speeds = [1000.0, 999.0, 900.0]
    launches = [[draw.normal(speed, 2.0, 24) for speed in speeds] for _ in range(5)]
    pairs = {
        (arm, rival): Evidence(
            paired=tuple(Rounds(tuple(own[rival]), tuple(own[arm])) for own in launches)
        )
        for arm, rival in ((0, 1), (0, 2), (1, 2))
    }
    known = Peaks(pd.DataFrame(peaks), pd.DataFrame(peaks))
    assert by_choice(lead(METRICS["tokens_per_s"], pairs, 3), known) == order
