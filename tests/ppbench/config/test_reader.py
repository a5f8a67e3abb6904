"""Sweep files: what they expand to, and how each mistake is located."""

import json
import sys
from pathlib import Path

import pytest
from sweep_files import assert_refused, only_case, read

from engine.model.descriptions import Facts
from engine.plan.schedules.registry import ProgramFileError
from ppbench.cautions import MIN_STEPS
from ppbench.config import programs as models
from ppbench.config.case import CASE_KEYS, SETTINGS, Case, Measure
from ppbench.config.feasibility import problems_of_fit
from ppbench.config.programs import check_file_unchanged, link_ns_of
from ppbench.config.reader import read_sweep
from ppbench.config.toml import as_toml
from ppbench.errors import SweepFileError, UsageError
from ppbench.judge.differences import FEWEST_LAUNCHES
from ppbench.run.job import Job, PlannedRun, read_job, write_job

SWEEPS = Path(__file__).parents[3] / "sweeps"
VALID = """\
name = "trial"

[model]
preset = "llama-8m"

[train]
microbatch_size = 1

[measure]
steps = 8

[grid]
schedule = ["afab", "1f1b"]
world_size = [1, 2]
num_microbatches = [
    4,
    8,
]

[[exclude]]
world_size = 1
schedule = "afab"
"""


def cases(sweep):
    return [(c.schedule, c.world_size, c.num_microbatches) for c, _ in sweep.cases]


def test_the_grid_is_expanded_in_order_without_what_is_excluded(tmp_path):
    sweep = read(tmp_path, VALID)
    assert cases(sweep) == [
        ("afab", 2, 4), ("afab", 2, 8),
        ("1f1b", 1, 4), ("1f1b", 1, 8), ("1f1b", 2, 4), ("1f1b", 2, 8),
    ]  # fmt: skip
    assert sweep.axes == ("schedule", "world_size", "num_microbatches")
    assert sweep.cases[0][1] == Measure(steps=8, block=1)


def test_every_key_is_taken_and_its_default_is_what_a_file_without_it_has(tmp_path):
    """The reference named `sharding_policy`, which the reader refused (FAULTS 47)."""
    lines = [
        f"{key} = {as_toml(declared.default)}"
        for key, declared in SETTINGS.items()
        if key != "name" and declared.default != () and not key.endswith("_ms")
    ]
    every, none = read(tmp_path, "\n".join(lines)), read(tmp_path, "")
    assert every.cases == none.cases
    for name in ("torchrun", "slurm", "track", "plan"):
        assert getattr(every, name) == getattr(none, name)


def test_an_empty_file_is_one_case_of_defaults_named_after_the_file(tmp_path):
    sweep = read(tmp_path, "")
    assert sweep.cases == ((Case(), Measure(block=1)),)
    assert sweep.name == "sweep"


@pytest.mark.parametrize(
    "key",
    [k for k in CASE_KEYS if k != "device" and not SETTINGS[k].shared and k[-3:] != "_ms"],
)
def test_any_dotted_key_may_be_an_axis_quoted_or_not(tmp_path, key):
    default = {**Case().settings(), **Measure().settings()}
    value = default[key.replace(".", "_")]
    is_word = isinstance(value, str) and not value.startswith("[")
    text = f'"{value}"' if is_word else str(value).lower()
    for written in (key, f'"{key}"'):
        sweep = read(tmp_path, f"[grid]\n{written} = [{text}]")
        assert len(sweep.cases) == 1
        assert sweep.axes == (key.replace(".", "_"),)


def test_overrides_replace_an_axis_or_set_a_key(tmp_path):
    sweep = read(tmp_path, VALID, "world_size=4", "train.microbatch_size=3", 'schedule=["1f1b"]')
    assert cases(sweep) == [("1f1b", 4, 4), ("1f1b", 4, 8)]
    assert {case.train_microbatch_size for case, _ in sweep.cases} == {3}
    ((case, _),) = read(tmp_path, "\ufeff", "schedule=gpipe").cases  # a byte order mark; no TOML
    assert (case.schedule, case.device) == ("afab", "cpu")


def test_a_case_id_is_stable_and_ignores_how_it_is_measured(tmp_path):
    ids = {c.case_id for c, _ in read(tmp_path, "[grid]\nmeasure.steps = [1, 2]").cases}
    assert ids == {Case().case_id}


