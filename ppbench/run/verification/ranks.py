"""The ranks' side of a verification: the case in small, its steps beside the author's, the outcome.

The setting is the one that runs: its program, replicas and sharding, and its split backward. It is
compared in float64 if the model can, where rounding is smaller than any mistake worth finding, and
then, where the case computes in bfloat16, in that as well. All is over, and its memory released,
before the measured case is built.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from engine.connection import broadcast
from engine.exactness import (
    NUM_STEPS,
    AuthorError,
    Decide,
    Exactness,
    IncomparableError,
    InexactError,
    NoRoomError,
    Trained,
    compare,
    try_author,
)
from engine.flight import Phase
from engine.model.author import TOLERANCE
from engine.model.factory import own_torch_numbers
from engine.plan.program import Program
from engine.run import device as devices
from ppbench.config.case import Case, Measure
from ppbench.run.machine.counters import available_bytes
from ppbench.run.machine.environment import ON_GPUS
from ppbench.run.runtimes.runtime import RankContext, trainer_config
from ppbench.run.verification.record import (
    Verified,
    is_asked_for,
    key_of,
    read_record,
    write_record,
)

SEQ_LEN = 16
MOST_SEQUENCES = 2  # of a microbatch
LEARNING_RATE = 1e-2  # so large that a step shows what has missed it
AUTHOR_S = 600.0
"""The least time for what rank 0 does with the author's module; `measure.timeout_s` may raise it.
The ranks' own part has the case's time: what hangs is ended as soon as in the case itself."""

NOTHING_IS_COMPUTED = Verified("no: an emulated run computes nothing")
NOT_ASKED_FOR = Verified("no: a preset on a built-in schedule is verified with measure.verify only")


@dataclass(frozen=True)
class Hands:
    """The worker's functions that a verification calls, on every rank."""

    prepare: Callable[[Case], RankContext | None]  # builds this rank's part of a case
    release: Callable[[], None]  # releases it
    begin_clock: Callable[[float], None]  # sets the time limit in seconds from now; 0: none


def verify(
    results: Path, case: Case, measure: Measure, hands: Hands, program: Program | None
) -> Verified:
    """Verify a case if it is due; `program` is what one with schedule auto runs. Collective.

    Raises, on every rank, InexactError and any error of opening the model.
    """
    if case.is_emulated:
        return NOTHING_IS_COMPUTED
    if not (measure.verify or is_asked_for(case)):
        return NOT_ASKED_FOR

    def look_up() -> tuple[str, dict[str, Any] | None]:
        if measure.verify:
            return "", None
        key = key_of(case, program)
        return key, read_record(results, key)

    began_s = time.monotonic()
    with own_torch_numbers():
        key, known = broadcast(look_up)
        if known is not None:
            verified = Verified(**known)
            how = f"{verified.how} (before, on this machine)"
            return dataclasses.replace(verified, how=how, seconds=0.0)
        failures: list[str] = []
        for way in _ways(case, is_full=measure.verify):
            try:
                compared = [_compared(way, measure, hands)]
                own = dataclasses.replace(
                    way, model_dtype=case.model_dtype, train_autocast=case.train_autocast
                )
                if own != way and "bfloat16" in (own.model_dtype, own.train_autocast):
                    compared.append(_compared(own, measure, hands))
            except IncomparableError as error:
                reason = str(error)
                if isinstance(error, AuthorError):
                    failures.append(reason)
                elif not isinstance(error, NoRoomError):
                    failures.clear()  # it runs in this way
                    break
            else:
                how, passed_s = _in_words(case, way, compared), time.monotonic() - began_s
                verified = Verified(how, compared[0].difference, passed_s)
                if key and dist.get_rank() == 0:
                    write_record(results, key, dataclasses.asdict(verified))
                return verified
    if failures:
        raise InexactError(
            f'verification: the module of "{case.model_preset}" itself fails when it is '
            f"called unsplit: {'; '.join(dict.fromkeys(failures))}"
        )
    if measure.verify:
        raise InexactError(f"measure.verify: the run cannot be verified: {reason}")
    return Verified(f"no: {reason}", seconds=time.monotonic() - began_s)


