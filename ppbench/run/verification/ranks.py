"""The ranks' side of a verification: the case in small, its two steps, and the outcome.

    rank 0       plans --> author tries --> way                     --> judges, records
    every rank                              builds, steps, writes

It ends, and releases all its memory, before the measured case is built.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.configuration import TrainerConfig, data_of, model_of, tokenizer_of
from engine.connection import broadcast
from engine.flight import Phase
from engine.model.factory import find_factory, own_torch_numbers
from engine.model.presets import PRESETS
from engine.model.stage_module import StageModule
from engine.plan.action import Op
from engine.plan.program import Program
from engine.plan.schedules.registry import CSV_PREFIX, ScheduleError, build_program
from engine.run import device as devices
from engine.run.device import random_state
from engine.run.recording import Recording
from engine.trainer import StepResult
from ppbench.config.case import Case, Measure
from ppbench.run.runtimes.runtime import RankContext, trainer_config
from ppbench.run.verification import exchange
from ppbench.run.verification.exchange import AuthorProcess, NoRoomError, VerificationError, Way
from ppbench.run.verification.record import (
    Verified,
    is_asked_for,
    key_of,
    read_verified,
    write_verified,
)

SEQ_LEN = 16
MOST_SEQUENCES = 2  # of a microbatch
MOST_MICROBATCHES = 8  # unless the program needs more
AUTHOR_S = 600.0
"""The least time limit of the author's process; `measure.timeout_s` may raise it."""
_COPIES = 12
"""Tensors of the model's size that exist at once: weights, gradients, AdamW's two moments and those
being written, on the ranks and in the author's process."""
_WRITTEN = 5
"""Tensors of the model's size that are written: initial weights, and gradients and weights of both
steps."""
_MOST_OF_FREE = 0.8

NOTHING_IS_COMPUTED = Verified("no: an emulated run computes nothing")
NOT_ASKED_FOR = Verified("no: a preset on a built-in schedule is verified with measure.verify only")
Taken = tuple[list[StepResult], Program]
"""Both steps' results, and the program that was run."""


@dataclass(frozen=True)
class Hands:
    """The worker's functions that a verification calls, on every rank."""

    prepare: Callable[[Case], RankContext | None]  # builds this rank's part of a case
    release: Callable[[], None]  # releases it
    begin_clock: Callable[[float], None]  # sets the time limit in seconds from now; 0: none


@dataclass(frozen=True)
class Plan:
    """The case and the way that the ranks run; with an `outcome` they run nothing."""

    outcome: Verified | None
    case: Case | None = None
    way: Way | None = None
    folder: str = ""
    key: str = ""


