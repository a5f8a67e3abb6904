"""The page is what the results make, of one clean commit, and short; each claim has its part."""

import importlib
from dataclasses import replace

import pytest

from benchmarks import page
from benchmarks.claims import CLAIMS, GPU_CHECKS, OTHERS, Goal
from benchmarks.rows import RESULTS, Result, Row, Surroundings

HERE = Surroundings("2026-01-01", "c0ffee" * 7, False, "A CPU of 2 GHz, 2 cores", "Python 3", 0.1)
MOST_WORDS, MOST_MINUTES = 900, 60


def write(folder, claims, surroundings=HERE, value=1.5):
    for claim in claims:
        row = Row("a figure", value, value - 0.1, value + 0.1, goal=claim.goal)
        text = Result(claim.name, 60, surroundings, (row,)).as_json()
        (folder / f"{claim.name}.json").write_text(text, encoding="utf-8")


def test_the_pages_are_what_the_results_make():
    assert page.PAGE.read_text("utf-8") == page.page_of(RESULTS), "run: python -m benchmarks.page"
    assert page.GPU_PAGE.read_text("utf-8") == page.gpu_page_of(RESULTS), "run: make gpu"


def test_a_row_has_claim_command_result_goal_machine_and_date(tmp_path):
    write(tmp_path, CLAIMS[:1])
    claim, text = CLAIMS[0], page.page_of(tmp_path)
    assert (
        f"| {claim.words}: `{claim.command}` | 1.500 [1.400, 1.600] | {claim.goal} | missed "
        "| A CPU of 2 GHz, 2 cores | 2026-01-01 |" in text
    )
    assert f"- {claim.name}: a figure: 1.500 [1.400, 1.600], goal {claim.goal}" in text
    assert text.count(page.NOT_MEASURED) == len(CLAIMS) - 1
    assert "Commit `c0ffeec0ffee`; Python 3." in text


def test_a_page_of_everything_is_short(tmp_path):
    write(tmp_path, [*CLAIMS, *OTHERS])
    assert len(page.page_of(tmp_path).split()) <= MOST_WORDS


@pytest.mark.parametrize("change", [{"commit": "decade" * 7}, {"is_dirty": True}])
def test_results_of_another_commit_or_of_changes_are_refused(tmp_path, change):
    write(tmp_path, CLAIMS)
    write(tmp_path, CLAIMS[1:2], replace(HERE, **change))
    with pytest.raises(page.MixedResultsError) as refused:
        page.page_of(tmp_path)
    assert CLAIMS[1].name in str(refused.value)
    assert "expected one commit without changes" in str(refused.value)
    assert "make bench" in str(refused.value)


def test_the_page_of_a_gpu_has_every_row(tmp_path):
    write(tmp_path, GPU_CHECKS[:1])
    text = page.gpu_page_of(tmp_path)
    assert "| marks | a figure | 1.500 [1.400, 1.600] |  |  |" in text
    assert text.count(page.NOT_MEASURED) == len(GPU_CHECKS) - 1


@pytest.mark.parametrize(
    "module", sorted({claim.module for claim in (*CLAIMS, *OTHERS, *GPU_CHECKS)})
)
def test_every_part_has_a_claim_and_is_told_of_in_its_module(module):
    parts = [claim.part for claim in (*CLAIMS, *OTHERS, *GPU_CHECKS) if claim.module == module]
    found = importlib.import_module(f"benchmarks.{module}")
    assert sorted(found.PARTS) == sorted(parts)
    assert f"python -m benchmarks.{module}" in found.__doc__


def test_all_are_measured_within_an_hour_and_have_goals_or_say_none():
    assert sum(claim.seconds for claim in (*CLAIMS, *OTHERS)) <= 0.9 * 60 * MOST_MINUTES
    assert all(isinstance(claim.goal, Goal) for claim in CLAIMS)


def test_results_are_small_and_belong_to_a_claim():
    names = {claim.name for claim in (*CLAIMS, *OTHERS, *GPU_CHECKS)}
    for file in RESULTS.glob("*.json"):
        assert file.stem in names
        assert file.stat().st_size < 200_000
