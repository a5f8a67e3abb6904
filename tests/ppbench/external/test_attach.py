"""Somebody else's training is watched and left as it was; torch's schedules are the oracle."""

import re
from pathlib import Path

import attached
import pytest
import torch
from command import python
from repositories import commit, make_repository

from engine.plan.action import COMPUTE_OPS, Op
from engine.plan.program import from_json
from engine.plan.schedules.registry import build_program
from ppbench.external.live import callback_of, waiting
from ppbench.external.recording import source_of
from ppbench.external.traces import import_traces
from ppbench.store import Store

pytestmark = pytest.mark.usefixtures("warm_starts")

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def watched(ranks, tmp_path_factory):
    """A folder with the run of a training that was watched, and what each rank knows of it."""
    folder = tmp_path_factory.mktemp("watched")
    return folder, ranks.run(4, attached.watched, folder)


def computations(spans, step):
    """Text of the computations of a step in the order of time, by rank."""
    of_step = spans[(spans["step"] == step) & spans["op"].isin([op.value for op in COMPUTE_OPS])]
    return [
        [f"{row.stage}{row.op}{row.microbatch}" for row in of_rank.itertuples()]
        for _, of_rank in of_step.sort_values("start_ns").groupby("rank")
    ]


def rows(program):
    return [[str(action) for action in row] for row in program.actions]


def test_the_first_pipelines_first_rank_stores_one_run_of_the_chosen_steps(watched):
    folder, outcomes = watched
    runs = Store(folder).runs()
    assert [outcome.run_id for outcome in outcomes] == [runs["run_id"].item(), None, None, None]
    run = runs.iloc[0]
    assert (run["status"], run["origin"], run["sweep_name"]) == ("ok", "attached", "titan")
    assert (run["schedule"], run["world_size"], run["num_microbatches"]) == ("1f1b", 2, 4)
    assert (run["model_preset"], run["seq_len"], run["model_dtype"]) == ("mine", 8, "unknown")
    assert (run["num_warmup_steps"], run["measure_steps"]) == (1, 2)
    assert from_json(run["program"]) == build_program("1f1b", 2, 4)
    assert [outcome.warnings for outcome in outcomes] == [[]] * 4


def test_a_watched_step_has_every_action_message_and_optimizer_step(watched):
    folder, outcomes = watched
    store = Store(folder)
    run_id = outcomes[0].run_id
    spans, steps = store.table("spans", [run_id]), store.table("steps", [run_id])
    assert steps["step"].tolist() == [1, 3]
    for step in (1, 3):
        assert computations(spans, step) == rows(build_program("1f1b", 2, 4))
        others = spans[(spans["step"] == step) & ~spans["op"].isin(list("FBIW"))]
        counted = others.groupby("op").size().to_dict()
        assert counted == {"OPT": 2, "RECV_B": 4, "RECV_F": 4, "SEND_B": 4, "SEND_F": 4}
        assert set(others.loc[others["op"] != "OPT", "num_bytes"]) == {2 * 8 * 4}
    assert (steps["step_ns"] > steps["makespan_ns"]).all()
    assert (steps["num_tokens"] == 64).all()
    assert steps["loss"].tolist() == pytest.approx([outcomes[2].losses[n] for n in (1, 3)])
    ranks = store.table("ranks", [run_id])
    assert ranks["num_parameters"].tolist() == [2 * (8 * 8 + 8)] * 2
    assert ranks["clock"].tolist() == ["rank 0", "shared with rank 0"]
    assert ranks["peak_memory_bytes"].isna().all()


def test_training_is_the_same_and_afterwards_nothing_is_left(ranks, watched):
    _, outcomes = watched
    for outcome, alone in zip(outcomes, ranks.run(4, attached.untouched), strict=True):
        assert all(map(torch.equal, outcome.parameters, alone))
    for outcome in (outcomes[0], outcomes[2]):
        assert [{name.split()[0] for name in names} for names in outcome.changed] == [
            {"step"},  # counted
            {"step", "hook"},  # watched: the optimizer, too, until the next step begins
            {"step"},
            {"step", "hook"},
            set(),
        ]
    for outcome in (outcomes[1], outcomes[3]):  # the pipeline that is not watched
        assert outcome.changed == [[]] * 5


