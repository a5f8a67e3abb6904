"""What a device's variables must be, and that every way of starting ranks sees to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.device_variables import (
    DEVICE_VARIABLES,
    DeviceVariableError,
    check,
    prepare,
    recorded,
    refused,
)
from ppbench.config.case import Case, Measure
from ppbench.config.sweep import Sweep
from ppbench.errors import UsageError
from ppbench.run.launch import local
from ppbench.run.sweep import plan

NAMES = [variable.name for variable in DEVICE_VARIABLES]
SET = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "CUDA_MODULE_LOADING": "EAGER",
    "CUDA_LAUNCH_BLOCKING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}


@pytest.fixture
def bare(monkeypatch):
    """An environment in which none is set."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_what_is_absent_is_set_and_what_is_set_stays():
    environ = {"CUDA_LAUNCH_BLOCKING": "1", "HOME": "/"}
    prepare(environ)
    assert environ == {**SET, "CUDA_LAUNCH_BLOCKING": "1", "HOME": "/"}
    assert recorded(environ) == {**SET, "CUDA_LAUNCH_BLOCKING": "1"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        ("NCCL_BLOCKING_WAIT", "true"),
        ("NVIDIA_TF32_OVERRIDE", "1"),
        ("AMD_SERIALIZE_KERNEL", "3"),
    ],
)
def test_a_value_that_bends_timings_is_refused_with_the_reason_and_the_remedy(name, value):
    problem = refused({**SET, name: value})
    assert problem.startswith(f'{name} is "{value}": ')
    assert "unset it" in problem
    with pytest.raises(DeviceVariableError, match=name):
        check({name: value})


@pytest.mark.parametrize(
    "environ",
    [
        {},
        SET,
        {"TORCH_NCCL_BLOCKING_WAIT": "no", "NCCL_BLOCKING_WAIT": "F"},
        {"NVIDIA_TF32_OVERRIDE": "0", "CUDA_MODULE_LOADING": "eager"},
    ],
)
def test_other_ways_to_write_the_same_are_accepted(environ):
    assert refused(environ) is None
    check(environ)


def test_ranks_of_the_supervisor_have_them(bare, tmp_path):
    started = []

    def start(*_, env, **__):
        started.append(env)
        raise OSError

    bare.setattr(subprocess, "Popen", start)
    begin = local.Begin(str(tmp_path), "", 1, 0, "", [], {})
    with pytest.raises(OSError):
        local.Supervisor().begin(begin)
    (worker,) = started
    assert worker.items() >= SET.items()


SHOW = f"""
import json, os, sys
def variables():
    return {{name: os.environ.pop(name, None) for name in {NAMES} if name in os.environ}}
"""
STUBS = {
    # Each entry point, and what is put in the place of the first thing that it would run.
    "engine.train": "Launch",
    "engine.describe": "facts",
    "ppbench.run.launch.supervisor": "run_on_node",
}


def shown_by(code, stdin=""):
    environ = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", SHOW + code], input=stdin, env=environ, capture_output=True,
        text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert "SHOWN " in output, output
    return json.loads(output.rpartition("SHOWN ")[2].splitlines()[0])


def test_every_entry_point_sets_them_before_it_begins():
    code = f"""
import importlib, operator
class Shown(BaseException): pass
def stub(*_, **__): raise Shown
found = {{}}
for module, stubbed in {STUBS}.items():
    sys.argv = [module, "facts", "1", "0", "json", "module"]
    entry = importlib.import_module(module)
    owner, _, name = stubbed.rpartition(".")
    setattr(operator.attrgetter(owner)(entry) if owner else entry, name, stub)
    variables()
    try: entry.main()
    except Shown: found[module] = variables()
print("SHOWN " + json.dumps(found), flush=True)
"""
    request = {"identity": {}, "settings": []}
    assert shown_by(code, json.dumps(request)) == dict.fromkeys(STUBS, SET)


def test_a_rank_that_anybody_starts_sets_them_before_it_imports_torch():
    code = """
import types
rank = types.ModuleType("ppbench.run.worker.rank")
def main(arguments):
    assert "torch" not in sys.modules
    print("SHOWN " + json.dumps(variables()))
rank.main = main
sys.modules["ppbench.run.worker.rank"] = rank
import runpy
runpy.run_module("ppbench.run.worker", run_name="__main__")
"""
    assert shown_by(code) == SET


def sweep_on(device):
    return Sweep("name", Path("file.toml"), ((Case(device=device), Measure()),), axes=())


def test_a_sweep_on_gpus_is_refused_before_anything_starts_and_one_on_cores_is_not(bare):
    bare.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    plan.check_devices(sweep_on("cpu"))
    with pytest.raises(UsageError, match=r"file\.toml: device: CUDA_DEVICE_MAX"):
        plan.check_devices(sweep_on("cuda"))
