"""Folders in which commands are run, each with a store of its own."""

import json
from dataclasses import replace

import pytest
from scenes import make_scene
from stored_runs import run_row, store_with

from ppbench.config.case import Case

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


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("places")
    for name in ("swept", "tracked", "history", "bisected", "traces", "empty"):
        (folder / name).mkdir()
        make_scene(name, folder / name)
    (folder / "axes").mkdir()
    many_axes(folder / "axes")
    return folder