class Verifier:
    """Verifies a launch's cases. All its methods are collective over the default group."""

    def __init__(self, results: Path, folder: Path) -> None:
        """Use `folder` for temporary files; rank 0 makes and removes it."""
        self._results, self._folder = results, folder
        self._author: AuthorProcess | None = None

    def verify(self, case: Case, measure: Measure, hands: Hands) -> Verified:
        """Verify a case if it is due; of several replicas one, on its own.

        Raises, on every rank, VerificationError and any error of opening the model.
        """
        if case.is_emulated:
            return NOTHING_IS_COMPUTED
        try:
            with own_torch_numbers():
                if case.replicas == 1:
                    return self._verify(case, measure, hands)
                # An author's module can be asked for the whole gradients of one replica alone.
                alone = dataclasses.replace(
                    case,
                    replicas=1,
                    sharding_policy=Case.sharding_policy,
                    sharding_residency=Case.sharding_residency,
                    sharding_look_ahead=Case.sharding_look_ahead,
                    sharding_every_backward=Case.sharding_every_backward,
                    sharding_max_active_stages=Case.sharding_max_active_stages,
                )
                verified = self._verify(alone, measure, hands)
                if verified.how.startswith("no: "):
                    return verified
                how = f"one replica of them: {verified.how}"
                return dataclasses.replace(verified, how=how)
        except NoRoomError as error:  # raised on every rank alike
            return _not_possible(str(error), is_asked=measure.verify)
        finally:
            if self._author is not None:
                self._author.stop()
                self._author = None
                shutil.rmtree(self._folder, ignore_errors=True)

    def _verify(self, case: Case, measure: Measure, hands: Hands) -> Verified:
        for_author = max(measure.timeout_s, AUTHOR_S) if measure.timeout_s else 0.0
        hands.begin_clock(for_author)
        plan = broadcast(functools.partial(self._plan, case, is_full=measure.verify))
        if plan.outcome is not None:
            return plan.outcome
        assert plan.case is not None
        hands.begin_clock(measure.timeout_s)
        member = hands.prepare(plan.case)
        taken = None
        if member is not None:
            taken = take_steps(member, plan)
            member.runtime.close()
        del member
        hands.release()
        hands.begin_clock(for_author)
        return broadcast(functools.partial(self._judge, plan, taken, is_full=measure.verify))

    def _plan(self, case: Case, *, is_full: bool) -> Plan:  # on rank 0
        if not is_full and not is_asked_for(case, case.model_preset in PRESETS):
            return Plan(NOT_ASKED_FOR)
        if ":" in case.model_preset:
            find_factory(case.model_preset)  # imported, so that its sources are known
        num_microbatches = case.num_microbatches if is_full else _fewer_microbatches(case)
        key = key_of(case, num_microbatches, is_full)
        known = None if is_full else read_verified(self._results, key)
        if known is not None:
            return Plan(dataclasses.replace(known, how=f"{known.how} (before, on this machine)"))
        ways, reason = _ways(case, self._results, is_full=is_full)
        if not ways:
            return Plan(_not_possible(reason, is_asked=is_full))
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        author = self._author = AuthorProcess(self._folder, request_of(case, ways))
        trial = author.wait_for(exchange.TRIAL)
        if trial["way"] is None:
            reasons = "; ".join(dict.fromkeys(trial["failures"]))
            raise VerificationError(
                f'verification: the module of "{case.model_preset}" itself fails when it is '
                f"called unsplit: {reasons}"
            )
        way = Way(**trial["way"])
        small = _in_small(case, way, num_microbatches, is_full=is_full)
        return Plan(None, small, way, str(self._folder), key)

    def _judge(self, plan: Plan, taken: Taken | None, *, is_full: bool) -> Verified:  # on rank 0
        assert plan.case is not None
        assert plan.way is not None
        assert self._author is not None
        if taken is None:
            reason = f'runtime "{plan.case.runtime}" does not expose its modules'
            return _not_possible(reason, is_asked=is_full)
        training = training_of(plan.case, *taken)
        batches = batches_of(trainer_config(plan.case), exchange.NUM_STEPS)
        torch.save(batches, self._folder / exchange.BATCHES)
        exchange.write(self._folder / exchange.TRAINING, dataclasses.asdict(training))
        verdict = exchange.Verdict(**self._author.wait_for(exchange.VERDICT))
        if verdict.error:
            raise VerificationError(f"verification: {verdict.error}")
        if verdict.notes and verdict.notes[0].startswith("no: "):
            return _not_possible(verdict.notes[0].removeprefix("no: "), is_asked=is_full)
        case, way, num_steps = plan.case, plan.way, exchange.NUM_STEPS
        author = "the factory's module" if ":" in case.model_preset else "transformers' module"
        notes = "".join(f"; {note}" for note in verdict.notes)
        how = (
            f"against {author}, unsplit: weights, loss and {verdict.num_gradients // num_steps} "
            f"gradients of {num_steps} steps of {case.num_microbatches} x {way.batch} x "
            f"{way.seq_len} tokens in {way.dtype}{notes}"
        )
        verified = Verified(how, verdict.difference)
        write_verified(self._results, plan.key, verified)
        return verified


def _not_possible(reason: str, *, is_asked: bool) -> Verified:
    if is_asked:
        raise VerificationError(f"measure.verify: the run cannot be verified: {reason}")
    return Verified(f"no: {reason}")


def _fewer_microbatches(case: Case) -> int:
    """Return the case's number of microbatches, or fewer if the schedule allows."""
    if case.schedule.startswith(CSV_PREFIX) or case.is_automatic:
        return case.num_microbatches
    most = max(MOST_MICROBATCHES, 2 * case.world_size)
    for count in range(min(case.num_microbatches, most), 0, -1):
        with contextlib.suppress(ScheduleError):
            build_program(case.schedule, case.world_size, count, case.stages_per_rank)
            return count
    return case.num_microbatches