GRID = """\
[grid]
schedule = ["afab", "dualpipev"]
world_size = [2, 4]
num_microbatches = [4, 8]
seq_len = [64, 128]
"""


def test_an_axis_takes_the_place_of_the_same_key_in_its_section(tmp_path):
    sweep = read(tmp_path, "seq_len = 7\n[grid]\nseq_len = [8, 9]")
    assert [case.seq_len for case, _ in sweep.cases] == [8, 9]


def test_partitions_may_be_listed_in_an_override(tmp_path):
    sweep = read(tmp_path, "", "model.partition=[[3, 5], [4, 4]]")
    assert [case.model_partition for case, _ in sweep.cases] == [(3, 5), (4, 4)]
    assert read(tmp_path, "", "model.partition=[3, 5]").axes == ()


def test_split_points_may_be_listed_too(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, ANSWERS)
    text = "model.split = 'trace'"
    one = read(tmp_path, text, 'model.split_points=["blocks.2"]')
    assert one.axes == ()
    assert one.cases[0][0].model_split_points == ("blocks.2",)
    several = read(tmp_path, text, 'model.split_points=[["blocks.2"], ["blocks.3"]]')
    assert several.axes == ("model_split_points",)
    assert [c.model_split_points for c, _ in several.cases] == [("blocks.2",), ("blocks.3",)]


def test_lists_survive_the_way_to_the_workers(tmp_path):
    case = Case(model_partition=(3, 5), model_split_points=("a.b", "c"), seq_len="variable")
    job = Job(
        "l",
        "r",
        "s",
        "n",
        "f",
        None,
        (PlannedRun(case, Measure(), 0, "k"), PlannedRun(Case(), Measure(), 0, "l")),
    )
    assert read_job(write_job(tmp_path / "launch", job)) == job


def test_a_length_may_be_variable_beside_numbers(tmp_path):
    sweep = read(tmp_path, '[grid]\nseq_len = [64, "variable"]')
    assert [case.seq_len for case, _ in sweep.cases] == [64, "variable"]
    assert [case.tokens_per_step for case, _ in sweep.cases] == [8 * 64, None]
    assert sweep.cases[1][0].max_tokens_per_step == 8 * 2048
    assert sweep.cases[1][0].settings()["seq_len"] == "variable"


def test_a_variable_length_gives_way_to_the_model_unless_its_bound_was_set(tmp_path):
    short = "seq_len = 'variable'\nmodel.preset = 'llama-tiny'"  # 1024 positions
    assert read(tmp_path, short).cases
    with pytest.raises(SweepFileError, match=r":3: data.max_seq_len: 2048 is longer than the 1024"):
        read(tmp_path, f"{short}\ndata.max_seq_len = 2048")
    with pytest.raises(SweepFileError, match=r":4: grid.data.max_seq_len: 1025 is longer"):
        read(tmp_path, f"{short}\n[grid]\ndata.max_seq_len = [1024, 1025]")


