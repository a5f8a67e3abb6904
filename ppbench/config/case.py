"""A case: one point of a sweep's grid, frozen and hashable; and how it is to be measured."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass

Setting = str | int | float | bool


@dataclass(frozen=True)
class Case:
    """Everything that defines the workload. Fields are the sweep file's keys, `.` written `_`."""

    schedule: str = "1f1b"
    world_size: int = 2
    num_microbatches: int = 8
    seq_len: int = 128
    device: str = "cpu"
    model_preset: str = "llama-8m"
    model_dtype: str = "float32"
    model_partition: str | tuple[int, ...] = "uniform"
    model_seed: int = 0
    data_source: str = "stdlib"
    data_seed: int = 0
    train_optimizer: str = "adamw"
    train_learning_rate: float = 1e-4
    train_microbatch_size: int = 1
    launch_threads_per_rank: int = 1

    @property
    def case_id(self) -> str:
        """Short hash of the canonical form: the settings that differ from the defaults.

        Leaving defaults out keeps the ids of stored cases when a later version adds a setting.
        """
        canonical = {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }
        text = json.dumps(canonical, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def tokens_per_step(self) -> int:
        return self.num_microbatches * self.train_microbatch_size * self.seq_len

    def settings(self) -> dict[str, Setting]:
        """Column -> value, in the order of the fields; a list is written as JSON."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {k: json.dumps(v) if isinstance(v, tuple) else v for k, v in values.items()}


@dataclass(frozen=True)
class Measure:
    """How a case is measured. Not part of its identity."""

    warmup_steps: int = 3
    steps: int = 10
    launches: int = 1
    verify: bool = False

    def settings(self) -> dict[str, Setting]:
        """Column -> value, in the order of the fields."""
        return {f"measure_{f.name}": getattr(self, f.name) for f in dataclasses.fields(self)}


@dataclass(frozen=True)
class Sweep:
    """A sweep file, expanded."""

    name: str
    file: str
    cases: tuple[tuple[Case, Measure], ...]
    axes: tuple[str, ...]  # columns that vary, in the file's order
