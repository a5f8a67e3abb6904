"""Watches the pipeline of somebody else's training script, and stores the chosen steps as a run.

    ppbench.attach(pp_schedule, steps=range(10, 20), name="titan")

    step       ... 9   10   11  ...  19   20 ...
    step()      count  watch watch  watch  usual
    clocks           ^ aligned           ^ aligned again, gathered; rank 0 writes the run

The script's schedule, model, data and process groups are its own. Only `schedule.step` is stood
before, to count; within a chosen step `run.runtimes.torch_spans` watches the schedule, and takes
its patches away at its end. After the last one nothing is left of all that.

Two rules. Nothing that goes wrong here may end the training: it becomes one warning, and the rank
still takes part in what the others wait for. And ranks talk to each other at the same points only:
in `attach`, where they agree on what to watch, and in calls of `schedule.step`, before the first
chosen step and after the last. With an optimizer to watch, the last one is over when the next step
begins, or `close` is called.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import operator
import platform
import resource
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import pandas as pd
import torch
import torch.distributed as dist

from engine.plan.action import NO_INDEX, Action, Op
from engine.plan.lower import check_delivery_between_ranks
from engine.plan.program import Program
from engine.plan.rules import ProgramError
from engine.plan.spans import COLUMNS, Span, lane_of
from engine.run.alignment import SAME_CLOCK, Alignment, Offset, align, measure_offset
from engine.run.clock import Clock, Mark, clock_for
from ppbench.analysis.transfers import Receive, hastened_end_ns
from ppbench.error_text import describe
from ppbench.errors import PpbenchError, UsageError, first_line
from ppbench.foreign.record import Account, Told, check_name, named_program, write_run
from ppbench.foreign.telling import settings_from
from ppbench.members import Members
from ppbench.repository import read_commit
from ppbench.run.environment import read_environment
from ppbench.run.runtimes.torch_spans import Instrument, program_from, stages_of
from ppbench.store import Store, check_writable

ATTACHED = "attached"
Loss = Callable[[], float | None]


class AttachWarning(UserWarning):
    """Why nothing will be stored, or what had to be left out. Training goes on."""


@dataclass(frozen=True)
class Plan:
    """What the script asks for."""

    steps: frozenset[int]
    told: Told
    results: Path
    optimizers: tuple[Any, ...]
    loss: Loss | None

    @property
    def last(self) -> int:
        return max(self.steps)

    def common(self) -> str:
        """What must be the same on all ranks, for them to wait for each other where they do."""
        return f"steps={sorted(self.steps)}, {'an' if self.optimizers else 'no'} optimizer"


@dataclass
class Seen:
    """What one rank saw, as the others get it."""

    error: str | None = None
    spans: list[Span] = field(default_factory=list)
    early: set[Receive] = field(default_factory=set)  # was there when the rank asked for it
    row: tuple[Action, ...] = ()
    losses: dict[int, float] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)
    gpu: str = ""  # names it among all, however many the process may see
    steps: list[int] = field(default_factory=list)


_schedules: WeakSet[Any] = WeakSet()
"""Those that are watched now. Two at once would not find each other's patches as they left them."""


