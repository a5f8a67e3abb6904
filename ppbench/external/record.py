"""Stores a run that ppbench did not start, with the same columns as a measured one.

Unknown figures are null. Settings are columns of every run: `settings_told` lists those that are
known, and the others are `unknown`, or 0 and false where they are not text. The workload's id also
depends on the name given by its owner, so that two unknown models are never compared.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pandas as pd

from engine.plan.check import check
from engine.plan.program import TRAIN, Program
from engine.plan.rules import ProgramError, peak_activations
from engine.plan.schedules.registry import SCHEDULES, ScheduleError, build_program, in_mode
from ppbench import __version__
from ppbench.analysis.transfers import Receive
from ppbench.cautions import Caution
from ppbench.config.case import UNKNOWN, Case, with_recompute_by_stage
from ppbench.config.conditions import checked_value, parse_assignment
from ppbench.config.programs import lowered_of
from ppbench.errors import UsageError
from ppbench.run.machine.measuring_code import code_hash
from ppbench.run.records import FinishedRun, first_loss_not_finite, rows_of
from ppbench.store import Condition, Store, new_run_id
from ppbench.store.columns import IMPORTED

_CASE_FIELDS: dict[str, object] = {
    case_field.name: case_field.default for case_field in dataclasses.fields(Case)
}
_RECORDED = (
    *("schedule", "mode", "world_size", "num_microbatches", "stages_per_rank"),
    *("slices_number", "slices_lengths", "slices_attention"),  # of no other trainer
)
_NOT_SETTABLE = (*_RECORDED, "replicas", "device", "runtime")
_NAMES = ("model.preset", "data.source")
"""Settings whose values ppbench need not know."""
_USUAL = ("transfer_", "sharding_", "slices_")
"""Beginnings of settings that keep defaults: a stored program is as if it was made with these."""


@dataclass(frozen=True)
class RunMetadata:
    """Name and known settings of a run, given by its owner."""

    name: str
    settings: Mapping[str, object] = field(default_factory=dict)  # fields of Case
    tokens_per_step: int | None = None


@dataclass(frozen=True)
class RecordedRun:
    """Spans and facts of a run that ppbench did not start."""

    origin: str  # `imported` or `attached`
    program: Program  # without transfers
    spans: pd.DataFrame  # columns of `engine.plan.spans.Span`, on rank 0's clock
    ranks: Sequence[Mapping[str, object]]  # columns of `ranks`, in order, replica by replica
    facts: Mapping[str, object]  # columns of `runs`
    losses: Mapping[int, float] = field(default_factory=dict)  # by step
    early: Collection[Receive] = frozenset()  # receives that had arrived before they were awaited
    num_warmup_steps: int | None = None
    cautions: Collection[Caution] = ()
    completion_seen_on_wait: bool = False  # a receive ends with the wait for it, not on arrival
    number: int = 0  # among runs that may be written at the same time
    source: str = ""  # what the run is from: the hash of a recording or script, or a script's path

    @property
    def num_replicas(self) -> int:
        return len(self.ranks) // self.program.world_size


def check_name(name: str, option: str) -> None:
    """Raises UsageError for an empty name."""
    if not name.strip():
        raise UsageError(f"{option}: is empty; expected a name for the run, such as titan")


def settings_from_text(assignments: Sequence[str]) -> dict[str, object]:
    """Return `model.preset=llama-8b` and the like as fields of a case. Raises UsageError."""
    return _fields("--set", (parse_assignment("--set", text)[:2] for text in assignments))


def settings_from(settings: Mapping[str, object]) -> dict[str, object]:
    """Return `{"model.preset": "llama-8b"}` and the like as fields of a case. Raises UsageError."""
    for key in settings:
        parse_assignment("settings", f"{key}=0")  # refuses a key that does not exist
    return _fields("settings", settings.items())


def _fields(option: str, settings: Iterable[tuple[str, object]]) -> dict[str, object]:
    fields: dict[str, object] = {}
    for key, value in settings:
        name = key.replace(".", "_")
        if name not in _CASE_FIELDS or name in _NOT_SETTABLE:
            raise UsageError(
                f"{option} {key}: is read from the run itself and cannot be set; settable are "
                "model.*, data.*, train.* and seq_len"
            )
        try:
            checked = str(value) if key in _NAMES else checked_value(key, value)
        except ValueError as error:
            raise UsageError(f"{option} {key}={value}: {error}") from None
        fields[name] = checked
    return with_recompute_by_stage(fields)


def named_program(program: Program, name: str | None = None) -> Program:
    """Return the program under the given name, or that of the registered schedule it equals."""
    shape = program.world_size, program.num_microbatches, _stages_per_rank(program)
    for registered in SCHEDULES if name is None else ():
        try:
            known = build_program(registered, *shape)
        except ScheduleError:
            continue
        if (known.placement, known.actions) == (program.placement, program.actions):
            name = registered
            break
    return dataclasses.replace(program, schedule=program.schedule if name is None else name)


def _stages_per_rank(program: Program) -> int:
    return max(len(program.placement.stages_of(rank)) for rank in range(program.world_size))


def check_legal(program: Program) -> None:
    """Raises UsageError for a program that is not a whole training step."""
    try:
        check(in_mode(program, TRAIN))
    except (ProgramError, ScheduleError) as error:
        raise UsageError(
            f"the actions are not a whole training step: {error}\n"
            "Check that the files of all ranks of one pipeline are there, with forward and backward"
        ) from None


def write_run(recorded: RecordedRun, metadata: RunMetadata, store: Store) -> str:
    """Store the run; returns its id. Raises UsageError, StoreError."""
    program = recorded.program
    check_legal(program)
    run_id, case = new_run_id(), _case_of(recorded, metadata)
    # The columns of ranks that the program implies: their stages and held microbatches.
    held = peak_activations(program)  # from a microbatch's forward to the end of its backward
    places = (divmod(number, program.world_size) for number in range(len(recorded.ranks)))
    ranks = [
        {
            "replica": replica,
            "rank": rank,
            "peak_memory_bytes": None,
            "predicted_peak_memory_bytes": None,
            **row,
            "peak_held_microbatches": held[rank],
            "planned_peak_held_microbatches": held[rank],
            "stages": json.dumps(program.placement.stages_of(rank)),
        }
        for (replica, rank), row in zip(places, recorded.ranks, strict=True)
    ]
    spans = recorded.spans.sort_values(["step", "rank", "start_ns"], ignore_index=True)
    losses = [loss for _, loss in sorted(recorded.losses.items())]
    no_warmup = [Caution.no_warmup] if recorded.num_warmup_steps == 0 else []  # null: not known
    finished = FinishedRun(
        case,
        program,
        lowered_of(case, program),
        spans,
        ranks,
        recorded.facts,
        recorded.losses,
        {int(step): metadata.tokens_per_step for step in spans["step"].unique()},
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        not_finite=first_loss_not_finite(recorded.losses, program.placement.ranks[-1]),
        early=recorded.early,
        completion_seen_on_wait=recorded.completion_seen_on_wait,
        cautions=[*recorded.cautions, *no_warmup],
    )
    rows = rows_of(finished)
    keys = _keys_of(recorded, metadata, case, run_id)
    same = [Condition(name, "=", (keys[name],)) for name in ("sweep_id", "case_id")]
    earlier = store.runs(["launch", "resume_key"], same)
    replaced = earlier.loc[earlier["resume_key"] == keys["resume_key"], "launch"]
    launch = (0 if earlier.empty else int(earlier["launch"].max()) + 1) + recorded.number
    replicas = ["replicas"] if recorded.num_replicas > 1 else []
    run = {
        "run_id": run_id,
        "sweep_name": metadata.name,
        **keys,
        "launch": launch if replaced.empty else int(replaced.iloc[-1]),
        "position": 0,
        "attempt": 1,
        "status": "ok",
        "origin": recorded.origin,
        "settings_told": json.dumps(sorted({*_RECORDED, *replicas, *metadata.settings})),
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **case.settings(),
        "code": code_hash(),
        "ppbench_version": __version__,
        **rows.run,
        "num_stages": program.num_stages,
        "tokens_per_step": metadata.tokens_per_step,
        "num_warmup_steps": recorded.num_warmup_steps,
        "measure_steps": len(rows.tables["steps"]),
    }
    edges = rows.tables["edges"]
    is_known = edges["num_bytes"] > 0
    known = {column: edges[column].where(is_known) for column in ("num_bytes", "bytes_per_s")}
    store.write_run(run, {**rows.tables, "edges": edges.assign(**known)})
    return run_id


def _case_of(recorded: RecordedRun, metadata: RunMetadata) -> Case:
    """Return the case with the known settings; the others are as described in the module."""
    program = recorded.program
    policy = {"sharding_policy": UNKNOWN} if recorded.num_replicas > 1 else {}
    known = {
        **policy,
        "schedule": program.schedule,
        "mode": program.mode,
        "world_size": program.world_size,
        "replicas": recorded.num_replicas,
        "num_microbatches": program.num_microbatches,
        "stages_per_rank": _stages_per_rank(program),
        **metadata.settings,
    }
    unknown = {
        name: UNKNOWN if isinstance(default, str) else type(default)()
        for name, default in _CASE_FIELDS.items()
        if not name.startswith(_USUAL)
    }
    return Case(**{**unknown, "seq_len": UNKNOWN, **known})  # type: ignore[arg-type]  # as declared


def same_recording(recorded: RecordedRun, metadata: RunMetadata, store: Store) -> str | None:
    """Return the newest run that was imported from the same recording under the same name."""
    keys = _keys_of(recorded, metadata, _case_of(recorded, metadata), "")
    runs = store.runs(["run_id"], [Condition("resume_key", "=", (keys["resume_key"],))])["run_id"]
    return None if runs.empty else str(runs.iloc[-1])


def _keys_of(
    recorded: RecordedRun, metadata: RunMetadata, case: Case, run_id: str
) -> dict[str, str]:
    """Return `sweep_id`, `case_id` and `resume_key`.

    Two scripts of one name are two workloads. What was imported before replaces itself; an attached
    run replaces none.
    """
    is_imported = recorded.origin == IMPORTED
    sweep_id = _digest(recorded.origin, metadata.name)
    script = [] if is_imported or not recorded.source else [recorded.source]
    case_id = _digest(case.case_id, metadata.name, *script)
    resume_key = _digest(sweep_id, case_id, recorded.source if is_imported else run_id)
    return {"sweep_id": sweep_id, "case_id": case_id, "resume_key": resume_key}


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
