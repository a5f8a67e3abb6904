"""The configuration that is asked for, and what follows from it before anything has weights."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from engine.model.data import DataSpec, Loader, load_tokenizer
from engine.model.spec import ModelSpec
from engine.model.split import open_model
from engine.model.stage_module import Model, ModelError
from engine.plan.action import RECV_OPS, SEND_OPS
from engine.plan.check import check
from engine.plan.collective_rules import with_checked_collectives
from engine.plan.collectives import CollectivePolicy, DataParallel, with_sums_of_copies
from engine.plan.lower import DEFAULT_LOOK_AHEAD, Policy, lower
from engine.plan.messages import Edge, edge_of
from engine.plan.program import TRAIN, Program
from engine.plan.schedules.registry import ScheduleError, build_program, in_mode
from engine.plan.slices import shares_of
from engine.run import device as devices
from engine.run.issue_limit import DEFAULT_ISSUE_AHEAD
from engine.run.optimizer import OptimizerSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AUTOCAST = {"none": None, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TrainerConfig:
    """Everything that decides what a step computes.

    `stages_per_rank` None is the schedule's own. A `program` is run in place of the schedule.
    `policy` and `look_ahead` say where receives are posted (see `engine.plan.lower`). `autocast` is
    `none` or `bfloat16`; `recompute` keeps only each layer's input until its backward, which runs
    its forward again, on all stages or on those where a tuple, one entry for each stage, is true;
    `compile` compiles the layers, and then I does all of a backward and W nothing.

    In `mode` "evaluate" there are forwards alone, of modules in the state of `eval()`; optimizer,
    `recompute` and `sharding` have no use then.

    `replicas` pipelines of `world_size` ranks train together, each on `num_microbatches` of its
    own, and `sharding` says what of parameters, gradients and optimizer states each keeps.

    With `slices`, each microbatch comes in slices of so many tokens, the sum of which is `seq_len`;
    `attention`, from 0 to 1, is the share of its time that attention takes (`engine.plan.slices`).

    With `has_pairs`, the forwards and backwards that a schedule pairs are one action each.

    On an accelerator the host issues at most `issue_ahead` computations that are not done. Each
    stage `rehearses` its computations before the first step; None: on an accelerator.
    """

    model: ModelSpec = field(default_factory=ModelSpec)
    data: DataSpec = field(default_factory=DataSpec)
    schedule: str = "1f1b"
    world_size: int = 1
    stages_per_rank: int | None = None
    policy: Policy = Policy.EARLY
    look_ahead: int = DEFAULT_LOOK_AHEAD
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    autocast: str = "none"
    recompute: bool | tuple[bool, ...] = False
    compile: bool = False
    program: Program | None = None
    replicas: int = 1
    sharding: CollectivePolicy = field(default_factory=DataParallel)
    issue_ahead: int = DEFAULT_ISSUE_AHEAD
    has_pairs: bool = False
    rehearses: bool | None = None
    mode: str = TRAIN
    slices: tuple[int, ...] = ()
    attention: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", Policy(self.policy))  # also of its name
        if self.replicas < 1:
            raise ValueError(f"replicas is {self.replicas}; expected at least 1")
        if self.issue_ahead < 1:
            raise ValueError(f"issue_ahead is {self.issue_ahead}; expected at least 1")
        if self.autocast not in AUTOCAST:
            known = ", ".join(AUTOCAST)
            raise ValueError(f'unknown autocast "{self.autocast}"; known: {known}')
        if not 0 <= self.attention <= 1:
            raise ValueError(f"attention is {self.attention:g}; expected a share from 0 to 1")
        if self.slices and self.data.is_variable:
            raise ValueError(
                'slices are cut from sequences of one length; seq_len is "variable", expected a '
                "number of tokens; give one, or no slices"
            )
        if self.slices and (sum(self.slices) != self.data.seq_len or min(self.slices) < 1):
            raise ValueError(
                f"slices of {list(self.slices)} tokens; expected at least 1 in each, and seq_len "
                f"{self.data.seq_len} in all"
            )
        if self.slices and self.compile:
            raise ValueError(
                "slices cannot be compiled: what a layer attends to grows; set no compile"
            )

    @property
    def trains(self) -> bool:
        """Whether there are gradients and an optimizer."""
        return self.mode == TRAIN

    @property
    def num_messages(self) -> int:
        """Messages of a step from one stage to the next: of each microbatch, or each slice."""
        return self.data.num_microbatches * max(1, len(self.slices))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, or slice of one, that a stage takes at once."""
        return max(self.slices, default=self.data.longest)

    @property
    def shapes_vary(self) -> bool:
        """Whether messages of a stage have different shapes."""
        return self.data.is_variable or len({*self.slices}) > 1

    @property
    def num_processes(self) -> int:
        """The ranks of all replicas: rank r of replica d is process d x `world_size` + r."""
        return self.replicas * self.world_size


