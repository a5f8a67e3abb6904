"""The options of the command-line trainer, and the configuration that they make.

They are checked before torch is imported: `--help` and a mistyped option are answered at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

import typer

from engine.plan.schedules.registry import CSV_PREFIX, find_schedule

if TYPE_CHECKING:
    from engine.configuration import TrainerConfig

LATEST: Final = "latest"
VARIABLE: Final = "variable"

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Raised by typer for a command line that it cannot read. It exports only a subclass, and the
module of this base class depends on typer's version."""


class OptionError(ValueError):
    """An option has an impossible value, or contradicts another."""


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
_model = functools.partial(typer.Option, rich_help_panel="Model")
_data = functools.partial(typer.Option, rich_help_panel="Data")
_pipeline = functools.partial(typer.Option, rich_help_panel="Pipeline")
_length = functools.partial(typer.Option, rich_help_panel="Length of the run")
_optimizer = functools.partial(typer.Option, rich_help_panel="Optimizer")
_precision = functools.partial(typer.Option, rich_help_panel="Precision and device")
_checkpoints = functools.partial(typer.Option, rich_help_panel="Checkpoints")
_output = functools.partial(typer.Option, rich_help_panel="Output")

_BOOLEANS = {"true": True, "false": False}

CHOICES = {
    "weights": ("auto", "random"),
    "split": ("auto", "trace"),
    "device": ("auto", "cpu", "cuda", "xpu"),
    "sharding": ("none", "ddp", "zero1", "zero2", "zero3", "torch"),
}


