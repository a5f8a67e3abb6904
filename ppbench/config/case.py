"""A case: one point of a sweep's grid, frozen and hashable; and how it is to be measured."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Final, Literal

_COSTS = ("emulated_F_ms", "emulated_I_ms", "emulated_W_ms", "emulated_link_ms")
Setting = str | int | float | bool
EMULATED: Final = "emulated"
"""The device whose stages take a set time and compute nothing."""
VARIABLE: Final = "variable"
"""A `seq_len` that differs from microbatch to microbatch: each as long as its documents are."""
UNKNOWN: Final = "unknown"
"""What was not told of a run that ppbench did not start; never in a sweep."""


@dataclass(frozen=True)
class Case:
    """Everything that defines the workload. Fields are the sweep file's keys, `.` written `_`."""

    schedule: str = "1f1b"
    runtime: str = "engine"
    world_size: int = 2
    num_microbatches: int = 8
    seq_len: int | Literal["variable"] = 128
    device: str = "cpu"
    model_preset: str = "llama-8m"
    model_weights: str = "auto"
    model_trust_remote_code: bool = False
    model_dtype: str = "float32"
    model_partition: str | tuple[int, ...] = "uniform"
    model_split: str = "auto"
    model_split_points: tuple[str, ...] = ()
    model_seed: int = 0
    data_source: str = "stdlib"
    data_tokenizer: str = "auto"
    data_text_column: str = "text"
    data_max_seq_len: int = 2048
    data_shuffle: bool = True
    data_num_workers: int = 0
    data_seed: int = 0
    train_optimizer: str = "adamw"
    train_learning_rate: float = 1e-4
    train_weight_decay: float = 0.01
    train_momentum: float = 0.0
    train_lr_schedule: str = "constant"
    train_lr_warmup_steps: int = 0
    train_lr_decay_steps: int = 0
    train_clip_norm: float = 0.0
    train_autocast: str = "none"
    train_recompute: bool = False
    train_compile: bool = False
    train_microbatch_size: int = 1
    launch_threads_per_rank: int = 1
    launch_bind: bool = True
    stages_per_rank: int = 1
    program_digest: str = ""  # of the file, where the schedule is one
    transfer_policy: str = "early"
    transfer_look_ahead: int = 1
    emulated_F_ms: tuple[float, ...] = ()  # noqa: N815  # an op's name
    emulated_I_ms: tuple[float, ...] = ()  # noqa: N815
    emulated_W_ms: tuple[float, ...] = ()  # noqa: N815
    emulated_link_ms: tuple[float, ...] = ()
    emulated_jitter: float = 0.0
    emulated_seed: int = 0
    emulated_costs: str = ""  # the file that the times above are from

    @property
    def case_id(self) -> str:
        """Short hash of the canonical form: the settings that differ from the defaults.

        What a file of costs says is left out too: it is code under test, and no workload.
        Leaving defaults out keeps the ids of stored cases when a later version adds a setting.
        """
        canonical = {
            one.name: value
            for one in dataclasses.fields(self)
            if (value := getattr(self, one.name)) != one.default
            and not (self.emulated_costs and one.name in _COSTS)
        }
        text = json.dumps(canonical, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def is_emulated(self) -> bool:
        return self.device == EMULATED

    @property
    def tokens_per_step(self) -> int | None:
        """None when sequences vary in length: then every step counts its own."""
        return self.max_tokens_per_step if isinstance(self.seq_len, int) else None

    @property
    def max_tokens_per_step(self) -> int:
        """Tokens of a step, its sequences being as long as they may be."""
        longest = self.seq_len if isinstance(self.seq_len, int) else self.data_max_seq_len
        return self.num_microbatches * self.train_microbatch_size * longest

    def settings(self) -> dict[str, Setting]:
        """Column -> value, in the order of the fields; a list is written as JSON."""
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return {k: json.dumps(v) if isinstance(v, tuple) else v for k, v in values.items()}


@dataclass(frozen=True)
class Measure:
    """How a case is measured. Not part of its identity."""

    warmup_steps: int = 3
    max_warmup_steps: int = 20
    steps: int = 10
    launches: int = 1
    verify: bool = False
    profile_steps: int = 0
    timeout_s: float = 1800.0
    retry: int = 0
    order_seed: int = 0

    @property
    def has_adaptive_warmup(self) -> bool:
        """Whether warm-up goes on until steps have settled, up to its bound."""
        return 0 < self.warmup_steps < self.max_warmup_steps

    def settings(self) -> dict[str, Setting]:
        """Column -> value, in the order of the fields."""
        return {f"measure_{f.name}": getattr(self, f.name) for f in dataclasses.fields(self)}


def untold(settings_told: object) -> frozenset[str]:
    """The settings that nobody knows of a run that ppbench did not start, by its `settings_told`;
    none of any other run.
    """
    if not isinstance(settings_told, str):
        return frozenset()
    told = {"transfer_policy", "transfer_look_ahead", *json.loads(settings_told)}
    return frozenset(one.name for one in dataclasses.fields(Case)) - told


def setting_of(case: Case, measure: Measure, key: str) -> object:
    """What a case has for a dotted key of the sweep file."""
    section, _, name = key.partition(".")
    if section == "measure":
        return getattr(measure, name)
    return getattr(case, key.replace(".", "_"))
