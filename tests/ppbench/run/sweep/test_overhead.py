"""The overhead of measuring: balanced turns, ratios by hand, the command as a subprocess."""

import collections
import itertools
import json
import signal
import subprocess
import sys

import pytest
from command import PATIENCE_S, ppbench

from ppbench.config.case import Case
from ppbench.run.sweep.overhead import Rounds
from ppbench.run.worker.overhead import ORDERS

pytestmark = pytest.mark.usefixtures("warm_starts")

SMALL = """\
name = "small"
seq_len = 16

[model]
preset = "llama-tiny"

[measure]
warmup_steps = 1
max_warmup_steps = 1

[grid]
num_microbatches = [2, 3]
"""


def test_each_arm_comes_as_often_at_every_place_and_after_every_arm():
    turns = list(itertools.chain(*ORDERS))
    for place in range(4):
        found = collections.Counter(order[place] for order in ORDERS)
        assert found == {"off": 2, "flight": 2, "on": 2, "profiler": 2}
    after = collections.Counter(zip(turns, [*turns[1:], turns[0]], strict=True))
    assert len(after) == 16
    assert set(after.values()) == {2}


def test_a_row_has_the_median_step_and_the_ratios_of_the_rounds():
    off, on, profiled = [100, 200, 300, 400, 500, 600], [110, 220, 300, 400, 500, 600], [200] * 6
    flight = [101, 202, 303, 404, 505, 606]
    row = Rounds(Case(), off, flight, on, profiled).row()
    assert row["num_rounds"] == 6
    assert row["step_off_ns"] == 350
    # The estimate is the median of 21 means of two rounds' logarithms, its ends are the extremes.
    assert [row["spans_ratio"], row["spans_ratio_low"], row["spans_ratio_high"]] == pytest.approx(
        [1.1**0.5, 1, 1.1]
    )
    flight_ratio = [row[f"flight_ratio{end}"] for end in ("", "_low", "_high")]
    assert flight_ratio == pytest.approx([1.01, 1.01, 1.01])
    ends = (row["profiler_ratio_low"], row["profiler_ratio_high"])
    assert ends == pytest.approx((200 / 600, 2))
    assert ends[0] < row["profiler_ratio"] < ends[1]


def test_the_command_prints_a_row_for_each_case_and_writes_nothing(tmp_path):
    (tmp_path / "small.toml").write_text(SMALL)
    done = ppbench("overhead", "small.toml", "--rounds", "7", "--format", "json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["num_microbatches"] for row in rows] == [2, 3]
    for row in rows:
        assert row["num_rounds"] == 7
        assert row["step_off_ns"] > 0
        for name in ("flight_ratio", "spans_ratio", "profiler_ratio"):
            assert 0 < row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]
    assert "case 2 of 2: 3 microbatches" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["small.toml"]


def test_a_rank_that_dies_is_one_clear_error_and_what_was_finished_is_printed(tmp_path):
    half_a_terabyte = '2_048]\n"train.microbatch_size" = [1, 1_000_000]'
    text = SMALL.replace("3]", half_a_terabyte)
    for count, size in ((2, 1_000_000), (2_048, 1)):
        text += f'[[exclude]]\nnum_microbatches = {count}\n"train.microbatch_size" = {size}\n'
    (tmp_path / "small.toml").write_text(text)
    done = ppbench("overhead", "small.toml", "--rounds", "6", folder=tmp_path)
    assert done.returncode == 4, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "case 2 of 2: 2048 microbatches, microbatch size 1000000: rank " in error
    assert "MemoryError" in error
    assert "Traceback" not in done.stderr
    headings, rows = done.stdout.split("─\n")
    assert "profiler/off" in headings
    row, *after = rows.splitlines()
    assert row.split()[0] == "2"
    assert "".join(after[:1]).startswith(" no room for ") or not after


def test_it_can_be_stopped(tmp_path):
    (tmp_path / "small.toml").write_text(SMALL)
    arguments = ["overhead", "small.toml", "--rounds", "2000"]
    command = [sys.executable, "-c", "from ppbench.cli import main; main()", *arguments]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline().startswith("case 1 of 2")  # the ranks have begun
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert stderr.splitlines() == ["stopped"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["small.toml", "--rounds", "5"], "6"),
        (["small.toml", "--set", "measure.profile_steps=1001"], "1,000"),
        (["nothing.toml"], "nothing.toml"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(tmp_path, arguments, words):
    (tmp_path / "small.toml").write_text(SMALL)
    done = ppbench("overhead", *arguments, folder=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
