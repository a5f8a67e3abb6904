"""`ppbench plan` and `ppbench.plan`: from a sweep file to what to run."""

import json
from dataclasses import replace

import pytest
from command import inside

import ppbench
from engine.plan.model_costs import LinkCosts, ModelCosts, StageCosts
from ppbench.errors import StoreError, SweepFileError, UsageError
from ppbench.planning.cost_file import read_costs_file, write_costs_file
from ppbench.planning.cost_set import MEASURED, CostSet, Setting
from ppbench.planning.words import as_dict
from ppbench.run import costs as costs_here

MIB = 2**20
SIZES = (10 * MIB, 4 * MIB, MIB, MIB, MIB, 5 * MIB, 15 * MIB, MIB)
LAYER = StageCosts(1e6, 2e6, 1e6, 1e6, 0.01, *SIZES, 1e5)
LINK = LinkCosts(1e4, 1e9)
TEXT = """\
num_microbatches = 8
seq_len = 64
[model]
preset = "llama-tiny"
[plan]
ranks = [2]
memory = "200 MiB"
schedules = ["1f1b", "zb_h1"]
costs = "file:costs.toml"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = ModelCosts(LAYER, (LAYER,) * 4, LAYER)
    by_setting = {Setting(1, recompute=False): model}
    costs = CostSet("llama-tiny", "float32", 64, "adamw", "cpu", "measured", by_setting, LINK)
    write_costs_file(costs, tmp_path / "costs.toml")
    (tmp_path / "mine.toml").write_text(TEXT)
    return tmp_path


def test_a_plan_is_made_of_a_sweep_file(folder):
    plan = ppbench.plan("mine.toml", effort=0.05)
    assert plan.first.configuration.schedule == "zb_h1"
    assert plan.request.memory_bytes == 200 * MIB
    assert plan.request.global_batch == 8


def test_the_command_prints_a_table_and_sentences_or_json_or_csv(folder):
    words = "plan", "mine.toml", "--effort", "0.05"
    table = inside(*words, folder=folder)
    assert "Run zb_h1 with 1 stage per rank on 2 ranks" in table
    assert "faster than the best 1F1B" in table
    data = json.loads(inside(*words, "--format", "json", folder=folder))
    assert data["proposals"][0]["schedule"] == "zb_h1"
    assert data["proposals"][0]["recompute"] == [False, False]
    rows = inside(*words, "--format", "csv", folder=folder).splitlines()
    assert rows[0].startswith("schedule,world_size,")
    assert len(rows) == 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"200 MiB"', '"20 MiB"', "mine.toml:7: plan.memory: no pipeline fits into 20 MiB"),
        ('"200 MiB"', '"much"', "mine.toml:7: plan.memory: expected a size with its unit"),
        ('"1f1b", ', '"1f1c", ', 'mine.toml:8: plan.schedules: unknown schedule "1f1c"'),
        ("ranks = [2]", "ranks = [0]", "mine.toml:6: plan.ranks: expected a whole number"),
        ("ranks = [2]", "ranks = [16]", "stages_per_rank: no schedule of 1f1b, zb_h1 has"),
        ("file:costs", "files:costs", 'plan.costs: expected "measure" or "file:PATH"'),
        ("ranks = [2]", "microbatch_sizes = [2]", "no costs for microbatches of 2, only for"),
        ("ranks = [2]", "ranks = 2\nrnks = 2", "mine.toml:7: plan.rnks: unknown key"),
    ],
)
def test_a_mistake_is_located(folder, old, new, message):
    (folder / "mine.toml").write_text(TEXT.replace(old, new))
    with pytest.raises(SweepFileError) as raised:
        ppbench.plan("mine.toml", effort=0.05)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('seq_len="variable"', 'seq_len: is "variable"; a plan needs a number of tokens'),
        ("seq_len=32", "seq_len is 64, but the plan is for 32"),
        ("grid.seq_len=[32,64]", "seq_len: has 2 values in the grid"),
        ("plan.memory=20MiB", "--set: plan.memory: no pipeline fits"),
        ("grid.num_microbatches=[4,8]", "plan.global_batch: is left out, and the grid has 2"),
    ],
)
def test_costs_of_something_else_and_other_settings_are_refused(folder, override, message):
    with pytest.raises(UsageError) as raised:
        ppbench.plan("mine.toml", [override], effort=0.05)
    assert message in str(raised.value)


def test_replicas_have_their_share_of_the_batch_and_of_the_optimizer(folder):
    """One rank each, so that nothing but layers, collectives and the optimizer takes time."""
    (folder / "mine.toml").write_text(TEXT.replace("ranks = [2]", "ranks = [1]\nglobal_batch = 8"))

    def planned(*overrides):
        return ppbench.plan("mine.toml", ["plan.schedules=['1f1b']", *overrides], effort=0.05)

    alone = planned("plan.global_batch=4", "plan.stages_per_rank=[1]").first
    for policy, divisor, passes in (
        ("ddp", 1, 2),
        ("zero1", 2, 3),
        ("zero2", 2, 2),
        ("zero3", 2, 2),
    ):
        own = [f"sharding.policy={policy}", "replicas=2", "plan.stages_per_rank=[1]"]
        own += ["sharding.every_backward=false"] if policy == "zero2" else []
        plan = planned(*own)
        first = plan.first
        assert (first.configuration.num_microbatches, plan.request.replicas) == (4, 2)
        one_bytes = 6 * LAYER.gradient_bytes
        moving_ns = passes * one_bytes / 2 / LINK.bytes_per_s * 1e9
        optimizer_ns = 6 * LAYER.optimizer_ns
        longer_ns = moving_ns - optimizer_ns * (1 - 1 / divisor)
        assert first.step_ns - alone.step_ns == pytest.approx(longer_ns, abs=6)
        states_gone = 2 * one_bytes * (1 - 1 / divisor)
        shard = one_bytes / 2 if policy == "zero3" else 0  # beside what is gathered
        assert first.peak_bytes[0] - alone.peak_bytes[0] == shard - states_gone
        assert first.tokens_per_s == pytest.approx(8 * 64 / first.step_ns * 1e9)
        assert f"2 replicas, which share by {policy}" in plan.sentences[-1]
        assert as_dict(plan)["global_batch"] == 8


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sharding.policy=zero2", 'sharding.every_backward: plans know "zero2" with one sum'),
        ("plan.global_batch=7", "plan.global_batch: 7 sequences cannot be shared by 2 replicas"),
        ("grid.replicas=[2,4]", "replicas: has 2 values in the grid"),
    ],
)
def test_what_no_plan_knows_of_replicas_is_refused(folder, override, message):
    with pytest.raises(SweepFileError) as raised:
        ppbench.plan("mine.toml", ["replicas=2", override], effort=0.05)
    assert message in str(raised.value)


def test_parameters_in_shards_are_planned_where_all_stages_of_a_rank_stay_unsharded(folder):
    sharding = ["sharding.policy=zero3", "sharding.residency=1", "sharding.look_ahead=0"]
    with pytest.raises(SweepFileError, match=r"plan\.stages_per_rank: plans know sharded param"):
        ppbench.plan("mine.toml", ["replicas=2", *sharding], effort=0.05)
    one = "plan.stages_per_rank=[1]"
    plan = ppbench.plan("mine.toml", ["replicas=2", *sharding, one], effort=0.05)
    assert plan.request.sharding == "zero3"


def test_a_plan_is_no_axis(folder):
    with pytest.raises(UsageError, match="cannot be an axis"):
        ppbench.plan("mine.toml", ["grid.plan.memory=1 GiB"])


def test_ranks_that_the_cases_do_not_agree_on_are_asked_for(folder):
    (folder / "mine.toml").write_text(TEXT.replace("ranks = [2]\n", ""))
    with pytest.raises(SweepFileError, match=r"plan\.ranks: is left out, and the grid has 2"):
        ppbench.plan("mine.toml", ["grid.world_size=[2,4]"], effort=0.05)


def test_nothing_is_measured_for_a_folder_that_takes_no_files(folder, monkeypatch):
    (folder / "mine.toml").write_text(TEXT.replace("file:costs.toml", "measure"))
    (folder / "results").write_text("a file")
    monkeypatch.setattr(costs_here, "measure_costs", lambda *_: pytest.fail("measured in vain"))
    with pytest.raises(StoreError, match="results: cannot be written to"):
        ppbench.plan("mine.toml", effort=0.05)


def test_costs_are_measured_again_for_another_way_to_train(folder, monkeypatch):
    (folder / "mine.toml").write_text(TEXT.replace("file:costs.toml", "measure"))
    costs, asked = read_costs_file(folder / "costs.toml"), []

    def measured(wanted, _tell):
        asked.append(wanted)
        models = {Setting(*one): costs.by_setting[1, False] for one in wanted.settings}
        return replace(costs, origin=MEASURED, by_setting=models)

    monkeypatch.setattr(costs_here, "measure_costs", measured)
    for override in ([], [], ["train.autocast=bfloat16"], ["train.momentum=0.5"], []):
        plan = ppbench.plan("mine.toml", ["plan.microbatch_sizes=[1]", *override], effort=0.05)
        assert plan.costs.origin == MEASURED
    assert [(one.autocast, one.optimizer["momentum"]) for one in asked] == [
        ("none", 0.0),
        ("bfloat16", 0.0),
        ("none", 0.5),
    ]
    ppbench.plan("mine.toml", ["plan.microbatch_sizes=[1]"], effort=0.05, remeasure=True)
    assert len(asked) == 4


def test_a_plan_says_that_its_costs_were_measured_on_a_busy_machine(folder, monkeypatch):
    (folder / "mine.toml").write_text(TEXT.replace("file:costs.toml", "measure"))
    costs, loads = read_costs_file(folder / "costs.toml"), iter([1.0, 0.0])

    def measured(wanted, _tell):
        models = {Setting(*one): costs.by_setting[1, False] for one in wanted.settings}
        return replace(costs, origin=MEASURED, by_setting=models)

    def summarized(samples, windows, _gpu):
        assert [(one.time_ns, two.time_ns) for one, two in [samples]] == windows
        return {"other_load_cores": next(loads), "watched_cores": 2}

    monkeypatch.setattr(costs_here, "measure_costs", measured)
    monkeypatch.setattr(costs_here, "summarize", summarized)
    notes = []
    for remeasure in (False, False, True, False):  # the second and the last take what is kept
        plan = ppbench.plan("mine.toml", effort=0.05, remeasure=remeasure)
        notes.append([text for text in plan.sentences if "tenth of the cores busy" in text])
    assert [len(texts) for texts in notes] == [1, 1, 0, 0]
    assert notes[0][0].endswith("measure the costs again, with --remeasure.")


def test_costs_are_kept_in_a_file_that_gains_the_settings_of_later_plans(folder, monkeypatch):
    (folder / "mine.toml").write_text(TEXT.replace("file:costs.toml", "measure"))
    costs, asked = read_costs_file(folder / "costs.toml"), []

    def measured(wanted, _tell):
        asked.append(wanted.settings)
        models = {Setting(*one): costs.by_setting[1, False] for one in wanted.settings}
        return replace(costs, origin=MEASURED, by_setting=models)

    monkeypatch.setattr(costs_here, "measure_costs", measured)
    for sizes in ("[1]", "[2]", "[1,2]", "[1]"):
        overrides = [f"plan.microbatch_sizes={sizes}", "plan.recompute=none"]
        ppbench.plan("mine.toml", overrides, effort=0.05)
    assert asked == [((1, False),), ((2, False),)]
    (kept,) = (folder / "results/costs").iterdir()
    assert kept.name.startswith("llama-tiny-")
    assert set(read_costs_file(kept).by_setting) == {(1, False), (2, False)}
    again = ["plan.microbatch_sizes=[1,2]", f"plan.costs=file:{kept}"]
    assert ppbench.plan("mine.toml", again, effort=0.05).costs.origin == f"file {kept.name}"
