"""Facts of a case before it runs: its program, its durations, and its model.

Emulated durations may come from a costs file. It is code under test and no part of the case: a
commit that changes it stays comparable with earlier ones.

Facts of a model are its layers, positions and vocabulary. Presets are plain numbers. Everything
else needs torch and transformers, so another process inspects all of it at once; this one imports
neither.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable
from operator import mul
from pathlib import Path
from typing import Any

from engine.model.descriptions import Facts, Identity, Problem
from engine.model.presets import PRESETS
from engine.model.spec import ModelSpec
from engine.plan.action import CODES, COMPUTE_OPS, OPS, SEND_OPS, Action, Op
from engine.plan.check import check
from engine.plan.collective_rules import with_checked_collectives
from engine.plan.collectives import (
    CollectivePolicy,
    DataParallel,
    NoCollectives,
    TorchWindow,
    Zero1,
    Zero2,
    Zero3,
    with_collectives,
    with_sums_of_copies,
)
from engine.plan.lower import Policy, lower
from engine.plan.messages import edge_of
from engine.plan.period import Step, period_ns, periods
from engine.plan.predict import Durations, took_by, uniform, with_pair_times
from engine.plan.program import Program
from engine.plan.schedules.registry import (
    CSV_PREFIX,
    ProgramFileError,
    ScheduleError,
    build_program,
    find_schedule,
)
from engine.plan.slices import balanced_lengths, even_lengths, shares_of
from engine.plan.walk import of_kinds
from ppbench.config.case import SETTINGS, TIMES, Case
from ppbench.config.described import ask
from ppbench.config.toml import read_source, unknown_key
from ppbench.errors import UsageError

NS_PER_MS = 1_000_000


def program_of(case: Case) -> Program:
    """The program of a case. Raises ScheduleError, ProgramError, NoProgramError.

    It has the collectives of its file where there are replicas to do them.
    That of `schedule = "auto"` is found before the case runs, and known to its run alone.
    """
    if case.is_automatic:
        raise ScheduleError(f'schedule "{case.schedule}": the program is found when the case runs')
    shape, has_pairs = (case.schedule, case.world_size, case.num_microbatches), has_pairs_of(case)
    if case.schedule.startswith(CSV_PREFIX):
        how: dict[str, Any] = {"is_replicated": case.replicas > 1, "mode": case.mode}
        how |= {"has_pairs": has_pairs, "slices": slices_of(case)}
        return _program_of_file(*shape, case.program_digest, **how)
    how = {"mode": case.mode, "has_pairs": has_pairs, "slices": slices_of(case)}
    return build_program(*shape, case.stages_per_rank, **how)


def slice_lengths_of(case: Case) -> tuple[int, ...]:
    """The tokens of each slice of a sequence; none where microbatches are whole."""
    num, lengths = case.slices_number, case.slices_lengths
    if num == 1 or not isinstance(case.seq_len, int):
        return ()
    if not isinstance(lengths, str):
        return lengths
    if lengths == "balanced":
        return balanced_lengths(case.seq_len, num, case.slices_attention)
    return even_lengths(case.seq_len, num)


def slices_of(case: Case) -> tuple[float, ...]:
    """The share of each slice in the time of its microbatch; none where they are whole."""
    lengths = slice_lengths_of(case)
    return shares_of(lengths, case.slices_attention) if lengths else ()


def has_pairs_of(case: Case) -> bool:
    """Whether a forward and a backward side by side are one action: where they have a time."""
    return bool(case.emulated_FB_ms)


@functools.lru_cache(maxsize=16)
def _program_of_file(
    schedule: str, world_size: int, num_microbatches: int, _digest: str, **how: Any
) -> Program:
    """Read a file once for all cases of a grid; changed content has another digest."""
    return build_program(schedule, world_size, num_microbatches, **how)


def sharding_of(case: Case) -> CollectivePolicy:
    """The policy that places a case's collectives. Raises ValueError for one that cannot be."""
    match case.sharding_policy:
        case "none":
            return NoCollectives()
        case "zero1":
            return Zero1()
        case "zero2":
            return Zero2(case.sharding_every_backward)
        case "zero3":
            return Zero3(case.sharding_residency, case.sharding_look_ahead)
        case "torch":
            return TorchWindow(case.sharding_max_active_stages)
        case _:
            return DataParallel()


