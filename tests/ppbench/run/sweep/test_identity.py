"""What a run is measured by: an edit of any of it makes the run another one, in any session."""

from __future__ import annotations

import pytest

from ppbench.config.case import Measure, settings_in
from ppbench.config.reader import read_sweep
from ppbench.run.sweep.plan import Choice, plan_sweep
from ppbench.store import Store

pytestmark = pytest.mark.usefixtures("warm_starts")

FACTORY = """\
from torch import nn
from below.parts import layer

def build():
    return nn.Sequential(nn.Embedding(256, 8), layer(), nn.Linear(8, 256))
"""
PARTS = """\
from . import width

def layer():
    import torch
    import unrelated
    return torch.nn.Linear(width.WIDTH, width.WIDTH)
"""
FILES = {
    "my_model.py": FACTORY,
    "below/parts.py": PARTS,
    "below/width.py": "WIDTH = 8\n",
    "unrelated.py": "x = 1\n",
    "not_imported.py": "x = 1\n",
    "a.txt": "some text\n" * 1000,
}
SWEEP = """\
name = "mine"
model.preset = "my_model:build"
data.source = "text:a.txt"
world_size = 1
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "sweep.toml").write_text(SWEEP)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def key_in(folder, *overrides):
    """The resume key of the sweep's first run, as one session of Python plans it."""
    sweep = read_sweep(folder / "sweep.toml", overrides, "cpu")
    item, *_ = plan_sweep(sweep, Store(folder / "results"), Choice()).items
    return item.resume_key


def test_an_edited_input_is_measured_again_in_the_same_session(folder):
    """A file that the factory does not import is no input."""
    key = key_in(folder)
    assert key_in(folder) == key
    for name, text in FILES.items():
        changed = text.replace("1", "2").replace("8", "16").replace("text", "word")
        (folder / name).write_text(changed.replace("256", "300") + "\n")
        before, key = key, key_in(folder)
        assert (key == before) is (name == "not_imported.py"), name


IS_HOW_IT_IS_MEASURED = {
    "warmup_steps=4": True,
    "max_warmup_steps=9": True,
    "steps=11": True,
    "block=5": True,
    "verify=true": True,
    "profile_steps=1": True,
    "launches=2": False,
    "budget=9m": False,
    "resolution=0.1": False,
    "timeout_s=60": False,
    "retry=1": False,
    "order_seed=1": False,
}


def test_a_run_that_is_measured_in_another_way_is_another_one(folder):
    every = {declared.field for declared in settings_in(Measure)}
    assert {one.partition("=")[0] for one in IS_HOW_IT_IS_MEASURED} == every
    preset = 'model.preset="llama-tiny"'
    before = key_in(folder, preset)
    for assignment, is_another in IS_HOW_IT_IS_MEASURED.items():
        assert (key_in(folder, preset, f"measure.{assignment}") != before) is is_another, assignment
