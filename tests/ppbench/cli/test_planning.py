"""Schedules listed, drawn, checked, exported and simulated from the command line."""

import base64
import io
import json
import re
import subprocess
import sys
import zlib
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from command import output_of
from rich.console import Console
from torch.distributed.pipelining.schedules import _Action

from engine.plan.collectives import NoCollectives, Zero3, add_collectives, with_collectives
from engine.plan.lower import lower
from engine.plan.program import from_csv
from engine.plan.schedules.registry import SCHEDULES, read_csv
from ppbench.cli import schedules as planning
from ppbench.cli.simulate import simulate
from ppbench.config.case import Case
from ppbench.config.programs import lowered_of, planned_step_ns
from ppbench.display.formats import Format
from ppbench.errors import UsageError
from ppbench.prediction import ProgramRequest as Wanted
from ppbench.prediction import predict, program_of
from ppbench.prediction.amounts import FREE_TRANSFERS, read_costs, read_transfers
from ppbench.prediction.replicas import Replication
from ppbench.report.timeline.terminal import text_of_program

pytestmark = pytest.mark.usefixtures("warm_starts")

ANSI = re.compile(r"\x1b\[[0-9;]*m")
AS_EARLY = {"with_communication": True}


def predicted(name, p, m, v=None, cost="F=1,I=1,W=1", transfers=FREE_TRANSFERS):
    return predict(program_of(Wanted(name, p, m, v)), read_costs(cost), transfers)


def simulated(name, p, m, v=None, **options):
    return json.loads(output_of(simulate, name, p, m, v, how=Format.json, **options))


def refusal(call, *arguments, **options):
    with pytest.raises(UsageError) as caught:
        call(*arguments, **options)
    return str(caught.value)


# simulate


REPLICATED = {
    "replicas": 3,
    "sharding": "zero3,residency=1,look_ahead=0",
    "collectives": "gather=0.25,reduce=0.5",
    "replica_factors": "1,1.3,1",
}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
def test_replicas_take_the_step_that_is_planned_for_emulated_ones(schedule):
    """The oracle is the planned step of a sweep's case, in milliseconds instead of seconds."""
    case = Case(
        device="emulated",
        schedule=schedule,
        stages_per_rank=1 if schedule == "1f1b" else 2,
        world_size=4,
        num_microbatches=8,
        replicas=3,
        sharding_policy="zero3",
        sharding_residency=1,
        sharding_look_ahead=0,
        emulated_F_ms=(1.0,),
        emulated_I_ms=(1.5,),
        emulated_W_ms=(1.0,),
        emulated_gather_ms=(0.25,),
        emulated_reduce_ms=(0.5,),
        emulated_replica_factors=(1.0, 1.3, 1.0),
    )
    alike = replace(case, emulated_replica_factors=(1.1,) * 3)
    free = replace(alike, emulated_gather_ms=(), emulated_reduce_ms=())
    running_ms = planned_step_ns(case, lowered_of(case)) / 1e6
    own_ms, alike_ms, free_ms = (  # where ranks meet, a step is a makespan
        planned_step_ns(replace(one, train_clip_norm=1.0), lowered_of(one)) / 1e6
        for one in (case, alike, free)
    )
    figures = simulated(schedule, 4, 8, cost="F=1,I=1.5,W=1", **REPLICATED)
    assert figures["makespan"] == pytest.approx(own_ms, abs=1e-5)
    assert figures["exposed_collective"] == pytest.approx(alike_ms - free_ms, abs=1e-5)
    assert figures["replica_skew"] == pytest.approx(own_ms - alike_ms, abs=1e-5)
    assert figures["period"] == pytest.approx(running_ms, abs=1e-5)
    # Of zbv the end of a step and the beginning of the next overlap.
    assert (figures["period"] < figures["makespan"]) == (schedule == "zbv")
    compute = 3.3 * 4 * 8 * 3.5
    assert figures["bubble_fraction"] == pytest.approx(1 - compute / (12 * figures["makespan"]))
    assert figures["bubble_max_stage_span"] <= figures["bubble_fraction"]


def test_replicas_alike_with_free_collectives_take_the_step_of_one():
    alone = simulated("interleaved_1f1b", 4, 8)
    joined = simulated("interleaved_1f1b", 4, 8, replicas=4, sharding="zero2")
    shared = ("makespan", "bubble_fraction", "bubble_max_stage_span", "peak_activations")
    assert {name: joined[name] for name in shared} == {name: alone[name] for name in shared}
    assert (joined["exposed_collective"], joined["replica_skew"]) == (0, 0)


