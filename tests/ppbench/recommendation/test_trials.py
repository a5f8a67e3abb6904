"""Trials of a plan: proposals as cases of a sweep, and what was measured before the predictions."""

import json

import pandas as pd
import pytest
from command import printed
from stored_runs import run_row

from engine.plan.model_costs import LinkCosts, ModelCosts, StageCosts
from engine.plan.program import Program, loop_placement
from engine.plan.schedules.registry import build_program
from ppbench.comparison.evidence import MOST_LAUNCHES
from ppbench.config.case import Case, Measure
from ppbench.config.feasibility import problems_of_settings
from ppbench.config.programs import program_of
from ppbench.errors import UsageError
from ppbench.planning.cost_file import write_costs_file
from ppbench.planning.cost_set import CostSet, Setting
from ppbench.planning.handover import case_of, program_text
from ppbench.planning.plan import Configuration, Proposal
from ppbench.recommendation.question import hand_over, plan, read_question
from ppbench.recommendation.trials import trials_of
from ppbench.store import Store

MIB = 2**20
TOKENS = 1000
"""Of a step."""


def proposal(schedule, step_ns=100, recompute=(False, False), ranks=2):
    made = build_program("zb_h1" if schedule == "auto" else schedule, ranks, 4)
    placement = loop_placement(ranks)
    program = Program(schedule, placement, 4, made.actions)
    layers = (1, 3) if ranks == 2 else (1,) * ranks
    configuration = Configuration(schedule, ranks, 1, placement, layers, 2, 4, recompute)
    return Proposal(
        *(configuration, program, step_ns, step_ns - 5, step_ns + 5, step_ns - 10),
        *((10, 20), 0.1, TOKENS / step_ns * 1e9),
    )


def test_a_proposal_is_run_as_the_case_that_it_is_for(tmp_path):
    one = proposal("1f1b").configuration
    case = case_of(one, Case(world_size=8, seq_len=64), tmp_path / "a.csv")
    assert (case.schedule, case.world_size, case.num_microbatches) == ("1f1b", 2, 4)
    assert (case.model_partition, case.train_microbatch_size) == ((1, 3), 2)
    assert (case.seq_len, case.recompute) == (64, False)
    assert next(problems_of_settings(case, Measure()), None) is None


def test_a_program_of_the_solver_is_that_of_a_file_and_some_stages_recompute(tmp_path):
    one = proposal("auto", recompute=(True, False))
    file = tmp_path / "a.csv"
    file.write_text(program_text(one.program))
    case = case_of(one.configuration, Case(), file)
    assert case.schedule == f"csv:{file}"
    assert program_of(case).actions == build_program("zb_h1", 2, 4).actions
    assert case.recompute == (True, False)
    assert next(problems_of_settings(case, Measure()), None) is None


def measured(folder, *steps_ms, **changes):
    """Trials of a program of the solver, of zb_h1 and of 1f1b with such steps of each launch."""
    proposals = [proposal("auto", 100e6), proposal("zb_h1", 110e6), proposal("1f1b", 120e6)]
    return trials(folder, proposals[: len(steps_ms)], steps_ms, **changes)


def trials(folder, proposals, steps_ms, peaks=(), **changes):
    """Trials of proposals with such steps of each launch, and peaks."""
    cases = [case_of(one.configuration, Case(), folder / "a.csv") for one in proposals]
    rows = [
        run_row(
            3 * launch + arm,
            case,
            launch=launch,
            tokens_per_s=TOKENS / step_ms * 1e3,
            run_id=f"{launch:04}{arm}",
            **({"peak_memory_bytes": peaks[arm]} if peaks else {}),
            **changes,
        )
        for arm, (case, own) in enumerate(zip(cases, steps_ms, strict=True))
        for launch, step_ms in enumerate(own)
    ]
    return trials_of(proposals, [case.case_id for case in cases], pd.DataFrame(rows))


