"""Every setting, declared once: its type, default, bounds and meaning.

A `Case` is one point of a sweep's grid, frozen and hashable; `Measure` is how it is measured;
`Torchrun` and `Slurm` are where its launches run, `Supervision` is how. `SETTINGS` is the table of
all of them by the dotted keys of a sweep file, from which its reader, the help and the
documentation are made. The columns of the store are made from the fields.

    world_size: int = setting(2, whole(1, 1024), "number of ranks in the pipeline")
                              |  |               |
                              |  |               the meaning of its column in the store
                              |  what a sweep file may give
                              the default, which must never change: case ids leave defaults out
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeVar

from engine.model.presets import PRESETS
from engine.plan.program import EVALUATE, TRAIN
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
    meaning: str = ""
    default: object = None  # of its key in a sweep file
    shared: str = ""  # why all cases share it, so that it is no axis; empty: it may be one
    metavar: str = ""  # of its option of `ppbench sweep`; empty: `--set` alone sets it
    key: str = ""  # its dotted key
    owner: type | None = None
    field: str = ""


def setting(
    default: T,
    kind: Kind,
    meaning: str = "",
    *,
    in_file: object = None,
    shared: str = "",
    metavar: str = "",
) -> T:
    """Declare a field of a settings class.

    `in_file` is the default of its key in a sweep file, where that is not the field's own.
    """
    declared = Setting(kind, meaning, default if in_file is None else in_file, shared, metavar)
    return dataclasses.field(default=default, metadata={"setting": declared})


def required(kind: Kind, meaning: str = "") -> Any:
    """Declare a field without a default."""
    return dataclasses.field(metadata={"setting": Setting(kind, meaning)})


def subtable(kind: Kind, meaning: str = "") -> Any:
    """Declare a field that is a table, by default an empty one."""
    return dataclasses.field(default_factory=dict, metadata={"setting": Setting(kind, meaning, {})})


@dataclass(frozen=True)
class Case:
    """Everything that defines the workload. Fields are the sweep file's keys, `.` written `_`."""

    schedule: str = setting(
        "1f1b",
        kinds.SCHEDULE,
        "name of the schedule, aliases resolved; `auto`: found by the solver",
    )
    mode: str = setting(
        TRAIN,
        choice(TRAIN, EVALUATE),
        "`train`, or `evaluate`: forwards alone, without gradients and optimizer",
    )
    runtime: str = setting(
        ENGINE,
        kinds.RUNTIME,
        "the runtime: `engine`, `torch` (torch.distributed.pipelining), `single` (no pipeline) "
        "or another package's; `engine` where it is missing",
    )
    world_size: int = setting(2, whole(1, 1024), "number of ranks in the pipeline")
    replicas: int = setting(
        1, whole(1, 1024), "pipelines of `world_size` ranks that train together, each on its share"
    )
    num_microbatches: int = setting(8, whole(1, 65_536), "microbatches of a step")
    seq_len: int | Literal["variable"] = setting(
        128,
        kinds.SEQ_LEN,
        "tokens of a sequence; 0 when variable (a microbatch is as long as its documents), -1 "
        "when unknown",
    )
    device: str = setting(
        "cpu",
        choice("auto", "cpu", "cuda", "xpu", "emulated"),
        "`cpu`, `cuda` (NVIDIA's GPUs, and AMD's), `xpu` (Intel's), or `emulated`: stages take "
        "a set time and compute nothing",
        in_file=AUTO,
    )
    model_preset: str = setting(
        "llama-8m", kinds.MODEL, "preset, hub id, checkpoint folder or `package.module:factory`"
    )
    model_weights: str = setting(
        "auto",
        choice("auto", "random"),
        "`auto`: the checkpoint's if there is one; `random`: initialised",
    )
    model_trust_remote_code: bool = setting(
        False, kinds.FLAG, "whether code that comes with the model may run"
    )
    model_dtype: str = setting(
        "float32", choice("float32", "float64", "bfloat16"), "dtype of parameters and activations"
    )
    model_partition: str | tuple[int, ...] = setting(
        "uniform",
        kinds.PARTITION,
        "how layers are cut into stages: `uniform`, `parameters`, `measured` or a list of counts",
    )
    model_split: str = setting(
        "auto",
        choice("auto", "trace"),
        "`auto`: by the plan of its architecture, or what is found; `trace`: by tracing",
    )
    model_split_points: tuple[str, ...] = setting(
        (), kinds.MODULES, "modules that begin a layer when traced, JSON list"
    )
    model_layers: str = setting(
        "",
        kinds.MODULE,
        "list of a transformers model that is cut; empty: what is declared or found",
    )
    model_before_layers: tuple[str, ...] = setting(
        (), kinds.MODULES, "modules of the first stage that are not found, JSON list"
    )
    model_after_layers: tuple[str, ...] = setting(
        (), kinds.MODULES, "modules of the last stage that are not found, JSON list"
    )
    model_seed: int = setting(0, kinds.SEED, "seed of the initial weights")
    data_source: str = setting("stdlib", kinds.SOURCE, "where tokens come from")
    data_tokenizer: str = setting(
        "auto", kinds.NAME, "`auto` (the model's, else bytes), `bytes`, or a hub id or folder"
    )
    data_text_column: str = setting(
        "text", kinds.NAME, "column of the data set that holds the text"
    )
    data_max_seq_len: int = setting(
        2048, whole(1, kinds.MAX_SEQ_LEN), "most tokens of a sequence when `seq_len` is variable"
    )
    data_shuffle: bool = setting(True, kinds.FLAG, "whether documents come in random order")
    data_num_workers: int = setting(
        0, whole(0, 1024), "processes that prepare batches; 0: the rank itself does"
    )
    data_seed: int = setting(0, kinds.SEED, "seed of the batches")
    train_optimizer: str = setting("adamw", choice("adamw", "sgd"), "optimizer")
    train_learning_rate: float = setting(
        1e-4, kinds.POSITIVE, "learning rate, the highest of its schedule"
    )
    train_weight_decay: float = setting(0.01, kinds.NOT_NEGATIVE, "weight decay")
    train_momentum: float = setting(0.0, kinds.BELOW_ONE, "momentum of SGD")
    train_lr_schedule: str = setting(
        "constant", choice("constant", "cosine"), "`constant` or `cosine`, after the warm-up"
    )
    train_lr_warmup_steps: int = setting(
        0, whole(0, 1_000_000_000), "steps over which the learning rate rises linearly"
    )
    train_lr_decay_steps: int = setting(
        0, whole(0, 1_000_000_000), "step at which a cosine schedule reaches zero"
    )
    train_clip_norm: float = setting(
        0.0, kinds.NOT_NEGATIVE, "largest global norm of the gradients; 0 when not clipped"
    )
    train_autocast: str = setting(
        "none", choice("none", "bfloat16"), "dtype of computation under autocast, or `none`"
    )
    train_recompute: bool = setting(
        False,
        kinds.RECOMPUTE,
        "whether layers recompute their activations in the backward pass; of a list: any stage",
    )
    train_recompute_stages: tuple[bool, ...] = setting(
        (), kinds.NO_KEY, "whether those of each stage do, where a list says so; JSON list"
    )
    train_compile: bool = setting(
        False, kinds.FLAG, "whether each stage went through torch.compile"
    )
    train_microbatch_size: int = setting(1, whole(1, 1_000_000), "sequences of a microbatch")
    launch_threads_per_rank: int = setting(1, whole(1, 1024), "CPU threads of a rank")
    launch_bind: bool = setting(
        True, kinds.FLAG, "whether CPU ranks are bound to cores of their own where there are enough"
    )
    launch_issue_ahead: int = setting(
        8,
        whole(1, 65_536),
        "most computations that the host of a GPU issues before the GPU has done them",
    )
    stages_per_rank: int = setting(
        1,
        kinds.STAGES_PER_RANK,
        "stages of a rank; of a program file the most of any rank",
        in_file=AUTO,
    )
    slices_number: int = setting(
        1, whole(1, 65_536), "slices that the sequences of each microbatch come in"
    )
    slices_lengths: str | tuple[int, ...] = setting(
        "even",
        kinds.SLICE_LENGTHS,
        "tokens of each slice: `even`, `balanced` (all take as long), or a list",
    )
    slices_attention: float = setting(
        0.0,
        up_to(1),
        "share of attention in the time of a microbatch; a slice attends to all before it",
    )
    memory_limit: str = setting(
        "none",
        kinds.MEMORY_LIMIT,
        "most that a rank may need with schedule `auto`: a size, or activations of emulated "
        "stages, each of a microbatch and stage",
    )
    program_digest: str = setting(
        "", kinds.NO_KEY, "hash of the program file, where the schedule is one"
    )
    transfer_policy: str = setting(
        "early",
        choice("early", "just_in_time"),
        "where receives are posted: `early` or `just_in_time`",
    )
    transfer_look_ahead: int = setting(
        1, whole(0, 65_536), "compute actions ahead of its consumer that `early` posts a receive"
    )
    sharding_policy: str = setting(
        "ddp",
        choice("none", "ddp", "zero1", "zero2", "zero3", "torch"),
        "what replicas keep in shards: `none`, `ddp` (nothing), `zero1` (optimizer), `zero2` "
        "(gradients too), `zero3` (parameters too) or `torch` (as torch does it)",
    )
    sharding_residency: int = setting(
        2, whole(1, 65_536), "most stages of a rank that `zero3` has unsharded at once"
    )
    sharding_look_ahead: int = setting(
        1, whole(0, 65_536), "stages that `zero3` unshards before they are needed"
    )
    sharding_every_backward: bool = setting(
        True, kinds.FLAG, "whether `zero2` sums gradients after each backward, or once for a stage"
    )
    sharding_max_active_stages: int = setting(
        3, whole(1, 65_536), "stages of a rank that `torch` keeps unsharded"
    )
    emulated_F_ms: tuple[float, ...] = setting(  # noqa: N815  # an op's name
        (),
        kinds.OP_MS,
        "forward of a rank (each of v stages takes 1/v; with two ways, `chimera` and `dualpipe`, "
        "each takes all), or of each stage; milliseconds, JSON list",
    )
    emulated_I_ms: tuple[float, ...] = setting(  # noqa: N815
        (), kinds.OP_MS, "input-gradient half of the backward, likewise"
    )
    emulated_W_ms: tuple[float, ...] = setting(  # noqa: N815
        (), kinds.OP_MS, "weight-gradient half of the backward, likewise"
    )
    emulated_FB_ms: tuple[float, ...] = setting(  # noqa: N815
        (),
        kinds.OP_MS,
        "pair of a forward and a backward side by side, by the stage of its forward; none: "
        "they run in order",
    )
    emulated_link_ms: tuple[float, ...] = setting(
        (),
        kinds.LINK_MS,
        "delay added to each message, or to those of each link from a stage to the next; "
        "milliseconds, JSON list",
    )
    emulated_gather_ms: tuple[float, ...] = setting(
        (),
        kinds.STAGE_MS,
        "time that an UNSHARD moves bytes, once all replicas have come to it: of every stage, "
        "or of each; milliseconds, JSON list",
    )
    emulated_reduce_ms: tuple[float, ...] = setting(
        (), kinds.STAGE_MS, "time of a REDUCE_GRAD, likewise"
    )
    emulated_replica_factors: tuple[float, ...] = setting(
        (),
        kinds.FACTORS,
        "factor of the times of each replica's computations; JSON list, empty: all 1",
    )
    emulated_jitter: float = setting(
        0.0, up_to(1), "standard deviation of an emulated duration over its mean"
    )
    emulated_seed: int = setting(0, kinds.SEED, "seed of the jitter")
    emulated_costs: str = setting(
        "", kinds.TEXT, "file that the times are read from; they are then no part of the case"
    )

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
        Nothing of this is in an evaluation.
        """
        preset = None if self.is_emulated else PRESETS.get(self.model_preset)
        is_tied = preset is not None and preset.tie_word_embeddings and self.world_size > 1
        return self.trains and (self.train_clip_norm > 0 or is_tied)

    @property
    def trains(self) -> bool:
        """Whether there are gradients and an optimizer."""
        return self.mode == TRAIN

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
    *("emulated_F_ms", "emulated_I_ms", "emulated_W_ms", "emulated_FB_ms", "emulated_link_ms"),
    *("emulated_gather_ms", "emulated_reduce_ms"),
)
"""The settings that a file of emulated costs fills."""


@dataclass(frozen=True)
class Measure:
    """How a case is measured. Not part of its identity."""

    warmup_steps: int = setting(3, whole(0, 1_000_000), "fewest steps to run before measuring")
    max_warmup_steps: int = setting(
        20, whole(0, 1_000_000), "most of them, while steps still get faster"
    )
    steps: int = setting(10, whole(1, 1_000_000), "measured steps")
    block: int = setting(
        0,
        whole(0, 1_000_000),
        "most measured steps of a turn, which follow each other unhindered; 0: 1, or 4 on a GPU",
    )
    launches: int = setting(
        1,
        whole(1, 1000),
        "launches that the sweep asked for",
        shared="all cases have the same number of launches",
    )
    budget: str = setting(
        "",
        kinds.BUDGET,
        "time for launches until it is known which case to take, as in 90s or 10m; none: "
        "`launches`",
        shared="it is the time of the whole sweep",
        metavar="TIME",
    )
    resolution: float = setting(
        0.02,
        kinds.RESOLUTION,
        "difference within which two cases are the same, as a share",
        shared="it belongs to the question of the whole sweep",
    )
    verify: bool = setting(False, kinds.FLAG, "whether the run was to be verified at its own size")
    profile_steps: int = setting(
        0, whole(0, 1000), "further steps, untimed, under torch's profiler"
    )
    timeout_s: float = setting(
        1800.0, up_to(1_000_000), "time limit of the run in seconds; 0: none"
    )
    retry: int = setting(0, whole(0, 100), "further tries of a launch after one that failed")
    order_seed: int = setting(
        0,
        kinds.SEED,
        "seed of the order of a launch's cases",
        shared="it sets the order of the cases of a launch",
    )

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

    def of_figures(self) -> dict[str, Scalar]:
        """Column -> value of those that a run's figures depend on."""
        return {
            column: value
            for column, value in self.settings().items()
            if column.removeprefix("measure_") not in _OF_NO_FIGURE
        }


