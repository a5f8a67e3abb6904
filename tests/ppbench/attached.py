"""A small training script, which the tests of `ppbench.attach` run on each rank."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
    schedules,
)
from torch.profiler import ProfilerActivity, profile

import ppbench
from engine.connection import agree
from engine.emulated import EmulatedStages
from engine.plan.predict import uniform
from engine.run.alignment import exchange_pings
from engine.run.emulation import Emulation
from engine.trainer import Trainer
from ppbench.external import members
from ppbench.external.members import Members
from ppbench.run.worker.measure import profile_steps

WIDTH, MICROBATCHES, STEPS = 8, 4, 5
CPU = torch.device("cpu")
groups: dict[tuple[int, ...], dist.ProcessGroup] = {}  # made once in a session


def pipeline_groups(*members: tuple[int, ...]) -> dist.ProcessGroup:
    """A group for each of these pipelines, made by all ranks; this rank's own."""
    for ranks in members:
        if ranks not in groups:
            groups[ranks] = dist.new_group(list(ranks))
    return next(groups[ranks] for ranks in members if dist.get_rank() in ranks)


class Script:
    """A rank of a pipeline with its schedule, optimizer and data."""

    def __init__(self, group: dist.ProcessGroup | None, stages_per_rank: int) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        num_stages = size * stages_per_rank
        self.indices = [rank + size * turn for turn in range(stages_per_rank)]
        self.stages = [
            PipelineStage(_layers(index), index, num_stages, CPU, group=group)
            for index in self.indices
        ]
        arguments = {"n_microbatches": MICROBATCHES, "loss_fn": nn.functional.mse_loss}
        self.schedule = (
            Schedule1F1B(self.stages[0], **arguments)
            if stages_per_rank == 1
            else ScheduleInterleavedZeroBubble(self.stages, **arguments)
        )
        self.is_first, self.is_last = 0 in self.indices, num_stages - 1 in self.indices
        self.parameters = [p for stage in self.stages for p in stage.submod.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, 0.1)
        generator = torch.Generator().manual_seed(0)
        self.inputs, self.targets = torch.randn(2, 8, WIDTH, generator=generator).unbind()

    def step(self) -> float | None:
        """One step of training; the loss on the last stage."""
        self.optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        self.forward_backward(losses)
        self.optimizer.step()
        return float(torch.stack(losses).mean()) if self.is_last else None

    def forward_backward(self, losses: list[torch.Tensor]) -> None:
        inputs = [self.inputs] if self.is_first else []
        last = {"target": self.targets, "losses": losses} if self.is_last else {}
        self.schedule.step(*inputs, **last)

    def evaluate(self) -> None:
        inputs = [self.inputs] if self.is_first else []
        last = {"target": self.targets} if self.is_last else {}
        with torch.no_grad():
            self.schedule.eval(*inputs, **last)

    def attributes(self) -> list[dict[str, object]]:
        """All attributes and hooks that recording could replace."""
        owners = [self.schedule, self.optimizer, *self.stages]
        hooks = (
            self.optimizer._optimizer_step_pre_hooks,
            self.optimizer._optimizer_step_post_hooks,
        )
        return [dict(vars(owner)) for owner in owners] + [
            {name: getattr(schedules, name) for name in ("_batch_p2p", "_wait_batch_p2p")},
            {f"hook {key}": hook for one in hooks for key, hook in one.items()},
        ]


def on_two_of_four(train):
    """Run on ranks 0 and 1 of four, which are a pipeline: `train` takes their group."""

    @functools.wraps(train)
    def on_each(_fabric, is_member, *arguments):
        group = pipeline_groups((0, 1), (2, 3))
        return train(group, *arguments) if is_member else None

    return on_each


def ours(caught: list[warnings.WarningMessage]) -> list[str]:
    """The texts of ppbench's warnings."""
    return [str(one.message) for one in caught if "ppbench" in str(one.message)]


