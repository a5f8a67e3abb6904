"""The keys that a sweep file may hold, with their types and bounds.

Pydantic, because this is text from outside; everything past this room is a frozen dataclass.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, TypeGuard

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from engine.model.presets import PRESETS
from engine.plan.lower import DEFAULT_LOOK_AHEAD, Policy
from engine.plan.schedules.registry import (
    CSV_PREFIX,
    UnknownScheduleError,
    find_schedule,
    known_names,
)
from ppbench.config.case import VARIABLE
from ppbench.config.places import minutes_of
from ppbench.config.problems import brief
from ppbench.errors import nearest
from ppbench.runtimes import ENGINE, is_known, known_runtimes


def _known_schedule(value: object) -> object:
    """The schedule's registered name, aliases resolved."""
    if not isinstance(value, str) or value.removeprefix(CSV_PREFIX) not in ("", value):
        return value
    try:
        return find_schedule(value).name
    except UnknownScheduleError:
        raise ValueError(
            f"unknown schedule {brief(value)}{nearest(value, known_names())}"
        ) from None


def _known_runtime(value: object) -> object:
    if isinstance(value, str) and not is_known(value):
        raise ValueError(f"unknown runtime {brief(value)}{nearest(value, known_runtimes())}")
    return value


def _model(value: object) -> object:
    """What can be told from the name alone; whether the model exists is asked later, of all."""
    if not isinstance(value, str) or value in PRESETS or _HUB_ID.fullmatch(value):
        return value
    if _FACTORY.fullmatch(value) or _is_folder(value):
        return value
    if "/" in value or value in (".", ".."):
        raise ValueError(f"no such folder: {brief(value)} (relative to the working directory)")
    others = 'a hub id "owner/name", a checkpoint folder, "package.module:factory"'
    raise ValueError(f"unknown preset {brief(value)}{nearest(value, PRESETS)}; or {others}")


def _is_folder(name: str) -> bool:
    try:
        return name != "" and Path(name).is_dir()
    except (OSError, ValueError):  # a name too long, or with a null byte
        return False


def _partition(value: object) -> object:
    if isinstance(value, list | tuple):
        if value and all(type(count) is int and count >= 0 for count in value):
            return tuple(value)
    elif isinstance(value, str) and value in _PARTITIONS:
        return value
    known = ", ".join(f'"{name}"' for name in _PARTITIONS)
    raise ValueError(f"expected {known} or the number of layers of each stage, such as [3, 5]")


def _split_points(value: object) -> object:
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) and v for v in value):
        raise ValueError('expected a list of module names, such as ["blocks.4", "blocks.8"]')
    if (twice := first_twice(value)) is not None:
        raise ValueError(f"module {brief(value[twice])} is listed twice")
    return tuple(value)


def first_twice(values: Sequence[Hashable]) -> int | None:
    """The index of the first value that stands earlier in the list too."""
    seen: set[Hashable] = set()
    for index, value in enumerate(values):
        if value in seen:
            return index
        seen.add(value)
    return None


def _source(value: object) -> object:
    if isinstance(value, str) and value not in ("stdlib", "synthetic"):
        kind, _, name = value.partition(":")
        if kind not in ("text", "json", "parquet", "hf") or not name:
            raise ValueError(f"unknown data source {brief(value)}{nearest(value, _SOURCES)}")
    return value


def _seq_len(value: object) -> object:
    if value == VARIABLE or (type(value) is int and 1 <= value <= MAX_SEQ_LEN):
        return value
    raise ValueError(f'expected 1 to {MAX_SEQ_LEN:,} tokens, or "{VARIABLE}"')


def _stages_per_rank(value: object) -> object:
    if value == AUTO:
        return value
    if isinstance(value, int) and value is not True and 1 <= value <= MAX_STAGES_PER_RANK:
        return value
    raise ValueError(f'expected 1 to {MAX_STAGES_PER_RANK} stages, or "{AUTO}"')


def _milliseconds(value: object) -> object:
    """One number for every rank, or a list of one for each stage; a tuple either way."""
    if isinstance(value, list) and len(value) < 2:
        raise ValueError("a list has a time for each stage; for every rank, give one number")
    return _times(value, "stage")


