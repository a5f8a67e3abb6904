"""The sweep file of `ppbench init`: valid on every machine, and no larger than it."""

import re
import tomllib

import pytest

from ppbench.config.reader import read_sweep
from ppbench.config.template import sweep_template

MACHINES = [(1, 0), (2, 0), (3, 0), (64, 0), (4, 1), (16, 2), (96, 8)]


@pytest.mark.parametrize(("num_cores", "num_gpus"), MACHINES)
def test_the_file_is_valid_and_no_larger_than_the_machine(tmp_path, num_cores, num_gpus):
    file = tmp_path / "mine.toml"
    file.write_text(sweep_template("mine", num_cores, num_gpus))
    sweep = read_sweep(file, [], "cpu")
    devices = {case.device for case, _ in sweep.cases}
    ranks = max(case.world_size for case, _ in sweep.cases)
    if num_gpus:
        assert devices == {"cuda"}
        assert ranks <= num_gpus
    elif num_cores == 1:
        assert devices == {"emulated"}
    else:
        assert devices == {"cpu"}
        assert 1 < ranks <= num_cores
    assert {measure.launches for _, measure in sweep.cases} == {3}
    assert sweep.name == "mine"


def test_every_key_has_a_comment_and_what_is_commented_out_is_valid_too(tmp_path):
    text = sweep_template("mine", 2, 0)
    keys = [line for line in text.splitlines() if re.match(r"(# )?\w+ +=", line)]
    plain = {"name", "learning_rate", "world_size", "num_microbatches", "set"}
    for line in keys:
        assert line.count("#") > line.startswith("#") or line.strip("# ").split()[0] in plain, line
    assert max(map(len, text.splitlines())) <= 100
    whole = re.sub(r"^# (?=\w+ *=|\[\[)", "", text, flags=re.MULTILINE)
    assert {"exclude", "override"} <= set(tomllib.loads(whole))
    file = tmp_path / "mine.toml"
    file.write_text(whole.replace("world_size       = [2]", "world_size       = [2, 16]"))
    cases = [case for case, _ in read_sweep(file, [], "cpu").cases]
    assert {case.device for case in cases} == {"cpu", "emulated"}
    assert cases[0].train_compile
    assert cases[0].model_weights == "random"


def test_what_replicas_share_can_be_uncommented(tmp_path):
    file = tmp_path / "mine.toml"
    text = sweep_template("mine", 1, 0)
    for key in ("sharding.policy", "gather_ms", "reduce_ms"):
        assert f"# {key} =" in text
        text = text.replace(f"# {key} =", f"{key} =")
    text = text.replace("# replicas       = [1, 2]", "replicas = [2]")
    file.write_text(text)
    for case, _ in read_sweep(file, [], "cpu").cases:
        assert (case.replicas, case.sharding_policy) == (2, "zero2")
        assert (case.emulated_gather_ms, case.emulated_reduce_ms) == ((5,), (10,))
