"""Launches go on until each question is answered, or the budget is spent."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from samples import sampled
from stored_runs import run_row

from ppbench.comparison.contrasts import compare_values
from ppbench.comparison.evidence import looks_of
from ppbench.comparison.launches import SIDE_COLUMNS
from ppbench.comparison.sentences import sentences
from ppbench.comparison.sides import side_of
from ppbench.config.case import Case, Measure
from ppbench.config.kinds import seconds_of
from ppbench.config.sweep import Sweep
from ppbench.display.cases import varying_axes
from ppbench.display.metrics import METRICS
from ppbench.judge.looks import ONE_LOOK
from ppbench.judge.verdicts import SPEED, Verdict
from ppbench.report.pages.conclusions import conclude
from ppbench.report.pages.judgement import judge
from ppbench.report.until_answered import UntilAnswered
from ppbench.store import Store

AFAB, OTHER, THIRD = (Case(schedule=name) for name in ("afab", "1f1b", "zb_h1"))
LAUNCH_S = 10.0
BEGAN = pd.Timestamp("2026-11-26T12:00:00Z")


class World:
    """Launches whose cases have true speeds; each start and each round adds its own."""

    def __init__(self, speeds, budget_s=600.0, seed=0, deviation=0.003, start_s=0.0, verify_s=0.0):
        self.speeds, self._draw, self._deviation = speeds, np.random.default_rng(seed), deviation
        self.now_s, self.rows, self.said, self.launched = 0.0, [], [], []
        self._budget, self._start_s, self._verify_s = f"{budget_s:.0f}s", start_s, verify_s
        cases = tuple((case, Measure()) for case in speeds)
        sweep = Sweep("w", "w.toml", cases, ("schedule",))
        self.policy = UntilAnswered(
            sweep, Store(Path("none")), budget_s, self.said.append, lambda: self.now_s
        )

    def run(self):
        while wanted := self.policy(self.runs()):
            number = len(self.launched)
            self.launched.append({case.schedule for case in self.speeds if case.case_id in wanted})
            self.now_s += 0.0 if number else self._start_s
            begun_at = BEGAN + pd.Timedelta(seconds=self.now_s)
            verified_s = 0.0 if number else self._verify_s
            self.now_s += LAUNCH_S + verified_s * len(wanted)
            for case, speed in self.speeds.items():
                if case.case_id in wanted:
                    own = speed * self._draw.lognormal(0, self._deviation)
                    turns = own * self._draw.lognormal(0, 0.02, 8)
                    rounds = {"round": list(range(8)), "tokens_per_s": turns.tolist()}
                    more = {"process_start": str(number), "rounds": json.dumps(rounds)}
                    more["measure_budget"] = self._budget
                    more["verification_s"] = verified_s
                    more |= Measure().of_figures()
                    more["created_at"] = str(BEGAN + pd.Timedelta(seconds=self.now_s))
                    run_id = f"{begun_at:%Y%m%dT%H%M%S}000-{case.schedule}"
                    speed_of_run = float(np.median(turns))
                    self.rows.append(
                        run_row(
                            0, case, launch=number, tokens_per_s=speed_of_run, run_id=run_id,
                            cautions="busy_machine", **more,
                        )
                    )  # fmt: skip
        return self

    def runs(self):
        rows = pd.DataFrame(self.rows or [run_row(0, AFAB)])[: len(self.rows)]
        return rows.reindex(columns=list(dict.fromkeys([*rows.columns, *SIDE_COLUMNS])))


def test_a_large_difference_is_decided_after_a_few_launches():
    world = World({AFAB: 1000.0, OTHER: 1300.0}).run()
    assert len(world.launched) == 4
    assert world.policy.stop == "decided after 4 launches"


@pytest.mark.parametrize("seed", sampled(range(3)))
def test_equal_cases_are_launched_until_they_are_the_same_within_the_resolution(seed):
    world = World({AFAB: 1000.0, OTHER: 1000.0}, seed=seed).run()
    assert 3 <= len(world.launched) <= 20
    assert world.policy.stop.startswith("decided after")


def test_a_case_that_is_beaten_has_no_part_in_further_launches():
    world = World({AFAB: 1000.0, OTHER: 1001.0, THIRD: 600.0}, deviation=0.008).run()
    assert world.launched[0] == {"afab", "1f1b", "zb_h1"}
    assert world.launched[-1] == {"afab", "1f1b"}


def test_no_launch_is_begun_that_the_budget_does_not_hold():
    world = World({AFAB: 1000.0, OTHER: 1005.0}, budget_s=45.0, deviation=0.03).run()
    assert len(world.launched) == 4
    assert world.policy.stop == (
        "stopped after 4 launches: another takes about 0:10, and 0:05 of the budget are left"
    )
    assert any("0 of 1 question decided; 1f1b over afab between" in text
               or "0 of 1 question decided; afab over 1f1b between" in text
               for text in world.said)  # fmt: skip


def test_the_first_start_says_nothing_of_how_long_further_launches_take():
    speeds, budget = {AFAB: 1000.0, OTHER: 1005.0}, {"budget_s": 55.0, "deviation": 0.03}
    assert len(World(speeds, **budget, verify_s=10.0).run().launched) == 3
    world = World(speeds, **budget, start_s=20.0).run()
    assert len(world.launched) == 3
    assert "another takes about 0:10, and 0:05 of the budget are left" in world.policy.stop


def test_a_budget_that_holds_too_few_launches_for_an_answer_is_said():
    world = World({AFAB: 1000.0, OTHER: 1005.0}, budget_s=15.0).run()
    assert world.policy.stop == (
        "stopped after 1 launch: another takes about 0:10, and 0:05 of the budget are left; an "
        "answer needs 3 launches: raise the budget"
    )


def test_the_command_that_goes_on_names_a_budget_which_is_enough():
    """The forecast holds in four of five cases; this is one of them."""
    speeds = {AFAB: 1000.0, OTHER: 1005.0}
    world = World(speeds, budget_s=45.0, deviation=0.01, seed=2).run()
    typed = "ppbench sweep w.toml --set seq_len=32 --only schedule=afab --budget 45s --results r"
    runs = world.runs()
    said = conclude(judge(runs, varying_axes(runs)), runs, typed).sentence
    kept = "ppbench sweep w.toml --set seq_len=32 --only schedule=afab --results r --budget "
    assert said.command.startswith(kept)
    budget = said.command.removeprefix(kept)
    assert said.advice.startswith(f"To decide it, measure for {budget}, which is about ")
    assert seconds_of(budget) > 45
    longer = World(speeds, budget_s=seconds_of(budget), deviation=0.01, seed=3)
    longer.rows = world.rows
    assert longer.run().policy.stop.startswith("decided after")


def test_what_is_stored_already_counts_and_an_answered_question_is_not_measured():
    world = World({AFAB: 1000.0, OTHER: 1300.0}).run()
    again = World({AFAB: 1000.0, OTHER: 1300.0})
    again.rows = world.rows
    assert again.run().launched == []
    assert again.policy.stop == "decided after 4 launches"


def test_the_looks_at_a_sweep_with_a_budget_follow_from_its_rows():
    """So the report, days later, says what was said when the sweep ended."""
    world = World({AFAB: 1000.0, OTHER: 1005.0}, budget_s=85.0, deviation=0.03).run()
    looks = looks_of(world.runs())
    assert looks.counts == tuple(range(3, len(world.launched) + 1))
    assert looks.most == len(world.launched) == 8  # all that 85 s allow
    assert looks_of(world.runs()[:4]) == ONE_LOOK  # two launches
    assert looks_of(world.runs()[:6]).most == 8  # known from the time of three
    assert looks_of(world.runs().assign(measure_budget="")) == ONE_LOOK


def test_cases_of_other_work_are_launched_until_what_the_axis_changes_is_decided():
    small, large, huge = (Case(model_preset=f"llama-{name}") for name in ("tiny", "8m", "25m"))
    world = World({small: 1000.0, large: 950.0, huge: 400.0}, deviation=0.012).run()
    runs = world.runs()
    launches = runs.groupby("model_preset").size()
    assert launches["llama-25m"] == 3  # its difference is plain
    assert launches["llama-8m"] == launches["llama-tiny"] == len(world.launched) > 3
    assert world.policy.stop.endswith("; no two cases do the same work, so none is the best")
    side = side_of("", "the sweep", Store(Path("none")), runs)
    told = compare_values("model_preset", side, "llama-tiny", [METRICS[SPEED]])
    assert {line.change.verdict for line in told.lines} == {Verdict.slower}
    for line in told.lines:
        assert f"{line.series.text}: slower, between " in world.policy.stop
    judged = judge(runs, varying_axes(runs), [Store(Path("none"))])
    said = conclude(judged, runs, "ppbench sweep w.toml --budget 600s").sentence
    assert (said.text, said.advice) == (f"Decided. {' '.join(sentences(told))}", "")
    early = runs[runs["launch"] < 3]
    judged = judge(early, varying_axes(early), [Store(Path("none"))])
    said = conclude(judged, early, "ppbench sweep w.toml --budget 600s").sentence
    assert said.text.startswith("Open. llama-8m against llama-tiny: -5.")
    assert said.command.startswith("ppbench sweep w.toml --budget ")
    alone = World({small: 1000.0}).run()
    assert alone.policy.stop == "made 3 launches: there is only one case"


def test_a_case_that_crashed_is_run_again_until_it_crashed_twice():
    world = World({AFAB: 1000.0, OTHER: 1000.0})
    world.policy(world.runs())
    crashed = run_row(10, OTHER, status="crash", launch=0)
    ok = [run_row(11 + at, AFAB, launch=at, verification_s=0.0) for at in range(4)]
    ids = {AFAB.case_id, OTHER.case_id}
    assert world.policy(pd.DataFrame([crashed, *ok[:1]])) == ids
    again = crashed | {"launch": 1}
    assert world.policy(pd.DataFrame([crashed, again, *ok[:2]])) == {AFAB.case_id}
    cases = tuple((case, Measure()) for case in (AFAB, OTHER))
    for status, retries_failed in (("crash", False), ("invalid", True), ("invalid", False)):
        rows = pd.DataFrame([crashed | {"status": status}, *ok]).assign(rounds=None)
        sweep, store = Sweep("w", "w.toml", cases, ("schedule",)), Store(Path("none"))
        later = UntilAnswered(sweep, store, 9.0, print, retries_failed=retries_failed)
        is_again = status == "crash" or retries_failed  # the same command, another day
        assert (OTHER.case_id in later(rows)) == is_again


def test_cases_that_were_not_chosen_have_no_part_in_the_question():
    others = World({AFAB: 1000.0, OTHER: 1300.0}).run()
    world = World({AFAB: 1000.0})
    world.rows = others.rows
    assert world.run().launched == []
    assert world.policy.stop.startswith("made 4 launches: there is only one case")


def test_nothing_is_decided_where_every_case_failed():
    world = World({AFAB: 1000.0, OTHER: 1000.0})
    world.policy(world.runs())
    world.now_s += LAUNCH_S
    failed = pd.DataFrame([run_row(0, case, status="oom") for case in (AFAB, OTHER)])
    assert not world.policy(failed)
    assert world.policy.stop == "every case failed"