class Attachment:
    """What `attach` returns. A context manager, whose end is `close`."""

    run_id: str | None = None  # on the pipeline's rank 0, once the run is stored

    def __init__(self, schedule: Any, plan: Plan, members: Members) -> None:
        self._schedule, self._plan, self._members = schedule, plan, members
        self._stages = stages_of(schedule)
        self._device = torch.device(self._stages[0].device)
        self._clock: Clock = clock_for(self._device)
        self._instrument = Instrument(schedule, self._clock, members.rank)
        self._seen = Seen()
        self._count = 0  # calls of `schedule.step` so far
        self._num_before = 0  # of them, those before the first chosen one
        self._watched: int | None = None  # the step whose optimizer may still come
        self._before: Offset = SAME_CLOCK
        self._has_begun = self._is_over = False
        self._hooks = contextlib.ExitStack()  # of the optimizers
        self._optimizing: dict[int, Mark] = {}  # by an optimizer's id, since when
        if schedule in _schedules:
            raise UsageError(
                "the schedule is watched already; give one attach all the steps, or close() the "
                "first before"
            )

    def begin(self) -> None:
        """Stand before the schedule's step."""
        schedule = self._schedule
        self._usual_step, self._had_own_step = schedule.step, "step" in vars(schedule)
        self._our_step = functools.wraps(self._usual_step)(functools.partial(self._step))
        schedule.step = self._our_step
        _schedules.add(schedule)
        atexit.register(self._at_exit)

    def close(self) -> None:
        """Store what was watched, if that is not done, and leave the script alone.

        Collective over the pipeline's ranks, unless nothing was watched or all is done.
        """
        if not self._is_over:
            if self._has_begun:
                self._finish()
            else:
                self._tell_unfinished()
        self._detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """After an exception nobody waits for anybody: nothing is stored."""
        if error is None:
            self.close()
        else:
            self._abandon(error)

    def _step(self, *arguments: Any, **named: Any) -> Any:
        """The script's call of `schedule.step`; `eval` comes here as well, and is not counted."""
        if not getattr(self._schedule, "_has_backward", True):
            return self._usual_step(*arguments, **named)
        self._unwatch_optimizers()
        number, self._count = self._count, self._count + 1
        if self._has_begun and number > self._plan.last:
            self.close()
        if number not in self._plan.steps or self._is_over:
            return self._usual_step(*arguments, **named)
        self._begin(number)
        try:
            result = self._usual_step(*arguments, **named)
        except BaseException as error:
            self._abandon(error)
            raise
        self._end(number, named.get("losses"))
        return result

    def _begin(self, number: int) -> None:
        if not self._has_begun:
            self._has_begun, self._num_before = True, number
            with self._guarded():
                self._members.meet("the first step", "")
                self._before = measure_offset(self._members, self._members.ranks)
        if self._seen.error is None:
            with self._guarded():
                self._instrument.start_step()

    def _end(self, number: int, losses: Sequence[torch.Tensor] | None) -> None:
        if self._seen.error is None:
            with self._guarded():
                self._seen.spans += self._instrument.collect(number)
                self._seen.early |= {(number, *action) for action in self._instrument.early}
                self._seen.row = self._seen.row or self._instrument.row
                self._seen.steps.append(number)
                self._note_loss(number, losses)
                self._watch_optimizers(number)
        if number == self._plan.last and not self._plan.optimizers:
            self.close()

    @contextlib.contextmanager
    def _guarded(self) -> Any:
        """What goes wrong is kept for the others, and nothing is watched any more."""
        try:
            yield
        except Exception as error:
            self._seen.error = first_line(describe(error))
            with contextlib.suppress(Exception):
                self._instrument.remove()

    def _note_loss(self, number: int, losses: Sequence[torch.Tensor] | None) -> None:
        """The mean over microbatches, where the script asked the schedule for them or tells."""
        try:
            told = None if self._plan.loss is None else self._plan.loss()
            if told is None and losses:
                told = float(torch.stack([loss.detach().float() for loss in losses]).mean())
            if told is not None:
                self._seen.losses[number] = float(told)
        except Exception as error:
            _warn(f"the loss of step {number} is not known: {describe(error)}")

    def _watch_optimizers(self, number: int) -> None:
        """Until the next step begins. By hooks, which others may add and take away in between."""
        self._watched = number
        for optimizer in self._plan.optimizers:
            before = optimizer.register_step_pre_hook(self._optimizer_begins)
            self._hooks.callback(before.remove)
            self._hooks.callback(optimizer.register_step_post_hook(self._optimizer_ends).remove)

    def _unwatch_optimizers(self) -> None:
        """Never within a hook: torch is going through them."""
        self._watched = None
        self._optimizing.clear()
        self._hooks.close()

    def _optimizer_begins(self, optimizer: Any, *_: Any) -> None:
        if self._seen.error is None:
            with self._guarded():
                self._clock.begin_step()
                self._optimizing[id(optimizer)] = self._clock.mark()

    def _optimizer_ends(self, optimizer: Any, *_: Any) -> None:
        start = self._optimizing.pop(id(optimizer), None)
        if start is not None and self._watched is not None:
            with self._guarded():
                end = self._clock.mark()
                self._clock.end_step()
                times = self._clock.read_ns(start), self._clock.read_ns(end)
                self._seen.spans.append(_optimizer_span(self._watched, self._members.rank, *times))

    def _finish(self) -> None:
        """Gather what all ranks saw; the first one writes it. Collective."""
        self._unwatch_optimizers()
        self._is_over = True
        members = self._members
        try:
            members.meet("the end of what is watched", "")
            alignment = align(self._before, measure_offset(members, members.ranks))
            if self._seen.error is None:
                with self._guarded():
                    self._seen.spans = alignment.apply(self._seen.spans)
                    self._seen.facts = self._facts(alignment)
                    self._seen.gpu = _gpu_of(self._device)
            everyone: list[Seen] = members.gather_objects(self._seen, members.ranks)
            if members.rank == 0:
                self.run_id = self._write(everyone)
                _say(f"run {self.run_id} is stored in {self._plan.results}")
        except Exception as error:
            self._warn(_told(error))

    def _write(self, everyone: Sequence[Seen]) -> str:
        """Raises PpbenchError."""
        for rank, seen in enumerate(everyone):
            if seen.error is not None:
                raise UsageError(f"rank {rank} could not be watched: {seen.error}")
        program = self._program_of(everyone)
        losses = {number: loss for seen in everyone for number, loss in seen.losses.items()}
        account = Account(
            ATTACHED,
            program,
            _settled(everyone),
            [seen.facts for seen in everyone],
            self._run_facts(program.world_size),
            losses,
            num_warmup_steps=self._num_before,
            is_oversubscribed=self._is_oversubscribed(everyone),
            is_noted_when_taken=True,
            number=self._members.ranks[0],
        )
        plan, told = self._plan, self._plan.told
        known = {
            "device": self._device.type,
            "runtime": "torch",
            "launch_threads_per_rank": torch.get_num_threads(),
            **told.settings,
        }
        return write_run(account, Told(told.name, known, told.tokens_per_step), Store(plan.results))

    def _program_of(self, everyone: Sequence[Seen]) -> Program:
        rows = [seen.row for seen in everyone]
        program = program_from(self._schedule, rows)
        try:
            check_delivery_between_ranks(program)
        except ProgramError as error:
            raise UsageError(
                f"the schedule trains on the wrong microbatch: {error.action} on rank {error.rank} "
                f"{error.reason}; torch delivers the messages between two ranks in the order in "
                "which they are posted, so post receives in the order of their sends"
            ) from None
        return named_program(program.compute_only())

    def _is_oversubscribed(self, everyone: Sequence[Seen]) -> bool:
        """As far as one host tells: on CPUs, more threads than cores; on GPUs, two ranks on one."""
        hosts = [str(seen.facts["hostname"]) for seen in everyone]
        if self._device.type == "cuda":
            return len({seen.gpu for seen in everyone}) < len(everyone)
        num_here = hosts.count(platform.node())
        return num_here * torch.get_num_threads() > read_environment().num_cores

    def _run_facts(self, world_size: int) -> dict[str, object]:
        environment, commit = read_environment(), read_commit(Path.cwd())
        device, threads = self._device.type, torch.get_num_threads()
        return {
            **({} if commit is None else asdict(commit)),
            "fingerprint": environment.fingerprint(device, world_size, threads),
            "environment": environment.as_json(),
            "transport": self._members.backend if world_size > 1 else "none",
            "sweep_file": sys.argv[0],
        }

    def _facts(self, alignment: Alignment) -> dict[str, object]:
        """Columns of `ranks`."""
        clock = "shared with rank 0" if alignment.is_shared else "aligned by pings"
        parameters = {id(p): p for stage in self._stages for p in stage.submod.parameters()}
        return {
            "hostname": platform.node(),
            "device": str(self._device),
            "num_parameters": sum(p.numel() for p in parameters.values()),
            "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "clock": "rank 0" if self._members.rank == 0 else clock,
            "clock_offset_ns": alignment.offset_ns,
            "clock_drift_ppb": alignment.drift_ppb,
            "clock_error_ns": alignment.error_ns + self._clock.error_ns,
            **_memory_facts(self._device),
        }

    def _abandon(self, error: BaseException) -> None:
        """The script's own error: leave it alone, and let nobody wait."""
        if not self._is_over:
            why = f"rank {self._members.rank} had an error of its own: {type(error).__name__}"
            self._members.give_up(why)
            self._warn(why)
        self._detach()

    def _detach(self) -> None:
        """Everything as it was. Once; a second time changes nothing."""
        self._is_over = True
        atexit.unregister(self._at_exit)
        _schedules.discard(self._schedule)
        with contextlib.suppress(Exception):
            self._instrument.remove()
        self._unwatch_optimizers()
        self._members.close()
        if vars(self._schedule).get("step") is self._our_step:
            _put_back(self._schedule, self._usual_step, is_own=self._had_own_step)

    def _at_exit(self) -> None:
        """Of the process, before the last chosen step. Nobody waits for anybody any more."""
        self._tell_unfinished()
        self._detach()

    def _tell_unfinished(self) -> None:
        if self._members.rank == 0:
            self._warn(
                f"it ended when schedule.step had been called {self._count} times, before the end "
                f"of the chosen steps, {min(self._plan.steps)} to {self._plan.last}; choose others "
                "that come earlier, or call close() at the end of the training"
            )

    def _warn(self, why: str) -> None:
        _warn(f"run {self._plan.told.name} is not stored: {why}")


