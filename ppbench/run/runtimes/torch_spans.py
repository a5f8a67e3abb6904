"""What a schedule of torch.distributed.pipelining does, as spans; for any script's schedule.

    instrument = Instrument(schedule, clock)
    instrument.start_step()           patches
    schedule.step(...)                torch's own code, unchanged
    spans = instrument.collect(step)  reads the marks, takes the patches away

Each patch calls what it stands before and takes marks around it:

    stage.forward_one_chunk, _maybe_compute_loss         F; on the last stage the loss is part of it
    stage.backward_one_chunk, backward_weight_one_chunk  B or I; W
    stage.get_fwd_send_ops and its three likes           which message an operation is of
    _batch_p2p, _wait_batch_p2p of torch's module        when it is started, and seen to be over

Not torch's profiler, which knows neither stage nor microbatch of the schedules with one stage per
rank, and not a schedule of our own, which would be another one than what is measured. Between steps
nothing is patched: a step that is not watched costs what it did before.

torch waits for a send when it must, often at the end of the step, so a send's end is when its rank
knew of it; `ppbench.analysis.transfers.settled_end_ns` puts both ends of a message together. What a
script waits for by itself is taken to be over when its consumer begins, or else with the step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.pipelining import schedules
from torch.profiler import record_function

from engine.plan.action import COMPUTE_OPS, Action, Op, parse_cell
from engine.plan.program import Placement, Program
from engine.plan.spans import Span, lane_of
from engine.run.clock import Clock, Mark

_STARTS = "_batch_p2p"
_WAITS = "_wait_batch_p2p"
_SENDS_AND_RECEIVES = {
    "get_fwd_recv_ops": Op.RECV_F,
    "get_fwd_send_ops": Op.SEND_F,
    "get_bwd_recv_ops": Op.RECV_B,
    "get_bwd_send_ops": Op.SEND_B,
}


def _op_of_backward(*arguments: Any, **named: Any) -> Op:
    """By torch's own argument: (microbatch, loss, full_backward)."""
    is_full = named.get("full_backward", arguments[2] if len(arguments) > 2 else True)
    return Op.B if is_full else Op.I


_COMPUTATIONS: dict[str, Callable[..., Op]] = {
    "forward_one_chunk": lambda *_, **__: Op.F,
    "backward_one_chunk": _op_of_backward,
    "backward_weight_one_chunk": lambda *_, **__: Op.W,
}


@dataclass
class _Timed:
    """An action and its marks."""

    action: Action
    start: Mark
    end: Mark | None = None
    num_bytes: int = 0