_OF_NO_FIGURE = ("launches", "budget", "resolution", "timeout_s", "retry", "order_seed")
"""Fields of `Measure` that say how many runs there are, and not how one is measured."""
Planned = tuple[Case, Measure]


@dataclass(frozen=True)
class Torchrun:
    """Nodes on each of which the same command is started."""

    nodes: int = setting(1, whole(1, 65_536), "number of nodes")
    rendezvous: str = setting("", kinds.RENDEZVOUS, "host:port of one of them")


@dataclass(frozen=True)
class Slurm:
    """The resources of a Slurm job; what is empty or 0 is left to the cluster or the cases."""

    partition: str = setting("", kinds.TEXT, "partition")
    account: str = setting("", kinds.TEXT, "account")
    qos: str = setting("", kinds.TEXT, "quality of service")
    constraint: str = setting("", kinds.TEXT, "constraint on nodes")
    nodes: int = setting(1, whole(1, 65_536), "number of nodes")
    time: str = setting(
        "1:00:00", kinds.SLURM_TIME, "time limit of all launches, as Slurm writes it"
    )
    gpus_per_node: int = setting(0, whole(0, 1024), "GPUs of a node")
    cpus_per_node: int = setting(0, whole(0, 65_536), "CPU cores of a node")
    memory_gb: float = setting(0.0, up_to(1_000_000), "memory of a node")
    extra: Mapping[str, str | int | bool] = subtable(
        kinds.SLURM_OPTIONS, "further options of sbatch"
    )

    @property
    def time_min(self) -> int:
        return minutes_of(self.time)


