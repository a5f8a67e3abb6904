"""The ranks' side of a verification: the case in small, its steps beside the author's, the outcome.

    rank 0       plans, tries the author's module --> ways         --> records
    every rank                                        builds, steps

The setting is the one that runs: its program, replicas and sharding, and its split backward. It is
compared in float64 if the model can, where rounding is smaller than any mistake worth finding, and
then, where the case computes in bfloat16, in that as well. All is over, and its memory released,
before the measured case is built.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from engine.configuration import data_of, model_of, tokenizer_of
from engine.connection import autocast_of, broadcast
from engine.exactness import (
    NUM_STEPS,
    Decide,
    Exactness,
    IncomparableError,
    InexactError,
    Trained,
    compare,
)
from engine.flight import Phase
from engine.model.author import TOLERANCE, author_module, train_unsplit
from engine.model.data import StepBatch
from engine.model.factory import own_torch_numbers
from engine.model.presets import PRESETS
from engine.model.stage_module import first_line
from engine.plan.program import Program
from engine.plan.schedules.registry import CSV_PREFIX, ScheduleError, build_program
from engine.run import device as devices
from ppbench.config.case import Case, Measure
from ppbench.run.runtimes.runtime import RankContext, trainer_config
from ppbench.run.verification.record import (
    Verified,
    is_asked_for,
    key_of,
    read_verified,
    write_record,
)

SEQ_LEN = 16
MOST_SEQUENCES = 2  # of a microbatch
MOST_MICROBATCHES = 8  # unless the program needs more
LEARNING_RATE = 1e-2  # so large that a step shows what has missed it
AUTHOR_S = 600.0
"""The least time for what rank 0 does with the author's module; `measure.timeout_s` may raise it.
The ranks' own part has the case's time: what hangs is ended as soon as in the case itself."""
_MOST_OF_FREE = 0.8

NOTHING_IS_COMPUTED = Verified("no: an emulated run computes nothing")
NOT_ASKED_FOR = Verified("no: a preset on a built-in schedule is verified with measure.verify only")


@dataclass(frozen=True)
class Hands:
    """The worker's functions that a verification calls, on every rank."""

    prepare: Callable[[Case], RankContext | None]  # builds this rank's part of a case
    release: Callable[[], None]  # releases it
    begin_clock: Callable[[float], None]  # sets the time limit in seconds from now; 0: none


@dataclass(frozen=True)
class Plan:
    """The cases in small that the ranks run, one after the other, or the outcome without any."""

    outcome: Verified | None
    ways: tuple[Case, ...] = ()
    key: str = ""


def verify(
    results: Path, case: Case, measure: Measure, hands: Hands, program: Program | None
) -> Verified:
    """Verify a case if it is due; `program` is what one with schedule auto runs. Collective.

    Raises, on every rank, InexactError and any error of opening the model.
    """
    if case.is_emulated:
        return NOTHING_IS_COMPUTED
    with own_torch_numbers():
        planning = functools.partial(_plan, results, case, program, is_full=measure.verify)
        plan: Plan = _in_time_of_author(measure, hands, broadcast)(planning)
        if plan.outcome is not None:
            return plan.outcome
        found = [_compared(way, measure, hands) for way in plan.ways]
    reason = next((text for text in found if isinstance(text, str)), None)
    if reason is not None:
        return _not_possible(reason, is_asked=measure.verify)
    compared = [one for one in found if isinstance(one, Exactness)]
    verified = Verified(_in_words(case, plan.ways, compared), compared[0].difference)
    if dist.get_rank() == 0:
        write_record(results, plan.key, dataclasses.asdict(verified))
    return verified


def _time_of_author(measure: Measure) -> float:
    return max(measure.timeout_s, AUTHOR_S) if measure.timeout_s else 0.0


def _in_time_of_author(measure: Measure, hands: Hands, decide: Decide) -> Decide:
    """Give what rank 0 does with the author's module more time than a case's ranks have."""

    def decide_in_time(work: Callable[[], Any]) -> Any:
        hands.begin_clock(_time_of_author(measure))
        try:
            return decide(work)
        finally:
            hands.begin_clock(measure.timeout_s)

    return decide_in_time


