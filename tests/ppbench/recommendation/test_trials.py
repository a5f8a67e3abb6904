"""Trials of a plan: proposals as cases, and what was measured beside what was predicted."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
from command import printed

import ppbench
from engine.plan.model_costs import LayerCosts, LinkCosts, ModelCosts
from engine.plan.program import Program, loop_placement
from engine.plan.schedules.registry import build_program, read_csv
from ppbench.config.case import Case, Measure
from ppbench.config.feasibility import problems_of_settings
from ppbench.errors import SweepInterruptedError
from ppbench.judge.differences import Ratio
from ppbench.judge.evidence import Noise
from ppbench.judge.lead import Regret
from ppbench.planning.cost_file import write_costs_file
from ppbench.planning.cost_set import CostSet, Setting
from ppbench.planning.plan import Configuration, Proposal
from ppbench.recommendation import trials
from ppbench.recommendation.question import read_question
from ppbench.recommendation.race import SetAside, Stop, race
from ppbench.run.sweep.control import run_sweep
from ppbench.store import Store

MIB = 2**20

PLACEMENT = loop_placement(2)


def proposal(schedule, step_ns=100, recompute=(False, False)):
    made = build_program("zb_h1" if schedule == "auto" else schedule, 2, 4)
    program = Program(schedule, PLACEMENT, 4, made.actions)
    configuration = Configuration(schedule, 2, 1, PLACEMENT, (1, 3), 2, 4, recompute)
    return Proposal(
        *(configuration, program, step_ns, step_ns - 5, step_ns + 5, step_ns - 10),
        *((10, 20), (11, 22), 0.1, 1e3),
    )


def test_a_proposal_is_run_as_the_case_that_it_is_for(tmp_path):
    case = trials.case_of(proposal("1f1b"), Case(world_size=8, seq_len=64), tmp_path / "a.csv")
    assert (case.schedule, case.world_size, case.num_microbatches) == ("1f1b", 2, 4)
    assert (case.model_partition, case.train_microbatch_size) == ((1, 3), 2)
    assert (case.seq_len, case.recompute) == (64, False)
    assert next(problems_of_settings(case, Measure()), None) is None


def test_a_program_of_the_solver_is_written_and_some_stages_recompute(tmp_path):
    file = tmp_path / "a.csv"
    case = trials.case_of(proposal("auto", recompute=(True, False)), Case(), file)
    assert case.schedule == f"csv:{file}"
    assert read_csv(file).actions == build_program("zb_h1", 2, 4).actions
    assert case.recompute == (True, False)
    assert next(problems_of_settings(case, Measure()), None) is None


def measured(steps, cautions="", most=6):
    """Trials of two proposals with such launches."""
    proposals = [proposal("zb_h1", 100e6), proposal("1f1b", 120e6)]
    runs = {
        arm: pd.DataFrame(
            {"peak_memory_bytes": 20.0, "cautions": [cautions, *[""] * len(own)][: len(own)]},
            index=range(len(own)),
        )
        for arm, own in enumerate(steps)
    }
    in_ns = [[step * 1e6 for step in own] for own in steps]
    outcome = race(lambda _, count: [own[:count] for own in in_ns], len(steps), most)
    return trials.trials_of(trials.table_of(proposals), outcome, runs)


def test_the_mean_of_launches_is_compared_with_the_prediction():
    found = measured([[110, 110, 110], [100, 100, 100]])
    assert list(found.frame["measured_step_ns"]) == pytest.approx([110e6, 100e6])
    assert list(found.frame["step_error"]) == pytest.approx([0.1, 100 / 120 - 1])
    assert list(found.frame["num_launches"]) == [3, 3]
    assert found.regret.estimate == pytest.approx(0.1)
    assert found.sentence == (
        "Measured, the first choice is slower by 10.0 % (10.0 % to 10.0 %) than 1f1b (number 2): "
        "it takes 110.0 ms, that 100.0 ms."
    )


def test_the_sentence_says_which_of_the_three_it_is():
    best = measured([[100, 100.1, 99.9], [120, 120.1, 119.9]])
    assert best.sentence == (
        "Measured, the first choice is the best of 2, 100.0 ms; the others are slower."
    )
    within = measured([[100, 100.1, 100.2] * 2, [100.1, 100, 100.2] * 2]).sentence
    assert "is the best of 2 or within 2 % of it: it takes 100.1 ms, and 1f1b (number" in within
    unsure = measured([[100, 110, 90], [108, 92, 96]], most=3).sentence
    assert unsure.startswith("Open after 3 launches: the first choice takes 99.7 ms, and 1f1b")
    assert unsure.endswith("More launches would help: --max-launches 6.")
    alone = measured([[100], [110]], most=1)
    assert "a regret of 0.0 %, with an unknown error." in alone.sentence
    assert alone.as_dict()["regret"]["high"] is None
    assert alone.frame["measured_high_ns"].isna().all()


def test_a_first_choice_that_failed_has_no_regret():
    failed = measured([[], [110, 111, 112]])
    assert failed.regret is None
    assert "failed" in failed.sentence
    assert json.loads(json.dumps(failed.as_dict()))["regret"] == {"sentence": failed.sentence}
    other = measured([[100, 101, 102], []])
    assert "is the best of 2, 101.0 ms: the others failed or are slower." in other.sentence


def test_a_line_says_which_difference_is_found_and_how_long_that_takes():
    reach, took = trials.forecast_texts(Noise(0.01, 10), "noise of stored launches", 30.0, 2, 6)
    assert "find, in 80 % of comparisons, a change of " in reach
    assert reach.endswith(" with 6 (noise of stored launches 1.0 %)")
    assert took == "one launch of each takes about 0:30: at most 3:00 for 6 launches of each"
    assert list(trials.forecast_texts(None, "", None, 2, 6)) == []


def test_a_line_says_why_no_more_is_launched():
    def text(steps, most):
        outcome = race(lambda _, count: [own[:count] for own in steps], len(steps), most)
        return trials.stop_text(outcome, most)

    assert text([[100] * 3, [120] * 3], 6) == "stopped: decided after 3 launches of each"
    unsure = [[100, 110, 90], [108, 92, 96]]
    assert text(unsure, 3) == "stopped: --max-launches 3 reached, and not decided"
    assert text(unsure, 6).startswith("stopped: launches failed after 3 launches of each")
    assert text([[], [110, 111, 112]], 6).startswith("stopped: launches failed")


def test_cautions_are_said_of_launches_that_the_finding_stands_on():
    assert "caution" not in measured([[110] * 3, [100] * 3]).sentence
    sentence = measured([[110] * 3, [100] * 3], cautions="busy_machine").sentence
    assert sentence.endswith(
        "Mind the cautions of launches of the first choice: 1 busy_machine; of 1f1b (number 2): "
        "1 busy_machine."
    )


def test_a_line_says_who_is_set_aside_when_and_why():
    frame = trials.table_of([proposal("zb_h1"), proposal("1f1b")])
    slower = SetAside(1, 2, 0, Ratio(1.2, 1.1, 1.3))
    assert trials.set_aside_text(frame, slower) == (
        "set aside after 2 launches: 1f1b (number 2), slower by 20.0 % (10.0 % to 30.0 %) than "
        "the first choice"
    )
    failed = trials.set_aside_text(frame, SetAside(1, 2, 0, None))
    assert failed.endswith("1f1b (number 2), whose runs failed; see: ppbench ls")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a sweep file whose layers have costs already."""
    folder = tmp_path_factory.mktemp("trials")
    layer = LayerCosts(1e6, 2e6, 1e6, 1e6, 0.01, 10 * MIB, 4 * MIB, MIB, 20 * MIB, MIB, 1e5)
    by_setting = {Setting(1, recompute=False): ModelCosts(layer, (layer,) * 4, layer)}
    costs = CostSet(
        "llama-tiny", "float32", 32, "adamw", "cpu", "made up", by_setting, LinkCosts(1e4)
    )
    write_costs_file(costs, folder / "costs.toml")
    (folder / "mine.toml").write_text(
        'num_microbatches = 2\nseq_len = 32\nmodel.preset = "llama-tiny"\n'
        "measure = {steps = 2, warmup_steps = 1, max_warmup_steps = 1}\n"
        f'plan = {{ranks = 2, schedules = ["1f1b", "zb_h1"], costs = "file:{folder}/costs.toml"}}\n'
    )
    return folder


