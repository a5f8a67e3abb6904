"""Attaches to the pipeline of an existing training script, and stores chosen steps as a run.

    ppbench.attach(pp_schedule, steps=range(10, 20), name="titan")

    step       ... 9   10      11      ...  19      20 ...
    step()      count  record  record  ...  record  as before
    clocks           ^ aligned                    ^ aligned again; gathered; rank 0 writes the run

The script keeps its own schedule, model, data and process groups. Only `schedule.step` is replaced,
to count its calls; within a chosen step `run.runtimes.torch_spans` patches the schedule and removes
its patches at the end of the step. After the last chosen step no patch is left.

Two rules hold. No error in here may end the training: it becomes one warning, and the rank still
takes part in what the others wait for. And ranks communicate only at fixed points: in `attach`,
where they agree on the steps to record, and in calls of `schedule.step`, before the first
chosen step and after the last. With an optimizer to record, the last one is over when the next step
begins, `close` is called or the script ends.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import torch
import torch.distributed as dist

from engine.plan.action import NO_INDEX, Op
from engine.plan.spans import Span, lane_of
from engine.run.alignment import SAME_CLOCK, align, measure_tie
from engine.run.clock import Clock, Mark, clock_for
from ppbench.errors import PpbenchError, UsageError, describe, first_line
from ppbench.external.live import Callback, LiveCurve, callback_of
from ppbench.external.members import Members, members_of
from ppbench.external.record import RunMetadata, check_name, settings_from, write_run
from ppbench.external.recording import RankRecording, join_recordings, place_of, rank_facts
from ppbench.run.runtimes.torch_collectives import replica_ranks
from ppbench.run.runtimes.torch_spans import Instrument, replace_attribute, stages_of
from ppbench.store import Store, check_writable

Loss = Callable[[], float | None]


class AttachWarning(UserWarning):
    """Reason why no run is stored, or why something is missing in it. Training goes on."""


@dataclass(frozen=True)
class AttachRequest:
    """Checked arguments of `attach`."""

    steps: frozenset[int]
    metadata: RunMetadata
    results: Path
    optimizers: tuple[Any, ...]
    loss: Loss | None
    every: int | None = None  # of a live curve
    callback: Callback | None = None  # on the first rank

    @property
    def last(self) -> int:
        """The last step that the run has; -1 where no run is stored."""
        return max(self.steps, default=-1)


_schedules: WeakSet[Any] = WeakSet()
"""The schedules that are attached: two attachments would remove each other's patches."""