def digest_of(path: Path) -> str:
    """Short hash of a program file's content. Raises OSError."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def check_file_unchanged(case: Case) -> None:
    """Raise ProgramFileError if the case's program file changed after it was read."""
    path = Path(case.schedule.removeprefix(CSV_PREFIX))
    try:
        is_same = not case.program_digest or digest_of(path) == case.program_digest
    except OSError as error:
        raise ProgramFileError(f"{path}: cannot be read: {error.strerror}") from None
    if not is_same:
        raise ProgramFileError(f"{path}: changed since the sweep began; restart the sweep")


def num_stages_of(case: Case) -> int:
    """Stages over all ranks."""
    if case.schedule.startswith(CSV_PREFIX):
        return program_of(case).num_stages
    return case.world_size * case.stages_per_rank


def depth_of(case: Case) -> int:
    """Return the number of parts that the model is cut into; two directions have copies of each."""
    if case.is_automatic:
        return num_stages_of(case)
    if case.schedule.startswith(CSV_PREFIX):
        return program_of(case).placement.depth
    return find_schedule(case.schedule).place(case.world_size, case.stages_per_rank).depth


def most_stages_per_rank(program: Program) -> int:
    return max(len(program.placement.stages_of(rank)) for rank in range(program.world_size))


def durations_of(case: Case) -> Durations:
    """The durations of each stage of an emulated case.

    One number is the time of a rank's whole share, divided among its stages. An evaluation may have
    none of a backward. Times are of whole microbatches, durations the mean over slices of one.
    """
    num, share = num_stages_of(case), case.world_size / depth_of(case)
    part = 1 / case.slices_number
    times = (case.emulated_F_ms, case.emulated_I_ms, case.emulated_W_ms)
    forward, first, second = (_ns_of_each(listed or (0.0,), num, share, part) for listed in times)
    pair_ns = _ns_of_each(case.emulated_FB_ms, num, share) or None
    return Durations(forward, first, second, pair_ns=pair_ns)


def link_ns_of(case: Case) -> tuple[int, ...]:
    """The delay that each emulated link adds to a message, from each stage to the next."""
    return _ns_of_each(case.emulated_link_ms, num_stages_of(case) - 1)


def collective_ns_of(case: Case) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The times of each stage's UNSHARD and of its REDUCE_GRAD, of an emulated case."""
    num = num_stages_of(case)
    return _ns_of_each(case.emulated_gather_ms, num), _ns_of_each(case.emulated_reduce_ms, num)


def _ns_of_each(
    listed: tuple[float, ...], num: int, share: float = 1.0, part: float = 1.0
) -> tuple[int, ...]:
    """Nanoseconds of a part of each stage or link: as listed, or a share of one number for all."""
    if len(listed) == 1:
        return (round(listed[0] * NS_PER_MS * share * part),) * num
    return tuple(round(ms * NS_PER_MS * part) for ms in listed)


def lowered_of(case: Case, program: Program | None = None) -> Program:
    """The program of a case, or the given one that was run instead, with its transfers.

    Where there are replicas, it has their collectives too, else the sums of copies of stages.
    """
    program = program or program_of(case)
    lowered = lower(program, Policy(case.transfer_policy), case.transfer_look_ahead)
    if case.replicas > 1:
        return with_collectives(lowered, program, sharding_of(case))
    return with_sums_of_copies(lowered)


def prove(program: Program, case: Case) -> None:
    """Raise ProgramError for a file's program that is not legal, or could hang, in a case."""
    sharding = sharding_of(case) if case.replicas > 1 else None
    _prove(program, Policy(case.transfer_policy), case.transfer_look_ahead, sharding)


@functools.lru_cache(maxsize=16)
def _prove(
    program: Program, policy: Policy, look_ahead: int, sharding: CollectivePolicy | None
) -> None:
    """Prove a program once for all cases of a grid that place its transfers alike."""
    check(program)
    lowered = lower(program, policy, look_ahead)
    if sharding is not None:
        with_checked_collectives(lowered, program, sharding)


