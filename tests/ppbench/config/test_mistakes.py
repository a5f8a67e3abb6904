"""Mistakes in sweep files: each is one line with its place and what is wrong there.

More of them are recorded, in `recorded/errors/sweep-files.txt`.
Values alone are in `test_kinds.py`; files that were broken at random in `test_fuzzed_sweeps.py`.
"""

import pytest
from sweep_files import assert_refused, read

from ppbench.errors import SweepFileError, UsageError

EMULATED = 'device = "emulated"\n[emulated]\nF_ms = 2\nI_ms = 1.5\nW_ms = [1, 2]\n'
TRACE = '[model]\nsplit = "trace"\n'
AUTO = 'schedule = "auto"\n'
TRACKED = '[track]\nsetup = "make"\n[track.thresholds]\n"schedule=1f1b" = 0.05\n'
OVERRIDE = "[grid]\nseq_len = [64, 128]\n[[override]]\n"


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("[grid]\nseq_len = [\n    4,\n    '8',\n]", "4: grid.seq_len", 'got "8" (a string)'),
        ("[model]\n'dtype' = 1", "2: model.dtype", '"bfloat16"; got 1 (an integer)'),
        ("[train]\ntrain.compile = 1", "2: train.train", "unknown key"),
        ("[model]\nmodel.dtype = 1\n[data]\nmodel = 3", "2: model.model", "unknown key"),
        ("[model]\n[grid]\nmodel = 3", "3: grid.model", "expected a table; got 3"),
        (TRACE, "1: model.split_points", "is empty; name the submodules"),
        ("[[exclude]]\nschedule = 'gpipes'", "2: exclude.schedule", "gpipe"),
        ("model = 3", "1: model", "expected a table; got 3"),
        ("launch = {slurm = 3}", "1: launch.slurm", "expected a table; got 3"),
        ("grid = 3", "1: grid", "expected a table; got 3"),
        ("override = 3", "1: override", "expected [[override]], an array of tables"),
        ('"train.compile" = true\ntrain.compile = true', "2: train.compile", "is given twice: tr"),
        ("world_size = 2\nranks = 4\n", "2: ranks", "is given twice: world_size is the same key"),
        # what schedules and runtimes cannot do
        ('schedule = "dualpipev"\nworld_size = 4\nnum_microbatches = 7', "3: num_microbatches",
         "at least 2 x world_size; got num_microbatches 7, world_size 4"),
        ('num_microbatches = 9\n[grid]\nschedule = ["interleaved_zb"]\nworld_size = [4]',
         "1: num_microbatches", "multiple of max(1, num_microbatches // world_size)"),
        ("schedule = 'zbv'\n[model]\npartition = [4, 4]", "3: model.partition",
         "world_size 2, stages_per_rank 2"),
        # emulated stages
        (EMULATED + "link_ms = [1, 2]", "6: emulated.link_ms", "2 stages have 1 links"),
        (EMULATED + "gather_ms = [1, 2, 3]", "6: emulated.gather_ms", "3 times for 2 stages"),
        (EMULATED + "replica_factors = [1, 2]", "6: emulated.replica_factors", "2 factors"),
        ("[emulated]\nlink_ms = 1", "2: emulated.link_ms", "only with device=emu"),
        ("[emulated]\nreplica_factors = [1]", "2: emulated.replica_factors", "only with device"),
        ("[emulated]\nseed = 1", "2: emulated.seed", "only with device"),
        (EMULATED.replace("emulated", "cpu", 1), "3: emulated.F_ms", "only with device=emu"),
        (EMULATED.replace("[1, 2]", "0").replace("1.5", "0").replace("= 2", "= 0"),
         "3: emulated.F_ms", "nothing to measure"),
        ("seq_len = 'variable'\n" + EMULATED, "1: seq_len", "no data is read"),
        (EMULATED + "[model]\npartition = 'measured'", "7: model.partition", "no time of their"),
        # schedule "auto" and its limit
        (AUTO + "memory_limit = 4", "2: memory_limit", 'has no unit; give a size, such as "4 GiB"'),
        ('memory_limit = "1 GiB"', "1: memory_limit", 'schedule=auto; schedule is "1f1b"'),
        (AUTO + "memory_limit = 1\nstages_per_rank = 2\n" + EMULATED, "2: memory_limit",
         "1 is less than any program needs: a rank holds one microbatch of each of its 2 stages"),
        (AUTO + 'memory_limit = "1 GiB"\n' + EMULATED, "2: memory_limit", "hold no bytes; give a"),
        (AUTO + 'runtime = "torch"\n', "2: runtime", '"torch" has no schedule "auto"'),
        ("[train]\nrecompute = [true]", "2: train.recompute", "1 values for 2 stages (world_size"),
        # replicas
        ('[sharding]\npolicy = "zero3"', "2: sharding.policy", "with replicas>1; replicas is 1"),
        ("replicas = 2\n[sharding]\nresidency = 3", "3: sharding.residency",
         "only with sharding.policy=zero3"),
        ('replicas = 2\n[sharding]\npolicy = "zero3"\nresidency = 1', "2: sharding.look_ahead",
         "below the residency"),
        ('replicas = 2\nworld_size = 1\nruntime = "single"', "3: runtime",
         '2 replicas need runtime = "engine"'),
        # overrides
        ("[override]\nwhere = {}", "1: override", "expected [[override]], an array"),
        (f"{OVERRIDE}world_size = 4", "3: override", "expected where = {KEY = VALUE, ...} and"),
        (f"{OVERRIDE}set = {{seq_len = 4}}\nwhere = {{}}", "5: override.where", "is empty"),
        (f"{OVERRIDE}set = {{}}\nwhere = {{seq_len = 4}}", "4: override.set", "is empty"),
        (f"{OVERRIDE}where = {{seq_len = 64}}\nset = {{wrold_size = 4}}",
         "5: override.set.wrold_size", 'mean "world_size"'),
        (f"{OVERRIDE}where = {{seq_len = 64}}\nset = {{seq_len = 4}}", "5: override.set.seq_len",
         "is an axis of [grid]"),
        (f"{OVERRIDE}where = {{seq_len = 64}}\nset = {{device = 'emulated'}}",
         "5: override.set.device", "needs F_ms, I_ms and W_ms"),
        (f"{OVERRIDE}where = {{seq_len = 64}}\nset = {{name = 'x'}}", "5: override.set.name",
         "names the whole sweep"),
        # what is tracked
        (TRACKED.replace('setup = "make"', 'repo = "nowhere"'), "2: track.repo", "no such folder"),
        (TRACKED.replace("setup", "steup"), "2: track.steup", "unknown key"),
        (TRACKED.replace("0.05", "5"), '4: track.thresholds."schedule=1f1b"', "expected a frac"),
        (TRACKED.replace("schedule", "shedule"), '4: track.thresholds."shedule=1f1b"',
         'did you mean "schedule"'),
        ("[grid]\n'track.setup' = ['a']", "2: grid.track.setup",
         "cannot be an axis: it sets what is tracked over commits"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_located(tmp_path, text, where, what):
    assert_refused(tmp_path, text, where, what)


GRID = """\
[grid]
schedule = ["afab", "dualpipev"]
world_size = [2, 4]
num_microbatches = [4, 8]
seq_len = [64, 128]
"""


def test_the_combination_that_cannot_run_is_named_by_the_axes_that_matter(tmp_path):
    with pytest.raises(SweepFileError) as caught:
        read(tmp_path, GRID)
    named = 'schedule = "dualpipev", world_size = 4, num_microbatches = 4'
    assert ":4: grid.num_microbatches: dualpipev: num_microbatches must" in str(caught.value)
    assert f"(in the combination {named}; leave it out with [[exclude]]" in str(caught.value)
    without = GRID + "[[exclude]]\n" + named.replace(", ", "\n")
    assert len(read(tmp_path, without).cases) == 14


@pytest.mark.parametrize(
    ("text", "overrides", "error"),
    [
        (GRID, ["seq_len=4096", "schedule=afab"],
         "--set: grid.seq_len: 4096 is longer than the 2048 positions of llama-8m"),
        ('world_size = 4\n[grid]\nschedule = ["zbv", "dualpipev"]\nnum_microbatches = [7]',
         ["stages_per_rank=3", 'schedule=["1f1b", "csv:no.csv"]'],
         ("--set: stages_per_rank: 1f1b needs exactly 1 stage per rank, got 3 (in the combination "
         'schedule = "1f1b")')),
        ("", ["schedule=dualpipev", "world_size=8"],
         ("--set: num_microbatches: dualpipev: num_microbatches must be at least 2 x world_size; "
         "got num_microbatches 8, world_size 8")),
        ("", ["grid.track.repo=x"], ("--set grid.track.repo=x: track.repo cannot be an axis: it "
         "sets what is tracked over commits for all cases; drop grid.")),
    ],
)  # fmt: skip
def test_a_mistake_of_the_command_line_is_told_as_such(tmp_path, text, overrides, error):
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text, *overrides)
    assert str(caught.value) == error


