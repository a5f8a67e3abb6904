"""Sweep files: what they expand to, and what models other than presets say of them."""

import dataclasses
import json
import sys
from pathlib import Path

import pandas as pd
import pytest
from sweep_files import assert_refused, only_case, read

from engine.model.descriptions import Facts
from engine.model.spec import ModelSpec
from engine.plan.schedules.registry import ProgramFileError
from ppbench.cautions import MIN_STEPS
from ppbench.config import described
from ppbench.config.case import CASE_KEYS, SETTINGS, Case, Measure
from ppbench.config.feasibility import problems_of_fit
from ppbench.config.programs import check_file_unchanged, link_ns_of
from ppbench.config.reader import read_sweep
from ppbench.config.toml import as_toml
from ppbench.display.cases import case_text, varying_axes
from ppbench.errors import SweepFileError, UsageError
from ppbench.judge.differences import FEWEST_LAUNCHES
from ppbench.run.job import Job, PlannedRun, read_job, write_job
from ppbench.run.runtimes.runtime import trainer_config
from ppbench.run.sweep.plan import planned_cases

SWEEPS = Path(__file__).parents[3] / "sweeps"
VALID = """\
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
SYNONYMS = """\
microbatches = 16
[grid]
ranks = [1, 2, 4]
[[exclude]]
ranks = 1
[[override]]
where = {ranks = 4}
set = {seq_len = 64}
"""
RECOMPUTE = "world_size = 2\n[grid]\ntrain.recompute = [false, [true, false], [false, true]]\n"
MIXED = """\
[grid]
world_size = [2, 4]
seq_len = [64, 128]
[[override]]
where = {world_size = 4}
set = {device = "emulated", emulated = {F_ms = 8, I_ms = 8, W_ms = 8}}
[[override]]
where = {world_size = [4, 8], seq_len = 128}
set = {emulated.F_ms = 16}
"""
EMULATED = 'device = "emulated"\n[emulated]\nF_ms = 2\nI_ms = 1.5\nW_ms = [1, 2]\n'
LIMITED = 'schedule = "auto"\nmemory_limit = "{}"\n'
AUTO = 'schedule = "auto"\n[grid]\nmemory_limit = ["none", "2048 MiB", "900 MB"]\n'


@pytest.mark.parametrize(
    ("text", "overrides", "field", "expected"),
    [
        (VALID, [], "schedule", ["afab"] * 2 + ["1f1b"] * 4),
        (VALID, [], "world_size", [2, 2, 1, 1, 2, 2]),
        (VALID, [], "num_microbatches", [4, 8] * 3),
        (VALID, ["world_size=4", 'schedule=["1f1b"]'], "world_size", [4, 4]),
        (VALID, ["train.microbatch_size=3"], "train_microbatch_size", [3] * 6),
        ("\ufeff", ["schedule=gpipe"], "schedule", ["afab"]),  # a byte order mark; no TOML
        ("\ufeff", [], "device", ["cpu"]),
        ("seq_len = 7\n[grid]\nseq_len = [8, 9]", [], "seq_len", [8, 9]),
        ('[grid]\nseq_len = [64, "variable"]', [], "tokens_per_step", [8 * 64, None]),
        ('seq_len = "variable"', [], "max_tokens_per_step", [8 * 2048]),
        ("", ["model.partition=[[3, 5], [4, 4]]"], "model_partition", [(3, 5), (4, 4)]),
        ("", ["model.partition=[3, 5]"], "model_partition", [(3, 5)]),
        ("[grid]\nschedule = ['1f1b', 'zb_h1', 'zbv']", [], "stages_per_rank", [1, 1, 2]),
        (AUTO, [], "memory_limit", ["none", "2 GiB", "900 MB"]),
        (AUTO, [], "stages_per_rank", [1] * 3),
        (RECOMPUTE, [], "recompute", [False, (True, False), (False, True)]),
        (RECOMPUTE, [], "train_recompute", [False, True, True]),
        ("train.recompute = [false, false]", [], "train_recompute", [False]),
        (f"{RECOMPUTE}[[exclude]]\ntrain.recompute = [[true, false]]", [], "recompute",
         [False, (False, True)]),
        (EMULATED, [], "emulated_W_ms", [(1.0, 2.0)]),
        (EMULATED, ["emulated.F_ms=[3, 4]"], "emulated_F_ms", [(3.0, 4.0)]),
        (f'{EMULATED}[grid]\n"emulated.F_ms" = [3, [4, 5]]', [], "emulated_F_ms",
         [(3.0,), (4.0, 5.0)]),
        (SYNONYMS, [], "world_size", [2, 4]),
        (SYNONYMS, [], "seq_len", [128, 64]),
        (SYNONYMS, ["ranks=2", "grid.microbatches=[4, 8]"], "num_microbatches", [4, 8]),
        (MIXED, [], "device", ["cpu", "cpu", "emulated", "emulated"]),
        (MIXED, [], "emulated_F_ms", [(), (), (8.0,), (16.0,)]),
        (MIXED, [], "emulated_W_ms", [(), (), (8.0,), (8.0,)]),
        # the command line wins over an override
        (MIXED, ["device=cpu"], "emulated_F_ms", [()] * 4),
        (MIXED, ["device=emulated", *(f"emulated.{op}_ms=4" for op in "FIW")], "emulated_F_ms",
         [(4.0,)] * 4),
    ],
)  # fmt: skip
def test_a_file_and_the_command_line_expand_into_cases(tmp_path, text, overrides, field, expected):
    sweep = read(tmp_path, text, *overrides)
    assert [getattr(case, field) for case, _ in sweep.cases] == expected


@pytest.mark.parametrize(
    ("text", "overrides", "axes"),
    [
        (VALID, [], "schedule world_size num_microbatches"),
        (VALID, ["world_size=2", "model.partition=[3, 5]"], "schedule world_size num_microbatches"),
        ("", ["grid.seq_len=8"], "seq_len"),
        (RECOMPUTE, [], "train_recompute train_recompute_stages"),
        (SYNONYMS, [], "world_size seq_len"),
        (MIXED, [], "world_size seq_len device"),
        (MIXED, ["device=cpu"], "world_size seq_len"),
        (f"{MIXED}[[override]]\nwhere = {{device = 'cpu'}}\nset = {{measure.steps = 4}}", [],
         "world_size seq_len device measure_steps"),
    ],
)  # fmt: skip
def test_axes_are_the_columns_that_vary(tmp_path, text, overrides, axes):
    assert " ".join(read(tmp_path, text, *overrides).axes) == axes


def test_names_say_which_cases_are_emulated_and_times_only_where_nothing_else_does(tmp_path):
    rows = planned_cases(read(tmp_path, MIXED))
    assert varying_axes(rows) == ("world_size", "seq_len", "device")
    names = [case_text(row, varying_axes(rows)) for _, row in rows.iterrows()]
    assert names[0] == "2 ranks, 64 tokens, cpu"
    assert names[-1] == "4 ranks, 128 tokens, emulated"
    slower = planned_cases(read(tmp_path, MIXED.replace("F_ms = 8", "F_ms = 10")))
    assert "emulated_F_ms" in varying_axes(pd.concat([rows, slower]))


def test_every_key_is_taken_and_its_default_is_what_a_file_without_it_has(tmp_path):
    """The reference named `sharding_policy`, which the reader refused (FAULTS 47)."""
    lines = [
        f"{key} = {as_toml(declared.default)}"
        for key, declared in SETTINGS.items()
        if key != "name" and declared.default != () and not key.endswith("_ms")
    ]
    every, none = read(tmp_path, "\n".join(lines)), read(tmp_path, "")
    assert every.cases == none.cases == ((Case(), Measure(block=1)),)
    assert none.name == "sweep"
    for name in ("torchrun", "slurm", "supervision", "track", "plan"):
        assert getattr(every, name) == getattr(none, name)


@pytest.mark.parametrize("quote", ["", '"'])
def test_any_dotted_key_may_be_an_axis_quoted_or_not(tmp_path, quote):
    axes = {
        key: [declared.default]
        for key, declared in SETTINGS.items()
        if key in CASE_KEYS and not declared.shared and declared.default != ()
    }
    lines = [f"{quote}{key}{quote} = {as_toml(axis)}" for key, axis in axes.items()]
    sweep = read(tmp_path, "\n".join(["[grid]", *lines]))
    assert sweep.axes == tuple(key.replace(".", "_") for key in axes)
    assert len(sweep.cases) == 1


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("[measure]\nsteps = 9", ""),
        ("stages_per_rank = 1", ""),
        ("train.recompute = false", ""),
        ('schedule = "zbv"', 'schedule = "zbv"\nstages_per_rank = 2'),
        (LIMITED.format("2048 MiB"), LIMITED.format("2 GiB")),
        ("microbatches = 16\n[grid]\nranks = [4]", "num_microbatches = 16\nworld_size = 4"),
    ],
)  # fmt: skip
def test_a_case_id_is_of_the_workload_however_it_is_written(tmp_path, text, same):
    one, other = (only_case(read(tmp_path, written)) for written in (text, same))
    assert one.case_id == other.case_id
    assert (one.case_id == Case().case_id) is (same == "")


def test_lists_survive_the_way_to_the_workers(tmp_path):
    case = Case(model_partition=(3, 5), model_split_points=("a.b", "c"), seq_len="variable")
    items = (PlannedRun(case, Measure(), 0, "k"), PlannedRun(Case(), Measure(), 0, "l"))
    job = Job("l", "r", "s", "n", "f", None, items)
    assert read_job(write_job(tmp_path / "launch", job)) == job
    by_stage = only_case(read(tmp_path, "train.recompute = [true, false]"))
    assert trainer_config(by_stage).recompute == (True, False)
    assert json.loads(str(by_stage.settings()["train_recompute_stages"])) == [True, False]
    assert trainer_config(Case(train_recompute=True)).recompute is True


def test_a_variable_length_gives_way_to_the_model_unless_its_bound_was_set(tmp_path):
    short = "seq_len = 'variable'\nmodel.preset = 'llama-tiny'"  # 1024 positions
    assert read(tmp_path, short).cases
    assert_refused(tmp_path, f"{short}\ndata.max_seq_len = 2048", "3: data.max_seq_len",
                   "2048 is longer than the 1024")  # fmt: skip
    assert_refused(tmp_path, f"{short}\n[grid]\ndata.max_seq_len = [1024, 1025]",
                   "4: grid.data.max_seq_len", "1025 is longer")  # fmt: skip


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
     "problem": wrong if "none" in one["spec"]["name"] else None}
    for one in asked
]))
"""


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """Another process answers at once: what models are is the engine's to know and to test."""
    monkeypatch.chdir(tmp_path)

    def set_code(code):
        monkeypatch.setattr(described, "COMMAND", (sys.executable, "-S", "-c", code))

    set_code(ANSWERS)
    return set_code