def _compared(way: Case, measure: Measure, hands: Hands) -> Exactness | str:
    """Compare one way; a text says why it cannot be compared. Collective over all ranks."""
    member = hands.prepare(way)
    outcome: Exactness | Exception | None = None
    if member is not None:
        try:
            in_time = functools.partial(_in_time_of_author, measure, hands)
            outcome = compared_on(member, in_time)
        except (InexactError, IncomparableError) as error:  # on all members alike
            outcome = error
        member.runtime.close()
    else:  # it waits for the ranks that have a part
        hands.begin_clock(_time_of_author(measure))
    del member
    hands.release()

    def decide() -> Exactness | str:
        if isinstance(outcome, IncomparableError):
            return str(outcome)
        if isinstance(outcome, Exception):
            raise outcome
        assert outcome is not None
        return outcome

    return broadcast(decide)


def compared_on(
    member: RankContext, in_time: Callable[[Decide], Decide] = lambda decide: decide
) -> Exactness:
    """Compare a case's steps with those of the author's module. Collective over its ranks.

    `in_time` gives what rank 0 decides a time limit.
    """
    runtime = member.runtime
    if not hasattr(runtime, "gathered"):
        name = member.case.runtime
        raise IncomparableError(f'runtime "{name}" does not tell its weights and gradients')

    def gather(ours: Any) -> list[Any]:
        is_first = dist.get_rank() == 0
        member.flight.enter(Phase.WAITS)
        theirs: list[Any] = [None] * len(member.ranks)
        dist.gather_object(ours, theirs if is_first else None, dst=0, group=member.group)
        return theirs

    device, trained = member.fabric.device, cast("Trained", runtime)
    make = functools.partial(author_module, trainer_config(member.case).model, device)
    decide = in_time(functools.partial(broadcast, group=member.group))
    return compare(trained, member.config, make, device, gather=gather, decide=decide)


def _plan(results: Path, case: Case, program: Program | None, *, is_full: bool) -> Plan:
    """Decide, on rank 0, what to run; the author's module is tried in each way that has room."""
    if not is_full and not is_asked_for(case, case.model_preset in PRESETS):
        return Plan(NOT_ASKED_FOR)
    key = key_of(case, program, is_full=is_full)
    known = None if is_full else read_verified(results, key)
    if known is not None:
        return Plan(dataclasses.replace(known, how=f"{known.how} (before, on this machine)"))
    longest = case.seq_len if isinstance(case.seq_len, int) else case.data_max_seq_len
    full = case.train_microbatch_size, longest
    small = min(MOST_SEQUENCES, full[0]), min(SEQ_LEN, longest)
    shapes = [full] if is_full or small == full else [small, full]
    reason, failures = "", []
    for dtype in dict.fromkeys(("float64", "float32", case.model_dtype)):
        reason = _lacking(case, dtype)
        for shape in () if reason else shapes:
            way = _in_small(case, dtype, *shape, is_full=is_full)
            try:
                _try(way)
            except (MemoryError, torch.OutOfMemoryError):
                reason = "the unsplit module ran out of memory"
            except Exception as error:  # a user's module may raise anything
                failures.append(f"{type(error).__name__}: {first_line(error)}")
            else:
                own = dataclasses.replace(
                    way, model_dtype=case.model_dtype, train_autocast=case.train_autocast
                )
                is_rounded = "bfloat16" in (own.model_dtype, own.train_autocast)
                return Plan(None, (way, own) if is_rounded and own != way else (way,), key)
    if failures:
        raise InexactError(
            f'verification: the module of "{case.model_preset}" itself fails when it is '
            f"called unsplit: {'; '.join(dict.fromkeys(failures))}"
        )
    return Plan(_not_possible(reason, is_asked=is_full))