def _layers(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def same_objects(before: list[dict[str, object]], after: list[dict[str, object]]) -> list[str]:
    """Names of attributes that were added or removed, or are other callables than before."""
    return [
        name
        for one, other in zip(before, after, strict=True)
        for name in one.keys() | other.keys()
        if (name in one) != (name in other)
        or (callable(one[name]) and one[name] is not other[name])
    ]


def untouched(_fabric, _is_member) -> list[torch.Tensor]:
    """Trained without anybody watching."""
    script = Script(pipeline_groups((0, 2), (1, 3)), 1)
    for _ in range(STEPS):
        script.step()
    return [p.detach() for p in script.parameters]


def watched(_fabric, _is_member, folder: Path) -> SimpleNamespace:
    """Two data-parallel pipelines, of which the first is watched in steps 1 and 3."""
    script = Script(pipeline_groups((0, 2), (1, 3)), 1)
    before = script.attributes()
    with warnings.catch_warnings(record=True, action="always") as told:
        attachment = ppbench.attach(
            script.schedule,
            steps=[1, 3],
            results=folder,
            name="titan",
            tokens_per_step=64,
            optimizer=script.optimizer,
            settings={"model.preset": "mine", "seq_len": 8},
        )
        losses, changed = [], []
        for _ in range(STEPS):
            losses.append(script.step())
            changed.append(same_objects(before, script.attributes()))
    script.evaluate()
    return SimpleNamespace(
        run_id=attachment.run_id,
        losses=losses,
        changed=changed,
        parameters=[p.detach() for p in script.parameters],
        warnings=ours(told),
    )


@on_two_of_four
def watched_and_profiled(group, folder: Path) -> SimpleNamespace:
    """Two ranks with two stages each, watched by us and by torch's profiler in the same steps."""
    script = Script(group, 2)
    attachment = ppbench.attach(script.schedule, range(1, 3), results=folder, name="two")
    script.step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        script.step()
        script.evaluate()  # is no step
        script.step()
    path = folder / f"rank{dist.get_rank()}.json"
    profiler.export_chrome_trace(str(path))
    order = script.schedule.pipeline_order
    return SimpleNamespace(
        run_id=attachment.run_id,
        path=path,
        changed=[n for n in ("step",) if n in vars(script.schedule)],
        order=[[str(action) for action in order[rank] if action] for rank in sorted(order)],
    )


@on_two_of_four
def with_curve(group, folder: Path) -> SimpleNamespace:
    """Every second step is handed on; the fourth is stored as a run as well."""
    script, handed = Script(group, 2), []
    before = script.attributes()
    with warnings.catch_warnings(record=True, action="always") as told:
        attachment = ppbench.attach(
            script.schedule,
            [4],
            every=2,
            to=lambda step, metrics: handed.append((step, metrics)),
            results=folder,
            tokens_per_step=64,
        )
        for _ in range(11):
            script.step()
            dist.barrier(group)  # what all ranks have posted is there when the next step begins
        attachment.close()
    return SimpleNamespace(
        run_id=attachment.run_id,
        handed=handed,
        changed=same_objects(before, script.attributes()),
        warnings=ours(told),
    )


@on_two_of_four
def our_error(group, folder: Path, where: str) -> SimpleNamespace:
    """Something of ours fails on rank 1 in the middle of a watched step, or a hook of ours does."""
    script = Script(group, 2)
    before = script.attributes()
    with warnings.catch_warnings(record=True, action="always") as told:
        attachment = ppbench.attach(
            script.schedule, [1, 2], results=folder, optimizer=script.optimizer
        )
        if dist.get_rank() == 1:
            owner = attachment._clock if where == "clock" else attachment._instrument
            times = iter(range(30))
            setattr(owner, *OUR_ERRORS[where](times))
        losses = [script.step() for _ in range(4)]
    return SimpleNamespace(
        losses=losses,
        changed=same_objects(before, script.attributes()),
        parameters=[p.detach() for p in script.parameters],
        warnings=ours(told),
    )


def _runs_out(times) -> int:
    return next(times)


class _Broken(dict):
    """What an instrument keeps in it makes an error."""

    def get(self, *_):
        raise ZeroDivisionError

    __setitem__ = __ior__ = get


OUR_ERRORS = {
    "clock": lambda times: ("mark", lambda: _runs_out(times)),
    "message": lambda _: ("_open_messages", _Broken()),
    "works": lambda _: ("_moving", _Broken()),
    "names": lambda _: ("_to_start", _Broken()),
}


@on_two_of_four
def unwatched(group) -> list[torch.Tensor]:
    script = Script(group, 2)
    for _ in range(4):
        script.step()
    return [p.detach() for p in script.parameters]


@on_two_of_four
def mistaken(group, folder: Path, how: str) -> SimpleNamespace:
    """Attach with a mistake; returns the runs, the attributes left changed, and the warnings."""
    script, rank = Script(group, 1), dist.get_rank()
    before = script.attributes()
    with warnings.catch_warnings(record=True, action="always") as told:
        runs = MISTAKES[how](script, rank, {"results": folder})
    return SimpleNamespace(
        runs=[one.run_id for one in runs],
        changed=same_objects(before, script.attributes()),
        warnings=ours(told),
        files={one.filename for one in told if "ppbench" in str(one.message)},
    )


def _one_step(script, steps, options):
    attachment = ppbench.attach(script.schedule, steps, **options)
    script.step()
    return [attachment]


def _no_folder(script, rank, options):
    if rank == 0:
        options["results"].write_text("a file")
    return _one_step(script, [0], options)


def _twice(script, _rank, options):
    """Then again, when the first is over."""
    attach = functools.partial(ppbench.attach, script.schedule, [0], **options)
    first, second = attach(), attach()
    script.step()
    third = attach()
    script.step()
    return [first, second, third]


def _one_rank_alone(script, rank, options):
    members.PATIENCE_S = 1
    attach = functools.partial(ppbench.attach, script.schedule, [0], **options)
    attachments = [attach()] if rank == 0 else []
    script.step()
    members.PATIENCE_S = 60
    members._made[0, 1] += rank  # as if it had come: the next ones meet again
    return attachments


def _closed_before(script, _rank, options):
    with ppbench.attach(script.schedule, [7], **options) as attachment:
        script.step()
    return [attachment]


def _closed_half_way(script, _rank, options):
    attachment = ppbench.attach(script.schedule, range(5), **options)
    script.step()
    script.step()
    attachment.close()
    attachment.close()
    script.step()
    return [attachment]


def _never_closed(script, _rank, options):
    """The process ends right after the last chosen step and its optimizer's."""
    attachment = ppbench.attach(script.schedule, [0, 1], optimizer=script.optimizer, **options)
    script.step()
    script.step()
    attachment._at_exit()
    return [attachment]


def _other_torch(script, _rank, options):
    usual = schedules._wait_batch_p2p
    del schedules._wait_batch_p2p
    attachment = ppbench.attach(script.schedule, [0], **options)
    schedules._wait_batch_p2p = usual
    script.step()
    return [attachment]


def _failing_callback(script, _rank, options):
    """The curve ends, and the run is stored."""

    def fail(step, _metrics):
        raise ZeroDivisionError(f"step {step}")

    attachment = ppbench.attach(script.schedule, [5], every=2, to=fail, **options)
    for _ in range(6):
        script.step()
        dist.barrier(script.stages[0].group)
    attachment.close()  # on the other rank the curve goes on
    return [attachment]


def _curve(script, options, **wanted):
    attachment = ppbench.attach(script.schedule, **options, **wanted)
    script.step()
    return [attachment]


MISTAKES = {
    "failing callback": _failing_callback,
    "no board": lambda script, _, options: _curve(script, options, every=2),
    "no such board": lambda script, _, options: _curve(script, options, every=2, to="tensorboard"),
    "every step": lambda script, _, options: _curve(script, options, every=1, to=print),
    "not how often": lambda script, _, options: _curve(script, options, steps=[0], to=print),
    "nothing": lambda script, _, options: _curve(script, options),
    "no folder": _no_folder,
    "twice": _twice,
    "different steps": lambda script, rank, options: _one_step(script, [rank], options),
    "mistake of one rank": lambda script, rank, options: _one_step(script, [-rank], options),
    "one rank alone": _one_rank_alone,
    "closed before": _closed_before,
    "never closed": _never_closed,
    "closed half way": _closed_half_way,
    "no optimizer": lambda script, _, options: [
        ppbench.attach(script.schedule, [0], optimizer="adamw", **options)
    ],
    "no schedule": lambda _script, _, options: [ppbench.attach("1f1b", [0], **options)],
    "other torch": _other_torch,
    "no loss": lambda script, _, options: _one_step(
        script, [0], {**options, "loss": lambda: 1 / 0}
    ),
}


@on_two_of_four
def from_csv(group, folder: Path, path: Path, form: str) -> SimpleNamespace:
    """A program of the script's author, run by torch's own runtime, two microbatches, two ranks."""
    script = Script(group, 2 if form == "compute_only" else 1)
    runtime = schedules._PipelineScheduleRuntime(
        script.stages, n_microbatches=2, loss_fn=nn.functional.mse_loss
    )
    runtime._load_csv(str(path), format=form)
    script.schedule = runtime
    with (
        warnings.catch_warnings(record=True, action="always") as told,
        ppbench.attach(runtime, [1, 2], results=folder, name="csv") as attachment,
    ):
        losses = [script.step() for _ in range(3)]
    return SimpleNamespace(
        run_id=attachment.run_id,
        losses=losses,
        parameters=[p.detach() for p in script.parameters],
        warnings=ours(told),
    )


def both_pipelines(_fabric, _is_member, folder: Path) -> str | None:
    """Every pipeline is watched, and they end at about the same time."""
    script = Script(pipeline_groups((0, 2), (1, 3)), 1)
    attachment = ppbench.attach(script.schedule, [0], results=folder, every_pipeline=True)
    script.step()
    return attachment.run_id


@on_two_of_four
def interrupted(group, folder: Path) -> list[str]:
    """The script's own exception, in a step that is watched."""
    script = Script(group, 1)
    before = script.attributes()
    script.stages[0].clear_runtime_states = lambda: 1 / 0
    try:
        with ppbench.attach(script.schedule, [0], results=folder, optimizer=script.optimizer):
            script.step()
    except ZeroDivisionError:
        del script.stages[0].clear_runtime_states
        return same_objects(before, script.attributes())
    raise AssertionError("the exception was lost")


@on_two_of_four
def pinged(group) -> tuple[list, list]:
    """The members' objects, and round trips as if their clocks were two."""
    both = Members(tuple(dist.get_process_group_ranks(group)), 1, "gloo")
    objects = both.gather_objects("x" * dist.get_rank(), both.ranks)
    return objects, exchange_pings(both, [1], 5, both.ranks)


def profiled_engine(fabric, is_member, settings, program, folder: Path) -> None:
    """Profile steps as `measure.profile_steps` does, with stages that take a millisecond."""
    agreement = agree(settings, fabric)
    group = pipeline_groups((0, 1), (2, 3))
    if not is_member:
        return
    ms = 1_000_000
    emulation = Emulation(uniform(program.placement, ms, ms, ms))
    trainer = Trainer(agreement, fabric, stages=EmulatedStages(agreement, emulation))
    profile_steps(SimpleNamespace(step=trainer.step), "cpu", range(4, 6), group, folder)
    trainer.close()