class Instrument:
    """Watches one rank's part of a schedule, whenever it is told to."""

    def __init__(self, schedule: Any, clock: Clock, rank: int | None = None) -> None:
        """`schedule`: of torch's, with one stage or several. `rank`: in the pipeline."""
        self.schedule, self.clock = schedule, clock
        self.stages = stages_of(schedule)
        self.rank = int(self.stages[0].group_rank) if rank is None else rank
        self._patches = contextlib.ExitStack()
        self._has_ranges = False
        self._issued: list[_Timed] = []  # in the order in which the rank came to them
        self._to_start: dict[int, Action] = {}  # by the id of an operation that is not started yet
        self._operations: list[Any] = []  # these, kept: an id means nothing without its object
        self._moving: dict[int, list[_Timed]] = {}  # by the id of the work that is waited for
        self._works: list[Any] = []
        self._open_messages: dict[Action, _Timed] = {}

    @property
    def row(self) -> tuple[Action, ...]:
        """What the rank did in the last step that was watched, transfers where they were issued."""
        return tuple(one.action for one in self._issued)

    @property
    def peak_held(self) -> int:
        """The most microbatches that it held in that step, over its stages."""
        held = peak = 0
        for action in self.row:
            held += {Op.F: 1, Op.B: -1, Op.W: -1}.get(action.op, 0)
            peak = max(peak, held)
        return peak

    def start_step(self, *, has_ranges: bool = False) -> None:
        """Watch what comes until `collect`. May synchronise the device (the clock's tie).

        `has_ranges`: each computation is a range of its name in torch's profiler, too.
        """
        self.remove()
        self._has_ranges = has_ranges
        for kept in (self._issued, self._operations, self._works):
            kept.clear()
        self._to_start.clear()
        self._moving.clear()
        self._open_messages.clear()
        for stage in self.stages:
            self._patch_stage(stage)
        self._patch(self.schedule, "_maybe_compute_loss", self._with_loss)
        self._patch(schedules, _STARTS, self._starting)
        self._patch(schedules, _WAITS, self._waiting)
        self.clock.begin_step()

    def collect(self, step: int) -> list[Span]:
        """The spans of the step that is over; nothing is patched any more.

        Blocks until the device is done with it.
        """
        self.remove()
        over = self.clock.mark()
        self.clock.end_step()
        begins = {one.action: one.start for one in self._issued if one.action.op in COMPUTE_OPS}
        return [self._span(step, one, begins, over) for one in self._issued]

    def remove(self) -> None:
        """Put everything back as it was; again changes nothing."""
        self._patches.close()

    def _span(self, step: int, one: _Timed, begins: dict[Action, Mark], over: Mark) -> Span:
        end = one.end
        if end is None:
            end = next((begins[a] for a in _consumers(one.action) if a in begins), over)
        stage, op, microbatch = one.action
        start_ns = self.clock.read_ns(one.start)
        end_ns = max(start_ns, self.clock.read_ns(end))
        lane = lane_of(op)
        return Span(step, self.rank, lane, stage, op, microbatch, start_ns, end_ns, one.num_bytes)

    def _patch(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Stand before an attribute until the patches are taken away."""
        usual, is_own = getattr(owner, name), name in vars(owner)
        ours = wrap(usual)
        setattr(owner, name, ours)

        def restore() -> None:
            if is_own:
                setattr(owner, name, usual)
            else:  # the class has it
                delattr(owner, name)

        self._patches.callback(restore)

    def _patch_stage(self, stage: Any) -> None:
        index = int(stage.stage_index)
        for name, op_of in _COMPUTATIONS.items():
            self._patch(stage, name, functools.partial(self._timed, index, op_of))
        for name, op in _SENDS_AND_RECEIVES.items():
            self._patch(stage, name, functools.partial(self._named, index, op))

    def _timed(self, stage: int, op_of: Callable[..., Op], usual: Any) -> Any:
        """A computation, with marks around it."""

        def run(*arguments: Any, **named: Any) -> Any:
            op = op_of(*arguments, **named)
            action = Action(stage, op, _microbatch(arguments, named))
            one = _Timed(action, self.clock.mark())
            self._issued.append(one)
            with self._range_of(action):
                result = usual(*arguments, **named)
            one.end = self.clock.mark()
            return result

        return run

    def _with_loss(self, usual: Any) -> Any:
        """The last stage's F ends with the loss."""

        def run(stage: Any, *arguments: Any, **named: Any) -> Any:
            result = usual(stage, *arguments, **named)
            if stage.is_last:
                last = self._issued[-1] if self._issued else None
                if last is not None and last.action.op is Op.F:
                    last.end = self.clock.mark()
            return result

        return run

    def _named(self, stage: int, op: Op, usual: Any) -> Any:
        """Operations of a message, remembered until they are started."""

        def run(*arguments: Any, **named: Any) -> Any:
            operations = usual(*arguments, **named)
            action = Action(stage, op, _microbatch(arguments, named))
            for operation in operations:
                self._to_start[id(operation)] = action
            self._operations += operations
            return operations

        return run

    def _starting(self, usual: Any) -> Any:
        """Messages begin. Works are one per operation, or one for all where NCCL joins them."""

        def run(operations: list[Any], *arguments: Any, **named: Any) -> Any:
            messages = [self._begin(operation) for operation in operations]
            works = usual(operations, *arguments, **named)
            self._follow(works, messages)
            return works

        return run

    def _begin(self, operation: Any) -> _Timed | None:
        action = self._to_start.pop(id(operation), None)
        if action is None:
            return None
        message = self._open_messages.get(action)  # of several tensors, this is not the first
        if message is None:
            message = self._open_messages[action] = _Timed(action, self.clock.mark())
            self._issued.append(message)
        message.num_bytes += operation.tensor.nbytes
        return message

    def _follow(self, works: Sequence[Any], messages: Sequence[_Timed | None]) -> None:
        self._works += works
        ours = [message for message in messages if message is not None]
        if len(works) == len(messages):
            for work, message in zip(works, messages, strict=True):
                if message is not None:
                    self._moving[id(work)] = [message]
        else:
            self._moving |= {id(work): ours for work in works}

    def _waiting(self, usual: Any) -> Any:
        """Messages are over when they have been waited for: each in turn, as torch does."""

        def run(works: Iterable[Any], *arguments: Any, **named: Any) -> Any:
            for work in works:
                usual([work], *arguments, **named)
                over = self.clock.mark()
                for message in self._moving.pop(id(work), ()):
                    message.end = over

        return run

    def _range_of(self, action: Action) -> contextlib.AbstractContextManager[object]:
        return record_function(str(action)) if self._has_ranges else contextlib.nullcontext()


def _microbatch(arguments: tuple[Any, ...], named: dict[str, Any]) -> int:
    """The first argument of each of the stage's methods, however it is called there."""
    if arguments:
        return int(arguments[0])
    return int(next(value for name, value in named.items() if name.endswith("chunk_id")))


def _consumers(transfer: Action) -> tuple[Action, ...]:
    """Who waits for a receive; nobody for anything else."""
    stage, op, microbatch = transfer
    if op is Op.RECV_F:
        return (Action(stage, Op.F, microbatch),)
    if op is Op.RECV_B:
        return tuple(Action(stage, one, microbatch) for one in (Op.B, Op.I))
    return ()


def stages_of(schedule: Any) -> list[Any]:
    """This rank's stages."""
    stages = getattr(schedule, "_stages", None)
    return [schedule._stage] if stages is None else list(stages)


def placement_of(schedule: Any) -> Placement:
    """Which rank has each stage, by torch's own table."""
    stage = stages_of(schedule)[0]
    ranks = stage.stage_index_to_group_rank
    return Placement(tuple(ranks[s] for s in range(stage.num_stages)), int(stage.group_size))


def program_of(schedule: Any) -> Program | None:
    """What the schedule is going to run, its transfers where torch has put them.

    None for the schedules of one stage per rank, whose order is code: `program_from` the rows that
    were run. (They have a table, too, but the one of 1F1B is wrong on the last rank.)
    """
    table = getattr(schedule, "pipeline_order_with_comms", None)
    if not table:
        return None
    rows = [
        tuple(a for cell in table[rank] for a in parse_cell(str(cell))) for rank in sorted(table)
    ]
    return program_from(schedule, rows)


def program_from(schedule: Any, rows: Sequence[Sequence[Action]]) -> Program:
    """The program of all ranks' rows, each with its transfers where it issues them."""
    name = type(schedule).__name__.removeprefix("Schedule")
    actions = tuple(tuple(row) for row in rows)
    return Program(name, placement_of(schedule), int(schedule._n_microbatches), actions)