def _try(way: Case) -> None:
    """Train the author's module on one microbatch."""
    config, device = trainer_config(way), torch.device(way.device)
    cpu = torch.device("cpu")
    data = data_of(config, model_of(config, cpu), tokenizer_of(config), cpu)
    batch = data.step(0).to(device)
    first = StepBatch(batch.inputs[:1], batch.targets[:1], batch.num_tokens)
    train_unsplit(author_module(config.model, device), first, autocast_of("none", device))


def _lacking(case: Case, dtype: str) -> str:
    """Why the comparison has no room in memory; empty if it has.

    Tensors of the model's size that exist at once: weights, gradients and AdamW's two moments, of
    the author's module and of each replica, and what the ranks send of each step.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        free_bytes = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        free_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if case.device == devices.kind():
        free_bytes = min(devices.free_bytes(torch.device(case.device)), free_bytes)
    num_parameters = model_of(trainer_config(case), torch.device("cpu")).num_parameters
    needed = num_parameters * getattr(torch, dtype).itemsize * (4 + 8 * case.replicas)
    if needed <= _MOST_OF_FREE * free_bytes:
        return ""
    return (
        f"it needs about {needed / 2**30:.1f} GiB of memory, and {free_bytes / 2**30:.1f} are free"
    )


def _not_possible(reason: str, *, is_asked: bool) -> Verified:
    if is_asked:
        raise InexactError(f"measure.verify: the run cannot be verified: {reason}")
    return Verified(f"no: {reason}")


def _in_small(case: Case, dtype: str, batch: int, seq_len: int, *, is_full: bool) -> Case:
    """Return the smaller case for verification. A measured partition would differ each time."""
    num_microbatches = case.num_microbatches
    if not (is_full or case.is_automatic or case.schedule.startswith(CSV_PREFIX)):
        most = max(MOST_MICROBATCHES, 2 * case.world_size)
        for count in range(min(num_microbatches, most), 0, -1):
            with contextlib.suppress(ScheduleError):
                build_program(
                    case.schedule,
                    case.world_size,
                    count,
                    case.stages_per_rank,
                    is_replicated=case.replicas > 1,
                )
                num_microbatches = count
                break
    is_variable = not isinstance(case.seq_len, int)
    return dataclasses.replace(
        case,
        num_microbatches=num_microbatches,
        seq_len=case.seq_len if is_variable else seq_len,
        data_max_seq_len=seq_len if is_variable else case.data_max_seq_len,
        data_num_workers=0,
        train_microbatch_size=batch,
        model_dtype=dtype,
        model_partition="parameters"
        if case.model_partition == "measured"
        else case.model_partition,
        train_learning_rate=max(case.train_learning_rate, LEARNING_RATE),
        train_autocast="none",
        train_compile=case.train_compile and is_full,
        train_lr_schedule="constant",
        train_lr_warmup_steps=0,
        launch_bind=False,
    )


def _in_words(case: Case, ways: tuple[Case, ...], compared: list[Exactness]) -> str:
    """Say against what a case was verified, in which ways, and what was not covered."""
    author = "the factory's module" if ":" in case.model_preset else "transformers' module"
    way, exactness = ways[0], compared[0]
    longest = way.seq_len if isinstance(way.seq_len, int) else way.data_max_seq_len
    text = (
        f"against {author}, unsplit: weights, loss and {exactness.num_gradients} gradients of "
        f"{NUM_STEPS} steps of {way.num_microbatches} x {way.train_microbatch_size} x {longest} "
        f"tokens in {way.model_dtype}"
    )
    if case.replicas > 1:
        text += f", {case.replicas} replicas by {case.sharding_policy}"
    if len(ways) > 1:
        kind = "autocast to bfloat16" if case.train_autocast == "bfloat16" else "bfloat16"
        text += f"; also in {kind}, within {TOLERANCE['bfloat16']:.0%} of rounding"
    missing = [note for one in compared for note in one.notes]
    missing += ["compilation"] if case.train_compile and not way.train_compile else []
    return text + (f"; not covered: {', '.join(dict.fromkeys(missing))}" if missing else "")
