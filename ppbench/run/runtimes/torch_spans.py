"""Records the actions of a schedule of torch.distributed.pipelining as spans, in any script.

    instrument = Instrument(schedule, clock)
    instrument.start_step()           patches
    schedule.step(...)                torch's own code, unchanged
    recorded = instrument.end_step()  takes the marks along, removes the patches
    clock.end()                       waits for the device, once for several steps
    spans, early = recorded.read(clock, step)

Each patch calls the function that it replaces. What is recorded of a call is a generator: it runs
to its `yield` before the call, and gets the result of the call there.

    stage.forward_one_chunk, _maybe_compute_loss         F; on the last stage it includes the loss
    stage.backward_one_chunk, backward_weight_one_chunk  B or I; W
    stage.get_fwd_send_ops and its three siblings        which message an operation belongs to
    _batch_p2p, _wait_batch_p2p of torch's module        when it is started, and when it is complete

Collectives of replicas are recorded by `torch_collectives`.

torch's profiler would not do: it knows neither stage nor microbatch of the schedules with one stage
per rank. A schedule of our own would not be the one to be measured. Between recorded steps nothing
is patched: a step that is not recorded costs no more than without ppbench.

torch waits for a send when it must, often at the end of the step, so the recorded end of a send is
late; `ppbench.analysis.transfers.reconciled_end_ns` combines both ends of a message. A message that
the script waits for, not torch, ends when its consumer begins, or else with the step.

A work object of gloo does not show whether it is complete before it is waited for, and one of NCCL
only when it is polled. So a receive ends when its rank has waited for it; one that had arrived
before that is `early`, and the time of its arrival is not known.

The patched names are private to torch; if one of them is missing, `Instrument` refuses. An error
of our own within a step is kept for `end_step`: torch's code runs on unrecorded, and its own errors
pass through.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.pipelining import schedules
from torch.profiler import record_function

from engine.plan.action import RECV_OPS, Action, Op, parse_cell
from engine.plan.program import Placement, Program
from engine.plan.spans import Span, lane_of
from engine.run.clock import Clock, Mark
from ppbench.errors import UsageError
from ppbench.run.runtimes.torch_collectives import (
    Collectives,
    Recorder,
    Recording,
    Timed,
    in_order,
)

EARLY_NS = 100_000
"""A shorter wait means that the message had arrived already: gloo needs 10 to 50 us for that."""
_STARTS = "_batch_p2p"
_WAITS = "_wait_batch_p2p"
_SENDS_AND_RECEIVES = {
    "get_fwd_recv_ops": Op.RECV_F,
    "get_fwd_send_ops": Op.SEND_F,
    "get_bwd_recv_ops": Op.RECV_B,
    "get_bwd_send_ops": Op.SEND_B,
}


def _op_of_backward(*arguments: Any, **named: Any) -> Op:
    """Decide by torch's own arguments: (microbatch, loss, full_backward)."""
    is_full = named.get("full_backward", arguments[2] if len(arguments) > 2 else True)
    return Op.B if is_full else Op.I


_CONSUMERS: dict[Op, tuple[Op, ...]] = {Op.RECV_F: (Op.F,), Op.RECV_B: (Op.B, Op.I)}
"""The computations that wait for a receive."""
_COMPUTATIONS: dict[str, Callable[..., Op]] = {
    "forward_one_chunk": lambda *_, **__: Op.F,
    "backward_one_chunk": _op_of_backward,
    "backward_weight_one_chunk": lambda *_, **__: Op.W,
}
_OF_STAGES = (*_COMPUTATIONS, *_SENDS_AND_RECEIVES, "stage_index", "num_stages", "is_last", "group")
_OF_STAGES += ("group_rank", "group_size", "stage_index_to_group_rank", "device", "submod")
_OF_SCHEDULES = ("step", "_maybe_compute_loss", "_n_microbatches", "_has_backward")


@dataclass(frozen=True)
class RecordedStep:
    """What one rank did in a step of a schedule, with marks that are not read yet."""

    rank: int
    replica: int
    issued: list[Timed]  # in the order in which the rank came to them
    over: Mark  # when the step had ended

    @property
    def row(self) -> tuple[Action, ...]:
        """The rank's actions, transfers at the places of their issue."""
        return tuple(timed.action for timed in self.issued)

    @property
    def peak_held(self) -> int:
        """The most microbatches that the rank held, over its stages."""
        held = peak = 0
        for action in self.row:
            held += {Op.F: 1, Op.B: -1, Op.W: -1}.get(action.op, 0)
            peak = max(peak, held)
        return peak

    def read(self, clock: Clock, step: int) -> tuple[list[Span], frozenset[Action]]:
        """Return the spans, and the receives that had arrived before the rank waited for them.

        Called after the clock's `end` and before its next `begin`.
        """
        computations = {timed.action: timed for timed in self.issued}
        spans, early = [], set()
        for timed in self.issued:
            action, last = timed.action, self.over
            if action.op is Op.RESHARD:
                continue
            if timed.end is None:
                kinds = _CONSUMERS.get(action.op, ())
                users = (computations.get(action._replace(op=kind)) for kind in kinds)
                last = next((user.start for user in users if user is not None), self.over)
            elif (
                timed.asked is not None
                and action.op in RECV_OPS
                and clock.read_ns(timed.end) - clock.read_ns(timed.asked) < EARLY_NS
            ):
                early.add(action)
            end_ns = timed.end_ns(clock, last)
            start_ns = clock.read_ns(timed.start) + timed.waited_ns(clock, last)
            num_bytes = sum(part.num_bytes for part in (timed, *timed.more))
            times, lane = (start_ns, max(start_ns, end_ns)), lane_of(action.op)
            spans.append(Span(step, self.rank, lane, *action, *times, num_bytes, self.replica))
        return in_order(spans), frozenset(early)