def test_several_stages_are_watched_as_torch_ordered_and_profiled_them(ranks, tmp_path):
    """An attached run and imported traces of the same steps have the same program."""
    outcomes = ranks.run(2, attached.watched_and_profiled, tmp_path)
    assert [outcome.changed for outcome in outcomes] == [[], []]
    done = import_traces([o.path for o in outcomes], "two", tmp_path)
    store = Store(tmp_path)
    runs = store.named([outcomes[0].run_id, done.run_id])
    assert runs["schedule"].tolist() == ["interleaved_zb"] * 2
    for _, run in runs.iterrows():
        assert rows(from_json(run["program"])) == outcomes[0].order
        spans = store.table("spans", [run["run_id"]])
        for step in spans["step"].unique():
            assert computations(spans, step) == outcomes[0].order
    assert runs["measure_steps"].tolist() == [2, 2]
    assert runs["num_stages"].tolist() == [4, 4]


OUT_OF_ORDER = """\
0F0,0F1,2F0,2F1,2B1,2B0,0B0,0B1
1F1,1F0,3F0,3F1,3B0,3B1,1B0,1B1
"""
"""Stage 2 takes what stage 1 sends the other way round, as do stages 2 and 1 with gradients. The
last stage keeps the order of microbatches: torch's list of losses asks for it."""

MISTAKEN = """\
0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1
1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1
"""
"""The author of the transfers posts receives in another order than that of their sends."""