def test_a_folder_and_a_factory_are_models_by_their_names(tmp_path, answers):
    (tmp_path / "checkpoint").mkdir()
    names = ["owner/name", "./checkpoint", str(tmp_path / "checkpoint"), "my.code:make"]
    sweep = read(tmp_path, f"[grid]\nmodel.preset = {names}")
    assert [case.model_preset for case, _ in sweep.cases] == names
    assert only_case(read(tmp_path, 'model.preset = "checkpoint"')) == sweep.cases[1][0]


def test_all_models_that_are_no_presets_are_looked_at_in_one_process(tmp_path, answers):
    text = "[grid]\nmodel.preset = ['llama-8m', 'a/b', 'c/d']\nschedule = ['afab', '1f1b']"
    assert len(read(tmp_path, text).cases) == 6
    (asked,) = [json.loads(line) for line in (tmp_path / "asked.json").read_text().splitlines()]
    assert [one["spec"]["name"] for one in asked] == ["a/b", "c/d"]
    assert asked[0] == {
        "spec": {
            **dataclasses.asdict(ModelSpec("a/b")),
            "split_points": [],
            "before_layers": [],
            "after_layers": [],
        },
        "tokenizer": "auto",
    }
    answers("raise SystemExit(9)")
    assert read(tmp_path, VALID).cases  # presets alone start no process
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
def test_what_the_model_cannot_do_is_located(tmp_path, answers, text, where, what):
    assert_refused(tmp_path, text, where, what)