def test_launches_are_compared_with_the_prediction(tmp_path):
    found = measured(tmp_path, [110, 111, 112], [99, 100, 101])
    assert list(found.frame["measured_step_ns"]) == pytest.approx([111e6, 100e6])
    assert list(found.frame["measured_low_ns"]) == pytest.approx([110e6, 99e6])
    assert list(found.frame["measured_high_ns"]) == pytest.approx([112e6, 101e6])
    assert list(found.frame["step_error"]) == pytest.approx([0.11, 100 / 110 - 1])
    assert list(found.frame["num_launches"]) == [3, 3]
    assert found.sentences[1].startswith("Measured steps differ from predicted ones by -9.1 % to +")


def test_the_answer_is_that_of_a_report_and_says_how_the_first_choice_did(tmp_path):
    slower = measured(tmp_path, [110, 110.1, 109.9], [100, 100.1, 99.9])
    assert slower.answers[0].startswith("Use zb_h1: ")
    assert slower.sentences[0].startswith("The first choice of the plan is auto: it trains 9.1 %")
    assert slower.sentences[0].endswith("fewer tokens/s than zb_h1.")
    best = measured(tmp_path, [100, 100.1, 99.9], [110, 110.1, 109.9], [120, 120.1, 119.9])
    assert best.answers[0].startswith("Use auto: ")
    assert best.sentences[0] == "The first choice of the plan is auto."
    same = measured(tmp_path, [100.1, 100, 100.2] * 2, [100, 100.1, 100.2] * 2)
    assert "as fast as" in same.answers[0]
    unsure = measured(tmp_path, [100, 110, 90], [98, 92, 86])
    assert unsure.answers[0].startswith("Open. ")
    assert unsure.sentences[0].endswith("auto; whether it is as fast is open.")


def test_the_case_to_take_is_the_one_that_the_sentence_names(tmp_path):
    slower = measured(tmp_path, [110, 110.1, 109.9], [100, 100.1, 99.9])
    assert slower.to_take.configuration.schedule == "zb_h1"
    unsure = measured(tmp_path, [100, 110, 90], [98, 92, 86])
    assert unsure.to_take is None
    alike = [100.1, 90, 110], [100, 110, 90.1]
    proposals = [proposal("auto", 100e6), proposal("zb_h1", 110e6)]
    saves = trials(tmp_path, proposals, alike, [5e8, 2e8])
    assert saves.answers[0].startswith("Use zb_h1 for its memory")
    assert saves.to_take.configuration.schedule == "zb_h1"


def test_the_number_of_ranks_is_a_choice_though_each_has_pairs_of_its_own(tmp_path):
    proposals = [
        proposal("zb_h1", 50e6, ranks=4),
        proposal("1f1b", 60e6, ranks=4),
        proposal("zb_h1", 90e6),
        proposal("1f1b", 100e6),
    ]
    steps_ms = [[step, step + 0.1, step - 0.1] for step in (80, 70, 50, 60)]
    found = trials(tmp_path, proposals, steps_ms)
    assert found.answers[0].startswith("Use zb_h1, 2 ranks, ")
    assert "faster than 1f1b, 2 ranks" in found.answers[0]
    assert len(found.answers) == 1  # it answers the whole question
    assert found.to_take is proposals[2]
    assert list(found.frame["world_size"]) == [4, 4, 2, 2]
    assert "is zb_h1, 4 ranks, " in found.sentences[0]
    assert ": it trains 37.5 %" in found.sentences[0]


def test_cautions_that_leave_the_answer_open_leave_the_first_choice_open(tmp_path):
    found = measured(tmp_path, [110, 110.1, 109.9], [100, 100.1, 99.9], cautions="oversubscribed")
    assert found.answers[0].startswith("Open. ")
    assert found.sentences[0].endswith("whether it is as fast is open.")