class _Inert(Attachment):
    """Where there is nothing to watch: another pipeline's ranks, or a mistake that was told."""

    def __init__(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _abandon(self, error: BaseException) -> None:
        pass


def attach(
    schedule: Any,
    steps: Iterable[int],
    *,
    name: str = "attached",
    results: str | Path = "results",
    tokens_per_step: int | None = None,
    optimizer: Any = None,
    loss: Loss | None = None,
    settings: Mapping[str, object] | None = None,
    every_pipeline: bool = False,
) -> Attachment:
    """Watch the chosen steps of a `torch.distributed.pipelining` schedule, and store them as a run.

    Every rank of the pipeline calls it at the same point, with the same arguments, before the first
    of the steps. `steps` counts the calls of `schedule.step` from now on, from 0. With data
    parallelism the pipeline that has rank 0 is watched, or `every_pipeline`, each a run of its own.

    `optimizer`: one or several, to have spans of their own. `loss`: asked for the step's loss after
    each chosen step; without it, it is the mean of the list that the script passes to
    `schedule.step(losses=...)`. `settings`: what is known of the workload, in the sweep file's
    words, `{"model.preset": "llama-8b", "seq_len": 8192}`.

    Never raises: what goes wrong becomes an `AttachWarning`.
    """
    try:
        if not (every_pipeline or _has_rank_0(schedule)):
            return _Inert()
        members = Members(stages_of(schedule)[0])
    except Exception as error:
        return _refuse(name, error)
    try:
        check_name(name, "name=")
        _check_tokens(tokens_per_step)
        if members.rank == 0:
            check_writable(Path(results), "results=")
        told = Told(name, settings_from(settings or {}), tokens_per_step)
        plan = Plan(_checked(steps), told, Path(results), _several(optimizer), loss)
        attachment = Attachment(schedule, plan, members)
    except Exception as error:
        members.give_up(f"rank {members.rank} could not attach: {_told(error)}")
        return _refuse(name, error)
    try:
        _agree(members, plan.common())
        attachment.begin()
    except Exception as error:
        return _refuse(name, error)
    return attachment


def _refuse(name: str, error: Exception) -> Attachment:
    _warn(f"run {name} will not be stored: {_told(error)}")
    return _Inert()


def _agree(members: Members, ours: str) -> None:
    """Raises UsageError where another rank of the pipeline was asked for something else."""
    first, *others = members.meet("attach", ours)
    for rank, theirs in enumerate(others, 1):
        if theirs != first:
            raise UsageError(
                f"rank {rank} of the pipeline was given {theirs}, rank 0 {first}; give the same on "
                "all ranks"
            )


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, PpbenchError) else describe(error)