def _ways(case: Case, *, is_full: bool) -> Iterator[Case]:
    """The case as it can be compared, in small unless `is_full`, the best way first."""
    is_variable = not isinstance(case.seq_len, int)
    length = "data_max_seq_len" if is_variable else "seq_len"
    full = case.train_microbatch_size, int(getattr(case, length))
    small = min(MOST_SEQUENCES, full[0]), min(SEQ_LEN, full[1])
    for dtype in dict.fromkeys(("float64", "float32", case.model_dtype)):
        for batch, seq_len in dict.fromkeys([full] if is_full else [small, full]):
            changes: dict[str, Any] = {length: seq_len}
            if seq_len != full[1] and case.slices_number > 1:
                changes["slices_number"] = min(case.slices_number, seq_len)
                if not isinstance(case.slices_lengths, str):  # others of different lengths
                    changes["slices_lengths"] = "balanced"
                    changes["slices_attention"] = max(0.5, case.slices_attention)
            if case.model_partition == "measured":  # it would differ each time
                changes["model_partition"] = "parameters"
            yield dataclasses.replace(
                case,
                **changes,
                data_num_workers=0,
                model_dtype=dtype,
                train_microbatch_size=batch,
                train_learning_rate=max(case.train_learning_rate, LEARNING_RATE),
                train_lr_schedule="constant",
                train_lr_warmup_steps=0,
                train_autocast="none",
                train_compile=case.train_compile and is_full,
                launch_bind=False,
            )


def _compared(way: Case, measure: Measure, hands: Hands) -> Exactness:
    """Compare one way. Collective over all ranks. Raises InexactError, IncomparableError."""
    author_s = max(measure.timeout_s, AUTHOR_S) if measure.timeout_s else 0.0

    def in_time(decide: Decide, work: Callable[[], Any]) -> Any:
        """Give what rank 0 does with the author's module more time than a case's ranks have."""
        hands.begin_clock(author_s)
        try:
            return decide(work)
        finally:
            hands.begin_clock(measure.timeout_s)

    def check() -> bool:
        free_bytes, device = available_bytes(), torch.device(way.device)
        if way.device in ON_GPUS:
            free_bytes = min(devices.free_bytes(device), free_bytes)
        try_author(trainer_config(way), device, free_bytes)
        return True

    in_time(broadcast, check)  # before any rank builds its part
    member = hands.prepare(way)
    outcome: Exactness | Exception | None = None
    if member is not None:
        try:
            outcome = compared_on(member, in_time)
        except (InexactError, IncomparableError) as error:  # on all members alike
            outcome = type(error)(str(error))  # which holds no memory
        member.runtime.close()
    else:  # it waits for the ranks that have a part
        hands.begin_clock(author_s)
    del member
    hands.release()

    def decide() -> Exactness:
        if isinstance(outcome, Exception):
            raise outcome
        assert outcome is not None
        return outcome

    return broadcast(decide)


def compared_on(
    member: RankContext,
    in_time: Callable[[Decide, Callable[[], Any]], Any] = lambda decide, work: decide(work),
) -> Exactness:
    """Compare a case's steps with those of the author's module. Collective over its ranks.

    `in_time` gives what rank 0 decides a time limit.
    """
    runtime = member.runtime
    if not runtime.modules or not hasattr(runtime, "gathered"):
        name = member.case.runtime
        raise IncomparableError(f'runtime "{name}" does not tell its weights and gradients')

    def gather(ours: Any) -> list[Any]:
        is_first = dist.get_rank() == 0
        member.flight.enter(Phase.WAITS)
        theirs: list[Any] = [None] * len(member.ranks)
        dist.gather_object(ours, theirs if is_first else None, dst=0, group=member.group)
        return theirs

    device, trained = member.fabric.device, cast("Trained", runtime)
    decide = functools.partial(in_time, functools.partial(broadcast, group=member.group))
    return compare(trained, member.config, device, gather=gather, decide=decide)


def _in_words(case: Case, way: Case, compared: list[Exactness]) -> str:
    """Say against what a case was verified, in which ways, and what was not covered."""
    author = "the factory's module" if ":" in case.model_preset else "transformers' module"
    longest = way.seq_len if isinstance(way.seq_len, int) else way.data_max_seq_len
    size = f"{way.num_microbatches} x {way.train_microbatch_size}"
    size += f" x {longest} tokens" if compared[0].is_on_text else " samples"
    what = "weights and loss"
    if case.trains:
        what = f"weights, loss and {compared[0].num_gradients} gradients"
    text = f"against {author}, unsplit: {what} of {NUM_STEPS} steps of {size} in {way.model_dtype}"
    if case.replicas > 1:
        text += f", {case.replicas} replicas"
        text += f" by {case.sharding_policy}" if case.trains else ""
    if len(compared) > 1:
        kind = "autocast to bfloat16" if case.train_autocast == "bfloat16" else "bfloat16"
        text += f"; also in {kind}, within {TOLERANCE['bfloat16']:.0%} of rounding"
    missing = [note for one in compared for note in one.notes]
    missing += ["compilation"] if case.train_compile and not way.train_compile else []
    return text + (f"; not covered: {', '.join(dict.fromkeys(missing))}" if missing else "")