def _in_small(case: Case, way: Way, num_microbatches: int, *, is_full: bool) -> Case:
    """Return the smaller case for verification. A measured partition would differ each time."""
    partition = "parameters" if case.model_partition == "measured" else case.model_partition
    is_variable = not isinstance(case.seq_len, int)
    return dataclasses.replace(
        case,
        num_microbatches=num_microbatches,
        seq_len=case.seq_len if is_variable else way.seq_len,
        data_max_seq_len=way.seq_len if is_variable else case.data_max_seq_len,
        data_num_workers=0,
        train_microbatch_size=way.batch,
        model_dtype=way.dtype,
        model_partition=partition,
        train_autocast="none",
        train_compile=case.train_compile and is_full,
        train_lr_schedule="constant",
        train_lr_warmup_steps=0,
        launch_bind=False,
    )


def _ways(case: Case, results: Path, *, is_full: bool) -> tuple[list[Way], str]:
    """Return the ways to run the case, the preferred first, and why others are not possible.

    There must be room for a way in memory and on the disk of `results`.
    """
    longest = case.seq_len if isinstance(case.seq_len, int) else case.data_max_seq_len
    full = case.train_microbatch_size, longest
    small = min(MOST_SEQUENCES, full[0]), min(SEQ_LEN, longest)
    shapes = [full] if is_full or small == full else [small, full]
    config = trainer_config(case)
    num_parameters = model_of(config, torch.device(case.device)).num_parameters
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        free_bytes = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        free_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if case.device == devices.kind():
        free_bytes = min(devices.free_bytes(torch.device(case.device)), free_bytes)
    ways, reason = [], ""
    for dtype in ("float64", "float32", case.model_dtype):
        size = getattr(torch, dtype).itemsize
        rooms = (
            ("memory", _COPIES, free_bytes),
            ("the results' disk", _WRITTEN, shutil.disk_usage(results).free),
        )
        lacking = [
            f"it needs about {num_parameters * size * copies / 2**30:.1f} GiB of {what}, and "
            f"{free / 2**30:.1f} are free"
            for what, copies, free in rooms
            if num_parameters * size * copies > _MOST_OF_FREE * free
        ]
        if lacking:
            reason = "; ".join(lacking)
            continue
        ways += [Way(dtype, case.device, *shape) for shape in shapes]
    return list(dict.fromkeys(ways)), reason


def request_of(case: Case, ways: list[Way]) -> exchange.Request:
    """Make the request, with a microbatch of the case's own data, of the largest shape."""
    largest = max(ways, key=lambda way: (way.batch, way.seq_len))
    config = trainer_config(_in_small(case, largest, case.num_microbatches, is_full=True))
    batch = batches_of(config, 1)[0]
    return exchange.Request(
        case.model_preset,
        case.model_weights,
        case.model_trust_remote_code,
        case.model_seed,
        case.model_split_points,
        tuple(ways),
        batch["inputs"][0].tolist(),
        batch["targets"][0].tolist(),
        [place for place in sys.path if place],
    )


def batches_of(config: TrainerConfig, num_steps: int) -> list[dict[str, list[Tensor]]]:
    """Return the batches of the first steps, on the CPU."""
    cpu = torch.device("cpu")
    data = data_of(config, model_of(config, cpu), tokenizer_of(config), cpu)
    try:
        steps = [data.step(step) for step in range(num_steps)]
    finally:
        data.close()
    return [{"inputs": list(step.inputs), "targets": list(step.targets)} for step in steps]


def training_of(case: Case, steps: list[StepResult], lowered: Program) -> exchange.Training:
    forwards: dict[int, list[int]] = {}
    for row in lowered.actions:
        for action in row:
            if action.op is Op.F:
                forwards.setdefault(action.stage, []).append(action.microbatch)
    return exchange.Training(
        case.world_size,
        [step.loss if step.loss is not None else float("nan") for step in steps],
        [step.gradient_norm for step in steps],
        forwards,
        case.train_optimizer,
        case.train_learning_rate,
        case.train_weight_decay,
        case.train_momentum,
        case.train_clip_norm,
        case.model_seed,
    )