def test_the_sums_of_copies_are_predicted_for_two_ways_without_replicas():
    free, summed = (simulated("chimera", 4, 8, collectives=f"reduce={s}") for s in (0, 0.5))
    assert summed["exposed_collective"] == 1  # of both stages of a rank
    assert summed["makespan"] == summed["period"] == free["makespan"] + 1
    assert summed["num_collectives"] == 8
    linked = simulated("chimera", 4, 8, collectives="bytes=8,bandwidth=16")
    assert linked["reduce"] == 0.5  # an all-reduce of two
    with pytest.raises(UsageError, match="add --replicas N"):
        simulated("1f1b", 4, 8, collectives="reduce=1")
    with pytest.raises(UsageError, match="add --replicas N"):
        simulated("chimera", 4, 8, replica_factors="1,2")


def test_a_file_keeps_its_own_collectives_if_they_are_those_of_the_policy(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(
        "0UNSHARD,0F0,0F1,0B0,0B1,0REDUCE_GRAD,0RESHARD\n"
        "1UNSHARD,1F0,1B0,1F1,1B1,1REDUCE_GRAD,1RESHARD\n"
    )
    options = {"replicas": 2, "collectives": "gather=1,reduce=2"}
    written = simulated(f"csv:{path}", None, None, sharding="zero3", **options)
    assert written["num_collectives"] == 4
    assert written["makespan"] == simulated("1f1b", 2, 2, sharding="zero3", **options)["makespan"]
    words = refusal(simulate, f"csv:{path}", sharding="ddp", **options)
    assert "0UNSHARD" in words


def test_a_drawing_of_replicas_is_that_of_the_slowest_with_its_collectives(tmp_path):
    page = tmp_path / "page.html"
    drawn = output_of(planning.draw, "interleaved_1f1b", 4, 8, output=page, **REPLICATED)
    assert "replica 1 of 3, planned" in drawn
    assert "\n replica skew " in drawn
    lanes = drawn.partition("with the collectives of replicas, in order:\n\n")[2]
    lane = lanes.partition(" rank 1")[0].split()
    assert (lane[:3], lane[-1][1:]) == (["rank", "0", "0UNSHARD"], "REDUCE_GRAD")
    (packed,) = re.findall(r'x-ppbench-timeline" id="timeline">([^<]+)<', page.read_text())
    assert b"gather parameters" in zlib.decompress(base64.b64decode(packed))


def test_thirds_and_tenths_stay_exact():
    assert predicted("interleaved_1f1b", 3, 6, v=3, cost="F=0.1,I=0.2,W=0.7").makespan_s == (
        6 + Fraction(2, 3)
    )
    transfers = read_transfers("0.1", "3", 1, overlaps=True)
    assert transfers.duration_s == Fraction(1, 10) + Fraction(1, 3)
    makespan = predicted("1f1b", 2, 1, cost="F=1,I=1,W=1", transfers=transfers).makespan_s
    assert makespan == 6 + 2 * transfers.duration_s


def test_messages_take_their_latency_and_their_bytes_over_the_bandwidth():
    free, slow, alone = (
        simulated("1f1b", 2, 4, **transfers)
        for transfers in (
            {},
            {"latency": "0.5", "bandwidth": "1e6", "message_bytes": 500_000},
            {"latency": "0.5", "bandwidth": "1e6", "message_bytes": 500_000, "overlap": False},
        )
    )
    assert (free["transfer"], slow["transfer"]) == (0, 1)
    assert free["makespan"] < slow["makespan"] < alone["makespan"]
    assert "0SEND_F0" in slow["critical_path"]


# draw


def drawn(prediction, width=None):
    """The drawing in colours for a terminal of this width, or for a pipe without one."""
    is_terminal = width is not None
    system = "truecolor" if is_terminal else None
    console = Console(
        file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=system
    )
    return text_of_program(prediction).drawn(console)


def test_a_terminal_gets_colours_and_blocks_that_fit(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")  # rich keeps the codes of a style once it is drawn
    monkeypatch.delenv("NO_COLOR", raising=False)
    piped = output_of(planning.draw, "zbv", 4, 8)
    assert ANSI.search(piped) is None
    assert sum(line.startswith("rank 0") for line in piped.splitlines()) == 1
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    coloured = output_of(planning.draw, "zbv", 4, 8)
    assert ANSI.search(coloured)
    plain = ANSI.sub("", coloured)
    assert max(map(len, plain.splitlines())) <= 60
    rows = [line for line in plain.splitlines() if line.startswith("rank 0")]
    assert len(rows) > 1
    labels = " ".join(row.removeprefix("rank 0") for row in rows).split()
    whole = next(line for line in piped.splitlines() if line.startswith("rank 0"))
    assert labels == whole.removeprefix("rank 0").split()


@pytest.mark.parametrize("width", [12, 79])
@pytest.mark.parametrize("cost", ["F=1,I=1.1,W=0.7", "F=6,I=1,W=1"])
def test_every_action_is_drawn_once_whatever_the_width_and_costs(cost, width):
    for name, schedule in SCHEDULES.items():
        p = 4 if schedule.is_two_way else 3
        prediction = predicted(name, p, 2 * p, cost=cost)
        plain = ANSI.sub("", drawn(prediction, width))
        rank_0 = "".join(
            line.removeprefix("rank 0  ") for line in plain.splitlines() if line[:6] == "rank 0"
        )
        has_stages = prediction.program.num_stages > p
        for stage, op, microbatch in prediction.program.actions[0]:
            label = f"{stage if has_stages else ''}{op}{microbatch}"
            assert rank_0.count(label) == 1, (name, label, rank_0)


def test_stages_of_a_rank_have_shades_of_their_own():
    text = drawn(predicted("interleaved_1f1b", 2, 2, v=4), 200)
    row = next(line for line in text.splitlines() if "rank 0" in ANSI.sub("", line))
    backgrounds = set(re.findall(r"48;2;\d+;\d+;\d+", row))
    assert len(backgrounds) == 2 * 4  # F and B of each of its stages


# check and export


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("communication", [None, AS_EARLY], ids=["compute", "with transfers"])
def test_what_is_exported_reads_back_and_is_torch_s(tmp_path, name, communication):
    path = tmp_path / "program.csv"
    output_of(planning.export, name, path, 4, 8, **(communication or {}))
    cells = [cell for line in path.read_text().splitlines() for cell in line.split(",")]
    assert [str(_Action.from_str(cell)) for cell in cells] == cells
    verdict = output_of(planning.check, str(path))
    assert verdict.startswith("ok: 4 ranks, ")
    assert "8 microbatches" in verdict
    assert "deadlock-free; peak activations by rank: " in verdict
    assert ("transfers" in verdict) == (communication is not None)
    again = output_of(planning.export, f"csv:{path}", tmp_path / "again.csv")
    assert output_of(planning.check, f"csv:{path}") == verdict
    assert (tmp_path / "again.csv").read_text() == path.read_text()
    assert again == str(tmp_path / "again.csv")


@pytest.mark.usefixtures("fresh_starts")
def test_planning_needs_neither_torch_nor_plotly():
    code = (
        "import sys; sys.argv = ['ppbench', 'simulate', '--schedule=1f1b', '-p2', '-m2']\n"
        "from ppbench.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "import ppbench.cli.schedules, ppbench.cli.simulate\n"
        "heavy = {'torch', 'plotly'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


SHARDING = "zero3,residency=1,look_ahead=0"


def test_collectives_are_exported_and_checked_by_a_policy(tmp_path):
    file = tmp_path / "sharded.csv"
    output_of(planning.export, "interleaved_1f1b", file, 2, 4, sharding=SHARDING)
    program, alone = read_csv(file), program_of(Wanted("interleaved_1f1b", 2, 4, None))
    assert program.actions == add_collectives(alone, Zero3(1, 0)).actions
    whole = output_of(planning.export, str(file), Path("-"), with_communication=True)
    lowered = with_collectives(lower(alone), program, NoCollectives())
    assert from_csv(whole, "all").actions == lowered.actions
    checked = output_of(planning.check, str(file), sharding=SHARDING)
    assert "32 actions, 36 collectives; deadlock-free" in checked
    assert "not checked" not in checked
    hint = "Its collectives are not checked: add --sharding POLICY"
    assert hint in output_of(planning.check, str(file))
    alone_again = output_of(planning.export, str(file), Path("-"), sharding="none")
    assert from_csv(alone_again, "alone").actions == alone.actions


def test_collectives_of_a_link_are_those_of_a_ring():
    link = "bytes=4e9,bandwidth=1e9,latency=0.5"
    sharded = {"replicas": 4, "sharding": "zero3"}
    given = simulated("1f1b", 2, 4, **sharded, collectives=link)
    assert (given["gather"], given["reduce"]) == (0.5 + 4 * 3 / 4, 0.5 + 4 * 3 / 4)
    whole = simulated("1f1b", 2, 4, replicas=4, collectives=link)
    assert whole["reduce"] == 0.5 + 2 * 4 * 3 / 4
    same = simulated("1f1b", 2, 4, **sharded, collectives="gather=3.5,reduce=3.5")
    assert same["makespan"] == given["makespan"]


@pytest.mark.parametrize("cost", ["F=1,I=1,W=1", "F=1e-9,I=0.3e-9,W=7e-10", "F=1e10,I=1,W=0"])
def test_the_frame_of_a_prediction_has_the_nearest_whole_nanoseconds(cost):
    costs = read_costs(cost)
    program = program_of(Wanted("1f1b", 2, 4, None))
    alone = predict(program, costs)
    alike = Replication(NoCollectives(), (Fraction(1), Fraction(1)))
    both = predict(program, costs, replication=alike)
    ends = [
        Fraction(end, alone.ticks_per_s) * 10**9 for row in alone.simulation.end_ns for end in row
    ]
    for frame in (alone.frame, both.frame[both.frame["replica"] == 0]):
        found = frame.loc[frame["lane"] == "compute", "end_ns"].tolist()
        assert all(isinstance(end, int) for end in found)
        assert all(
            abs(end - exact) <= Fraction(1, 2) for end, exact in zip(found, ends, strict=True)
        )
