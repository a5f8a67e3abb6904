"""Every setting, declared once: its type, default and bounds.

A `Case` is one point of a sweep's grid, frozen and hashable; `Measure` is how it is measured;
`Torchrun` and `Slurm` are where its launches run, `Supervision` is how. `SETTINGS` is the table of
all of them by the dotted keys of a sweep file, from which its reader, the help and the
documentation are made. The columns of the store are made from the fields.

    world_size: int = setting(2, whole(1, 1024))
                              |  what a sweep file may give
                              the default, which must never change: case ids leave defaults out

Its meaning is a line of `settings.txt`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar

from engine.model.presets import PRESETS
from engine.plan.sizes import bytes_of
from ppbench.config import kinds
from ppbench.config.kinds import AUTO, Kind, choice, minutes_of, up_to, whole
from ppbench.config.kinds import VARIABLE as VARIABLE  # noqa: PLC0414  # of a case
from ppbench.runtimes import ENGINE

EMULATED: Final = "emulated"
"""The device whose stages take a set time and compute nothing."""
UNKNOWN: Final = "unknown"
"""A setting of a run that ppbench did not start and that is not known; never in a sweep."""
Scalar = str | int | float | bool
T = TypeVar("T")


class Setting(NamedTuple):
    """The declaration of a field of a settings class."""

    kind: Kind  # `NO_KEY`: a field that a sweep file does not set
    default: object = None  # of its key in a sweep file
    shared: str = ""  # why all cases share it, so that it is no axis; empty: it may be one
    metavar: str = ""  # of its option of `ppbench sweep`; empty: `--set` alone sets it
    key: str = ""  # its dotted key
    owner: type | None = None
    field: str = ""
    meaning: str = ""  # from settings.txt


def setting(
    default: T, kind: Kind, *, in_file: object = None, shared: str = "", metavar: str = ""
) -> T:
    """Declare a field of a settings class.

    `in_file` is the default of its key in a sweep file, where that is not the field's own.
    """
    declared = Setting(kind, default if in_file is None else in_file, shared, metavar)
    return dataclasses.field(default=default, metadata={"setting": declared})


def required(kind: Kind) -> Any:
    """Declare a field without a default."""
    return dataclasses.field(metadata={"setting": Setting(kind)})


def subtable(kind: Kind) -> Any:
    """Declare a field that is a table, by default an empty one."""
    return dataclasses.field(default_factory=dict, metadata={"setting": Setting(kind, {})})


@dataclass(frozen=True)
class Case:
    """Everything that defines the workload. Fields are the sweep file's keys, `.` written `_`."""

    schedule: str = setting("1f1b", kinds.SCHEDULE)
    runtime: str = setting(ENGINE, kinds.RUNTIME)
    world_size: int = setting(2, whole(1, 1024))
    replicas: int = setting(1, whole(1, 1024))
    num_microbatches: int = setting(8, whole(1, 65_536))
    seq_len: int | Literal["variable"] = setting(128, kinds.SEQ_LEN)
    device: str = setting("cpu", choice("auto", "cpu", "cuda", "xpu", "emulated"), in_file=AUTO)
    model_preset: str = setting("llama-8m", kinds.MODEL)
    model_weights: str = setting("auto", choice("auto", "random"))
    model_trust_remote_code: bool = setting(False, kinds.FLAG)
    model_dtype: str = setting("float32", choice("float32", "float64", "bfloat16"))
    model_partition: str | tuple[int, ...] = setting("uniform", kinds.PARTITION)
    model_split: str = setting("auto", choice("auto", "trace"))
    model_split_points: tuple[str, ...] = setting((), kinds.SPLIT_POINTS)
    model_seed: int = setting(0, kinds.SEED)
    data_source: str = setting("stdlib", kinds.SOURCE)
    data_tokenizer: str = setting("auto", kinds.NAME)
    data_text_column: str = setting("text", kinds.NAME)
    data_max_seq_len: int = setting(2048, whole(1, kinds.MAX_SEQ_LEN))
    data_shuffle: bool = setting(True, kinds.FLAG)
    data_num_workers: int = setting(0, whole(0, 1024))
    data_seed: int = setting(0, kinds.SEED)
    train_optimizer: str = setting("adamw", choice("adamw", "sgd"))
    train_learning_rate: float = setting(1e-4, kinds.POSITIVE)
    train_weight_decay: float = setting(0.01, kinds.NOT_NEGATIVE)
    train_momentum: float = setting(0.0, kinds.BELOW_ONE)
    train_lr_schedule: str = setting("constant", choice("constant", "cosine"))
    train_lr_warmup_steps: int = setting(0, whole(0, 1_000_000_000))
    train_lr_decay_steps: int = setting(0, whole(0, 1_000_000_000))
    train_clip_norm: float = setting(0.0, kinds.NOT_NEGATIVE)
    train_autocast: str = setting("none", choice("none", "bfloat16"))
    train_recompute: bool = setting(False, kinds.RECOMPUTE)
    train_recompute_stages: tuple[bool, ...] = setting((), kinds.NO_KEY)
    train_compile: bool = setting(False, kinds.FLAG)
    train_microbatch_size: int = setting(1, whole(1, 1_000_000))
    launch_threads_per_rank: int = setting(1, whole(1, 1024))
    launch_bind: bool = setting(True, kinds.FLAG)
    launch_issue_ahead: int = setting(8, whole(1, 65_536))
    stages_per_rank: int = setting(1, kinds.STAGES_PER_RANK, in_file=AUTO)
    memory_limit: str = setting("none", kinds.MEMORY_LIMIT)
    program_digest: str = setting("", kinds.NO_KEY)
    transfer_policy: str = setting("early", choice("early", "just_in_time"))
    transfer_look_ahead: int = setting(1, whole(0, 65_536))
    sharding_policy: str = setting("ddp", choice("none", "ddp", "zero1", "zero2", "zero3", "torch"))
    sharding_residency: int = setting(2, whole(1, 65_536))
    sharding_look_ahead: int = setting(1, whole(0, 65_536))
    sharding_every_backward: bool = setting(True, kinds.FLAG)
    sharding_max_active_stages: int = setting(3, whole(1, 65_536))
    emulated_F_ms: tuple[float, ...] = setting((), kinds.OP_MS)  # noqa: N815  # an op's name
    emulated_I_ms: tuple[float, ...] = setting((), kinds.OP_MS)  # noqa: N815
    emulated_W_ms: tuple[float, ...] = setting((), kinds.OP_MS)  # noqa: N815
    emulated_link_ms: tuple[float, ...] = setting((), kinds.LINK_MS)
    emulated_gather_ms: tuple[float, ...] = setting((), kinds.STAGE_MS)
    emulated_reduce_ms: tuple[float, ...] = setting((), kinds.STAGE_MS)
    emulated_replica_factors: tuple[float, ...] = setting((), kinds.FACTORS)
    emulated_jitter: float = setting(0.0, up_to(1))
    emulated_seed: int = setting(0, kinds.SEED)
    emulated_costs: str = setting("", kinds.TEXT)

    @property
    def case_id(self) -> str:
        """Short hash of the canonical form: the settings that differ from the defaults.

        The times of a file of costs are left out too: the file is code under test, no workload.
        Leaving defaults out keeps the ids of stored cases when a later version adds a setting.
        """
        canonical = {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
            and not (self.emulated_costs and field.name in TIMES)
        }
        text = json.dumps(canonical, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def num_processes(self) -> int:
        """The ranks of all replicas: rank r of replica d is process d x `world_size` + r."""
        return self.replicas * self.world_size

    @property
    def recompute(self) -> bool | tuple[bool, ...]:
        """The value of `train.recompute`: for all stages, or one for each."""
        return self.train_recompute_stages or self.train_recompute

    @property
    def meets(self) -> bool:
        """Whether ranks wait for each other after a step.

        They do where gradients are clipped by the norm of all, and where stages of a preset share a
        weight, whose gradients they sum. Replicas meet rank by rank, which their collectives say.
        """
        preset = None if self.is_emulated else PRESETS.get(self.model_preset)
        is_tied = preset is not None and preset.tie_word_embeddings and self.world_size > 1
        return self.train_clip_norm > 0 or is_tied

    @property
    def is_emulated(self) -> bool:
        return self.device == EMULATED

    @property
    def is_automatic(self) -> bool:
        """Whether the solver finds the program."""
        return self.schedule == AUTO

    @property
    def tokens_per_step(self) -> int | None:
        """None when sequences vary in length: then every step counts its own."""
        return self.max_tokens_per_step if isinstance(self.seq_len, int) else None

    @property
    def max_tokens_per_step(self) -> int:
        """Tokens of a step whose sequences are as long as they may be."""
        longest = self.seq_len if isinstance(self.seq_len, int) else self.data_max_seq_len
        return self.replicas * self.num_microbatches * self.train_microbatch_size * longest

    def settings(self) -> dict[str, Scalar]:
        """Column -> value, in the order of the fields; a list is written as JSON."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {k: json.dumps(v) if isinstance(v, tuple) else v for k, v in values.items()}


def with_recompute_by_stage(settings: Mapping[str, object]) -> dict[str, object]:
    """Fields of a case whose `train_recompute` may be a list: that is a field of its own."""
    given = settings.get("train_recompute")
    if not isinstance(given, tuple):
        return dict(settings)
    return {**settings, "train_recompute": any(given), "train_recompute_stages": given}


TIMES: Final = (
    *("emulated_F_ms", "emulated_I_ms", "emulated_W_ms", "emulated_link_ms"),
    *("emulated_gather_ms", "emulated_reduce_ms"),
)
"""The settings that a file of emulated costs fills."""


@dataclass(frozen=True)
class Measure:
    """How a case is measured. Not part of its identity."""

    warmup_steps: int = setting(3, whole(0, 1_000_000))
    max_warmup_steps: int = setting(20, whole(0, 1_000_000))
    steps: int = setting(10, whole(1, 1_000_000))
    block: int = setting(0, whole(0, 1_000_000))
    launches: int = setting(1, whole(1, 1000), shared="all cases have the same number of launches")
    budget: str = setting(
        "", kinds.BUDGET, shared="it is the time of the whole sweep", metavar="TIME"
    )
    resolution: float = setting(
        0.02, kinds.RESOLUTION, shared="it belongs to the question of the whole sweep"
    )
    verify: bool = setting(False, kinds.FLAG)
    profile_steps: int = setting(0, whole(0, 1000))
    timeout_s: float = setting(1800.0, up_to(1_000_000))
    retry: int = setting(0, whole(0, 100))
    order_seed: int = setting(0, kinds.SEED, shared="it sets the order of the cases of a launch")

    @property
    def turns(self) -> tuple[int, ...]:
        """The measured steps of each turn: as few turns as blocks allow, about equally long."""
        num_turns = -(-self.steps // max(1, self.block))
        ends = [self.steps * at // num_turns for at in range(num_turns + 1)]
        return tuple(end - begin for begin, end in itertools.pairwise(ends))

    @property
    def has_adaptive_warmup(self) -> bool:
        """Whether warm-up goes on until steps have settled, up to its bound."""
        return 0 < self.warmup_steps < self.max_warmup_steps

    def settings(self) -> dict[str, Scalar]:
        """Column -> value, in the order of the fields."""
        return {f"measure_{f.name}": getattr(self, f.name) for f in dataclasses.fields(self)}


Planned = tuple[Case, Measure]


@dataclass(frozen=True)
class Torchrun:
    """Nodes on each of which the same command is started."""

    nodes: int = setting(1, whole(1, 65_536))
    rendezvous: str = setting("", kinds.RENDEZVOUS)


@dataclass(frozen=True)
class Slurm:
    """The resources of a Slurm job; what is empty or 0 is left to the cluster or the cases."""

    partition: str = setting("", kinds.TEXT)
    account: str = setting("", kinds.TEXT)
    qos: str = setting("", kinds.TEXT)
    constraint: str = setting("", kinds.TEXT)
    nodes: int = setting(1, whole(1, 65_536))
    time: str = setting("1:00:00", kinds.SLURM_TIME)
    gpus_per_node: int = setting(0, whole(0, 1024))
    cpus_per_node: int = setting(0, whole(0, 65_536))
    memory_gb: float = setting(0.0, up_to(1_000_000))
    extra: Mapping[str, str | int | bool] = subtable(kinds.SLURM_OPTIONS)

    @property
    def time_min(self) -> int:
        return minutes_of(self.time)


@dataclass(frozen=True)
class Supervision:
    """How the supervisors and the ranks of a launch work, here or on any node; no part of a case.

    A field is a key of `[launch]`, an option of `ppbench sweep` and of supervisors, and `here` in
    the supervisors and ranks of the launch.
    """

    patience_s: float = setting(600.0, up_to(1_000_000), metavar="S")

    @classmethod
    def here(cls) -> Supervision:
        """Return what was handed over to this process."""
        return cls(**json.loads(os.environ.get(_HANDED_OVER, "{}")))

    def variables(self) -> dict[str, str]:
        """Return the environment that hands it over."""
        return {_HANDED_OVER: json.dumps(dataclasses.asdict(self))}


_HANDED_OVER = "PPBENCH_SUPERVISION"


@dataclass(frozen=True)
class PlanSettings:
    """`[plan]`: what a plan is asked for. No part of a case."""

    ranks: tuple[int, ...] = setting((), kinds.COUNTS)
    memory: str = setting("", kinds.MEMORY)
    global_batch: int = setting(0, whole(0, 1_000_000_000))
    schedules: tuple[str, ...] = setting((), kinds.SCHEDULES)
    stages_per_rank: tuple[int, ...] = setting((1, 2), kinds.SOME_COUNTS)
    microbatch_sizes: tuple[int, ...] = setting((), kinds.COUNTS)
    recompute: str = setting("auto", choice("auto", "none", "all"))
    costs: str = setting("measure", kinds.COSTS_ORIGIN)

    @property
    def memory_bytes(self) -> int | None:
        """None without a limit."""
        return bytes_of(self.memory) if self.memory else None


@dataclass(frozen=True)
class TrackSettings:
    """`[track]`: what is tracked over commits; see `ppbench.config.sweep`. No part of a case."""

    repo: str = setting("", kinds.TEXT)
    setup: str = setting("", kinds.TEXT)
    thresholds: Mapping[str, object] = subtable(kinds.TABLE)
    accept: Sequence[object] = setting((), kinds.TABLES, in_file=[])


def _declared() -> Iterator[Setting]:
    """Every setting, with its key and its meaning."""
    lines = Path(__file__).with_name("settings.txt").read_text().splitlines()
    meanings = dict(line.split(maxsplit=1) for line in lines if line and line[0] != "#")
    name = Setting(kinds.SWEEP_NAME, "", "it names the whole sweep", key="name")
    yield name._replace(meaning=meanings["name"])
    sections = ("model", "data", "train", "launch", "transfer", "sharding", "emulated")
    owners: tuple[tuple[str, type, str], ...] = (
        ("", Case, ""),
        ("measure.", Measure, ""),
        ("launch.torchrun.", Torchrun, "it sets where launches run for all cases"),
        ("launch.slurm.", Slurm, "it sets where launches run for all cases"),
        ("launch.", Supervision, "it sets how launches run for all cases"),
        ("track.", TrackSettings, "it sets what is tracked over commits for all cases"),
        ("plan.", PlanSettings, "it sets what a plan is asked for for all cases"),
    )
    for prefix, owner, why in owners:
        for field in dataclasses.fields(owner):
            section, _, rest = field.name.partition("_")
            is_inside = owner is Case and section in sections
            key = f"{section}.{rest}" if is_inside else f"{prefix}{field.name}"
            one: Setting = field.metadata["setting"]
            one = one._replace(shared=one.shared or why, key=key, owner=owner, field=field.name)
            yield one._replace(meaning=meanings[key])


_DECLARED = tuple(_declared())
SETTINGS: Final = {
    declared.key: declared for declared in _DECLARED if declared.kind is not kinds.NO_KEY
}
"""Every key of a sweep file but `grid`, `exclude` and `override`, which name other keys."""
CASE_KEYS: Final = tuple(
    declared.key for declared in SETTINGS.values() if declared.owner in (Case, Measure)
)
"""The keys of which every case has a value."""


def settings_in(owner: type) -> Iterator[Setting]:
    """The settings that are fields of a class."""
    return (declared for declared in _DECLARED if declared.owner is owner)


def unknown_settings(settings_told: object) -> frozenset[str]:
    """The settings that are not known of a run that ppbench did not start.

    `settings_told` is the column of its row; without one, every setting is known.
    """
    if not isinstance(settings_told, str):
        return frozenset()
    known = {"transfer_policy", "transfer_look_ahead", *json.loads(settings_told)}
    return frozenset(field.name for field in dataclasses.fields(Case)) - known


def setting_of(case: Case, measure: Measure, key: str) -> object:
    """The value that a case has for a dotted key of the sweep file."""
    section, _, name = key.partition(".")
    if section == "measure":
        return getattr(measure, name)
    if key == "train.recompute":
        return case.recompute
    return getattr(case, key.replace(".", "_"))