def _link_milliseconds(value: object) -> object:
    """One number for every link, or a list of one for each; a tuple either way."""
    return _times(value, "link from a stage to the next")


def _times(value: object, each: str) -> tuple[float, ...]:
    listed = value if isinstance(value, list | tuple) else [value]
    times = tuple(float(ms) for ms in listed if _is_time(ms))
    if listed and len(times) == len(listed):
        return times
    raise ValueError(
        f"expected milliseconds, 0 or {MIN_MS} to {MAX_MS:,}: one number, or a list with one for "
        f"each {each}"
    )


def _is_time(value: object) -> TypeGuard[float]:
    """Compared before it is made a float: an integer may be too large for one."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return value == 0 or MIN_MS <= value <= MAX_MS


def _slurm_time(value: object) -> object:
    """A bare number is minutes, as to Slurm itself."""
    text = str(value) if type(value) is int else value
    if isinstance(text, str) and minutes_of(text):
        return text
    raise ValueError('expected minutes, or a time such as "90", "1:30:00" or "2-12:00:00"')


def _slurm_options(value: object) -> object:
    """Strings, numbers and true, under the names that `sbatch` has for them."""
    if not isinstance(value, dict) or not all(map(_OPTION.fullmatch, value)):
        raise ValueError('expected options of sbatch without dashes, such as {exclude = "node7"}')
    for name, option in value.items():
        if not isinstance(option, str | int) or option is False:
            raise ValueError(f"{name}: expected a string, an integer or true")
    return value


def _rendezvous(value: object) -> object:
    if isinstance(value, str) and (value == "" or _HOST_AND_PORT.fullmatch(value)):
        return value
    raise ValueError('expected the name of a node and a free port on it, such as "node1:29400"')


AUTO: Final = "auto"
MAX_STAGES_PER_RANK = 1024
MIN_MS, MAX_MS = 0.001, 3_600_000
_PARTITIONS = ("uniform", "parameters", "measured")
_SOURCES = ("stdlib", "synthetic", "text:PATH", "json:PATH", "parquet:PATH", "hf:DATASET")
_OPTION = re.compile(r"[a-z][a-z0-9_-]*")
_HOST_AND_PORT = re.compile(r"[\w.-]+:[1-9]\d{0,4}|\[[0-9a-fA-F:.]+\]:[1-9]\d{0,4}", re.ASCII)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
MAX_SEQ_LEN = 16_777_216
Schedule = Annotated[str, BeforeValidator(_known_schedule)]
RuntimeName = Annotated[str, BeforeValidator(_known_runtime)]
Model = Annotated[str, BeforeValidator(_model)]
Partition = Annotated[str | tuple[int, ...], BeforeValidator(_partition)]
SplitPoints = Annotated[tuple[str, ...], BeforeValidator(_split_points)]
Source = Annotated[str, BeforeValidator(_source)]
StagesPerRank = Annotated[int | str, BeforeValidator(_stages_per_rank)]
Milliseconds = Annotated[tuple[float, ...], BeforeValidator(_milliseconds)]
LinkMilliseconds = Annotated[tuple[float, ...], BeforeValidator(_link_milliseconds)]
SeqLen = Annotated[int | str, BeforeValidator(_seq_len)]
NumNodes = Annotated[int, Field(ge=1, le=65_536)]
Rendezvous = Annotated[str, BeforeValidator(_rendezvous)]
SlurmTime = Annotated[str, BeforeValidator(_slurm_time)]
SlurmOptions = Annotated[dict[str, str | int | bool], BeforeValidator(_slurm_options)]
Name = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
NumSteps = Annotated[int, Field(ge=0, le=1_000_000_000)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelSection(_Section):
    preset: Model = "llama-8m"
    weights: Literal["auto", "random"] = "auto"
    trust_remote_code: bool = False
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    partition: Partition = "uniform"
    split: Literal["auto", "trace"] = "auto"
    split_points: SplitPoints = ()
    seed: Seed = 0


class DataSection(_Section):
    source: Source = "stdlib"
    tokenizer: Name = "auto"
    text_column: Name = "text"
    max_seq_len: Annotated[int, Field(ge=1, le=MAX_SEQ_LEN)] = 2048
    shuffle: bool = True
    num_workers: Annotated[int, Field(ge=0, le=1024)] = 0
    seed: Seed = 0


class TrainSection(_Section):
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-4
    weight_decay: NotNegative = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    lr_schedule: Literal["constant", "cosine"] = "constant"
    lr_warmup_steps: NumSteps = 0
    lr_decay_steps: NumSteps = 0
    clip_norm: NotNegative = 0.0
    autocast: Literal["none", "bfloat16"] = "none"
    recompute: bool = False
    compile: bool = False
    microbatch_size: Count = 1


class MeasureSection(_Section):
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 3
    max_warmup_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 20
    steps: Count = 10
    launches: Annotated[int, Field(ge=1, le=1000)] = 1
    verify: bool = False
    profile_steps: Annotated[int, Field(ge=0, le=1000)] = 0
    timeout_s: Annotated[float, Field(ge=0, le=1_000_000)] = 1800.0
    retry: Annotated[int, Field(ge=0, le=100)] = 0
    order_seed: Seed = 0


class TorchrunSection(_Section):
    nodes: NumNodes = 1
    rendezvous: Rendezvous = ""


class SlurmSection(_Section):
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    nodes: NumNodes = 1
    time: SlurmTime = "1:00:00"
    gpus_per_node: Annotated[int, Field(ge=0, le=1024)] = 0
    cpus_per_node: Annotated[int, Field(ge=0, le=65_536)] = 0
    memory_gb: Annotated[float, Field(ge=0, le=1_000_000)] = 0.0
    extra: SlurmOptions = {}


class LaunchSection(_Section):
    threads_per_rank: Annotated[int, Field(ge=1, le=1024)] = 1
    bind: bool = True
    torchrun: TorchrunSection = TorchrunSection()
    slurm: SlurmSection = SlurmSection()


class TransferSection(_Section):
    policy: Literal["early", "just_in_time"] = Policy.EARLY.value
    look_ahead: Annotated[int, Field(ge=0, le=65_536)] = DEFAULT_LOOK_AHEAD


class CostsFile(_Section):
    """A file of emulated costs."""

    F_ms: Milliseconds = ()
    I_ms: Milliseconds = ()
    W_ms: Milliseconds = ()
    link_ms: LinkMilliseconds = ()


class EmulatedSection(CostsFile):
    costs: str = ""
    jitter: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Seed = 0


class TrackSection(_Section):
    repo: str = ""
    accept: str = ""
    setup: str = ""
    thresholds: dict[str, str | float] = {}


class SweepFile(_Section):
    """A whole sweep file, apart from `[grid]` and `[[exclude]]`, which name other keys."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    device: Literal["auto", "cpu", "cuda", "emulated"] = "auto"
    schedule: Schedule = "1f1b"
    runtime: RuntimeName = ENGINE
    world_size: Annotated[int, Field(ge=1, le=1024)] = 2
    stages_per_rank: StagesPerRank = AUTO
    num_microbatches: Annotated[int, Field(ge=1, le=65_536)] = 8
    seq_len: SeqLen = 128
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    measure: MeasureSection = MeasureSection()
    launch: LaunchSection = LaunchSection()
    transfer: TransferSection = TransferSection()
    emulated: EmulatedSection = EmulatedSection()
    track: TrackSection = TrackSection()


def known_keys() -> list[str]:
    """Every dotted key that may be an axis, or set for all cases."""
    keys = []
    for name, field in SweepFile.model_fields.items():
        section = _section_of(field)
        if section is None:
            keys.append(name)
        elif section is not TrackSection:
            fields = section.model_fields.items()
            keys += [f"{name}.{key}" for key, inner in fields if _section_of(inner) is None]
    return keys


def shared_keys() -> list[str]:
    """Every dotted key that holds for all cases and is part of none: places, and `[track]`."""
    sections = {name: _section_of(field) for name, field in LaunchSection.model_fields.items()}
    places = [
        f"launch.{name}.{key}"
        for name, section in sections.items()
        if section is not None
        for key in section.model_fields
    ]
    return [*places, *(f"track.{key}" for key in TrackSection.model_fields)]


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    section = field.annotation
    if isinstance(section, type) and issubclass(section, BaseModel):
        return section
    return None
