"""Records what the replicas of a stage do together, where FSDP2 or DDP wraps its module.

    fully_shard    foreach_all_gather, foreach_all_gather_copy_out: UNSHARD begins, is waited for
    replicate      foreach_reduce: REDUCE_GRAD, as for fully_shard
    DDP            the last B of a stage: from its last gradient until torch has summed them all

The functions are those of torch's own module, and each is called as torch calls it. DDP works in
C++, where nothing can be replaced: hooks of the parameters tell when the gradients are complete,
and what it sums before that is hidden behind the backward, and not seen.

A gather of one module follows the other: those that torch begins in a row are one UNSHARD of their
stage. A gather that a computation begins is one of its own, and issued before it: it comes off the
computation's start, as long as that waited for it. So a span of F is as long as F computed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_groups
from torch.nn.parallel import DistributedDataParallel

from engine.plan.action import NO_INDEX, Action, Op
from engine.plan.spans import Lane, Span
from engine.run.clock import Clock, Mark
from ppbench.errors import UsageError

PATCHED = ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce")
"""Names of torch's module of FSDP2 that are replaced while a step is recorded."""


Recording = Generator[None, Any, None]
"""What is recorded of a call: up to the `yield` before it, and with its result after it."""
Recorder = Callable[..., Recording]
"""Takes the arguments of a call."""


@dataclass
class Timed:
    """An action and its marks."""

    action: Action
    start: Mark
    end: Mark | None = None
    num_bytes: int = 0
    asked: Mark | None = None  # when the rank began to wait for it, if it is a message or a gather
    more: list[Timed] = field(default_factory=list)  # of a collective: its other parts
    gathers: list[Timed] = field(default_factory=list)  # that a computation has waited for

    def end_ns(self, clock: Clock, over: Mark) -> int:
        """Return the end of its last part; `over` is the end of what has none."""
        ends = (over if part.end is None else part.end for part in (self, *self.more))
        return max(map(clock.read_ns, ends))

    def waited_ns(self, clock: Clock, over: Mark) -> int:
        """Return how long a computation waited for the gathers that it needed."""
        return sum(
            max(0, gather.end_ns(clock, over) - clock.read_ns(gather.asked))
            for gather in self.gathers
            if gather.asked is not None
        )