def program_of(config: TrainerConfig) -> Program:
    """The step's program, checked.

    Raises ScheduleError or ProgramError.
    """
    asked = config.world_size, config.num_messages
    own = config.program
    if own is not None and (own.placement.world_size, own.num_microbatches) != asked:
        raise ScheduleError(
            f"the program has {own.placement.world_size} ranks and {own.num_microbatches} "
            f"microbatches; the configuration asks for {asked[0]} and {asked[1]}"
        )
    program = own or build_program(
        config.schedule,
        config.world_size,
        config.data.num_microbatches,
        config.stages_per_rank,
        is_replicated=config.replicas > 1,
        mode=config.mode,
        has_pairs=config.has_pairs,
        slices=shares_of(config.slices, config.attention) if config.slices else (),
    )
    program = in_mode(program if config.has_pairs else program.in_order(), config.mode)
    check(program)
    return program


def lowered_of(config: TrainerConfig) -> Program:
    """The step's program with its transfers and collectives, proved free of deadlock.

    All replicas run this one program: what cannot hang in one of them cannot hang in all. Raises
    ScheduleError or ProgramError.
    """
    program = program_of(config)
    lowered = lower(program, config.policy, config.look_ahead)
    if config.replicas > 1 and config.trains:
        return with_checked_collectives(lowered, program, config.sharding)
    return with_sums_of_copies(lowered)


def edges_of(lowered: Program) -> list[Edge]:
    """Every channel of the program, in one order on all ranks."""
    transfers = (a for row in lowered.actions for a in row if a.op in SEND_OPS | RECV_OPS)
    return sorted({edge_of(transfer) for transfer in transfers})


_opened = functools.lru_cache(maxsize=2)(open_model)
"""The models that were opened last: each is asked for more than once, and tracing takes seconds."""


def model_of(config: TrainerConfig, device: torch.device) -> Model:
    """The model, checked against the data; `agree` tries its architecture. Raises ModelError."""
    data = config.data
    if data.is_variable and config.model.split == "trace":
        message = 'split = "trace" fixes the shape of a microbatch; seq_len cannot be "variable"'
        raise ModelError(message, "model.split")
    shape = (data.microbatch_size, data.longest)
    spec = dataclasses.replace(config.model, partition="uniform")  # it is cut only later
    model = _opened(spec, shape, device, trains=config.trains)
    if model.task.vocab_size is None:  # the length is that of the factory's batches
        if data.is_variable:
            message = f'{config.model.name} brings its own batches; seq_len cannot be "variable"'
            raise ModelError(message, "seq_len")
        return model
    is_too_long = model.max_positions is not None and data.longest > model.max_positions
    if is_too_long and not data.is_variable:
        raise ModelError(
            f"seq_len is {data.longest}, more than the {model.max_positions} positions of "
            f"{config.model.name}; at most {model.max_positions}",
            "seq_len",
        )
    return model


def data_spec_of(config: TrainerConfig, model: Model) -> DataSpec:
    """The data's settings; documents are cut to the model's positions where lengths vary."""
    data, positions = config.data, model.max_positions
    if not data.is_variable or positions is None or positions >= data.max_seq_len:
        return data
    return dataclasses.replace(data, max_seq_len=positions)


def recomputed_stages(config: TrainerConfig, num_stages: int) -> tuple[bool, ...]:
    """Whether each stage recomputes its layers. Raises ModelError for a list of other stages."""
    given = config.recompute
    if isinstance(given, bool):
        return (given,) * num_stages
    if len(given) != num_stages:
        raise ModelError(
            f"recompute has {len(given)} values for {num_stages} stages; give true, false, or one "
            "of them for each stage",
            "train.recompute",
        )
    return given


def tokenizer_of(config: TrainerConfig) -> PreTrainedTokenizerBase | None:
    """The tokenizer, None for bytes. Raises DataError."""
    if config.data.source == "synthetic":
        return None
    model = config.model
    return load_tokenizer(
        config.data.tokenizer, model.home, trust_remote_code=model.trust_remote_code
    )


def data_of(
    config: TrainerConfig,
    model: Model,
    tokenizer: PreTrainedTokenizerBase | None,
    device: torch.device,
) -> Loader:
    """The loader of all replicas' microbatches. Raises DataError."""
    spec = data_spec_of(config, model)
    spec = dataclasses.replace(spec, num_microbatches=config.replicas * spec.num_microbatches)
    return model.task.data(spec, tokenizer, pin_memory=devices.is_accelerator(device))
