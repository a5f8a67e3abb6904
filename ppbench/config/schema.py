"""The keys that a sweep file may hold, with their types and bounds.

Pydantic, because this is text from outside; everything past this room is a frozen dataclass.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from engine.model.presets import PRESETS
from engine.plan.schedules.registry import UnknownScheduleError, find_schedule, known_names
from ppbench.errors import nearest


def _known_schedule(value: object) -> object:
    """The schedule's registered name, aliases resolved."""
    if not isinstance(value, str):
        return value
    try:
        return find_schedule(value).name
    except UnknownScheduleError:
        raise ValueError(f'unknown schedule "{value}"{nearest(value, known_names())}') from None


def _known_preset(value: object) -> object:
    if isinstance(value, str) and value not in PRESETS:
        raise ValueError(f'unknown preset "{value}"{nearest(value, PRESETS)}')
    return value


def _partition(value: object) -> object:
    if isinstance(value, list | tuple):
        if value and all(type(count) is int and count >= 0 for count in value):
            return tuple(value)
    elif value == "uniform":
        return value
    raise ValueError('expected "uniform" or the number of layers of each stage, such as [3, 5]')


def _source(value: object) -> object:
    if isinstance(value, str) and value not in ("stdlib", "synthetic"):
        kind, _, path = value.partition(":")
        if kind != "text" or not path:
            known = ["stdlib", "synthetic", "text:PATH"]
            raise ValueError(f'unknown data source "{value}"{nearest(value, known)}')
    return value


Schedule = Annotated[str, BeforeValidator(_known_schedule)]
Preset = Annotated[str, BeforeValidator(_known_preset)]
Partition = Annotated[str | tuple[int, ...], BeforeValidator(_partition)]
Source = Annotated[str, BeforeValidator(_source)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelSection(_Section):
    preset: Preset = "llama-8m"
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    partition: Partition = "uniform"
    seed: Seed = 0


class DataSection(_Section):
    source: Source = "stdlib"
    seed: Seed = 0


class TrainSection(_Section):
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-4
    microbatch_size: Count = 1


class MeasureSection(_Section):
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 3
    steps: Count = 10
    launches: Annotated[int, Field(ge=1, le=1000)] = 1
    verify: bool = False


class LaunchSection(_Section):
    threads_per_rank: Annotated[int, Field(ge=1, le=1024)] = 1


class SweepFile(_Section):
    """A whole sweep file, apart from `[grid]` and `[[exclude]]`, which name other keys."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    device: Literal["auto", "cpu", "cuda"] = "auto"
    schedule: Schedule = "1f1b"
    world_size: Annotated[int, Field(ge=1, le=1024)] = 2
    num_microbatches: Annotated[int, Field(ge=1, le=65_536)] = 8
    seq_len: Annotated[int, Field(ge=1, le=16_777_216)] = 128
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    measure: MeasureSection = MeasureSection()
    launch: LaunchSection = LaunchSection()


def known_keys() -> list[str]:
    """Every dotted key that may be set or be an axis."""
    keys = []
    for name, field in SweepFile.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            keys += [f"{name}.{key}" for key in section.model_fields]
        else:
            keys.append(name)
    return keys