@app.command()
@dataclass(frozen=True)
class Options:
    """Train a language model in a pipeline: each rank has some of its layers.

    Start one process per rank with [bold]torchrun --nproc-per-node N -m engine.train …[/bold];
    [bold]python -m engine.train …[/bold] trains unsplit.
    """

    model: Annotated[
        str, _model(metavar="NAME", help="Preset, hub id, folder or package.module:factory.")
    ] = "llama-8m"
    dtype: Annotated[
        str, _model(metavar="float32|float64|bfloat16", help="Of parameters and gradients.")
    ] = "float32"
    weights: Annotated[
        str, _model(metavar="auto|random", help="A checkpoint's own where it has them, or random.")
    ] = "auto"
    seed: Annotated[
        int, _model(metavar="N", min=0, help="Of random weights, dropout and shuffling.")
    ] = 0
    trust_remote_code: Annotated[
        bool, _model("--trust-remote-code", help="Run the code that a hub model brings.")
    ] = False

    data: Annotated[
        str,
        _data(
            metavar="SOURCE",
            help="stdlib, synthetic, text:PATH, files:PATH or hf:NAME?config=…&split=…&revision=…",
        ),
    ] = "stdlib"
    tokenizer: Annotated[
        str, _data(metavar="NAME", help="Hub id, folder or bytes; auto: the model's, else bytes.")
    ] = "auto"
    text_column: Annotated[str, _data(metavar="NAME", help="The column to train on.")] = "text"
    seq_len: Annotated[
        str,
        _data(metavar="N|variable", help="Tokens of a sequence; variable: a document, padded."),
    ] = "128"
    max_seq_len: Annotated[
        int, _data(metavar="N", min=1, help="Longer documents are cut (variable).")
    ] = 2048
    shuffle: Annotated[bool, _data(help="Anew in each epoch.")] = True
    data_workers: Annotated[int, _data(metavar="N", min=0, help="Loader processes per rank.")] = 0

    schedule: Annotated[
        str,
        _pipeline(
            metavar="NAME",
            help="Such as 1f1b, zb_h1 or zbv; csv:PATH: a program file.",
        ),
    ] = "1f1b"
    stages_per_rank: Annotated[
        int | None,
        _pipeline(
            metavar="N",
            min=1,
            help="For interleaved_1f1b, interleaved_zb, looped_bfs.",
            show_default="the schedule's own",
        ),
    ] = None
    replicas: Annotated[
        int, _pipeline(metavar="N", min=1, help="Pipelines, which divide the processes and batch.")
    ] = 1
    sharding: Annotated[
        str,
        _pipeline(
            metavar="none|ddp|zero1|zero2|zero3|torch",
            help="What each replica keeps a part of: optimizer, gradients too, parameters too.",
        ),
    ] = "ddp"
    global_batch_size: Annotated[int, _pipeline(metavar="N", min=1, help="Sequences per step.")] = 8
    microbatch_size: Annotated[
        int,
        _pipeline(
            metavar="N", min=1, help="Sequences per microbatch; divides the global batch size."
        ),
    ] = 1
    partition: Annotated[
        str,
        _pipeline(
            metavar="KIND|N,N,…",
            help="uniform, parameters, measured, or the layers of each stage: 6,10,10,6.",
        ),
    ] = "uniform"
    split: Annotated[
        str, _pipeline(metavar="auto|trace", help="trace: cut any factory's module by tracing.")
    ] = "auto"
    split_points: Annotated[
        str, _pipeline(metavar="NAME,NAME,…", help="Submodules to cut before (trace).")
    ] = ""

    max_tokens: Annotated[
        int | None,
        _length(metavar="N", min=1, help="Stop at the step that reaches as many tokens."),
    ] = None
    max_steps: Annotated[
        int | None,
        _length(metavar="N", min=1, help="Stop after as many steps, resumed ones included."),
    ] = None

    optimizer: Annotated[str, _optimizer(metavar="adamw|sgd")] = "adamw"
    learning_rate: Annotated[float, _optimizer(metavar="X", min=0, help="At its peak.")] = 1e-4
    weight_decay: Annotated[float, _optimizer(metavar="X", min=0, help="AdamW's.")] = 0.01
    momentum: Annotated[float, _optimizer(metavar="X", min=0, help="SGD's.")] = 0.0
    lr_schedule: Annotated[str, _optimizer(metavar="constant|cosine")] = "constant"
    lr_warmup_steps: Annotated[
        int, _optimizer(metavar="N", min=0, help="The rate grows from 0 until then.")
    ] = 0
    lr_decay_steps: Annotated[
        int | None,
        _optimizer(
            metavar="N", min=1, help="Where the cosine reaches 0.", show_default="the run's steps"
        ),
    ] = None
    clip_norm: Annotated[
        float, _optimizer(metavar="X", min=0, help="Largest norm of all gradients; 0: no limit.")
    ] = 0.0

    autocast: Annotated[
        str, _precision(metavar="none|bfloat16", help="Compute in it where torch deems it safe.")
    ] = "none"
    recompute: Annotated[
        bool, _precision("--recompute", help="Save memory: run each layer's forward again.")
    ] = False
    recompute_stages: Annotated[
        str,
        _precision(
            metavar="BOOL,BOOL,…",
            help="The same for some stages: true or false for each, such as true,false.",
        ),
    ] = ""
    compile: Annotated[bool, _precision("--compile", help="Compile the layers.")] = False
    device: Annotated[
        str, _precision(metavar="auto|cpu|cuda", help="auto: cuda where there is one.")
    ] = "auto"
    threads: Annotated[
        int | None,
        _precision(
            metavar="N",
            min=1,
            help="CPU threads per rank.",
            show_default="OMP_NUM_THREADS, which torchrun sets to 1; else all cores",
        ),
    ] = None

    save: Annotated[
        Path | None, _checkpoints(metavar="FOLDER", help="Save here when the run is complete.")
    ] = None
    save_every: Annotated[
        int | None, _checkpoints(metavar="N", min=1, help="Also save after every N steps.")
    ] = None
    resume: Annotated[
        str | None,
        _checkpoints(
            metavar="FOLDER|latest", help="Go on from a checkpoint; latest: the last in --save."
        ),
    ] = None

    # Not "--log": torchrun takes it for a prefix of its own options, wherever it is written.
    log_file: Annotated[
        Path | None, _output(metavar="FILE", help="Write each step to it, as a line of JSON.")
    ] = None
    log_every: Annotated[int, _output(metavar="N", min=1, help="Print every N steps.")] = 1
    quiet: Annotated[bool, _output("--quiet", help="Print steps only: no bar, no notes.")] = False

    def __post_init__(self) -> None:
        """Check everything that needs no torch. Raises OptionError or UnknownScheduleError."""
        for name, known in CHOICES.items():
            _check_choice(name, getattr(self, name), known)
        if self.max_tokens is None and self.max_steps is None:
            raise OptionError("the run has no end; give --max-tokens, --max-steps or both")
        if self.seq_len != VARIABLE and not (self.seq_len.isdecimal() and int(self.seq_len)):
            raise OptionError(
                f'--seq-len is "{self.seq_len}"; expected a number of tokens or "{VARIABLE}"'
            )
        whole, part = self.global_batch_size, self.microbatch_size
        if whole % part:
            raise OptionError(
                f"--global-batch-size {whole} is not a multiple of --microbatch-size {part}; "
                f"{(whole // part + 1) * part} is"
            )
        if whole // part % self.replicas:
            raise OptionError(
                f"--global-batch-size {whole} has {whole // part} microbatches, which --replicas "
                f"{self.replicas} does not divide; expected a multiple of {part * self.replicas}"
            )
        if self.save is None and self.save_every is not None:
            raise OptionError("--save-every needs a folder to save in; give --save FOLDER")
        if self.save is None and self.resume == LATEST:
            raise OptionError(
                "--resume latest means the latest checkpoint in the folder of --save; "
                "give --save FOLDER, or name a checkpoint"
            )
        words = self.recompute_stages.split(",") if self.recompute_stages else []
        if self.recompute and words:
            raise OptionError("--recompute means all stages; give it or --recompute-stages")
        if unknown := [word for word in words if word.strip() not in _BOOLEANS]:
            raise OptionError(
                f'--recompute-stages has "{unknown[0]}"; expected true or false for each stage, '
                "with commas between"
            )
        if not self.schedule.startswith(CSV_PREFIX):
            find_schedule(self.schedule)

    @property
    def recomputed(self) -> bool | tuple[bool, ...]:
        """Whether layers are recomputed, or on which stages."""
        if not self.recompute_stages:
            return self.recompute
        return tuple(_BOOLEANS[word.strip()] for word in self.recompute_stages.split(","))

    @property
    def length(self) -> int | Literal["variable"]:
        return VARIABLE if self.seq_len == VARIABLE else int(self.seq_len)

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of a step; None if sequences differ in length."""
        length = self.length
        return None if length == VARIABLE else self.global_batch_size * length

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole run; None if only its tokens are known."""
        steps = [] if self.max_steps is None else [self.max_steps]
        if self.max_tokens is not None and self.tokens_per_step is not None:
            steps.append(math.ceil(self.max_tokens / self.tokens_per_step))
        return min(steps, default=None)

    def share_done(self, step: int, tokens: int) -> float:
        """The share of the run that is done after these steps and tokens; 1 or more at the end."""
        return max(step / (self.max_steps or math.inf), tokens / (self.max_tokens or math.inf))


