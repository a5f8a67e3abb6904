"""Stages without parameters are named before anything runs, as the model that is built has them."""

from __future__ import annotations

import itertools

import pytest
import torch
from recordings import ppbench

from engine.model.partition import balance, partition_layers
from engine.model.spec import ModelSpec
from engine.model.split import open_model
from ppbench.config.case import Case
from ppbench.config.feasibility import notes_on_stages, stages_without
from ppbench.config.programs import facts_of, identity_of

SWEEP = """
[model]
preset = "llama-tiny"
[data]
source = "synthetic"
[grid]
schedule = ["afab", "1f1b"]
world_size = [2, 7]
"""


@pytest.mark.parametrize("name", ["llama-tiny", "llama-tiny-tied"])
def test_stages_are_as_bare_as_those_of_the_model_itself(name):
    model = open_model(ModelSpec(name), (1, 16), torch.device("cpu"))
    parts = {"uniform": partition_layers, "parameters": lambda _, __, n: balance(model.costs, n)}
    identity = identity_of(Case(model_preset=name))
    costs = facts_of([identity])[identity].costs
    assert costs == model.costs
    for num_stages, partition in itertools.product(range(1, 13), parts):
        layers = parts[partition](partition, model.num_layers, num_stages)
        sizes = model.costs.of_stages(layers)
        assert stages_without(costs, partition, num_stages) == [
            stage for stage, size in enumerate(sizes) if size == 0
        ]


@pytest.mark.parametrize("partition", [(2, 0, 1, 1, 0, 0, 0), "measured"])
def test_what_is_asked_for_or_decided_by_the_run_is_not_noted(partition):
    case = Case(model_preset="llama-tiny", world_size=7, model_partition=partition)
    assert notes_on_stages([case], facts_of([identity_of(case)])) == []


def test_a_dry_run_names_the_stages_once_and_keeps_its_output_clean(tmp_path):
    (tmp_path / "bare.toml").write_text(SWEEP)
    done = ppbench(["sweep", "bare.toml", "--dry-run", "--format", "csv"], tmp_path)
    (line,) = done.stderr.splitlines()
    assert line.startswith("note: llama-tiny on 7 stages (world_size 7): stage 5 has no parameters")
    assert len(done.stdout.splitlines()) == 5