class Instrument:
    """Records chosen steps of one rank's part of a schedule."""

    def __init__(
        self,
        schedule: Any,
        clock: Clock,
        replica: int = 0,
        begin_computation: Callable[[], object] = lambda: None,
        end_computation: Callable[[], object] = lambda: None,
    ) -> None:
        """Take a schedule of torch's, with one stage or several, and what notes computations.

        Raises UsageError for any other object, and for a version of torch that is not supported.
        """
        self.schedule, self.clock = schedule, clock
        self._begin_computation, self._end_computation = begin_computation, end_computation
        self.stages = stages_of(schedule)
        wanted = [(schedules, name) for name in (_STARTS, _WAITS)]
        wanted += [(schedule, name) for name in _OF_SCHEDULES]
        wanted += [(stage, name) for stage in self.stages for name in _OF_STAGES]
        for owner, name in wanted:
            if not hasattr(owner, name):
                whose = getattr(owner, "__name__", type(owner).__name__)
                raise UsageError(
                    f"torch {torch.__version__}: {whose} has no {name}, which recording needs; "
                    "torch 2.10 to 2.14 are supported"
                )
        self.rank, self._replica = int(self.stages[0].group_rank), replica  # in the pipeline
        self._patches = contextlib.ExitStack()
        self._has_ranges = False
        self._issued: list[Timed] = []  # in the order in which the rank came to them
        self._error: Exception | None = None  # of our own, in the recorded step
        self._collectives = Collectives(self.stages, clock, self._issued)
        # By the id of an operation that is not started yet, or of a work that is not waited for.
        # The object is kept as well, since an id is reused; no longer, since it holds its tensor.
        self._to_start: dict[int, tuple[Any, Action]] = {}
        self._moving: dict[int, tuple[Any, list[Timed]]] = {}
        self._open_messages: dict[Action, Timed] = {}
        self._computations: dict[Action, Timed] = {}

    def start_step(self, *, has_ranges: bool = False) -> None:
        """Record until `end_step`. May synchronise the device, to tie its clock to the host's.

        `has_ranges`: each computation becomes a range of its name in torch's profiler, too.
        """
        self.remove()
        self._has_ranges, self._error = has_ranges, None
        self._issued = self._collectives.issued = []  # the one of the step before is handed over
        self._open_messages.clear()
        self._computations.clear()
        for stage in self.stages:
            index = int(stage.stage_index)
            for name, op_of in _COMPUTATIONS.items():
                self._patch(stage, name, functools.partial(self._computed, index, op_of))
            for name, op in _SENDS_AND_RECEIVES.items():
                self._patch(stage, name, functools.partial(self._named, index, op))
        self._patch(self.schedule, "_maybe_compute_loss", self._with_loss)
        self._patch(schedules, _STARTS, self._started)
        self._patch(schedules, _WAITS, self._awaited, is_one_by_one=True)
        self._collectives.clock = self.clock
        for owner, name, record in self._collectives.recorders():
            self._patch(owner, name, record)
        self.clock.begin()

    def end_step(self) -> RecordedStep:
        """Hand over what was recorded, and remove the patches. Does not wait for the device.

        Raises the error that ended the recording.
        """
        self.remove()
        if self._error is not None:
            raise self._error
        return RecordedStep(self.rank, self._replica, self._issued, self.clock.mark())

    def remove(self) -> None:
        """Remove the patches and keep no tensor. A second call changes nothing."""
        self._patches.close()
        self._collectives.remove()
        self._to_start.clear()
        self._moving.clear()

    def _patch(
        self, owner: Any, name: str, record: Recorder, *, is_one_by_one: bool = False
    ) -> None:
        """Record each call of a function until the patches are removed.

        With `is_one_by_one`, its first argument is a list, and it is called for each item.
        """
        usual = getattr(owner, name)

        def run(*arguments: Any, **named: Any) -> Any:
            recording = _begun(record, arguments, named)
            self._go_on(recording)
            try:
                result = usual(*arguments, **named)
                self._go_on(recording, result)
            finally:
                recording.close()
            return result

        def run_each(items: Iterable[Any], *arguments: Any, **named: Any) -> None:
            for item in items:
                run([item], *arguments, **named)

        value = run_each if is_one_by_one else run
        self._patches.callback(replace_attribute(owner, name, value))

    def _go_on(self, recording: Recording, result: Any = None) -> None:
        """Run a recording to its `yield`, or its end. Its error is kept and ends no training."""
        try:
            recording.send(result)
        except StopIteration:
            pass
        except Exception as error:
            self._error = self._error or error

    def _computed(
        self, stage: int, op_of: Callable[..., Op], *arguments: Any, **named: Any
    ) -> Recording:
        """Record a computation with marks around it."""
        action = Action(stage, op_of(*arguments, **named), _microbatch(arguments, named))
        computation = self._computations[action] = Timed(action, self.clock.mark())
        self._issued.append(computation)
        self._collectives.begin_computation(computation, arguments, named)
        self._begin_computation()
        with record_function(str(action)) if self._has_ranges else contextlib.nullcontext():
            yield
        self._end_computation()
        computation.end = self.clock.mark()
        self._collectives.end_computation(computation)

    def _with_loss(
        self, stage: Any, _output: Any, _targets: Any, microbatch: Any, *_more: Any
    ) -> Recording:
        """Record the loss: the last stage's F ends with it."""
        yield
        if stage.is_last:
            action = Action(int(stage.stage_index), Op.F, int(microbatch))
            self._computations[action].end = self.clock.mark()

    def _named(self, stage: int, op: Op, *arguments: Any, **named: Any) -> Recording:
        """Remember the operations of a message until they are started."""
        operations = yield
        action = Action(stage, op, _microbatch(arguments, named))
        self._to_start |= {id(operation): (operation, action) for operation in operations}

    def _started(self, operations: list[Any], *_more: Any, **_named: Any) -> Recording:
        """Record the start of messages: a work per operation, or one for all if NCCL joins them."""
        messages: list[Timed | None] = []
        for operation in operations:
            _, action = self._to_start.pop(id(operation), (None, None))
            if action is None:
                messages.append(None)
                continue
            message = self._open_messages.get(action)
            if message is None:  # else it has several tensors, and this is not the first
                message = self._open_messages[action] = Timed(action, self.clock.mark())
                self._issued.append(message)
            message.num_bytes += operation.tensor.nbytes
            messages.append(message)
        works = yield
        ours = [message for message in messages if message is not None]
        if len(works) != len(messages):
            self._moving |= {id(work): (work, ours) for work in works}
            return
        for work, own in zip(works, messages, strict=True):
            if own is not None:
                self._moving[id(work)] = (work, [own])

    def _awaited(self, works: list[Any], *_more: Any, **_named: Any) -> Recording:
        """Record the wait for a message, which ends when it has been waited for."""
        asked = self.clock.mark()
        yield
        over = self.clock.mark()
        _, messages = self._moving.pop(id(works[0]), (None, ()))
        for message in messages:
            message.asked = message.asked or asked  # of several tensors, the first
            message.end = over


