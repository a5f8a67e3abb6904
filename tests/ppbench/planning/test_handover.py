"""Everything that is handed over for a pipeline: files that others load."""

import random
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from engine.plan.lower import lower
from engine.plan.predict import Durations
from engine.plan.program import Placement, loop_placement, v_placement
from engine.plan.schedules.registry import build_program, read_csv
from ppbench.config.case import Case, Measure
from ppbench.config.programs import program_of
from ppbench.config.reader import read_sweep
from ppbench.errors import SweepFileError, UsageError
from ppbench.planning.handover import case_of, write_handover
from ppbench.planning.plan import Configuration
from ppbench.planning.solver.problem import counted
from ppbench.planning.solver.solver import solve

sys.path.append(str(Path(__file__).parents[2] / "engine" / "plan"))  # torch's schedules, mocked
from torch_schedules import runtime

GIVEN = Case(seq_len=64, model_preset="llama-8m", train_optimizer="sgd", train_microbatch_size=2)
MEASURE = Measure(steps=5)


def case_with(program, layers, **rest):
    p, num_stages = program.world_size, program.num_stages
    numbers = {"world_size": p, "stages_per_rank": -(-num_stages // p)}
    shape = {**numbers, "num_microbatches": program.num_microbatches, "model_partition": layers}
    return replace(GIVEN, **{**shape, "schedule": program.schedule, **rest})


def chosen(name, world_size, layers, **rest):
    program = build_program(name, world_size, 4, len(layers) // world_size)
    return case_with(program, layers, **rest), program


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_sweep_file_runs_the_pipeline_with_its_settings(tmp_path):
    recompute = (True, False, False, True)
    stages = {"train_recompute": True, "train_recompute_stages": recompute}
    given = chosen("zbv", 2, (1, 3, 3, 1), **stages)
    handover = write_handover(*given, tmp_path / "plan", "best", MEASURE)
    ((case, measure),) = read_sweep(handover.form("sweep").path, [], "cpu").cases
    assert (case.schedule, case.world_size, case.stages_per_rank) == ("zbv", 2, 2)
    assert (case.model_partition, case.recompute) == ((1, 3, 3, 1), recompute)
    assert (case.train_microbatch_size, case.num_microbatches) == (2, 4)
    assert (case.seq_len, case.train_optimizer, measure.steps) == (64, "sgd", 5)


def test_a_program_without_a_name_is_run_from_its_file(tmp_path):
    case, program = chosen("zb_h1", 4, (2, 2, 2, 2), schedule="mine")
    handover = write_handover(case, program, tmp_path, "best")
    ((case, _),) = read_sweep(handover.form("sweep").path, [], "cpu").cases
    assert case.schedule == f"csv:{handover.form('program').path}"
    assert program_of(case).actions == program.actions
    keys = tomllib.loads(handover.form("sweep").text)
    assert keys["train"]["recompute"] is False
    assert "stages_per_rank" not in keys


def test_the_program_is_written_without_its_transfers(tmp_path):
    case, program = chosen("1f1b", 2, (4, 4), schedule="mine")
    handover = write_handover(case, lower(program), tmp_path, "best")
    assert read_csv(handover.form("program").path).actions == program.actions


def test_partitions_are_written_for_other_trainers(tmp_path):
    handover = write_handover(*chosen("interleaved_1f1b", 2, (1, 3, 3, 1)), tmp_path, "best")
    layout, modules = handover.form("megatron"), handover.form("torchtitan")
    assert layout.path.read_text() == "Et|t*3|t*3|tL\n"
    assert modules.path.read_text().startswith('[["tok_embeddings", "layers.0"], ["layers.1"')
    assert handover.torchtitan_schedule == "Interleaved1F1B"


def test_what_a_form_cannot_express_is_said_and_no_older_file_stays(tmp_path):
    write_handover(*chosen("interleaved_1f1b", 2, (1, 3, 3, 1)), tmp_path, "best")
    handover = write_handover(*chosen("zbv", 2, (1, 3, 3, 1)), tmp_path, "best")
    layout = handover.form("megatron")
    assert layout.path is None
    assert "stage 2 of 4 belongs to rank 0" in layout.refusal
    assert not (tmp_path / "best.layout").exists()
    assert handover.torchtitan_schedule == "ZBVZeroBubble"


def test_settings_that_cannot_be_run_are_refused_as_in_any_sweep_file(tmp_path):
    with pytest.raises(SweepFileError, match=r"best\.toml:.*train\.optimizer"):
        write_handover(*chosen("1f1b", 2, (4, 4), train_optimizer="adam"), tmp_path, "best")
    with pytest.raises(SweepFileError, match="sums to 9 layers"):
        write_handover(*chosen("1f1b", 2, (4, 5)), tmp_path, "best")
    with pytest.raises(
        UsageError, match=r"partition: expected the layers of each stage, got .even"
    ):
        write_handover(*chosen("1f1b", 2, (4, 4), model_partition="even"), tmp_path, "best")


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file/plan: cannot be made"):
        write_handover(*chosen("1f1b", 2, (4, 4)), tmp_path / "file" / "plan", "best")


def solved(rng):
    """A program of the solver for stages of different costs, in a loop or a V."""
    p = rng.randint(1, 4)
    placement = rng.choice([loop_placement(p), loop_placement(p, 2), v_placement(p)])
    times = (tuple(rng.randint(1, 9) for _ in range(placement.num_stages)) for _ in range(3))
    limit = placement.num_stages + rng.randint(0, 4)
    return solve(counted(placement, rng.randint(1, 6), Durations(*times), limit), 0.01).program


def test_torch_loads_programs_of_the_solver(tmp_path, is_thorough):
    rng = random.Random(7)
    for _ in range(200 if is_thorough else 12):
        program = solved(rng)
        ranks, stages, m = program.world_size, program.num_stages, program.num_microbatches
        layers = tuple(8 // stages + (stage < 8 % stages) for stage in range(stages))
        case = case_with(program, layers, schedule="mine")
        path = write_handover(case, program, tmp_path, "best").form("program").path
        torchs = runtime(ranks, m, stages // ranks)
        torchs._load_csv(path)
        torchs._dump_csv(tmp_path / "back.csv", "compute_only")
        assert torchs.stage_index_to_group_rank == dict(enumerate(program.placement.ranks))
        assert read_csv(tmp_path / "back.csv").actions == program.actions


def test_an_uneven_program_is_handed_over_where_a_form_has_it(tmp_path):
    program = build_program("1f1b", 2, 2)
    assert program.placement == Placement((0, 1), 2)
    text = "0F0,2F0,2B0,0B0\n1F0,1B0\n"
    (tmp_path / "mine.csv").write_text(text)
    program = read_csv(tmp_path / "mine.csv")
    handover = write_handover(case_with(program, (3, 3, 2)), program, tmp_path, "best")
    assert handover.form("program").text == text
    assert "stage 2 of 3" in handover.form("megatron").refusal
    assert handover.torchtitan_schedule == ""


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "auto"])
def test_the_configuration_of_a_plan_is_handed_over(tmp_path, schedule):
    program, layers = build_program("interleaved_1f1b", 2, 4, 2), (1, 3, 3, 1)
    recompute = (False, True, True, False)
    plan = Configuration(schedule, 2, 2, program.placement, layers, 3, 4, recompute)
    handover = write_handover(
        case_of(plan, GIVEN, tmp_path / "best.csv"), program, tmp_path, "best"
    )
    ((case, _),) = read_sweep(handover.form("sweep").path, [], "cpu").cases
    assert (case.schedule == "interleaved_1f1b") == (schedule != "auto")
    assert program_of(case).actions == program.actions
    assert (case.train_microbatch_size, case.recompute, case.seq_len) == (3, recompute, 64)


def test_two_ways_are_handed_over_to_ppbench_alone(tmp_path):
    program = build_program("chimera", 2, 4)
    recompute = (True, False, False, True)
    stages = {"train_recompute": True, "train_recompute_stages": recompute}
    handover = write_handover(case_with(program, (5, 3), **stages), program, tmp_path, "best")
    ((case, _),) = read_sweep(handover.form("sweep").path, [], "cpu").cases
    assert (case.schedule, case.model_partition, case.recompute) == ("chimera", (5, 3), recompute)
    assert read_csv(handover.form("program").path).placement == program.placement
    for form in ("megatron", "torchtitan"):
        assert "cannot put a stage on two ranks" in handover.form(form).refusal
    assert handover.torchtitan_schedule == ""