def planned_step_ns(case: Case, lowered: Program) -> int:
    """The planned step of an emulated case in a running training, slow links included.

    `lowered` is the case's program with its transfers, and its collectives if it has replicas.
    """
    links, num_stages = link_ns_of(case), lowered.num_stages
    durations = durations_of(case)
    took, pair_ns = durations.by_kind(num_stages), durations.pair_ns
    for code, op in enumerate(OPS if links else ()):
        for stage in range(num_stages) if op in SEND_OPS else ():
            hop = min(edge_of(Action(stage, op, 0)))
            if 0 <= hop < len(links):
                took[code * num_stages + stage] = links[hop]
    gather, reduce = collective_ns_of(case)
    for op, listed in ((Op.UNSHARD, gather), (Op.REDUCE_GRAD, reduce)):
        if listed:
            first = CODES[op] * num_stages
            took[first : first + num_stages] = listed
    num_computing = len(COMPUTE_OPS) * num_stages
    times = []
    for factor in case.emulated_replica_factors or (1.0,) * case.replicas:
        slowed = [round(ns * factor) for ns in took[:num_computing]]  # messages are not slower
        whole = of_kinds(lowered, [*slowed, *took[num_computing:]])
        if pair_ns is not None:
            whole = with_pair_times(lowered, whole, [round(ns * factor) for ns in pair_ns])
        times.append(whole)
    return round(periods([Step(lowered, times, meets=case.meets)])[0])


def bubble_in_theory(case: Case, program: Program) -> float:
    """The bubble of a running training with a program, free transfers and no optimizer.

    Durations are the emulated ones, else equal stages with F = I = W. Ranks wait for each other in
    each step where the case says so.
    """
    # So that the time of a stage is a whole number, and that of a slice of it nearly one.
    unit = program.num_stages * (1_000_000 if program.slices else 1)
    durations = uniform(program.placement, unit, unit, unit)
    if case.is_emulated:
        durations = durations_of(case)
    period = period_ns(program, durations, meets=case.meets)
    if durations.pair_ns is None and not program.slices:
        compute_ns = sum(map(mul, program.num_of_kind, durations.by_kind(program.num_stages)))
    else:
        compute_ns = sum(took_by(program.compute_only(), durations))
    return float(1 - compute_ns / (program.world_size * period))


def read_costs(file: str) -> dict[str, tuple[float, ...]]:
    """Read milliseconds of each stage or link, by the keys of `[emulated]`.

    Raises ValueError with the problem and its place.
    """
    times: dict[str, tuple[float, ...]] = {name.removeprefix("emulated_"): () for name in TIMES}
    try:
        source = read_source(Path(file), "the costs file")
        for name, value in source.tree.items():
            if name not in times:
                raise source.error((name,), unknown_key(name, value, times))
            times[name] = source.checked(SETTINGS[f"emulated.{name}"].kind, value, (name,))
    except UsageError as error:
        raise ValueError(str(error)) from None
    return times


def is_plain_preset(identity: Identity) -> bool:
    """Whether all facts are known without a process that has torch."""
    spec, is_bytes = identity.spec, identity.tokenizer in ("auto", "bytes")
    return spec.name in PRESETS and spec.split == "auto" and not spec.has_plan and is_bytes


def identity_of(case: Case) -> Identity:
    """The identity of a case's model, however it is cut into stages."""
    spec = ModelSpec(
        case.model_preset,
        case.model_dtype,
        weights=case.model_weights,
        trust_remote_code=case.model_trust_remote_code,
        split=case.model_split,
        split_points=case.model_split_points,
        layers=case.model_layers,
        before_layers=case.model_before_layers,
        after_layers=case.model_after_layers,
    )
    return Identity(spec, case.data_tokenizer)


def facts_of(identities: Iterable[Identity]) -> dict[Identity, Facts]:
    """The facts of each distinct model. Raises UsageError when models cannot be inspected."""
    distinct = list(dict.fromkeys(identities))
    known: dict[Identity, Facts] = {}
    for model in filter(is_plain_preset, distinct):
        preset = PRESETS[model.spec.name]
        table = preset.vocab_size * preset.hidden_size
        layers = (preset.layer_parameters,) * preset.num_hidden_layers
        known[model] = Facts(
            preset.num_hidden_layers,
            preset.max_position_embeddings,
            preset.vocab_size,
            preset.num_parameters,
            part_sizes=(table, *layers, preset.hidden_size + table),
        )
    others = [model for model in distinct if model not in known]
    if not others:
        return known
    names = ", ".join(dict.fromkeys(identity.spec.name for identity in others))
    question = [dataclasses.asdict(identity) for identity in others]
    answers = ask("facts", question, f"{names}: cannot be inspected")
    for model, answer in zip(others, answers, strict=True):
        if problem := answer.get("problem"):
            known[model] = Facts(problem=Problem(**problem))
            continue
        known[model] = Facts(**answer | {"part_sizes": tuple(answer.get("part_sizes", ()))})
    return known