def test_a_key_left_at_its_default_is_reported_where_it_is_asked_for(tmp_path):
    text = 'schedule = "dualpipev"\n[grid]\nworld_size = [2, 8]'
    assert_refused(tmp_path, text, "3: num_microbatches", "combination world_size = 8")


@pytest.mark.parametrize("kind", ["text", "files"])
def test_a_folder_without_a_file_is_said_to_be_there(tmp_path, kind):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".hidden.txt").write_text("text")
    with pytest.raises(SweepFileError) as error:
        read(tmp_path, f'[data]\nsource = "{kind}:{tmp_path}/empty"')
    assert f":2: data.source: no file in the folder: {tmp_path}/empty (" in str(error.value)


def test_a_grid_that_is_too_large_is_refused_without_expanding_it(tmp_path):
    axis = list(range(1, 400))
    text = f"[grid]\nnum_microbatches = {axis}\nseq_len = {axis}\nworld_size = {axis}"
    assert_refused(tmp_path, text, "1: grid", "63,521,199 cases; at most 100,000")


def test_a_program_file_that_is_wrong_is_to_be_mended(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0\n1B0,1F0\n")
    schedules = f'[grid]\nschedule = ["1f1b", "csv:{path}"]\n'
    with pytest.raises(SweepFileError) as caught:
        read(tmp_path, f"world_size = 2\nnum_microbatches = 1\n{schedules}")
    assert f"ppbench schedules check {path}" in str(caught.value)
    assert "[[exclude]]" not in str(caught.value)
    with pytest.raises(SweepFileError, match=f'write "csv:{path}"'):  # without its prefix
        read(tmp_path, f'schedule = "{path}"\n')