def take_steps(member: RankContext, plan: Plan) -> Taken | None:
    """Train two steps, and write the state before and after each into files.

    The results have the loss of the rank with the last stage. None for a runtime of another package
    that does not expose its modules.
    """
    modules = getattr(member.runtime, "modules", None)
    if modules is None:
        return None
    folder, own_rank = Path(plan.folder), dist.get_rank()
    is_visible = (folder / exchange.REQUEST).exists()

    def write(phase: str, part: dict[str, Any]) -> None:
        """Write into rank 0's folder, or, from another machine, send to rank 0. Collective."""
        sent = None
        if is_visible:
            torch.save(part, exchange.part_file(folder, own_rank, phase))
        else:
            torch.save(part, buffer := io.BytesIO())
            sent = buffer.getvalue()
        for rank, received in enumerate(_gathered(member, sent)):
            if received is not None and own_rank == 0:
                exchange.part_file(folder, rank, phase).write_bytes(received)

    write(exchange.BEFORE, _held(modules, with_flags=True))
    results = []
    for step in range(exchange.NUM_STEPS):
        with _drawing(modules, member.fabric.device) as draws:
            result = member.runtime.step(step, Recording.flight_only)
        write(str(step), {**_held(modules), "draws": draws})
        results.append(dataclasses.replace(result, spans=[]))
    everyone: list[list[StepResult]] = _gathered(member, results)
    steps = [
        next((result for result in of_step if result.loss is not None), of_step[0])
        for of_step in zip(*everyone, strict=True)
    ]
    return steps, member.runtime.lowered


def _gathered(member: RankContext, ours: Any) -> list[Any]:
    member.flight.enter(Phase.WAITS)
    theirs: list[Any] = [None] * len(member.ranks)
    dist.all_gather_object(theirs, ours, group=member.group)
    return theirs


def _held(modules: Mapping[int, StageModule], *, with_flags: bool = False) -> dict[str, Any]:
    """Return a rank's tensors, by stage and by name in the unsplit module."""
    stages = {}
    for stage, module in modules.items():
        parameters = module.own_parameters()
        stages[stage] = {
            "state": {name: _copy(tensor) for name, tensor in module.own_state().items()},
            "gradients": {
                name: None if p.grad is None else _copy(p.grad) for name, p in parameters.items()
            },
            "trains": {name: p.requires_grad for name, p in parameters.items()}
            if with_flags
            else {},
        }
    return {"stages": stages, "draws": []}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


@contextlib.contextmanager
def _drawing(
    modules: Mapping[int, StageModule], device: torch.device
) -> Iterator[list[dict[str, Any]]]:
    """Record the random state at the forwards of stages, in their order."""
    draws: list[dict[str, Any]] = []

    def begin(stage: int, entrance: str, *_: object) -> None:
        state = random_state(device)
        draws.append({"stage": stage, "entrance": entrance, "begin": state, "at_entrance": state})

    def enter(*_: object) -> None:
        draw = draws[-1] if draws else {}
        if "end" not in draw:  # a recomputation enters it again
            draw["at_entrance"] = random_state(device)

    def end(*_: object) -> None:
        draw = draws[-1]
        draw["end"] = random_state(device)
        draw["has_drawn"] = not torch.equal(draw["begin"], draw["end"])

    with contextlib.ExitStack() as hooks:
        for stage, module in modules.items():
            name = entrance_of(module)
            begins = functools.partial(begin, stage, name)
            hooks.callback(module.register_forward_pre_hook(begins).remove)
            hooks.callback(module.register_forward_hook(end).remove)
            if module.units and name:
                hooks.callback(module.units[0].register_forward_pre_hook(enter).remove)
        yield draws


def entrance_of(module: StageModule) -> str:
    """Return the submodule of the unsplit module that the stage begins with.

    It is empty for the first stage. `#3` is piece 3 of a chain, whose name the author's process
    knows.
    """
    if module.is_first or not module.units:
        return ""
    inner = getattr(module, "model", None)
    if isinstance(inner, nn.Module):
        names = {id(part): name for name, part in inner.named_modules()}
        entrance: str = names.get(id(module.units[0]), "")
        return entrance
    return f"#{module.layers.start}"
