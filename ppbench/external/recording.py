"""Joins the recordings of the ranks of an attached pipeline and its replicas to one run."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from engine import device_variables
from engine.plan.action import RECV_OPS, SEND_OPS, Action, Op
from engine.plan.check import check_delivery_between_ranks
from engine.plan.program import Program
from engine.plan.rules import ProgramError
from engine.plan.spans import COLUMNS, Span
from engine.run import device as devices
from engine.run.alignment import Alignment
from engine.run.clock import Clock
from engine.run.precision import float32_precision
from ppbench.analysis.transfers import Receive
from ppbench.cautions import Caution
from ppbench.errors import RepositoryError, UsageError
from ppbench.external.members import Members
from ppbench.external.record import RecordedRun, named_program
from ppbench.git import Repository, read_commit
from ppbench.run.machine.environment import available_cores, fingerprint_here, read_environment
from ppbench.run.machine.placement import Place, has_too_few_cores, machine_id, shares_device
from ppbench.run.runtimes.runtime import clock_facts, id_of
from ppbench.run.runtimes.torch_spans import program_from, stages_of
from ppbench.store.columns import ATTACHED


@dataclass
class RankRecording:
    """Recording of one rank, as it is sent to the others."""

    error: str | None = None
    spans: list[Span] = field(default_factory=list)
    early: set[Receive] = field(default_factory=set)  # had arrived before the rank waited for it
    row: tuple[Action, ...] = ()
    losses: dict[int, float] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)  # columns of `ranks`
    place: Place = field(default_factory=lambda: Place("", 1))


def join_recordings(
    recordings: Sequence[RankRecording],
    schedule: Any,
    device: torch.device,
    members: Members,
    num_steps_before: int,
) -> RecordedRun:
    """Join the recordings of all ranks. Raises UsageError, also if a rank could not record."""
    for rank, recording in enumerate(recordings):
        if recording.error is not None:
            name = members.name_of(rank).removesuffix(" of the pipeline")
            raise UsageError(f"{name} could not be recorded: {recording.error}")
    size = len(recordings) // members.num_replicas
    replicas = [recordings[first : first + size] for first in range(0, len(recordings), size)]
    program = _program_of(schedule, replicas)
    # The mean over the replicas of each step; of each replica that of its last rank that has it.
    by_step: dict[int, list[float]] = {}
    for replica in replicas:
        of_replica = {step: loss for rank in replica for step, loss in rank.losses.items()}
        for step, loss in of_replica.items():
            by_step.setdefault(step, []).append(loss)
    # One optimizer span per rank and step: there may be an optimizer for each stage.
    optimizers: dict[tuple[int, int, int], Span] = {}
    spans = []
    for span in (span for recording in recordings for span in recording.spans):
        if span.op is not Op.OPT:
            spans.append(span)
            continue
        key = span.step, span.rank, span.replica
        before = optimizers.get(key, span)
        optimizers[key] = before._replace(
            start_ns=min(before.start_ns, span.start_ns), end_ns=max(before.end_ns, span.end_ns)
        )
    places = [recording.place for recording in recordings]
    cautions = {
        Caution.oversubscribed: has_too_few_cores(places, torch.get_num_threads()),
        Caution.time_sliced: shares_device(places),
    }
    commit, num_ranks = read_commit(Path.cwd()), len(members.ranks)
    facts = {
        **({} if commit is None else asdict(commit)),
        "fingerprint": fingerprint_here(device.type, num_ranks, torch.get_num_threads()),
        "environment": read_environment().as_json(),
        "device_variables": json.dumps(device_variables.recorded(os.environ))
        if devices.is_accelerator(device)
        else None,
        "float32_precision": float32_precision(),
        "transport": members.backend if num_ranks > 1 else "none",
        "sweep_file": sys.argv[0],
    }
    return RecordedRun(
        ATTACHED,
        program,
        pd.DataFrame([*spans, *optimizers.values()], columns=list(COLUMNS)),
        [recording.facts for recording in recordings],
        facts,
        {step: sum(losses) / len(losses) for step, losses in by_step.items()},
        early=set().union(*(recording.early for recording in recordings)),
        num_warmup_steps=num_steps_before,
        cautions=[caution for caution, holds in cautions.items() if holds],
        completion_seen_on_wait=True,
        number=members.ranks[0],
        source=source_of(Path(sys.argv[0])),
    )


def source_of(script: Path) -> str:
    """Tell a script from others: by its path where git tracks it, else by a hash of its text.

    What is in a tracked one, the commit and its changes tell. Empty where there is no file.
    """
    with contextlib.suppress(RepositoryError):
        repository = Repository.around(Path.cwd())
        if repository.has_commits() and (path := repository.path_of(script)):
            return path
    with contextlib.suppress(OSError):
        return hashlib.sha256(script.read_bytes()).hexdigest()[:12]
    return ""


def _program_of(schedule: Any, replicas: Sequence[Sequence[RankRecording]]) -> Program:
    """Return the program of all replicas, without transfers. Raises UsageError."""
    first, *others = (
        program_from(schedule, [recording.row for recording in replica]) for replica in replicas
    )
    for replica, program in enumerate(others, 1):
        if program.actions != first.actions:
            raise UsageError(
                f"replica {replica} did other actions than replica 0, or in another order; "
                "expected one program"
            )
    try:
        check_delivery_between_ranks(first)
    except ProgramError as error:
        raise UsageError(
            f"the schedule trains on the wrong microbatch: {error.action} on rank {error.rank} "
            f"{error.reason}; torch delivers the messages between two ranks in the order in "
            "which they are posted, so post receives in the order of their sends"
        ) from None
    name = named_program(first.compute_only()).schedule
    kept = [tuple(a for a in row if a.op not in SEND_OPS | RECV_OPS) for row in first.actions]
    return dataclasses.replace(first, schedule=name, actions=kept)


def rank_facts(
    schedule: Any, members: Members, clock: Clock, alignment: Alignment
) -> dict[str, object]:
    """Return columns of `ranks`."""
    stages = stages_of(schedule)
    device = torch.device(stages[0].device)
    memory: dict[str, object] = {"peak_memory_bytes": None}
    if devices.is_accelerator(device):
        # The allocator's peak since the script began or last reset it; ppbench never resets.
        peaks = devices.peaks_of(device)
        memory = {
            "peak_memory_bytes": peaks.allocated_bytes,
            "active_bytes": peaks.active_bytes,
            "reserved_bytes": peaks.reserved_bytes,
        }
    parameters = {id(p): p for stage in stages for p in stage.submod.parameters()}
    return {
        "hostname": platform.node(),
        "device": str(device),
        "num_parameters": sum(p.numel() for p in parameters.values()),
        "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **clock_facts(members.rank, alignment, clock.error_ns),
        **memory,
    }


def place_of(device: torch.device) -> Place:
    """Return where this rank is, which is told apart also where a process sees only some GPUs."""
    uuid = id_of(device) if devices.is_accelerator(device) else ""
    return Place(machine_id(), available_cores(), uuid)
