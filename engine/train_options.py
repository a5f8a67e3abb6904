"""The options of the command-line trainer: a table, how they are read, and what they configure.

Torch is imported only when a configuration is made: `--help` and a mistyped option are answered at
once.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

if TYPE_CHECKING:
    from engine.configuration import TrainerConfig

T = TypeVar("T")


class OptionError(Exception):
    """An option has an impossible value, or contradicts another."""


OPTIONS: list[str | tuple[str, Any, str, str]] = [
    "Model",
    ("model", "llama-8m", "NAME", "preset, hub id, folder or package.module:factory"),
    ("dtype", "float32", "float32|float64|bfloat16", "of parameters and gradients"),
    ("weights", "auto", "auto|random", "a checkpoint's own where it has them, or random"),
    ("seed", 0, "N≥0", "of random weights, dropout and shuffling"),
    ("trust-remote-code", False, "", "run the code that a hub model brings"),
    "Data",
    ("data", "stdlib", "SOURCE", "stdlib, synthetic, text:PATH, files:PATH, hf:NAME?split=…"),
    ("tokenizer", "auto", "NAME", "hub id, folder or bytes; auto: the model's, else bytes"),
    ("text-column", "text", "NAME", "the column to train on"),
    ("seq-len", "128", "N|variable", "tokens of a sequence; variable: a document, padded"),
    ("max-seq-len", 2048, "N≥1", "longer documents are cut (variable)"),
    ("shuffle", True, "", "anew in each epoch"),
    ("data-workers", 0, "N≥0", "loader processes per rank"),
    "Pipeline",
    ("schedule", "1f1b", "NAME", "such as 1f1b, zb_h1 or zbv; csv:PATH: a program file"),
    ("stages-per-rank", None, "N≥1", "of interleaved schedules; else the schedule's own"),
    ("replicas", 1, "N≥1", "pipelines, which divide the processes and the batch"),
    ("sharding", "ddp", "none|ddp|zero1|zero2|zero3|torch", "what replicas keep parts of"),
    ("global-batch-size", 8, "N≥1", "sequences per step"),
    ("microbatch-size", 1, "N≥1", "sequences per microbatch; divides the global batch size"),
    ("partition", "uniform", "KIND|N,N,…", "uniform, parameters, measured, or 6,10,10,6"),
    ("split", "auto", "auto|trace", "trace: cut any factory's module by tracing"),
    ("split-points", "", "NAME,NAME,…", "submodules to cut before (trace)"),
    "Length of the run",
    ("max-tokens", None, "N≥1", "stop at the step that reaches as many tokens"),
    ("max-steps", None, "N≥1", "stop after as many steps, resumed ones included"),
    "Optimizer",
    ("optimizer", "adamw", "adamw|sgd", ""),
    ("learning-rate", 1e-4, "X≥0", "at its peak"),
    ("weight-decay", 0.01, "X≥0", "AdamW's"),
    ("momentum", 0.0, "X≥0", "SGD's"),
    ("lr-schedule", "constant", "constant|cosine", ""),
    ("lr-warmup-steps", 0, "N≥0", "the rate grows from 0 until then"),
    ("lr-decay-steps", None, "N≥1", "where the cosine reaches 0; else at the end of the run"),
    ("clip-norm", 0.0, "X≥0", "largest norm of all gradients; 0: no limit"),
    "Precision and device",
    ("autocast", "none", "none|bfloat16", "compute in it where torch deems it safe"),
    ("recompute", False, "", "save memory: run each layer's forward again"),
    ("recompute-stages", (), "true|false,…", "the same for some stages, such as true,false"),
    ("compile", False, "", "compile the layers"),
    ("device", "auto", "auto|cpu|cuda|xpu", "auto: an accelerator where there is one"),
    ("threads", None, "N≥1", "CPU threads per rank; else OMP_NUM_THREADS (torchrun: 1), or all"),
    "Checkpoints",
    ("save", None, "FOLDER", "save here when the run is complete"),
    ("save-every", None, "N≥1", "also save after every N steps"),
    ("resume", None, "FOLDER|latest", "go on from a checkpoint; latest: the last in --save"),
    "Output",  # not "--log": torchrun takes it for a prefix of its own options
    ("log-file", None, "FILE", "write each step to it, as a line of JSON"),
    ("log-every", 1, "N≥1", "print every N steps"),
    ("quiet", False, "", "print steps only: no notes"),
]
"""Groups; and of each option its name, default, values and meaning."""


KINDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "N≥1": (r"[1-9]\d*", int),
    "N≥0": (r"\d+", int),
    "X≥0": (r"(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", float),
    "N|variable": (r"[1-9]\d*|variable", lambda word: int(word) if word.isdecimal() else word),
    "KIND|N,N,…": (
        r"[a-z]+|\d+(, *\d+)*",
        lambda words: words if words.isalpha() else tuple(map(int, words.split(","))),
    ),
    "NAME,NAME,…": (".*", lambda words: tuple(filter(None, words.split(",")))),
    "true|false,…": (
        "(true|false)(, *(true|false))*",
        lambda words: tuple(word.strip() == "true" for word in words.split(",")),
    ),
    "FOLDER": (".+", Path),
    "FILE": (".+", Path),
}
"""The form of some values, and what they become. Other values are words."""


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Read a command line, as far as it needs no torch. Raises OptionError."""

    def read(name: str, values: str, text: str) -> Any:
        form, convert = KINDS.get(values, (values if values.islower() else ".+", str))
        if not re.fullmatch(form, text):
            raise OptionError(f'--{name} is "{text}"; expected {values}')
        return convert(text)

    def refuse(message: str) -> NoReturn:
        raise OptionError(f"{message}; see --help")

    parser = argparse.ArgumentParser(
        prog="python -m engine.train",
        description="Train a language model in a pipeline: each rank has some of its layers. "
        "Start one process per rank with `torchrun --nproc-per-node N -m engine.train …`; "
        "`python -m engine.train …` trains unsplit.",
        allow_abbrev=False,
    )
    parser.error = refuse  # type: ignore[method-assign]
    for row in OPTIONS:
        if isinstance(row, str):
            group = parser.add_argument_group(row)
            continue
        name, default, values, meaning = row
        more: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if values:
            more = {"metavar": values, "type": functools.partial(read, name, values)}
        shown = f"{meaning} [{default}]" if default or (default == 0 and values) else meaning
        group.add_argument(f"--{name}", default=default, help=shown, **more)
    options = parser.parse_args(arguments)
    if options.max_tokens is None and options.max_steps is None:
        raise OptionError("the run has no end; give --max-tokens, --max-steps or both")
    batch, part = options.global_batch_size, options.microbatch_size * options.replicas
    if batch % part:
        raise OptionError(
            f"--global-batch-size {batch} is not a multiple of {part}, --microbatch-size times "
            f"--replicas; {(batch // part + 1) * part} is"
        )
    if options.save is None and (options.save_every is not None or options.resume == "latest"):
        needs = "--save-every" if options.save_every is not None else "--resume latest"
        raise OptionError(f"{needs} needs the folder of checkpoints; give --save FOLDER")
    if options.recompute and options.recompute_stages:
        raise OptionError("--recompute means all stages; give it or --recompute-stages")
    return options