def _checked(steps: Iterable[int]) -> frozenset[int]:
    try:
        chosen = frozenset(map(operator.index, steps))
    except TypeError:
        chosen = frozenset()
    if not chosen or min(chosen) < 0:
        raise UsageError(
            f"steps={steps}: expected numbers of steps from now on, such as range(10, 20)"
        )
    return chosen


def _check_tokens(tokens_per_step: int | None) -> None:
    if tokens_per_step is not None and not (
        isinstance(tokens_per_step, int) and tokens_per_step > 0
    ):
        raise UsageError(f"tokens_per_step={tokens_per_step!r}: expected a number above 0")


def _several(optimizer: Any) -> tuple[Any, ...]:
    """Raises UsageError for what has not the hooks of torch's optimizers."""
    if optimizer is None:
        return ()
    several = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    for one in several:
        if not hasattr(one, "register_step_pre_hook"):
            raise UsageError(
                f"optimizer={type(one).__name__}: expected a torch.optim.Optimizer, or several"
            )
    return several


def _has_rank_0(schedule: Any) -> bool:
    group = stages_of(schedule)[0].group
    return group is None or 0 in dist.get_process_group_ranks(group)


def _put_back(owner: Any, usual: Any, *, is_own: bool) -> None:
    if is_own:
        owner.step = usual
    else:  # the class has it
        del owner.step