def unsplit_losses(num_stages):
    """Those of the script's layers on one device, in three steps of the script's optimizer."""
    layers = torch.nn.Sequential(*map(attached._layers, range(num_stages)))
    optimizer = torch.optim.SGD(layers.parameters(), 0.1)
    inputs, targets = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0)).unbind()
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(layers(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_messages_taken_out_of_order_are_stored_with_their_own_actions(ranks, tmp_path):
    path = tmp_path / "program.csv"
    path.write_text(OUT_OF_ORDER)
    outcomes = ranks.run(2, attached.from_csv, tmp_path / "results", path, "compute_only")
    assert outcomes[1].losses == pytest.approx(unsplit_losses(4), rel=1e-5)
    store, run_id = Store(tmp_path / "results"), outcomes[0].run_id
    ours = from_json(store.find("last")["program"])
    assert rows(ours) == [row.split(",") for row in OUT_OF_ORDER.split()]
    spans = store.table("spans", [run_id])
    at = {(s.step, f"{s.stage}{s.op}{s.microbatch}"): s for s in spans.itertuples()}
    for (step, action), span in at.items():
        if "RECV" in action:
            assert span.end_ns <= at[step, action.replace("RECV_", "")].start_ns
        elif "SEND" in action:
            assert at[step, action.replace("SEND_", "")].end_ns <= span.start_ns


def test_a_program_that_torch_trains_on_the_wrong_microbatch_is_not_stored(ranks, tmp_path):
    path = tmp_path / "program.csv"
    path.write_text(MISTAKEN)
    outcomes = ranks.run(2, attached.from_csv, tmp_path / "results", path, "compute_comms")
    assert outcomes[1].losses[0] != pytest.approx(unsplit_losses(2)[0], rel=1e-3)
    assert outcomes[0].run_id is None
    (warning,) = outcomes[0].warnings
    assert "trains on the wrong microbatch" in warning
    assert "1RECV_F1 on rank 1 receives what rank 0 sends as 0SEND_F0" in warning


def test_profiles_of_our_own_runs_give_back_their_program(ranks, tmp_path):
    from pipeline import config

    program, settings = build_program("zbv", 2, 4), config("zbv", 2, 4)
    ranks.run(2, attached.profiled_engine, settings, program, tmp_path)
    paths = sorted(tmp_path.glob("rank*.json.gz"))
    done = import_traces(paths, "ours", tmp_path / "results")
    store = Store(tmp_path / "results")
    assert from_json(store.find("last")["program"]) == program
    assert store.table("steps", [done.run_id])["step"].tolist() == [4, 5]


def test_members_talk_and_ping_without_the_scripts_groups(ranks):
    (objects, none), (same, pings) = ranks.run(2, attached.pinged)
    assert objects == same == ["", "x"]
    assert (none, len(pings)) == ([], 5)
    for sent, received, answered, returned in pings:  # on one clock here
        assert sent <= received <= answered <= returned


def test_a_live_curve_has_the_figures_of_the_stored_step(ranks, tmp_path):
    first, second = ranks.run(4, attached.with_curve, tmp_path)[:2]
    assert [step for step, _ in first.handed] == [2, 4, 6, 8]
    assert second.handed == []
    assert first.changed == second.changed == []
    assert first.warnings == second.warnings == []
    store = Store(tmp_path)
    spans = store.table("spans", [first.run_id])
    spans = spans.assign(time_ns=spans["end_ns"] - spans["start_ns"])
    windows = spans.groupby("rank").agg(begin=("start_ns", "min"), end=("end_ns", "max"))
    time_ns = 2 * (windows["end"] - windows["begin"]).max()
    by_op = spans.groupby("op")["time_ns"].sum()
    _, metrics = first.handed[1]
    computed = by_op[[op for op in by_op.index if op in {each.value for each in COMPUTE_OPS}]].sum()
    assert metrics["bubble_fraction"] == pytest.approx(1 - computed / time_ns, abs=0.01)
    assert 0 < metrics["waiting_fraction"] <= metrics["bubble_fraction"] < 1
    held = store.table("ranks", [first.run_id])["peak_held_microbatches"]
    assert metrics["in_flight_peak"] == held.max()
    assert metrics["tokens_per_s"] == pytest.approx(64 / metrics["period_s"])


def test_a_rank_waits_where_it_receives_and_does_not_compute():
    times = [
        (Op.RECV_F, 0, 10), (Op.F, 10, 20), (Op.RECV_F, 15, 30), (Op.RECV_B, 25, 40),
        (Op.F, 30, 35), (Op.SEND_F, 35, 60), (Op.B, 45, 50),
    ]  # fmt: skip
    assert waiting(times) == 10 + 10 + 5


def test_a_curve_is_drawn_by_tensorboard_wandb_and_any_function():
    got = []

    class Writer:
        def add_scalar(self, *values):
            got.append(values)

    class Run:
        def log(self, values, step):
            got.append((values, step))

    for to in (Writer(), Run(), lambda *values: got.append(values)):
        callback_of(to)(7, {"period_s": 0.5})
    assert got == [
        ("pipeline/period_s", 0.5, 7),
        ({"pipeline/period_s": 0.5}, 7),
        (7, {"period_s": 0.5}),
    ]


def test_after_an_exception_of_the_script_nothing_is_left(ranks, tmp_path):
    assert ranks.run(2, attached.interrupted, tmp_path / "results") == [[], []]
    assert not (tmp_path / "results" / "runs").exists()


def test_an_error_of_ours_in_a_watched_step_ends_the_watching_only(ranks, tmp_path):
    alone = ranks.run(2, attached.unwatched)
    for where in attached.OUR_ERRORS:
        outcomes = ranks.run(2, attached.our_error, tmp_path / "results", where)
        for outcome, parameters in zip(outcomes, alone, strict=True):
            assert all(map(torch.equal, outcome.parameters, parameters)), where
            assert outcome.changed == [], where
        assert [len(outcome.warnings) for outcome in outcomes] == [1, 0], where
        assert "rank 1 could not be recorded" in outcomes[0].warnings[0], where


@pytest.mark.parametrize(
    ("how", "told", "stored"),
    [
        ("no folder", ["cannot be written to"] * 2, [False]),
        ("twice", ["attached already", "attached already"], [True, False, True]),
        ("different steps", ["rank 1 of the pipeline was given steps=[1], no"] * 2, [False]),
        ("mistake of one rank", ["rank 1 could not attach: steps=[-1]", "steps=[-1]"], [False]),
        (
            "one rank alone",
            ["rank 1 of the pipeline did not reach attach()", None],
            [False],
        ),
        ("closed before", ["called 1 times, before the end of the chosen steps", None], [False]),
        ("never closed", [None, None], [True]),
        ("closed half way", [None, None], [True]),
        ("no optimizer", ["optimizer=str: expected a torch.optim.Optimizer"] * 2, [False]),
        ("failing callback", ["the live curve ends at step", None], [True]),
        ("no board", ["every= is given without to="] * 2, [False]),
        ("no such board", ["to=str: expected a SummaryWriter"] * 2, [False]),
        ("every step", ["every=1: expected a number of steps above 1"] * 2, [False]),
        ("not how often", ["to= is given without every="] * 2, [False]),
        ("nothing", ["neither steps= nor every= is given"] * 2, [False]),
        ("no schedule", ["str has no stages; expected a schedule"] * 2, [False]),
        ("other torch", ["has no _wait_batch_p2p, which recording needs"] * 2, [False]),
        ("no loss", ["the loss of step 0 is not known: ZeroDivisionError"] * 2, [True]),
    ],
)
def test_what_cannot_be_is_told_once_at_the_scripts_line(ranks, tmp_path, how, told, stored):
    outcomes = ranks.run(2, attached.mistaken, tmp_path / "results", how)
    for outcome, expected in zip(outcomes, told, strict=True):
        assert len(outcome.warnings) == (expected is not None)
        assert expected is None or expected in outcome.warnings[0]
        assert outcome.changed == []
        assert outcome.files <= {attached.__file__}
    assert [run_id is not None for run_id in outcomes[0].runs] == stored


def test_pipelines_that_end_together_are_launches_of_their_own(ranks, tmp_path):
    ids = ranks.run(4, attached.both_pipelines, tmp_path)
    runs = Store(tmp_path).runs()
    assert set(runs["run_id"]) == {run_id for run_id in ids if run_id is not None}
    assert len(runs) == runs["launch"].nunique() == runs["resume_key"].nunique() == 2
    assert runs["case_id"].nunique() == 1


def test_a_script_is_told_from_others_by_its_path_in_git_else_by_its_text(tmp_path, monkeypatch):
    folder = make_repository(tmp_path / "repo")
    monkeypatch.chdir(folder)

    def sources(*files):
        return [source_of(Path(file)) for file in files]  # as they stand in `sys.argv`

    (folder / "copy.py").write_text("one")
    assert sources("copy.py", "none.py") == [source_of(folder / "copy.py"), ""]
    commit(folder, {"one.py": "one", "sub/two.py": "one"}, "Both")
    (folder / "copy.py").write_text("another")
    assert sources("one.py", str(folder / "sub" / "two.py")) == ["one.py", "sub/two.py"]
    (folder / "one.py").write_text("changed")  # which the commit's changes tell
    assert sources("one.py", "copy.py") == ["one.py", "copy.py"]
    for text in ("third", "fourth"):  # git does not know it
        (folder / "new.py").write_text(text)
        outside = tmp_path / f"{text}.py"
        outside.write_text(text)
        assert source_of(Path("new.py")) == source_of(outside)
    assert source_of(tmp_path / "third.py") != source_of(tmp_path / "fourth.py")


def test_the_documented_script_leaves_a_run_even_if_it_ends_without_close(tmp_path):
    page = (ROOT / "docs" / "howto" / "attach-to-a-training.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (script,) = (block for block in blocks if "init_process_group" in block)
    script = script.replace("with ppbench.attach(", "ppbench.attach(")
    script = script.replace("\n):", "\n)\nif 1:")
    (tmp_path / "train.py").write_text(script)
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = python(*launch, "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    run = Store(tmp_path / "results").find("last")
    assert f"run {run['run_id']} is stored in results" in done.stderr
    assert (run["schedule"], run["measure_steps"], run["tokens_per_step"]) == ("1f1b", 5, 64)
