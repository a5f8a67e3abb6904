"""What is noted of models and texts before anything runs, as the model that is built has them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from recordings import ppbench

from engine.model.local_files import local_files
from engine.model.partition import balance, partition_layers, totals_of
from engine.model.sequences import PackedSequences
from engine.model.spec import ModelSpec
from engine.model.split import open_model
from engine.model.tokens import FileTokens
from ppbench.config.case import Case
from ppbench.config.feasibility import notes_on_sources, notes_on_stages, stages_without
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
    parts = {
        "uniform": partition_layers,
        "parameters": lambda _, __, n: balance(model.part_sizes, n),
    }
    identity = identity_of(Case(model_preset=name))
    sizes = facts_of([identity])[identity].part_sizes
    assert sizes == model.part_sizes
    for num_stages, partition in itertools.product(range(1, 13), parts):
        layers = parts[partition](partition, model.num_layers, num_stages)
        totals = totals_of(sizes, layers)
        assert stages_without(sizes, partition, num_stages) == [
            stage for stage, size in enumerate(totals) if size == 0
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


def test_a_source_has_its_files_bytes_and_the_sequences_of_a_training(tmp_path: Path) -> None:
    for name, size in (("a.txt", 1000), ("b.txt", 24)):
        (tmp_path / name).write_bytes(b"x" * size)
    source = f"text:{tmp_path}"
    case = Case(data_source=source, seq_len=128)
    cases = [case, replace(case, seq_len=64), replace(case, schedule="afab"), Case()]
    tokens = FileTokens(source, local_files(source))
    short, long = (PackedSequences(tokens, n, source).num_sequences for n in (64, 128))
    assert (short, long) == (15, 7)  # the last token is a target only
    (told,) = notes_on_sources(cases, facts_of(map(identity_of, cases)))
    assert told == (
        f"{source}: 2 files, 1,024 bytes, {short} sequences of 64 tokens, "
        f"{long} sequences of 128 tokens"
    )


def test_sequences_of_variable_length_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 1000)
    case = Case(data_source=f"text:{tmp_path}/a.txt", seq_len="variable")
    (told,) = notes_on_sources([case], facts_of([identity_of(case)]))
    assert told.endswith("a.txt: 1 file, 1,000 bytes")