class Attachment:
    """An attached schedule. As a context manager it calls `close` at the end."""

    run_id: str | None = None  # on the pipeline's rank 0, once the run is stored

    def __init__(self, schedule: Any, request: AttachRequest, members: Members) -> None:
        self._schedule, self._request, self._members = schedule, request, members
        self._device = torch.device(stages_of(schedule)[0].device)
        self._clock: Clock = clock_for(self._device)
        self._instrument = Instrument(schedule, self._clock, members.replica)
        self._recording = RankRecording()
        self._count = 0  # calls of `schedule.step` so far
        self._num_before = 0  # the number of calls before the first chosen one
        self._optimizer_step: int | None = None  # the chosen step whose optimizer may still run
        self._before = SAME_CLOCK
        self._has_begun, self._is_over = False, not request.steps  # of the run
        self._live: LiveCurve | None = None
        if request.every is not None:
            tokens = request.metadata.tokens_per_step
            self._live = LiveCurve(request.every, request.callback, members, tokens)
        self._hooks = contextlib.ExitStack()  # of the optimizers
        self._optimizer_starts: dict[int, Mark] = {}  # by the optimizer's id
        if schedule in _schedules:
            raise UsageError(
                "this schedule is attached already; pass all steps to one attach(), or close() the "
                "first"
            )

    def begin(self) -> None:
        """Replace the schedule's `step` by one that counts and records."""
        schedule = self._schedule
        self._usual_step = schedule.step
        self._our_step = functools.wraps(self._usual_step)(functools.partial(self._step))
        self._restore_step = replace_attribute(schedule, "step", self._our_step)
        _schedules.add(schedule)
        atexit.register(self._at_exit)

    def close(self) -> None:
        """Store the run, unless it is stored already, and restore the schedule.

        Collective over the pipeline's ranks, unless nothing was recorded or the run is stored.
        """
        if not self._is_over:
            if self._has_begun:
                self._finish()
            else:
                self._warn_unfinished()
        self._detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """Close; after an exception, store nothing, and wait for no other rank."""
        if error is None:
            self.close()
        else:
            self._abandon(error)

    def _step(self, *arguments: Any, **named: Any) -> Any:
        """Count and record a call of `schedule.step`. Calls by `schedule.eval` are not counted."""
        if not getattr(self._schedule, "_has_backward", True):
            return self._usual_step(*arguments, **named)
        self._release_optimizers()
        number, self._count = self._count, self._count + 1
        if self._has_begun and number > self._request.last:
            self._end_run()
        is_chosen, is_due = number in self._request.steps and not self._is_over, False
        if self._live is not None:
            try:
                is_due = self._live.begins(number)
            except Exception as error:  # of the callback, too
                self._end_live(error)
        if not is_chosen and not is_due:
            return self._usual_step(*arguments, **named)
        if is_chosen and not self._has_begun:
            self._has_begun, self._num_before = True, number
            with self._guarded():
                self._members.meet("the first chosen step", "")
                self._before = measure_tie(self._members, self._members.ranks)
        if self._recording.error is None:
            with self._guarded():
                self._instrument.start_step()
        try:
            result = self._usual_step(*arguments, **named)
        except BaseException as error:
            self._abandon(error)
            raise
        if self._recording.error is None:
            with self._guarded():
                recorded = self._instrument.end_step()
                self._clock.end()
                spans, early = recorded.read(self._clock, number)
                if is_due and self._live is not None:
                    self._live.ended(number, recorded, spans)
                if not is_chosen:
                    return result
                self._recording.spans += spans
                self._recording.early |= {(number, *action) for action in early}
                self._recording.row = recorded.row
                self._note_loss(number, named.get("losses"))
                # The optimizers are hooked until the next step begins.
                self._optimizer_step = number
                for optimizer in self._request.optimizers:
                    before = optimizer.register_step_pre_hook(self._optimizer_begins)
                    self._hooks.callback(before.remove)
                    after = optimizer.register_step_post_hook(self._optimizer_ends)
                    self._hooks.callback(after.remove)
        if number == self._request.last and not self._request.optimizers:
            self._end_run()
        return result

    def _end_run(self) -> None:
        """Store the run; the schedule is restored unless a live curve goes on."""
        if self._live is None:
            self.close()
        elif not self._is_over:
            self._finish()

    @contextlib.contextmanager
    def _guarded(self) -> Any:
        """Keep an error for the other ranks, and record nothing from then on."""
        try:
            yield
        except Exception as error:
            self._recording.error = first_line(describe(error))
            if self._is_over:  # no run will say so
                self._end_live(error)
            with contextlib.suppress(Exception):
                self._instrument.remove()

    def _end_live(self, error: Exception) -> None:
        """End the live curve; the run goes on."""
        self._live = None
        _warn(f"the live curve ends at step {self._count - 1}: {_text_of(error)}")

    def _note_loss(self, number: int, losses: Sequence[torch.Tensor] | None) -> None:
        """Note the loss that the script gives, or the mean over the schedule's microbatches."""
        try:
            loss = None if self._request.loss is None else self._request.loss()
            if loss is None and losses:
                loss = float(torch.stack([part.detach().float() for part in losses]).mean())
            if loss is not None:
                self._recording.losses[number] = float(loss)
        except Exception as error:
            _warn(f"the loss of step {number} is not known: {describe(error)}")

    def _release_optimizers(self) -> None:
        """Remove the hooks. Not to be called from one: torch is iterating over them."""
        self._optimizer_step = None
        self._optimizer_starts.clear()
        self._hooks.close()

    def _optimizer_begins(self, optimizer: Any, *_: Any) -> None:
        if self._recording.error is None:
            with self._guarded():
                self._clock.begin()
                self._optimizer_starts[id(optimizer)] = self._clock.mark()

    def _optimizer_ends(self, optimizer: Any, *_: Any) -> None:
        start = self._optimizer_starts.pop(id(optimizer), None)
        if start is not None and self._optimizer_step is not None:
            with self._guarded():
                end = self._clock.mark()
                self._clock.end()
                step, rank, lane = self._optimizer_step, self._instrument.rank, lane_of(Op.OPT)
                times = self._clock.read_ns(start), self._clock.read_ns(end)
                action = NO_INDEX, Op.OPT, NO_INDEX
                self._recording.spans.append(
                    Span(step, rank, lane, *action, *times, 0, self._members.replica)
                )

    def _finish(self) -> None:
        """Gather the recordings of all ranks; rank 0 writes the run. Collective."""
        self._release_optimizers()
        self._is_over = True
        members = self._members
        try:
            members.meet("the end of the chosen steps", "")
            alignment = align(self._before, measure_tie(members, members.ranks))
            if self._recording.error is None:
                with self._guarded():
                    self._recording.spans = alignment.apply(self._recording.spans)
                    self._recording.facts = rank_facts(
                        self._schedule, members, self._clock, alignment
                    )
                    self._recording.place = place_of(self._device)
            everyone: list[RankRecording] = members.gather_objects(self._recording, members.ranks)
            if members.rank == 0:
                recorded = join_recordings(
                    everyone, self._schedule, self._device, members, self._num_before
                )
                metadata, results = self._request.metadata, self._request.results
                settings = {
                    "device": self._device.type,
                    "runtime": "torch",
                    "launch_threads_per_rank": torch.get_num_threads(),
                    **metadata.settings,
                }
                metadata = dataclasses.replace(metadata, settings=settings)
                self.run_id = write_run(recorded, metadata, Store(results))
                stored = f"ppbench: run {self.run_id} is stored in {results}"
                print(stored, file=sys.stderr, flush=True)
        except Exception as error:
            self._warn(_text_of(error))

    def _abandon(self, error: BaseException) -> None:
        """After an error of the script: restore the schedule, and let no other rank wait."""
        if not self._is_over:
            why = f"the script failed on rank {self._members.rank}: {type(error).__name__}"
            self._members.give_up(why)
            self._warn(why)
        self._detach()

    def _detach(self) -> None:
        """Remove every patch and hook. A second call changes nothing."""
        self._is_over = True
        atexit.unregister(self._at_exit)
        _schedules.discard(self._schedule)
        with contextlib.suppress(Exception):
            self._instrument.remove()
        self._release_optimizers()
        self._members.close()
        if vars(self._schedule).get("step") is self._our_step:
            self._restore_step()

    def _at_exit(self) -> None:
        """Store the run where only its last optimizer was awaited; else say what is missing."""
        if self._is_over:  # there was a live curve alone, or the run is stored
            self._detach()
            return
        if self._has_begun and self._count > self._request.last:
            self.close()
            if self._members.rank == 0 and self.run_id is None:
                _warn("call close() at the end of the training: not all ranks wait at exit")
            return
        self._warn_unfinished()
        self._detach()

    def _warn_unfinished(self) -> None:
        if self._members.rank == 0:
            self._warn(
                f"it ended when schedule.step had been called {self._count} times, before the end "
                f"of the chosen steps, {min(self._request.steps)} to {self._request.last}; choose "
                "earlier ones, or call close() at the end of the training"
            )

    def _warn(self, why: str) -> None:
        _warn(f"run {self._request.metadata.name} is not stored: {why}")


