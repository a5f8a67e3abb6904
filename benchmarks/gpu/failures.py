"""A rank that runs out of memory, asserts, is killed or stops: named, and other cases are sound."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

import ppbench
from benchmarks.gpu.findings import Bound, Finding
from benchmarks.surroundings import ROOT
from ppbench.run.sweep.control import sweep

FACTORIES = "benchmarks.gpu.faulty"
EXPECTED = {
    "out_of_memory": ("oom",),
    "asserts": ("error", "crash"),  # a failed assertion may end the process
    "is_killed": ("crash",),
    "stops": ("timeout",),
}
"""The statuses that a fault may end in."""
SWEEP = """\
name = "failures"
device = "{device}"
world_size = 2
seq_len = 16

[measure]
warmup_steps = 1
max_warmup_steps = 1
steps = 2
timeout_s = {timeout_s}

[grid]
num_microbatches = [4]
"model.preset" = {presets}
"""


@dataclass(frozen=True)
class Measurements:
    """By fault, the status of its run, and that of a sound case of the same launch."""

    statuses: dict[str, str]
    following: dict[str, str]


def judge(measured: Measurements) -> list[Finding]:
    return [finding for fault in EXPECTED for finding in _judge(fault, measured)]


def _judge(fault: str, measured: Measurements) -> list[Finding]:
    status = measured.statuses.get(fault, "no run")
    following = measured.following.get(fault, "no run")
    wanted = " or ".join(EXPECTED[fault])
    return [
        Finding.of(
            "failures",
            f"{fault}: a run with status {wanted}",
            int(status in EXPECTED[fault]),
            Bound(at_least=1),
            note=f"status {status}",
        ),
        Finding.of(
            "failures",
            f"{fault}: a sound case of the same launch is ok",
            int(following == "ok"),
            Bound(at_least=1),
            note=f"status {following}",
        ),
    ]


def measure(device: torch.device, timeout_s: int = 20) -> Measurements:
    """As many sound cases as faults, in one launch, in the order that the sweep gives them."""
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    presets = [f"{FACTORIES}:{prefix}{fault}" for fault in EXPECTED for prefix in ("", "after_")]
    with tempfile.TemporaryDirectory(prefix="ppbench-gpu-") as folder:
        path = Path(folder) / "failures.toml"
        settings = {"device": device.type, "timeout_s": timeout_s, "presets": json.dumps(presets)}
        path.write_text(SWEEP.format(**settings))
        sweep(path, results=Path(folder) / "results")
        runs = ppbench.load(Path(folder) / "results").runs
    names = runs["model_preset"].str.removeprefix(f"{FACTORIES}:")
    found = dict(zip(names, runs["status"].astype(str), strict=True))
    return Measurements(
        {fault: found.get(fault, "no run") for fault in EXPECTED},
        {fault: found.get(f"after_{fault}", "no run") for fault in EXPECTED},
    )
