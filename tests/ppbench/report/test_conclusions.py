"""The answer in words, from runs made by hand; intervals by scipy's own test."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from stored_runs import run_row

from ppbench.config.case import Case
from ppbench.display.cases import varying_axes
from ppbench.report.charts.memory import pareto_front
from ppbench.report.pages.conclusions import answer
from ppbench.statistics.significance import launch_ratio

MIB = 2**20
AFAB, OTHER = Case(schedule="afab"), Case(schedule="1f1b")


def launches(case: Case, speeds: list[float], **changes: object) -> list[dict]:
    return [
        run_row(0, case, launch=n, tokens_per_s=speed, run_id=f"{case.schedule}{n}", **changes)
        for n, speed in enumerate(speeds)
    ]


def second_sentence(rows: list[dict]) -> str:
    return answer(pd.DataFrame(rows), ("schedule",))[1]


def test_the_front_holds_what_nothing_else_equals_in_both_and_betters_in_one() -> None:
    memory = [100.0, 200.0, 300.0, 250.0, 100.0, 300.0]
    speed = [10.0, 20.0, 30.0, 15.0, 9.0, 30.0]
    assert pareto_front(memory, speed) == [0, 1, 2]
    assert pareto_front([], []) == []


def test_an_interval_by_launches_is_that_of_welchs_test_on_the_logarithms() -> None:
    one, other = [1100.0, 1130.0, 1090.0, 1200.0], [1000.0, 1010.0, 960.0]
    ratio = launch_ratio(one, other)
    welch = scipy.stats.ttest_ind(np.log(one), np.log(other), equal_var=False)
    low, high = welch.confidence_interval(0.95)
    assert (ratio.low, ratio.high) == pytest.approx((np.exp(low), np.exp(high)))
    assert ratio.estimate == pytest.approx(np.exp(np.mean(np.log(one)) - np.mean(np.log(other))))


def test_launches_that_do_not_differ_have_an_interval_without_width() -> None:
    ratio = launch_ratio([200.0] * 3, [100.0] * 3)
    assert (ratio.estimate, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))


def test_two_launches_make_no_interval() -> None:
    with pytest.raises(ValueError, match="2 and 3 launches; expected at least 3 of each"):
        launch_ratio([1.0, 2.0], [1.0, 2.0, 3.0])


def test_with_three_launches_of_each_the_lead_has_an_interval_by_them() -> None:
    rows = launches(AFAB, [1000.0] * 3) + launches(OTHER, [1200.0] * 3)
    text = second_sentence(rows)
    assert "20.0 % more throughput than afab, the next schedule;" in text
    assert text.endswith(
        "By the geometric means of their launches, the lead is between +20.0 % and +20.0 % (95 %)."
    )


def test_a_lead_that_launches_do_not_prove_is_called_unclear() -> None:
    rows = launches(AFAB, [900.0, 1000.0, 1100.0]) + launches(OTHER, [950.0, 1010.0, 1120.0])
    unclear = "It is unclear which is faster: by the geometric means of their launches, the"
    assert f"{unclear} lead is between -" in second_sentence(rows)


def test_the_lead_is_the_estimate_that_its_interval_is_of() -> None:
    fast, slow = [1200.0, 1210.0, 1500.0], [1000.0, 1001.0, 1002.0]
    rows = launches(AFAB, slow) + launches(OTHER, fast)
    percent = (launch_ratio(fast, slow).estimate - 1) * 100
    assert f"that is {percent:.1f} % more throughput than afab, the next" in second_sentence(rows)


@pytest.mark.parametrize(
    ("fast", "text"),
    [
        ([100.0] * 6 + [80.0] * 4, "It is unclear which is faster: by the geometric"),
        ([100.0] * 11 + [50.0] * 10, "The order of the medians is misleading: by the geometric"),
    ],
)
def test_a_higher_median_that_launches_contradict_is_said_to_be_no_more(
    fast: list[float], text: str
) -> None:
    sentence = second_sentence(launches(OTHER, fast) + launches(AFAB, [99.0] * 10))
    assert "less throughput than afab, the next schedule, although its median is not lo" in sentence
    assert text in sentence
    assert sentence.endswith("so that the other one is faster.") == ("misleads" in text)


def test_the_case_whose_launches_failed_is_named() -> None:
    rows = launches(AFAB, [1000.0] * 3) + launches(OTHER, [1200.0] * 2)
    rows += launches(OTHER, [1200.0], status="failed")
    few = "only 2 launches of 1f1b succeeded; a firmer verdict needs at least 3."
    assert second_sentence(rows).endswith(few)


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (1050.0, 1150.0, "They differ by their steps (the 95 % intervals do not overlap)"),
        (1010.0, 1150.0, "It is unclear which is faster: the 95 % intervals over steps"),
        (None, None, "The certainty is unknown: too few steps"),
    ],
)
def test_fewer_launches_tell_what_their_steps_tell_and_that_it_is_not_more(
    low: float | None, high: float | None, text: str
) -> None:
    slow = {"tokens_per_s_low": 980.0, "tokens_per_s_high": 1020.0}
    rows = launches(AFAB, [1000.0], **slow)
    rows += launches(OTHER, [1100.0], tokens_per_s_low=low, tokens_per_s_high=high)
    assert text in second_sentence(rows)
    assert "a firmer verdict needs at least 3 launches of each" in second_sentence(rows)


def test_without_a_rival_of_the_same_settings_the_next_case_is_named() -> None:
    cases = [replace(OTHER, num_microbatches=m) for m in (4, 8)]
    rows = [run_row(m, case, tokens_per_s=1000.0 + m) for m, case in enumerate(cases)]
    sentence = answer(pd.DataFrame(rows), ("num_microbatches",))[1]
    assert sentence.startswith("That is as much throughput as 4 microbatches, the next case; it")


def test_the_answer_walks_down_the_front_of_the_cases_that_do_the_same_work() -> None:
    figures = [  # schedule, microbatches, tokens/s, MiB
        ("afab", 16, 1000.0, 400),
        ("1f1b", 16, 990.0, 396),  # on the front, but it saves a per cent only
        ("afab", 8, 900.0, 300),
        ("1f1b", 8, 800.0, 100),
        ("afab", 4, 700.0, 200),  # slower and bigger than the one before
    ]
    cases = [Case(schedule=s, num_microbatches=m) for s, m, *_ in figures]
    rows = [
        run_row(n, case, tokens_per_s=speed, peak_memory_bytes=mib * MIB)
        for n, (case, (_, _, speed, mib)) in enumerate(zip(cases, figures, strict=True))
    ]
    longer = replace(cases[0], seq_len=512)
    rows.append(run_row(9, longer, tokens_per_s=950.0, peak_memory_bytes=50 * MIB))
    text = answer(pd.DataFrame(rows), ("schedule", "num_microbatches", "seq_len"))[2]
    assert text == (
        "With less than 396.0 MiB per rank, afab, 8 microbatches, 128 tokens is fastest "
        "(300.0 MiB, 10.0 % fewer tokens/s); with less than 300.0 MiB per rank, 1f1b, "
        "8 microbatches, 128 tokens is fastest (100.0 MiB, 20.0 % fewer tokens/s)."
    )


def told_of(*figures: tuple[Case, float, float, str]) -> list[str]:
    """The answer about cases with these tokens/s, MiB and cautions."""
    rows = [
        run_row(n, case, tokens_per_s=speed, peak_memory_bytes=mib * MIB, cautions=cautions)
        for n, (case, speed, mib, cautions) in enumerate(figures)
    ]
    runs = pd.DataFrame(rows)
    return answer(runs, varying_axes(runs))


def test_smaller_cases_that_were_oversubscribed_are_not_denied() -> None:
    crowded = (replace(OTHER, world_size=4), 500.0, 50.0, "oversubscribed")
    text = told_of((AFAB, 1000.0, 100.0, ""), (OTHER, 900.0, 99.0, ""), crowded)
    sound = "No case that does the same work and was not oversubscribed needs much less memory."
    assert sound in text
    assert "No case that does the same work needs much less memory." in told_of(
        (AFAB, 1000.0, 100.0, ""), (OTHER, 900.0, 99.0, "")
    )


def test_sizes_that_read_the_same_are_no_step_down() -> None:
    third = replace(AFAB, schedule="zbv")
    text = told_of((AFAB, 103.0, 100.0, ""), (OTHER, 102.0, 95.04, ""), (third, 101.0, 95.01, ""))
    assert text[2] == (
        "With less than 100.0 MiB per rank, 1f1b is fastest (95.0 MiB, 1.0 % fewer tokens/s)."
    )


def test_of_two_as_fast_the_smaller_is_named() -> None:
    text = told_of((AFAB, 100.0, 200.0, ""), (OTHER, 100.0, 100.0, ""))
    assert text[0].startswith("Fastest of 2 cases: 1f1b. It reaches")
    assert text[2] == "No case that does the same work needs much less memory."


def test_cases_of_different_work_have_no_fastest_but_one_of_each_kind() -> None:
    big = [replace(case, model_preset="llama-1b") for case in (AFAB, OTHER)]
    text = told_of(
        (AFAB, 1000.0, 10.0, ""),
        (OTHER, 990.0, 10.0, ""),
        (big[0], 100.0, 90.0, ""),
        (big[1], 110.0, 90.0, ""),
    )
    assert text[0].startswith(
        "Most tokens/s of 4 cases, which do different work: afab, llama-8m. It reaches 1,000 tok"
    )
    assert "With llama-1b, 1f1b is fastest (110 tokens/s)." in text


def test_more_emulated_ranks_do_more_work() -> None:
    cases = [
        replace(case, device="emulated", world_size=ranks)
        for case in (AFAB, OTHER)
        for ranks in (2, 4)
    ]
    rows = [run_row(n, case, tokens_per_s=1000.0 + n) for n, case in enumerate(cases)]
    text = answer(pd.DataFrame(rows), ("schedule", "world_size"))
    assert text[0].startswith("Most tokens/s of 4 cases, which do different work: 1f1b, 4 ranks.")
    assert "With 2 ranks, 1f1b is fastest (1,002 tokens/s)." in text


def test_another_device_does_the_same_work() -> None:
    other = replace(OTHER, device="cuda")
    text = told_of((AFAB, 100.0, 10.0, ""), (other, 900.0, 10.0, ""))
    assert text[0].startswith("Fastest of 2 cases: 1f1b, cuda.")