def _optimizer_span(step: int, rank: int, start_ns: int, end_ns: int) -> Span:
    lane = lane_of(Op.OPT)
    return Span(step, rank, lane, NO_INDEX, Op.OPT, NO_INDEX, start_ns, end_ns, 0)


def _settled(everyone: Sequence[Seen]) -> pd.DataFrame:
    """All ranks' spans, messages that nobody waited for ended as far as that can be known."""
    found = [span for seen in everyone for span in seen.spans]
    early = set().union(*(seen.early for seen in everyone))
    spans = pd.DataFrame(_joined(found), columns=list(COLUMNS))
    return spans.assign(end_ns=hastened_end_ns(spans, early))


def _joined(spans: Sequence[Span]) -> list[Span]:
    """One optimizer span for each rank and step: there may be an optimizer for each stage."""
    found: dict[tuple[int, int], Span] = {}
    others = []
    for span in spans:
        if span.op is not Op.OPT:
            others.append(span)
            continue
        before = found.get((span.step, span.rank), span)
        found[span.step, span.rank] = before._replace(
            start_ns=min(before.start_ns, span.start_ns), end_ns=max(before.end_ns, span.end_ns)
        )
    return [*others, *found.values()]


def _gpu_of(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _memory_facts(device: torch.device) -> dict[str, object]:
    """The allocator's peak since the script began, or since it last reset it: it is not ours to."""
    if device.type != "cuda":
        return {"peak_memory_bytes": None}
    return {
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


def _say(text: str) -> None:
    print(f"ppbench: {text}", file=sys.stderr, flush=True)


def _warn(text: str) -> None:
    """Shown at the script's line."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        level, frame = level + 1, frame.f_back
    warnings.warn(f"ppbench: {text}", AttachWarning, stacklevel=level)
