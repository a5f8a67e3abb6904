"""Folders in which commands are run, each with a store of its own."""

import json
from dataclasses import replace

import pytest
from scenes import make_scene
from stored_runs import run_row, store_with

from engine.plan.model_costs import LinkCosts, ModelCosts, StageCosts
from ppbench.config.case import Case
from ppbench.planning.cost_file import write_costs_file
from ppbench.planning.cost_set import CostSet, Setting

LONG = "a message that is much longer than any terminal is wide, since somebody wrote a whole page "
AXES = {
    "schedule": ["afab", "1f1b", "interleaved_1f1b"],
    "world_size": [2, 4],
    "num_microbatches": [8, 1024],
    "seq_len": [128, "variable"],
    "stages_per_rank": [1, 2],
    "model_preset": ["llama-8m", "a/folder/of/a/model/with/a/long/path"],
    "train_microbatch_size": [1, 16],
    "device": ["cpu", "emulated"],
}


def many_axes(folder):
    rows = []
    for number in range(12):
        chosen = {name: values[number % len(values)] for name, values in AXES.items()}
        error = {"status": "oom", "error": LONG, "tokens_per_s": None} if number == 5 else {}
        row = run_row(number, replace(Case(), **chosen), cautions="busy_machine,few_steps", **error)
        row["run_id"] = f"20260101T0000{number:05}-{number * 7919:06x}"
        row |= {"commit": f"{number:x}" * 40, "sweep_name": f"a sweep named {number}"}
        rows.append(row)
    store_with(folder / "results", rows)
    axes = "\n".join(
        f"{name.replace('train_', 'train.').replace('model_', 'model.')} = {json.dumps(values)}"
        for name, values in AXES.items()
        if name not in ("device", "model_preset", "schedule", "stages_per_rank")
    )
    (folder / "many.toml").write_text(
        f"device = 'cpu'\n[grid]\nschedule = ['afab', '1f1b']\n{axes}"
    )


PLANNED = "a_sweep_with_a_name_of_forty_characters.toml"


def planned(folder):
    """A sweep whose layers have costs already."""
    layer = StageCosts(1e6, 2e6, 1e6, 1e6, 0.01, 2**24, 2**22, 2**20, 2**20, 2**20, 1e5)
    model = ModelCosts(layer, (layer,) * 4, layer)
    made = {Setting(1, recompute=False): model}
    costs = CostSet("llama-tiny", "float32", 64, "adamw", "cpu", "made up", made, LinkCosts(1e4))
    write_costs_file(costs, folder / "costs.toml")
    (folder / PLANNED).write_text(
        'num_microbatches = 8\nseq_len = 64\nmodel.preset = "llama-tiny"\n'
        'plan = {ranks = [2, 4], schedules = ["1f1b", "zb_h1"], costs = "file:costs.toml"}\n'
    )


@pytest.fixture(scope="session")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("places")
    for name in ("swept", "tracked", "history", "bisected", "traces", "empty"):
        (folder / name).mkdir()
        make_scene(name, folder / name)
    (folder / "axes").mkdir()
    many_axes(folder / "axes")
    (folder / "planned").mkdir()
    planned(folder / "planned")
    return folder