def test_models_that_cannot_be_looked_at_are_one_clear_error(tmp_path, answers):
    answers("raise RuntimeError('the disk is full')")
    message = "a/b: cannot be inspected; python -m engine.describe facts ended with exit code 1: "
    what = f"{message}RuntimeError: the disk is full"
    assert_refused(tmp_path, "model.preset = 'a/b'", "1: model.preset", what)


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
        (Case(replicas=2), Facts(num_parameters=0), "replicas", "2 replicas share nothing"),
        (Case(replicas=2), Facts(num_parameters=1), None, ""),
        (Case(data_source="text:short.txt"), Facts(), "data.source", "has 5 bytes; seq_len 128"),
        (Case(data_source="text:."), Facts(), "data.source", "has 5 bytes"),
        (Case(data_source="text:short.txt"), Facts(tokenizer_size=9), None, ""),
        (Case(data_source="text:short.txt", seq_len="variable"), Facts(), None, ""),
    ],
)  # fmt: skip
def test_data_fits_the_model(tmp_path, monkeypatch, case, facts, key, what):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("short")
    found = list(problems_of_fit(case, facts, lambda _key: False))
    assert [problem.key for problem in found] == ([] if key is None else [key])
    assert all(what in problem.message for problem in found)


@pytest.mark.parametrize("key", ["seq_len", "data.source", "data.tokenizer", "data.shuffle"])
def test_what_is_set_of_texts_is_refused_where_a_factory_brings_its_own_batches(key):
    own = Facts(num_layers=4, targets_per_sample=1)
    case = Case(model_preset="vit:build", seq_len=9999, model_partition=(1, 3))
    assert not list(problems_of_fit(case, own, {"data.num_workers"}.__contains__))
    (problem,) = problems_of_fit(case, own, {key}.__contains__)
    assert problem.key == key
    assert problem.message == "does nothing: vit:build brings its own batches; remove it"