@pytest.mark.usefixtures("warm_starts")
def test_trials_that_are_stopped_are_kept_and_go_on(folder, monkeypatch):
    monkeypatch.chdir(folder)
    plan, sweep = ppbench.plan("mine.toml", effort=0.05), read_question("mine.toml")

    def stopped(sweep, *how):
        run_sweep(replace(sweep, cases=sweep.cases[:1]), *how)
        raise SweepInterruptedError("stopped")

    with monkeypatch.context() as patched, pytest.raises(SweepInterruptedError):
        patched.setattr(trials, "run_sweep", stopped)
        trials.measure(plan, sweep, 1, 1, folder / "results")
    words = "mine.toml", "--run", 1, "--launches", 1, "--effort", 0.05, "--format", "json"
    done = printed("plan", *words)
    assert "1 launch of trials that were stopped are kept" in done.notes
    found = json.loads(done.text)
    assert [row["num_launches"] for row in found["trials"]] == [1, 1]
    assert 0 <= found["regret"]["low"] <= found["regret"]["estimate"]
    store = Store(folder / "results")
    runs = store.table("runs", store.runs(["run_id"])["run_id"])
    assert len(runs) == 2
    assert set(runs["status"]) == {"ok"}
    of_first = runs[runs["schedule"] == found["trials"][0]["schedule"]]["step_ns"]
    assert found["trials"][0]["measured_step_ns"] == pytest.approx(of_first.item())
    assert not list((folder / "results" / "locks").glob("rerun-*"))


@pytest.mark.parametrize(
    ("has_regret", "stop", "is_kept"),
    [(True, Stop.failed, True), (True, Stop.most, False), (False, Stop.failed, False)],
)
def test_only_trials_whose_launches_failed_go_on_with_the_same_command(
    folder, monkeypatch, has_regret, stop, is_kept
):
    monkeypatch.chdir(folder)
    plan, sweep = ppbench.plan("mine.toml", effort=0.05), read_question("mine.toml")
    regret = Regret(0.0, 0.0, 0.1, 1) if has_regret else None
    ended = SimpleNamespace(steps=[[1.0], [2.0]], regret=regret, stop=lambda _: stop)
    monkeypatch.setattr(trials, "race", lambda *_: ended)
    monkeypatch.setattr(trials, "trials_of", lambda frame, *_: trials.Trials(frame, regret))
    results = folder / f"results-{has_regret}-{stop.name}"
    trials.measure(plan, sweep, 1, 1, results)
    assert bool(list((results / "locks").glob("rerun-*"))) == is_kept