def _check_choice(name: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise OptionError(f'--{name} is "{value}"; expected one of {", ".join(known)}')


def read_options(arguments: Sequence[str]) -> Options | None:
    """Parse a command line; None after `--help`. Raises OptionError or UnknownScheduleError."""
    try:
        options = app(arguments, standalone_mode=False)
    except UsageError as error:
        message = cast(Any, error).format_message().rstrip(".")
        raise OptionError(f"{message}; see --help") from None
    return options if isinstance(options, Options) else None


def configuration(options: Options, world_size: int) -> TrainerConfig:
    """The trainer's configuration, of the replicas on all processes. Raises OptionError."""
    from engine.configuration import TrainerConfig
    from engine.model.data import DataSpec
    from engine.model.spec import DTYPES, ModelSpec
    from engine.plan.collectives import POLICIES
    from engine.run.optimizer import OptimizerSpec

    if world_size % options.replicas:
        raise OptionError(
            f"--replicas {options.replicas} does not divide the {world_size} processes; start a "
            f"multiple of it: torchrun --nproc-per-node {options.replicas}"
        )
    parts = options.partition.split(",")
    is_list = all(part.strip().isdecimal() for part in parts)
    decay_steps = options.lr_decay_steps
    try:
        _check_choice("dtype", options.dtype, DTYPES)
        if decay_steps is None and options.lr_schedule == "cosine":
            decay_steps = options.num_steps
            if decay_steps is None:
                raise OptionError(
                    "the cosine has no end: the number of steps in --max-tokens is unknown with "
                    "sequences of variable length; give --lr-decay-steps or --max-steps"
                )
        return TrainerConfig(
            model=ModelSpec(
                name=options.model,
                dtype=options.dtype,
                partition=tuple(map(int, parts)) if is_list else options.partition,
                seed=options.seed,
                weights=options.weights,
                trust_remote_code=options.trust_remote_code,
                split=options.split,
                split_points=tuple(filter(None, options.split_points.split(","))),
            ),
            data=DataSpec(
                source=options.data,
                seq_len=options.length,
                microbatch_size=options.microbatch_size,
                num_microbatches=(
                    options.global_batch_size // options.microbatch_size // options.replicas
                ),
                seed=options.seed,
                tokenizer=options.tokenizer,
                text_column=options.text_column,
                max_seq_len=options.max_seq_len,
                shuffle=options.shuffle,
                num_workers=options.data_workers,
            ),
            schedule=options.schedule,
            world_size=world_size // options.replicas,
            stages_per_rank=options.stages_per_rank,
            optimizer=OptimizerSpec(
                name=options.optimizer,
                learning_rate=options.learning_rate,
                weight_decay=options.weight_decay,
                momentum=options.momentum,
                lr_schedule=options.lr_schedule,
                lr_warmup_steps=options.lr_warmup_steps,
                lr_decay_steps=decay_steps or 0,
                clip_norm=options.clip_norm,
            ),
            autocast=options.autocast,
            recompute=options.recomputed,
            compile=options.compile,
            replicas=options.replicas,
            sharding=POLICIES[options.sharding](),
        )
    except ValueError as error:
        raise OptionError(str(error)) from None
