"""Replicas and shards of a sweep file: what its settings mean, and which cannot be together."""

from __future__ import annotations

import dataclasses

import pytest
from sweep_files import only_case, read

from engine.plan.action import COLLECTIVE_OPS, COMPUTE_OPS
from engine.plan.collectives import (
    DataParallel,
    NoCollectives,
    TorchWindow,
    Zero1,
    Zero2,
    Zero3,
)
from engine.plan.program import to_csv
from ppbench.config.case import Case
from ppbench.config.programs import lowered_of, program_of, sharding_of
from ppbench.errors import SweepFileError

EMULATED = 'device = "emulated"\n[emulated]\nF_ms = 1\nI_ms = 1\nW_ms = 1\n'
SHARDED = Case(world_size=2, replicas=2, num_microbatches=3, sharding_policy="zero3")


def names_of(row):
    return " ".join(str(action) for action in row if action.op in COMPUTE_OPS | COLLECTIVE_OPS)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("", DataParallel()),
        ('policy = "none"', NoCollectives()),
        ('policy = "zero1"', Zero1()),
        ('policy = "zero2"\nevery_backward = false', Zero2(every_backward=False)),
        ('policy = "zero3"\nresidency = 3\nlook_ahead = 2', Zero3(3, 2)),
        ('policy = "torch"\nmax_active_stages = 1', TorchWindow(1)),
    ],
)
def test_each_policy_has_its_settings(tmp_path, text, policy):
    case = only_case(read(tmp_path, f"replicas = 3\nworld_size = 2\n[sharding]\n{text}"))
    assert sharding_of(case) == policy
    assert (case.num_processes, case.tokens_per_step) == (6, 3 * 8 * 128)


def test_a_case_with_replicas_has_their_collectives_and_one_without_has_none():
    row = "0UNSHARD 0F0 0F1 0B0 0F2 0B1 0B2 0REDUCE_GRAD 0RESHARD"
    assert names_of(lowered_of(SHARDED).actions[0]) == row
    alone = dataclasses.replace(SHARDED, replicas=1, sharding_policy="ddp")
    assert not lowered_of(alone).has_collectives


def written(*, has_transfers):
    alone = dataclasses.replace(SHARDED, replicas=1, sharding_policy="ddp")
    program = lowered_of(alone) if has_transfers else program_of(alone)
    return [line.split(",") for line in to_csv(program).splitlines()]


@pytest.mark.parametrize("has_transfers", [False, True])
def test_a_file_with_collectives_is_run_as_it_is_written(tmp_path, monkeypatch, has_transfers):
    monkeypatch.chdir(tmp_path)
    rows = [
        [f"{r}UNSHARD", *row, f"{r}RESHARD", f"{r}REDUCE_GRAD"]
        for r, row in enumerate(written(has_transfers=has_transfers))
    ]
    (tmp_path / "own.csv").write_text("\n".join(",".join(row) for row in rows))
    text = 'schedule = "csv:own.csv"\nnum_microbatches = 3\n[sharding]\npolicy = "zero3"\n'
    case = only_case(read(tmp_path, "replicas = 2\n" + text))
    first = names_of(lowered_of(case).actions[0])
    assert first == "0UNSHARD 0F0 0F1 0B0 0F2 0B1 0B2 0RESHARD 0REDUCE_GRAD"
    alone = only_case(read(tmp_path, text, "sharding.policy=ddp"))
    assert not lowered_of(alone).has_collectives
    with pytest.raises(SweepFileError, match="the policy shards no parameters"):
        read(tmp_path, "replicas = 2\n" + text, "sharding.policy=ddp")