def test_a_first_choice_that_failed_has_no_figures(tmp_path):
    proposals = [proposal("zb_h1"), proposal("1f1b")]
    cases = [case_of(one.configuration, Case(), tmp_path / "a.csv") for one in proposals]
    ids = [case.case_id for case in cases]
    found = trials_of(proposals, ids, pd.DataFrame([run_row(0, cases[1])]))
    assert found.sentences[0].startswith("The first choice of the plan was not measured: its runs")
    assert list(found.frame["num_launches"]) == [0, 1]
    assert not found.is_ok
    assert json.loads(json.dumps(found.as_dict()))["trials"][0]["measured_step_ns"] is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a sweep file whose layers have costs already."""
    folder = tmp_path_factory.mktemp("trials")
    layer = StageCosts(1e6, 2e6, 1e6, 1e6, 0.01, 10 * MIB, 4 * MIB, MIB, 20 * MIB, MIB, 1e5)
    by_setting = {Setting(1, recompute=False): ModelCosts(layer, (layer,) * 4, layer)}
    costs = CostSet(
        "llama-tiny", "float32", 32, "adamw", "cpu", "made up", by_setting, LinkCosts(1e4)
    )
    write_costs_file(costs, folder / "costs.toml")
    (folder / "mine.toml").write_text(
        'num_microbatches = 2\nseq_len = 32\nmodel.preset = "llama-tiny"\n'
        "measure = {steps = 2, warmup_steps = 1, max_warmup_steps = 1}\n"
        f'plan = {{ranks = 2, schedules = ["1f1b", "auto"], costs = "file:{folder}/costs.toml"}}\n'
    )
    return folder


@pytest.mark.usefixtures("warm_starts")
def test_measured_figures_lead_and_the_same_command_goes_on_with_what_is_stored(
    folder, monkeypatch
):
    monkeypatch.chdir(folder)
    words = "mine.toml", "--run", 1, "--max-launches", 1, "--effort", 0.05
    text = printed("plan", *words, "-o", "plan.html").text
    assert text.startswith("Open. ")
    assert "ppbench plan mine.toml --effort 0.05 --run 1 --max-launches 5" in text.splitlines()
    parts = "The first choice of the plan is auto", "to be the best:", "% faster than the best 1F1B"
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    page = (folder / "plan.html").read_text()
    assert "predicted, not measured" not in page
    assert page.index("a single launch cannot decide it") < page.index("% faster than the best")
    assert page.index(">measured step") < page.index(">predicted step")
    runs = Store(folder / "results").runs(["run_id", "process_start"])
    assert len(runs) == 2
    assert len(set(runs["process_start"])) == 1  # in turns, in the same processes

    again = printed("plan", *words, "--format", "json")
    assert "2 runs of earlier launches count" in again.notes
    found = json.loads(again.text)
    assert [row["num_launches"] for row in found["trials"]] == [1, 1]
    assert found["answer"]["grade"] == "open"
    assert found["sentences"][0].startswith("Predicted to be the best: ")
    assert len(Store(folder / "results").runs(["run_id"])) == 2
    handed = printed("plan", *words, "--hand-over", "open").text.splitlines()
    (which,) = (line for line in handed if line.startswith("handed over: auto, 2 ranks, "))
    assert which.endswith(", the plan's first, as the runs leave it open")
    printed("plan", *words, "--rerun")
    assert len(Store(folder / "results").runs(["run_id"])) == 4


def test_the_pipeline_that_is_handed_over_may_be_another_than_the_plan_s_first(folder, monkeypatch):
    monkeypatch.chdir(folder)
    found, sweep = plan("mine.toml", effort=0.05), read_question("mine.toml")
    written = hand_over(found, sweep, folder / "taken", found.baseline)
    assert found.first.configuration.schedule == "auto"
    assert 'schedule = "1f1b"' in written.form("sweep").text


@pytest.mark.parametrize("options", [("--budget", "10s"), ("--rerun",)])
def test_options_of_trials_need_trials(folder, options, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match="add --run 2"):
        printed("plan", "mine.toml", *options)


def test_no_more_launches_can_be_asked_for_than_the_policy_makes(folder, monkeypatch):
    monkeypatch.chdir(folder)
    many = "--max-launches", MOST_LAUNCHES + 1
    assert printed("plan", "mine.toml", "--run", 1, *many).exit_code == 2