def _begun(record: Recorder, arguments: tuple[Any, ...], named: dict[str, Any]) -> Recording:
    """Take the arguments when it is resumed, so that a mistake in them is its own."""
    yield from record(*arguments, **named)


def _microbatch(arguments: tuple[Any, ...], named: dict[str, Any]) -> int:
    """Return the first argument of any of the stage's methods, whose name differs."""
    if arguments:
        return int(arguments[0])
    return int(next(value for name, value in named.items() if name.endswith("chunk_id")))


def replace_attribute(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of an object; return the function that restores it."""
    if name in vars(owner):
        restore = functools.partial(setattr, owner, name, getattr(owner, name))
    else:  # its class has it
        restore = functools.partial(delattr, owner, name)
    setattr(owner, name, value)
    return restore


def stages_of(schedule: Any) -> list[Any]:
    """Return this rank's stages. Raises UsageError for anything but a schedule of torch's."""
    only = getattr(schedule, "_stage", None)
    stages = getattr(schedule, "_stages", None) or ([] if only is None else [only])
    if not stages:
        raise UsageError(
            f"{type(schedule).__name__} has no stages; expected a schedule of "
            "torch.distributed.pipelining, such as Schedule1F1B"
        )
    return list(stages)


def placement_of(schedule: Any) -> Placement:
    """Return the rank of each stage, from torch's own table."""
    stage = stages_of(schedule)[0]
    ranks = stage.stage_index_to_group_rank
    return Placement(tuple(ranks[s] for s in range(stage.num_stages)), int(stage.group_size))


def program_of(schedule: Any) -> Program | None:
    """Return the schedule's program, with transfers where torch has placed them.

    None for the schedules of one stage per rank, whose order is code: use `program_from` on the
    recorded rows. (They have a table, too, but that of 1F1B is wrong on the last rank.)
    """
    table = getattr(schedule, "pipeline_order_with_comms", None)
    if not table:
        return None
    rows = [
        tuple(a for cell in table[rank] for a in parse_cell(str(cell))) for rank in sorted(table)
    ]
    return program_from(schedule, rows).without_collectives()


def program_from(schedule: Any, rows: Sequence[Sequence[Action]]) -> Program:
    """Return the program of all ranks' rows, with transfers where each rank issues them."""
    name = type(schedule).__name__.removeprefix("Schedule")
    actions = tuple(tuple(row) for row in rows)
    return Program(name, placement_of(schedule), int(schedule._n_microbatches), actions)