def configuration(options: argparse.Namespace, world_size: int) -> TrainerConfig:
    """The trainer's configuration, of the replicas on all processes. Raises OptionError."""
    from engine.configuration import TrainerConfig
    from engine.model.data import DataSpec
    from engine.model.spec import ModelSpec
    from engine.plan.collectives import POLICIES
    from engine.run.optimizer import OptimizerSpec

    def spec(kind: Callable[..., T], **given: object) -> T:
        """Make a part of the configuration: of what is given, and of the options of its names."""
        names = {field.name for field in dataclasses.fields(cast(Any, kind))}
        return kind(**{name: v for name, v in vars(options).items() if name in names} | given)

    replicas, decay_steps = options.replicas, options.lr_decay_steps or 0
    if world_size % replicas:
        raise OptionError(
            f"--replicas {replicas} does not divide the {world_size} processes; start a multiple "
            f"of it: torchrun --nproc-per-node {replicas}"
        )
    if not decay_steps and options.lr_schedule == "cosine":
        ends = [] if options.max_steps is None else [options.max_steps]
        if options.max_tokens is not None and options.seq_len != "variable":
            ends.append(math.ceil(options.max_tokens / options.global_batch_size / options.seq_len))
        if not ends:
            raise OptionError(
                "the cosine has no end: the number of steps in --max-tokens is unknown with "
                "sequences of variable length; give --lr-decay-steps or --max-steps"
            )
        decay_steps = min(ends)
    num_microbatches = options.global_batch_size // options.microbatch_size // replicas
    own = {"num_microbatches": num_microbatches, "num_workers": options.data_workers}
    try:
        return spec(
            TrainerConfig,
            model=spec(ModelSpec, name=options.model),
            data=spec(DataSpec, source=options.data, **own),
            optimizer=spec(OptimizerSpec, name=options.optimizer, lr_decay_steps=decay_steps),
            world_size=world_size // replicas,
            recompute=options.recompute_stages or options.recompute,
            sharding=POLICIES[options.sharding](),
        )
    except ValueError as error:
        raise OptionError(str(error)) from None