class _Inert(Attachment):
    """Records nothing: on another pipeline's ranks, or after a mistake that was reported."""

    def __init__(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _abandon(self, error: BaseException) -> None:
        pass


def attach(
    schedule: Any,
    steps: Iterable[int] = (),
    *,
    every: int | None = None,
    to: Any = None,
    name: str = "attached",
    results: str | Path = "results",
    tokens_per_step: int | None = None,
    optimizer: Any = None,
    loss: Loss | None = None,
    settings: Mapping[str, object] | None = None,
    every_pipeline: bool = False,
) -> Attachment:
    """Record chosen steps of a `torch.distributed.pipelining` schedule and store them as a run.

    Every rank of the pipeline calls it at the same point, with the same arguments, before the first
    of the steps. `steps` counts the calls of `schedule.step` from now on, from 0.

    Where FSDP2 or DDP wraps the stages, the ranks of all replicas call it, and are one run with
    their collectives. Else the pipeline of rank 0 is recorded, or `every_pipeline` as its own run.

    `optimizer`: one or several, whose steps get spans. `loss`: called for the step's loss after
    each chosen step; without it, the loss is the mean of the list that the script passes to
    `schedule.step(losses=...)`. `settings`: the known settings of the workload, by the sweep file's
    keys, `{"model.preset": "llama-8b", "seq_len": 8192}`.

    `every` and `to` make a live curve: one step in every so many is recorded, and `to` on the
    pipeline's first rank has its period, bubble, waiting and peak in flight, see
    `ppbench.external.live`: a SummaryWriter, a run of W&B, or a function of step and metrics.

    Never raises: an error becomes an `AttachWarning`.
    """
    try:
        stages = stages_of(schedule)
        replicas, group = replica_ranks(stages), stages[0].group
        has_rank_0 = group is None or 0 in dist.get_process_group_ranks(group)
        if replicas is None and not (every_pipeline or has_rank_0):
            return _Inert()
        members = members_of(stages[0], replicas)
    except Exception as error:
        return _refuse(name, error)
    try:
        check_name(name, "name=")
        _check_tokens(tokens_per_step)
        if members.rank == 0:
            check_writable(Path(results), "results=")
        metadata = RunMetadata(name, settings_from(settings or {}), tokens_per_step)
        request = _request(steps, metadata, Path(results), optimizer, loss)
        request = _with_curve(request, every, to, is_first=members.rank == 0)
        attachment = Attachment(schedule, request, members)
    except Exception as error:
        members.give_up(f"rank {members.rank} could not attach: {_text_of(error)}")
        return _refuse(name, error)
    try:
        _agree(members, request)
        attachment.begin()
    except Exception as error:
        return _refuse(name, error)
    return attachment


def _refuse(name: str, error: Exception) -> Attachment:
    _warn(f"run {name} will not be stored: {_text_of(error)}")
    return _Inert()


def _check_tokens(number: int | None) -> None:
    if number is not None and not (isinstance(number, int) and number > 0):
        raise UsageError(f"tokens_per_step={number!r}: expected a number above 0")


def _request(
    steps: Iterable[int], metadata: RunMetadata, results: Path, optimizer: Any, loss: Loss | None
) -> AttachRequest:
    """Make the request of these arguments of `attach`. Raises UsageError for what cannot be."""
    several = optimizer if isinstance(optimizer, list | tuple) else (optimizer,)
    optimizers = () if optimizer is None else tuple(several)
    for candidate in optimizers:  # torch's optimizers have these hooks
        if not hasattr(candidate, "register_step_pre_hook"):
            raise UsageError(
                f"optimizer={type(candidate).__name__}: expected a torch.optim.Optimizer or several"
            )
    chosen, is_wrong = frozenset[int](), False
    try:
        chosen = frozenset(map(operator.index, steps))
    except TypeError:
        is_wrong = True
    if is_wrong or min(chosen, default=0) < 0:
        raise UsageError(
            f"steps={steps}: expected numbers of steps from now on, such as range(10, 20)"
        )
    return AttachRequest(chosen, metadata, results, optimizers, loss)


def _with_curve(request: AttachRequest, every: object, to: Any, *, is_first: bool) -> AttachRequest:
    """Add what makes a live curve, where one is asked for. Raises UsageError."""
    if every is None:
        if to is not None:
            raise UsageError("to= is given without every=: say how often, as in every=100")
        if not request.steps:
            raise UsageError("neither steps= nor every= is given: nothing would be recorded")
        return request
    if not isinstance(every, int) or isinstance(every, bool) or every < 2:
        raise UsageError(f"every={every!r}: expected a number of steps above 1, such as 100")
    if to is None and is_first:
        raise UsageError(
            "every= is given without to=: give a SummaryWriter, a run of W&B, or a function of a "
            "step and its metrics"
        )
    callback = callback_of(to) if is_first else None
    return dataclasses.replace(request, every=every, callback=callback)


def _agree(members: Members, request: AttachRequest) -> None:
    """Raises UsageError if the members would wait at different points."""
    ours = f"steps={sorted(request.steps)}, {'an' if request.optimizers else 'no'} optimizer"
    ours += f", every={request.every}" if request.every else ""
    first, *others = members.meet("attach()", ours)
    for rank, theirs in enumerate(others, 1):
        if theirs != first:
            raise UsageError(
                f"{members.name_of(rank)} was given {theirs}, rank 0 {first}; give the same on "
                "all ranks"
            )


def _text_of(error: Exception) -> str:
    return str(error) if isinstance(error, PpbenchError) else describe(error)


def _warn(text: str) -> None:
    """Warn with the script's line as the place."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        level, frame = level + 1, frame.f_back
    warnings.warn(f"ppbench: {text}", AttachWarning, stacklevel=level)