def test_every_case_of_the_demo_means_something_on_two_cores():
    for case, measure in read_sweep(SWEEPS / "1f1b_vs_afab.toml", [], "cpu").cases:
        has_cores = case.world_size * case.launch_threads_per_rank <= 2
        assert case.is_emulated is not has_cores
        assert measure.launches >= FEWEST_LAUNCHES
        assert measure.steps >= MIN_STEPS


def test_one_link_time_is_that_of_each_link(tmp_path):
    linked = read(tmp_path, EMULATED + "link_ms = 3\n", "world_size=4", "emulated.W_ms=1")
    assert link_ns_of(only_case(linked)) == (3_000_000,) * 3


def test_a_program_file_tells_its_stages_and_its_content_is_part_of_the_case(tmp_path):
    file = tmp_path / "program.csv"
    file.write_text("0F0,2F0,2B0,0B0\n1F0,1B0\n")
    text = f'schedule = "csv:{file}"\nnum_microbatches = 1'
    before = only_case(read(tmp_path, text))
    assert before.stages_per_rank == 2
    check_file_unchanged(before)
    file.write_text("0F0,2F0,2I0,0B0,2W0\n1F0,1B0\n")
    assert only_case(read(tmp_path, text)).case_id != before.case_id
    with pytest.raises(ProgramFileError, match="changed since the sweep began"):
        check_file_unchanged(before)


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


def test_a_turn_has_one_step_on_the_cpu_and_four_where_the_host_issues_ahead(tmp_path):
    path = tmp_path / "turns.toml"
    path.write_text("[measure]\nsteps = 8\n")
    turns = {device: read_sweep(path, [], device).cases[0][1].turns for device in ("cpu", "cuda")}
    assert turns == {"cpu": (1,) * 8, "cuda": (4, 4)}
    (_, asked), *_ = read_sweep(path, ["measure.block=3"], "cpu").cases
    assert asked.turns == (2, 3, 3)