class Collectives:
    """Records the collectives of one rank's stages among its other actions."""

    def __init__(self, stages: Sequence[Any], clock: Clock, issued: list[Timed]) -> None:
        """`issued` has the rank's actions of the step, and gets its collectives."""
        self.clock, self.issued = clock, issued
        self._stage_of: dict[int, int] = {}  # by the id of a parameter of FSDP's
        self._summed: dict[int, DistributedDataParallel] = {}  # by stage
        self._roots: dict[int, FSDPModule] = {}  # by stage
        for part in stages:
            stage, module = int(part.stage_index), part.submod
            if isinstance(module, DistributedDataParallel):
                if dist.get_world_size(module.process_group) > 1:
                    self._summed[stage] = module
                continue
            for group in _groups_of(module):
                self._stage_of |= {id(parameter): stage for parameter in group.fsdp_params}
            if isinstance(module, FSDPModule):
                self._roots[stage] = module
        self.computation: Timed | None = None  # that is running
        self._unsharded: set[int] = set()  # stages that were gathered and not freed
        self._gathers: dict[int, Timed] = {}  # not waited for, by the id of their first parameter
        self._hooks = contextlib.ExitStack()
        self._complete: Mark | None = None  # the last gradient of the running B

    def recorders(self) -> Iterator[tuple[Any, str, Recorder]]:
        """Yield whose attribute is recorded, its name, and by what."""
        self._unsharded.clear()
        if self._stage_of:
            records: Sequence[Recorder] = (self._gathered, self._awaited, self._reduced)
            for name, record in zip(PATCHED, records, strict=True):
                yield param_groups, name, record
        for stage, module in self._roots.items():
            yield module, "reshard", functools.partial(self._resharded, stage)

    def remove(self) -> None:
        """Remove the hooks and keep no tensor. A second call changes nothing."""
        self._hooks.close()
        self._gathers.clear()
        self.computation = None

    def _mark(self, stream: object = None) -> Mark:
        """Take a mark, on the stream of the collective where there is one."""
        if isinstance(stream, torch.Stream):
            with stream:
                return self.clock.mark()
        return self.clock.mark()

    def begin_computation(self, computation: Timed, arguments: Any, named: Any) -> None:
        """Note what is computed; where DDP will sum its gradients, watch for the last of them."""
        self.computation, self._complete = computation, None
        module = self._summed.get(computation.action.stage)
        is_last = named.get("last_backward", len(arguments) > 3 and arguments[3])
        if module is None or computation.action.op is not Op.B or not is_last:
            return

        def accumulated(_parameter: torch.Tensor) -> None:
            self._complete = self._mark()

        for parameter in module.parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(accumulated)
                self._hooks.callback(hook.remove)

    def end_computation(self, computation: Timed) -> None:
        """End it with its last gradient where the rest of its time was DDP's sum."""
        self.computation = None
        self._hooks.close()
        if self._complete is None or computation.end is None:
            return
        stage = computation.action.stage
        gradients = (p for p in self._summed[stage].parameters() if p.requires_grad)
        reduction = Timed(_collective(stage, Op.REDUCE_GRAD), self._complete, computation.end)
        reduction.num_bytes = sum(parameter.nbytes for parameter in gradients)
        self.issued.append(reduction)
        computation.end = self._complete

    def _gathered(self, parameters: Any, *arguments: Any, **named: Any) -> Recording:
        """Record the beginning of a gather, which blocks if it is not asynchronous."""
        streams = [x for x in (*arguments, *named.values()) if isinstance(x, torch.Stream)]
        stream = streams[-1] if streams else None
        gather = self._begin(parameters, Op.UNSHARD, stream)
        result = yield
        if gather is None or result is None:
            return

        def arrive(_future: object) -> None:
            gather.end = self._mark()

        gather.num_bytes = result.all_gather_output.nbytes
        self._gathers[id(parameters[0])] = gather
        if isinstance(result.all_gather_work, dist.Work):
            result.all_gather_work.get_future().add_done_callback(arrive)
        else:
            gather.end = self._mark(stream)
            gather.asked = None if stream is not None else gather.start

    def _begin(self, parameters: Any, op: Op, stream: object = None) -> Timed | None:
        stage = self._stage_of.get(id(parameters[0]))
        if stage is None:  # of a model that is no part of the pipeline
            return None
        part = Timed(_collective(stage, op), self._mark(stream))
        before = self.issued[-1] if self.issued else None
        if self.computation is not None:
            self.issued.insert(-1, part)
        elif before is not None and before.action == part.action:
            before.more.append(part)
        else:
            self.issued.append(part)
        if op is Op.UNSHARD:
            self._unsharded.add(stage)
        return part

    def _awaited(self, _result: Any, parameters: Any, *_: Any, **__: Any) -> Recording:
        """Record the wait for a gather, and the copies out of it."""
        gather = self._gathers.pop(id(parameters[0]), None)
        if gather is not None:
            gather.asked = gather.asked or self._mark()
            if self.computation is not None:
                self.computation.gathers.append(gather)
        yield

    def _reduced(self, parameters: Any, gradients: Any, *_: Any, **__: Any) -> Recording:
        """Record a sum of gradients: the device is done with it later than the call returns."""
        num_bytes = sum(gradient.nbytes for gradient in gradients)
        reduction = self._begin(parameters, Op.REDUCE_GRAD)
        result = yield
        if reduction is not None:
            reduction.num_bytes, reduction.end = num_bytes, self._mark(result[2])

    def _resharded(self, stage: int) -> Recording:
        """Record the freeing of a stage's parameters; the schedule does it after computations."""
        if self.computation is None and stage in self._unsharded:
            self._unsharded.remove(stage)
            mark = self._mark()
            self.issued.append(Timed(_collective(stage, Op.RESHARD), mark, mark))
        yield


def _collective(stage: int, op: Op) -> Action:
    return Action(stage, op, NO_INDEX)


def in_order(spans: Sequence[Span]) -> list[Span]:
    """Return a rank's spans with its collectives one after the other, as its lane does them."""
    free_ns, out = 0, []
    for span in sorted(spans, key=lambda span: span.start_ns):
        if span.lane is Lane.COLLECTIVE:
            start_ns = max(span.start_ns, free_ns)
            free_ns = max(span.end_ns, start_ns)
            out.append(span._replace(start_ns=start_ns, end_ns=free_ns))
        else:
            out.append(span)
    return out


def _groups_of(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the groups of parameters that FSDP2 communicates together."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state: Any = part._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.10 has one at most
            found = [getattr(state, "_fsdp_param_group", None)] if groups is None else groups
            yield from (group for group in found if group is not None)


def replica_ranks(stages: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the job's ranks that have the same stages, by replica; None if only this one.

    Where parameters are of several meshes, as experts are, it is the largest.
    """
    found: set[tuple[int, ...]] = set()
    for stage in stages:
        if isinstance(stage.submod, DistributedDataParallel):
            found.add(tuple(dist.get_process_group_ranks(stage.submod.process_group)))
        for group in _groups_of(stage.submod):
            found.add(tuple(group.mesh_info.mesh.mesh.flatten().tolist()))
    largest = max(found, key=len, default=())
    if any(len(ranks) == len(largest) and ranks != largest for ranks in found):
        raise UsageError("the stages of this rank have different replicas; expected one mesh")
    return largest if len(largest) > 1 else None
