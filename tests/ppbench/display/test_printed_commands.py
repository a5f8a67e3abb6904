"""Commands that go on: nothing of the typed one is lost but what would bound it as before."""

import pytest

from ppbench.display.commands import BUDGET, LAUNCHES, larger_budget, repeated


def test_what_bounds_a_measurement_is_replaced_and_all_else_is_kept():
    typed = (
        "ppbench sweep 'my file.toml' --set seq_len=32 --set measure.budget=60s --only "
        "schedule=1f1b --results 'a store' --rerun"
    )
    assert repeated(typed, {BUDGET: "110s"}) == (
        "ppbench sweep 'my file.toml' --set seq_len=32 --only schedule=1f1b --results 'a store' "
        "--budget 110s"
    )
    once_more = repeated(typed, {LAUNCHES: "5"}, ["--rerun"])
    assert once_more.endswith("--results 'a store' --set measure.launches=5 --rerun")


@pytest.mark.parametrize(
    "words", ["compare main worktree two.toml --run", "check --run", "plan a.toml --run 2"]
)
def test_other_commands_have_options_for_both_bounds(words):
    typed = f"ppbench {words} --budget 60s --max-launches 4 --results r"
    assert repeated(typed, {BUDGET: "2m", LAUNCHES: "9"}) == (
        f"ppbench {words} --results r --budget 2m --max-launches 9"
    )


def test_a_command_that_measures_nothing_is_not_repeated():
    assert repeated("ppbench report last", {LAUNCHES: "5"}) == ""
    assert repeated("", {LAUNCHES: "5"}) == ""


def test_a_larger_budget_holds_the_launches_and_is_well_above_the_former_one():
    assert larger_budget(5, 10, 20) == "70s"
    assert larger_budget(5, 10, 60) == "90s"
    assert larger_budget(10, 30, 60) == "7m"