@dataclass(frozen=True)
class Supervision:
    """How the supervisors and the ranks of a launch work, here or on any node; no part of a case.

    A field is a key of `[launch]`, an option of `ppbench sweep` and of supervisors, and `here` in
    the supervisors and ranks of the launch.
    """

    patience_s: float = setting(
        600.0,
        up_to(1_000_000),
        "seconds for the slowest node and rank to come, also in place of a node that was lost",
        metavar="S",
    )

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

    ranks: tuple[int, ...] = setting(
        (), kinds.COUNTS, "number of ranks, or a list to choose from; none: `world_size`"
    )
    memory: str = setting("", kinds.MEMORY, 'memory of each rank, as in "1.5 GiB"; none: no limit')
    global_batch: int = setting(
        0,
        whole(0, 1_000_000_000),
        "sequences of a step; 0: `num_microbatches` x `train.microbatch_size`",
    )
    schedules: tuple[str, ...] = setting(
        (), kinds.SCHEDULES, 'schedules to choose from, "auto" among them; none: all'
    )
    stages_per_rank: tuple[int, ...] = setting(
        (1, 2), kinds.SOME_COUNTS, "numbers of stages of a rank to choose from"
    )
    microbatch_sizes: tuple[int, ...] = setting(
        (), kinds.COUNTS, "sequences of a microbatch to choose from; none: all with costs"
    )
    recompute: str = setting(
        "auto",
        choice("auto", "none", "all"),
        "layers that recompute: of the stages that would not fit, of none, of all",
    )
    costs: str = setting(
        "measure", kinds.COSTS_ORIGIN, 'where costs are from: "measure" here, or "file:PATH"'
    )

    @property
    def memory_bytes(self) -> int | None:
        """None without a limit."""
        return bytes_of(self.memory) if self.memory else None


@dataclass(frozen=True)
class TrackSettings:
    """`[track]`: what is tracked over commits; see `ppbench.config.sweep`. No part of a case."""

    repo: str = setting("", kinds.TEXT, "a folder of the repository; none: around the sweep file")
    setup: str = setting("", kinds.TEXT, "command that is run in the work tree of a past commit")
    thresholds: Mapping[str, object] = subtable(kinds.TABLE, "changes that the gate lets pass")
    accept: Sequence[object] = setting(
        (), kinds.TABLES, "changes for the worse that are intended", in_file=[]
    )


def _declared() -> Iterator[Setting]:
    """Every setting, with its key and its meaning."""
    yield Setting(kinds.SWEEP_NAME, "name of the sweep", "", "it names the whole sweep", key="name")
    sections = ("model", "data", "train", "launch", "transfer", "sharding", "slices", "emulated")
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
            yield one._replace(shared=one.shared or why, key=key, owner=owner, field=field.name)


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