def test_a_folder_and_a_factory_are_models_by_their_names(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, ANSWERS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint").mkdir()
    names = [
        "owner/name",
        "./checkpoint",
        str(tmp_path / "checkpoint"),
        "my.code:make",
    ]
    sweep = read(tmp_path, f"[grid]\nmodel.preset = {names}")
    assert [case.model_preset for case, _ in sweep.cases] == names
    ids = {
        read(tmp_path, f'model.preset = "{name}"').cases[0][0].case_id
        for name in ("checkpoint", "./checkpoint")
    }
    assert ids == {sweep.cases[1][0].case_id}


ANSWERS = """\
import json, sys
asked = json.load(sys.stdin)
with open("asked.json", "a") as file:
    print(json.dumps(asked), file=file)
print("a module that prints when it is imported")
keys = ("num_layers", "max_positions", "vocab_size", "num_parameters", "tokenizer_size", "problem")
wrong = {"key": "model.preset", "message": "no such model"}
print(json.dumps([
    {**dict.fromkeys(keys), "num_layers": 6, "max_positions": 512, "vocab_size": 300,
     "problem": wrong if "none" in one["model"] else None}
    for one in asked
]))
"""


def stand_in(tmp_path, monkeypatch, code):
    """A process that answers at once: what models are is the engine's to know and to test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "COMMAND", (sys.executable, "-c", code))


def test_all_models_that_are_no_presets_are_looked_at_in_one_process(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, ANSWERS)
    text = "[grid]\nmodel.preset = ['llama-8m', 'a/b', 'c/d']\nschedule = ['afab', '1f1b']"
    assert len(read(tmp_path, text).cases) == 6
    (asked,) = [json.loads(line) for line in (tmp_path / "asked.json").read_text().splitlines()]
    assert [one["model"] for one in asked] == ["a/b", "c/d"]
    assert asked[0] == {
        "model": "a/b", "split": "auto", "split_points": [], "weights": "auto",
        "trust_remote_code": False, "dtype": "float32", "tokenizer": "auto",
    }  # fmt: skip


def test_presets_alone_start_no_process(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, "raise SystemExit(9)")
    assert read(tmp_path, VALID).cases
    with pytest.raises(UsageError, match="exit code 9"):
        read(tmp_path, "data.tokenizer = 'some/tokenizer'")


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("model.preset = 'a/none'", "1: model.preset", "no such model"),
        ("[grid]\nmodel.preset = ['a/b', 'a/none']", "2: grid.model.preset", "no such model"),
        ("model.preset = 'a/b'\nseq_len = 513", "2: seq_len", "513 is longer than the 512 pos"),
        ("model.preset = 'a/b'\nmodel.partition = [3, 5]", "2: model.partition", "[3, 5] sums"),
    ],
)
def test_what_the_model_cannot_do_is_located(tmp_path, monkeypatch, text, where, what):
    stand_in(tmp_path, monkeypatch, ANSWERS)
    assert_refused(tmp_path, text, where, what)


def test_models_that_cannot_be_looked_at_are_one_clear_error(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, "raise RuntimeError('the disk is full')")
    with pytest.raises(UsageError) as caught:
        read(tmp_path, "model.preset = 'a/b'")
    message = "a/b: cannot be inspected; python -m engine.model.facts ended with exit code 1: "
    place = f"{tmp_path / 'sweep.toml'}:1: model.preset: "
    assert str(caught.value) == f"{place}{message}RuntimeError: the disk is full"


@pytest.mark.parametrize(
    ("case", "facts", "key", "what"),
    [
        (Case(), Facts(vocab_size=255), "model.preset", "text as bytes needs a vocabulary of 256"),
        (Case(data_source="synthetic"), Facts(vocab_size=2), None, ""),
        (Case(data_source="hf:x"), Facts(vocab_size=99, tokenizer_size=100), "model.preset",
         "a vocabulary of 100"),
        (Case(data_source="hf:x"), Facts(vocab_size=100, tokenizer_size=100), None, ""),
        (Case(data_source="hf:x", data_tokenizer="t"), Facts(vocab_size=9, tokenizer_size=10),
         "data.tokenizer", "tokenizer t needs a vocabulary of 10"),
        (Case(data_tokenizer="t"), Facts(vocab_size=300, tokenizer_size=400), None, ""),
        (Case(seq_len=9999), Facts(), None, ""),
        (Case(model_partition=(1, 1)), Facts(), None, ""),
    ],
)  # fmt: skip
def test_a_vocabulary_holds_what_the_text_becomes(case, facts, key, what):
    found = list(problems_of_fit(case, facts, is_max_seq_len_set=False))
    assert [problem.key for problem in found] == ([] if key is None else [key])
    assert all(what in problem.message for problem in found)


def test_a_text_is_long_enough_only_if_its_tokens_are_bytes(tmp_path):
    (tmp_path / "short.txt").write_text("short")
    case = Case(data_source=f"text:{tmp_path / 'short.txt'}")
    (problem,) = problems_of_fit(case, Facts(), is_max_seq_len_set=False)
    assert (problem.key, "has 5 bytes; seq_len 128" in problem.message) == ("data.source", True)
    assert not list(problems_of_fit(case, Facts(tokenizer_size=9), is_max_seq_len_set=False))
    folder = Case(data_source=f"text:{tmp_path}")
    (problem,) = problems_of_fit(folder, Facts(), is_max_seq_len_set=False)
    assert "has 5 bytes" in problem.message


def test_exclude_sees_the_device_that_auto_stands_for(tmp_path):
    text = '[grid]\nworld_size = [1, 2]\n[[exclude]]\ndevice = "cpu"\nworld_size = 1'
    assert len(read(tmp_path, text).cases) == 1


def test_every_case_of_the_demo_means_something_on_two_cores():
    for case, measure in read_sweep(SWEEPS / "1f1b_vs_afab.toml", [], "cpu").cases:
        has_cores = case.world_size * case.launch_threads_per_rank <= 2
        assert case.is_emulated is not has_cores
        assert measure.launches >= FEWEST_LAUNCHES
        assert measure.steps >= MIN_STEPS


@pytest.mark.parametrize(
    ("schedule", "stages"), [("1f1b", 1), ("zb_h1", 1), ("interleaved_1f1b", 2), ("zbv", 2)]
)
def test_a_schedule_has_its_own_number_of_stages_where_nobody_says(tmp_path, schedule, stages):
    case = only_case(read(tmp_path, f'schedule = "{schedule}"'))
    assert case.stages_per_rank == stages


def test_a_case_that_names_the_schedules_own_number_of_stages_is_the_same_case(tmp_path):
    auto, said = (
        only_case(read(tmp_path, 'schedule = "zbv"' + text))
        for text in ("", "\nstages_per_rank = 2")
    )
    assert auto == said
    assert only_case(read(tmp_path, "stages_per_rank = 1")).case_id == Case().case_id


EMULATED = 'device = "emulated"\n[emulated]\nF_ms = 2\nI_ms = 1.5\nW_ms = [1, 2]\n'


def test_emulated_times_are_one_number_or_one_per_stage(tmp_path):
    case = only_case(read(tmp_path, EMULATED))
    times = (case.emulated_F_ms, case.emulated_I_ms, case.emulated_W_ms)
    assert times == ((2.0,), (1.5,), (1.0, 2.0))
    sweep = read(tmp_path, EMULATED, "emulated.F_ms=[3, 4]")
    assert only_case(sweep).emulated_F_ms == (3.0, 4.0)
    linked = read(tmp_path, EMULATED + "link_ms = 3\n", "world_size=4", "emulated.W_ms=1")
    assert link_ns_of(only_case(linked)) == (3_000_000,) * 3
    axis = read(tmp_path, EMULATED + '[grid]\n"emulated.F_ms" = [3, [4, 5]]')
    assert [case.emulated_F_ms for case, _ in axis.cases] == [(3.0,), (4.0, 5.0)]


def test_a_program_file_tells_its_stages_and_its_content_is_part_of_the_case(tmp_path):
    file = tmp_path / "program.csv"
    file.write_text("0F0,2F0,2B0,0B0\n1F0,1B0\n")
    text = f'schedule = "csv:{file}"\nnum_microbatches = 1'
    before = only_case(read(tmp_path, text))
    assert before.stages_per_rank == 2
    file.write_text("0F0,2F0,2I0,0B0,2W0\n1F0,1B0\n")
    assert only_case(read(tmp_path, text)).case_id != before.case_id


def test_a_program_file_whose_own_transfers_could_hang_is_refused(tmp_path):
    file = tmp_path / "program.csv"
    file.write_text(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
    )
    text = f'schedule = "csv:{file}"\nnum_microbatches = 2'
    with pytest.raises(SweepFileError, match=r"1: schedule: .*would deliver microbatch 0 to it"):
        read(tmp_path, text)
    legal = file.read_text().replace("1RECV_F1,1RECV_F0", "1RECV_F0,1RECV_F1")
    file.write_text(legal)
    assert only_case(read(tmp_path, text)).program_digest
    with pytest.raises(SweepFileError, match=r"transfer\.policy: .*has its own transfers"):
        read(tmp_path, text + '\ntransfer.policy = "just_in_time"')


def test_a_program_file_that_changes_under_a_sweep_is_noticed(tmp_path):
    file = tmp_path / "program.csv"
    file.write_text("0F0,0B0\n1F0,1B0\n")
    case = only_case(read(tmp_path, f'schedule = "csv:{file}"\nnum_microbatches = 1'))
    check_file_unchanged(case)
    file.write_text("0F0,0I0,0W0\n1F0,1B0\n")
    with pytest.raises(ProgramFileError, match="changed since the sweep began"):
        check_file_unchanged(case)


def test_a_turn_has_one_step_on_the_cpu_and_four_where_the_host_issues_ahead(tmp_path):
    path = tmp_path / "turns.toml"
    path.write_text("[measure]\nsteps = 8\n")
    turns = {device: read_sweep(path, [], device).cases[0][1].turns for device in ("cpu", "cuda")}
    assert turns == {"cpu": (1,) * 8, "cuda": (4, 4)}
    (_, asked), *_ = read_sweep(path, ["measure.block=3"], "cpu").cases
    assert asked.turns == (2, 3, 3)
