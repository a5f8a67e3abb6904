"""The tables of the store and their columns: what each holds, and the type that it is stored as."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from engine.plan.spans import COLUMNS as SPAN_COLUMNS
from ppbench.config.case import Case

SCHEMA_VERSION = 6
"""Version 1 knew presets and fixed lengths only. Since 2 `model_preset` may name
any model and `seq_len` may be 0. Since 3 a rank may have several stages, `device` may be `emulated`
and figures of memory may be null. Since 4 a run tells where its idle time went, in columns and
tables of their own. Since 5 a run that failed tells the rank and what every rank did last. Since 6
a run tells its commit's date, parent and subject, and what was changed since.
Settings and figures added later are absent from older files."""
RUN_ID = "run_id"


@dataclass(frozen=True)
class Column:
    """A column of the store: its name, its type and what it holds."""

    name: str
    type: pa.DataType
    meaning: str


_CASE_MEANINGS = {
    "schedule": "name of the schedule, aliases resolved",
    "runtime": "what runs the case: `engine`, `torch` (torch.distributed.pipelining), `single` (no "
    "pipeline) or another package's; `engine` where it is missing",
    "world_size": "number of ranks in the pipeline",
    "num_microbatches": "microbatches of a step",
    "seq_len": "tokens of a sequence; 0 when variable (a microbatch is as long as its documents), "
    "-1 when unknown",
    "device": "`cpu`, `cuda`, or `emulated`: stages take a set time and compute nothing",
    "model_preset": "preset, hub id, checkpoint folder or `package.module:factory`",
    "model_weights": "`auto`: those of the checkpoint if there is one; `random`: initialised",
    "model_trust_remote_code": "whether code that comes with the model may run",
    "model_dtype": "dtype of parameters and activations",
    "model_partition": "how layers are cut into stages: `uniform`, `parameters`, `measured` or "
    "a list of counts",
    "model_split": "`auto`: by the plan of its architecture; `trace`: by tracing",
    "model_split_points": "modules that begin a stage when traced, JSON list",
    "model_seed": "seed of the initial weights",
    "data_source": "where tokens come from",
    "data_tokenizer": "`auto` (the model's, else bytes), `bytes`, or a hub id or folder",
    "data_text_column": "column of the data set that holds the text",
    "data_max_seq_len": "most tokens of a sequence when `seq_len` is variable",
    "data_shuffle": "whether documents come in random order",
    "data_num_workers": "processes that prepare batches; 0: none but the rank's own",
    "data_seed": "seed of the batches",
    "train_optimizer": "optimizer",
    "train_learning_rate": "learning rate, the highest of its schedule",
    "train_weight_decay": "weight decay",
    "train_momentum": "momentum of SGD",
    "train_lr_schedule": "`constant` or `cosine`, after the warm-up",
    "train_lr_warmup_steps": "steps over which the learning rate rises linearly",
    "train_lr_decay_steps": "step at which a cosine schedule reaches zero",
    "train_clip_norm": "largest global norm of the gradients; 0 when not clipped",
    "train_autocast": "dtype of computation under autocast, or `none`",
    "train_recompute": "whether layers recompute their activations in the backward pass",
    "train_compile": "whether each stage went through torch.compile",
    "train_microbatch_size": "sequences of a microbatch",
    "launch_threads_per_rank": "CPU threads of a rank",
    "launch_bind": "whether CPU ranks are bound to cores of their own where there are enough",
    "stages_per_rank": "stages of a rank; of a program file the most that a rank has",
    "program_digest": "hash of the program file, where the schedule is one",
    "transfer_policy": "where receives are posted: `early` or `just_in_time`",
    "transfer_look_ahead": "compute actions ahead of its consumer that `early` posts a receive",
    "emulated_F_ms": "forward of a rank's share, or of each stage; milliseconds, JSON list",
    "emulated_I_ms": "input-gradient half of the backward, likewise",
    "emulated_W_ms": "weight-gradient half of the backward, likewise",
    "emulated_link_ms": "by how much longer each message takes, or those of each link from a stage "
    "to the next; milliseconds, JSON list",
    "emulated_jitter": "standard deviation of an emulated duration over its mean",
    "emulated_seed": "seed of the jitter",
    "emulated_costs": "file that the times are from; then they are no part of the case",
}
_ARROW = {bool: pa.bool_(), int: pa.int64(), float: pa.float64()}


def _case_columns() -> list[Column]:
    """Typed as the setting's default is; what is neither number nor boolean is text."""
    return [
        Column(f.name, _ARROW.get(type(f.default), pa.string()), _CASE_MEANINGS[f.name])
        for f in dataclasses.fields(Case)
    ]


_RUN_ID = Column(RUN_ID, pa.string(), "identifies the run; sorts by time")
_VERSION = Column("schema_version", pa.int64(), "version of this table's columns")

RUNS: tuple[Column, ...] = (
    _RUN_ID,
    _VERSION,
    Column("sweep_id", pa.string(), "hash of the sweep's name, runs, commit and machine"),
    Column("sweep_name", pa.string(), "name of the sweep"),
    Column("sweep_file", pa.string(), "path of the sweep file as given"),
    Column("resume_key", pa.string(), "hash that tells whether this run has been done already"),
    Column("case_id", pa.string(), "hash of the workload"),
    Column("launch", pa.int64(), "which start of the worker processes, from 0"),
    Column("position", pa.int64(), "place in the sweep file's order, which is not that of time"),
    Column("attempt", pa.int64(), "which try of the launch this is, from 1; see `measure.retry`"),
    Column(
        "status",
        pa.string(),
        "`ok`, `oom`, `error`, `crash`, `timeout`, `invalid` or `interrupted`",
    ),
    Column(
        "error",
        pa.string(),
        "what went wrong, when status is not `ok`: at most 40,000 printable characters",
    ),
    Column("error_rank", pa.int64(), "rank where it went wrong; null if that cannot be told"),
    Column(
        "last_actions",
        pa.string(),
        "of a run that failed: what each rank did last, JSON list in order of rank; see `flight`",
    ),
    Column("created_at", pa.string(), "when the run ended, ISO 8601, UTC"),
    Column(
        "origin",
        pa.string(),
        "`attached` or `imported`: training that ppbench did not start; null: a sweep's",
    ),
    Column(
        "settings_told",
        pa.string(),
        "of such a run: which settings are known, JSON list. Of the others those that are text are "
        "`unknown`, numbers 0 and flags false, and that means nothing",
    ),
    *_case_columns(),
    Column("measure_warmup_steps", pa.int64(), "steps to run before measuring, at least"),
    Column("measure_max_warmup_steps", pa.int64(), "and at most, while steps get faster"),
    Column("measure_steps", pa.int64(), "measured steps"),
    Column("measure_launches", pa.int64(), "launches that the sweep asked for"),
    Column("measure_verify", pa.bool_(), "whether the run was to be verified at its own size"),
    Column("measure_profile_steps", pa.int64(), "further steps, untimed, under torch's profiler"),
    Column("measure_timeout_s", pa.float64(), "seconds that the run might take; 0: no limit"),
    Column("measure_retry", pa.int64(), "further tries of a launch after one that failed"),
    Column("measure_order_seed", pa.int64(), "decides the order of a launch's cases"),
    Column("tokens_per_step", pa.int64(), "tokens trained on in a step; median"),
    Column(
        "tokens_per_s", pa.float64(), "tokens of a step over its time, optimizer included; median"
    ),
    Column("step_ns", pa.float64(), "first computation's start to last action's end; median"),
    Column("optimizer_ns", pa.float64(), "longest optimizer span of any rank; median over steps"),
    Column("step_with_optimizer_ns", pa.float64(), "first start to last optimizer end; median"),
    Column("bubble_fraction", pa.float64(), "1 - compute / (world_size x step_ns); median"),
    Column("bubble_idle_over_ideal", pa.float64(), "idle over compute time; median"),
    Column("bubble_max_stage_span", pa.float64(), "1 - mean compute / longest rank span; median"),
    Column(
        "bubble_fraction_theory",
        pa.float64(),
        "simulated with free transfers: as emulated, else equal stages with F = I = W",
    ),
    Column("planned_step_ns", pa.int64(), "simulated step_ns of an emulated run"),
    Column("step_relative_deviation", pa.float64(), "median absolute deviation / median of steps"),
    Column("step_ns_low", pa.float64(), "95 % interval of the median step_ns: its lower end"),
    Column("step_ns_high", pa.float64(), "its upper end; null for fewer than 6 steps"),
    Column("tokens_per_s_low", pa.float64(), "95 % interval of the median tokens_per_s: lower end"),
    Column("tokens_per_s_high", pa.float64(), "its upper end; null for fewer than 6 steps"),
    Column("num_outliers", pa.int64(), "measured steps that stand apart; they are kept"),
    Column("num_warmup_steps", pa.int64(), "steps that were run before measuring"),
    Column("warmup_step_ns", pa.string(), "what each of them took on rank 0's clock, JSON list"),
    Column(
        "modelled_step_ns",
        pa.int64(),
        "step_ns predicted by replaying the program with the run's own mean costs and transfers",
    ),
    Column("modelled_bubble_fraction", pa.float64(), "bubble_fraction of that prediction"),
    Column("model_residual", pa.float64(), "mean step_ns over modelled_step_ns, less 1"),
    Column("bubble_mean", pa.float64(), "idle time of all measured steps over their rank-time"),
    Column("bubble_structure", pa.float64(), "part of bubble_mean: equal stages, free transfers"),
    Column("bubble_imbalance", pa.float64(), "part that the stages' mean costs add"),
    Column("bubble_transfer", pa.float64(), "part that mean transfers add"),
    Column("bubble_jitter", pa.float64(), "part that each action's and message's own time adds"),
    Column("bubble_launch_gap", pa.float64(), "the rest: the host between actions"),
    Column(
        "op_costs_ns",
        pa.string(),
        "mean cost of one microbatch by op and stage, JSON; stages that chance alone tells apart "
        "are equal",
    ),
    Column(
        "op_variation", pa.float64(), "root mean square deviation of actions from those, relative"
    ),
    Column(
        "peak_memory_bytes",
        pa.int64(),
        "allocator peak of the rank that has the highest; null: emulated",
    ),
    Column("predicted_peak_memory_bytes", pa.int64(), "what the program predicts for that rank"),
    Column(
        "peak_held_microbatches",
        pa.int64(),
        "most activations held by one rank at once, each of one microbatch of one stage",
    ),
    Column("mfu", pa.float64(), "model FLOPs of the tokens per second over the devices' peak"),
    Column("mfu_formula", pa.string(), "how model FLOPs were counted, or why they were not"),
    Column("mfu_peak", pa.string(), "whose peak: a datasheet's, or a measured product's"),
    Column("model_flops_per_token", pa.float64(), "the formula's, forward and backward"),
    Column("peak_flops_per_s", pa.float64(), "the peak's, of all devices together"),
    Column("energy_per_token_j", pa.float64(), "energy of the measured steps over their tokens"),
    Column("energy_source", pa.string(), "whose energy: `gpus` or `cpu packages`; null: untold"),
    Column("first_loss", pa.float64(), "loss per token of the first step, warm-up included"),
    Column(
        "last_loss",
        pa.float64(),
        "loss per token of step measure_warmup_steps + measure_steps, which every run makes",
    ),
    Column(
        "is_finite",
        pa.bool_(),
        "whether no loss, gradient or weight was NaN or infinite in any step, warm-up included; "
        "null: not known, or nothing was computed",
    ),
    Column("not_finite_step", pa.int64(), "the first step in which one was; null: none"),
    Column("not_finite_rank", pa.int64(), "the rank that saw it first"),
    Column("not_finite_what", pa.string(), "what it was: `loss`, or whose gradient or weight"),
    Column(
        "verified",
        pa.string(),
        "how training was compared with the author's unsplit module, and against what; `no: ` and "
        "why not, where it was not; null in older files",
    ),
    Column(
        "verified_difference",
        pa.float64(),
        "largest relative difference of a loss, gradient norm or gradient that was found",
    ),
    Column("num_parameters", pa.int64(), "parameters of the model; a tied weight counted once"),
    Column("num_stages", pa.int64(), "stages of the pipeline"),
    Column("layers_per_stage", pa.string(), "layers of each stage, JSON list"),
    Column("parameters_per_stage", pa.string(), "parameters of each stage, JSON list"),
    Column(
        "stage_shares",
        pa.string(),
        "share of what the partition balances (layers, parameters or measured time) of each "
        "stage, JSON list",
    ),
    Column(
        "transport", pa.string(), "what moved the messages: `memory`, `gloo`, `nccl`, `none`, ..."
    ),
    Column("cautions", pa.string(), "names of the cautions, comma-separated; empty if none"),
    Column(
        "program",
        pa.string(),
        "the program that ran, JSON; before lowering, unless its file or runtime has transfers of "
        "its own",
    ),
    Column("commit", pa.string(), "commit of the tracked repository; null without one"),
    Column("branch", pa.string(), "branch that was checked out; null when none was"),
    Column("author_date", pa.string(), "when the commit was written, ISO 8601"),
    Column("parent", pa.string(), "the commit's first parent; null when it is the first"),
    Column("subject", pa.string(), "first line of the commit's message"),
    Column("is_dirty", pa.bool_(), "whether the work tree had uncommitted changes"),
    Column("changes", pa.string(), "hash of these changes to tracked files; empty when clean"),
    Column("fingerprint", pa.string(), "hash of what makes timings comparable"),
    Column("environment", pa.string(), "what the fingerprint was made from, and more; JSON"),
    Column("code", pa.string(), "hash of the sources of engine and ppbench.run"),
    Column(
        "runtime_code",
        pa.string(),
        "package of the runtime, its version and a hash of its sources; null for ppbench's own",
    ),
    Column("ppbench_version", pa.string(), "version that wrote the row"),
    Column(
        "tables",
        pa.string(),
        "tables that the run was stored with, comma-separated; null in older files",
    ),
)
STEPS: tuple[Column, ...] = (
    _RUN_ID,
    _VERSION,
    Column("step", pa.int64(), "number of the step; warm-up steps come before the first"),
    Column("step_ns", pa.int64(), "first computation's start to last action's end over all ranks"),
    Column("optimizer_ns", pa.int64(), "longest optimizer span of any rank"),
    Column("step_with_optimizer_ns", pa.int64(), "first start to last optimizer end"),
    Column("num_tokens", pa.int64(), "targets trained on in the step"),
    Column("tokens_per_s", pa.float64(), "num_tokens over step_with_optimizer_ns"),
    Column("bubble_fraction", pa.float64(), "1 - compute / (world_size x step_ns)"),
    Column("bubble_idle_over_ideal", pa.float64(), "idle over compute time"),
    Column("bubble_max_stage_span", pa.float64(), "1 - mean compute / longest rank span"),
    Column("loss", pa.float64(), "mean loss per token"),
    Column("is_outlier", pa.bool_(), "whether the step's full time stands apart from the others'"),
)
RANKS: tuple[Column, ...] = (
    _RUN_ID,
    _VERSION,
    Column("rank", pa.int64(), "rank in the pipeline"),
    Column("hostname", pa.string(), "machine of the rank"),
    Column("device", pa.string(), "device of the rank"),
    Column("cores", pa.string(), "cores that it is bound to, JSON list; null: not bound"),
    Column("stages", pa.string(), "stages it owns, JSON list"),
    Column("num_layers", pa.int64(), "decoder layers it owns"),
    Column("num_parameters", pa.int64(), "parameters it holds"),
    Column("compute_ns", pa.float64(), "time in F, B, I and W; median over steps"),
    Column("idle_fraction", pa.float64(), "1 - compute_ns / step_ns; median over steps"),
    Column(
        "peak_memory_bytes", pa.int64(), "bytes allocated to tensors at the worst moment of a step"
    ),
    Column(
        "predicted_peak_memory_bytes",
        pa.int64(),
        "the same, predicted from the program with the bytes of a few of its actions",
    ),
    Column("parameter_bytes", pa.int64(), "of the peak: parameters"),
    Column("gradient_bytes", pa.int64(), "of the peak: gradients alive then"),
    Column("optimizer_bytes", pa.int64(), "of the peak: optimizer state"),
    Column("buffer_bytes", pa.int64(), "of the peak: buffers of the model"),
    Column(
        "activation_bytes",
        pa.int64(),
        "of the peak: all else (activations, messages, the batch, temporaries)",
    ),
    Column("reserved_bytes", pa.int64(), "bytes held by the caching allocator (CUDA)"),
    Column("process_peak_bytes", pa.int64(), "resident high-water mark of the process"),
    Column(
        "peak_held_microbatches",
        pa.int64(),
        "most activations held at once, each of one microbatch of one stage",
    ),
    Column("other_load_cores", pa.float64(), "cores kept busy by processes outside the launch"),
    Column("watched_cores", pa.int64(), "cores of the node that the launch may run on"),
    Column("steal_fraction", pa.float64(), "of their time, taken by the hypervisor"),
    Column("load_window_s", pa.float64(), "seconds around the measured steps that these are of"),
    Column("cpu_mhz", pa.float64(), "mean frequency over cores and time"),
    Column(
        "cpu_throttled_fraction", pa.float64(), "of the CPU time asked for, held back by a quota"
    ),
    Column("cpu_energy_j", pa.float64(), "energy of all the node's packages, measured steps"),
    Column("gpu_power_w", pa.float64(), "mean power of the rank's GPU"),
    Column("gpu_energy_j", pa.float64(), "energy of the rank's GPU, measured steps"),
    Column("gpu_utilization", pa.float64(), "mean, 0 to 1"),
    Column("gpu_sm_mhz", pa.float64(), "mean clock of its multiprocessors"),
    Column("gpu_temperature_c", pa.float64(), "highest temperature"),
    Column("gpu_throttle_reasons", pa.string(), "reasons for a lower clock that were seen"),
    Column("gpu_memory_used_bytes", pa.int64(), "most memory in use, by all processes"),
    Column("telemetry_note", pa.string(), "what of these is absent or less than exact, and why"),
    Column("planned_peak_held_microbatches", pa.int64(), "the same, predicted from the program"),
    Column(
        "clock",
        pa.string(),
        "`rank 0`, `shared with rank 0`, `aligned by pings` or, of traces, `aligned by messages`",
    ),
    Column("clock_offset_ns", pa.int64(), "how far its clock was ahead of rank 0's, halfway"),
    Column(
        "clock_drift_ppb",
        pa.int64(),
        "nanoseconds that it gained on rank 0's in a second; off by up to twice the error over the "
        "time of the steps",
    ),
    Column(
        "clock_error_ns",
        pa.int64(),
        "the most that its times are off on rank 0's clock, those of its device included",
    ),
)
_SPAN_MEANINGS = {
    "step": (pa.int32(), "number of the step"),
    "rank": (pa.int32(), "rank that did it"),
    "lane": (pa.string(), "`compute`, `send` or `recv`"),
    "stage": (pa.int32(), "stage; -1 for the optimizer"),
    "op": (pa.string(), "F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B or OPT"),
    "microbatch": (pa.int32(), "microbatch; -1 for the optimizer"),
    "start_ns": (pa.int64(), "start on the clock of rank 0; a receive starts when it is posted"),
    "end_ns": (
        pa.int64(),
        "end on that clock; both ends of a message end when the first has noted it",
    ),
    "num_bytes": (pa.int64(), "bytes moved by a transfer; 0 for compute"),
}
_OF_SPAN = tuple(Column(name, *_SPAN_MEANINGS[name]) for name in SPAN_COLUMNS)
SPANS: tuple[Column, ...] = (
    _RUN_ID,
    _VERSION,
    *_OF_SPAN,
    Column(
        "waiting_ns",
        pa.int64(),
        "how long a transfer waited for its peer or its channel; what is left moved bytes",
    ),
)
PLANNED: tuple[Column, ...] = (_RUN_ID, _VERSION, *_OF_SPAN[:-1])
ATTRIBUTION: tuple[Column, ...] = (
    _RUN_ID,
    _VERSION,
    Column("step", pa.int64(), "number of the step"),
    Column("rank", pa.int64(), "rank in the pipeline"),
    Column("idle_ns", pa.int64(), "step_ns - time in F, B, I and W"),
    Column("structure_ns", pa.int64(), "idle with equal stages and free transfers"),
    Column("imbalance_ns", pa.int64(), "more idle with the stages' mean costs"),
    Column("transfer_ns", pa.int64(), "more idle with the channels' mean transfers"),
    Column("jitter_ns", pa.int64(), "more idle with each action's and message's own time"),
    Column("launch_gap_ns", pa.int64(), "the rest; the five parts add up to idle_ns"),
    Column("warmup_ns", pa.int64(), "idle before the rank's first backward begins"),
    Column("steady_ns", pa.int64(), "idle between; the three phases add up to idle_ns"),
    Column("cooldown_ns", pa.int64(), "idle after the rank's last forward and first backward"),
)
EDGES: tuple[Column, ...] = (
    _RUN_ID,
    _VERSION,
    Column("source", pa.int64(), "sending stage"),
    Column("target", pa.int64(), "receiving stage"),
    Column("source_rank", pa.int64(), "its rank"),
    Column("target_rank", pa.int64(), "its rank"),
    Column("num_messages", pa.int64(), "messages of a step"),
    Column("num_bytes", pa.float64(), "bytes of a message, mean"),
    Column("bytes_per_s", pa.float64(), "all bytes over all the time in which they moved"),
    Column("moving_ns", pa.float64(), "time in which the bytes of a message moved, mean"),
    Column("sender_waiting_ns", pa.float64(), "time for which a send waited first, mean"),
    Column("receiver_waiting_ns", pa.float64(), "time for which a receive waited first, mean"),
)
"""Bytes move until the receive ends; a send may be let go earlier."""
MEMORY: tuple[Column, ...] = (
    _RUN_ID,
    _VERSION,
    Column("rank", pa.int64(), "rank in the pipeline"),
    Column("time_ns", pa.int64(), "since the first rank began the extra step for memory"),
    Column("num_bytes", pa.int64(), "bytes allocated from then on; an envelope of 2,000 at most"),
)
TELEMETRY: tuple[Column, ...] = (
    _RUN_ID,
    _VERSION,
    Column("time_ns", pa.int64(), "when, as spans tell time"),
    Column("hostname", pa.string(), "the node"),
    Column("device", pa.string(), "`cpu` for the node itself, or `gpu0`, `gpu1`, ..."),
    Column("other_load_cores", pa.float64(), "cores kept busy by processes outside the launch"),
    Column("steal_fraction", pa.float64(), "of the cores' time, taken by the hypervisor"),
    Column("cpu_throttled_fraction", pa.float64(), "of the CPU time asked for, held back"),
    Column("utilization", pa.float64(), "of the GPU, or of all that runs on the node; 0 to 1"),
    Column("power_w", pa.float64(), "power of the GPU or of the node's packages"),
    Column("clock_mhz", pa.float64(), "clock of the multiprocessors, or of the cores"),
    Column("memory_clock_mhz", pa.float64(), "clock of the GPU's memory"),
    Column("temperature_c", pa.float64(), "temperature of the GPU"),
    Column("throttle_reasons", pa.string(), "the GPU's reasons for a lower clock, with commas"),
    Column("memory_used_bytes", pa.int64(), "memory in use"),
)
FLIGHT: tuple[Column, ...] = (
    _RUN_ID,
    _VERSION,
    Column("rank", pa.int64(), "rank in the pipeline"),
    Column("hostname", pa.string(), "machine of the rank"),
    Column("process", pa.string(), "`alive`, `stopped` or `dead` when the run was ended"),
    Column("phase", pa.string(), "what it did then: `steps`, `builds the model`, ..."),
    Column("step", pa.int64(), "number of its step; null outside steps"),
    Column("action", pa.string(), "its action in that step, such as `2F0`; null outside steps"),
    Column("is_waiting", pa.bool_(), "whether it waited for the action's input"),
    Column("since_ns", pa.int64(), "since when, as spans tell time"),
    Column("until_ns", pa.int64(), "when the run was ended, likewise"),
    Column("waits_for_rank", pa.int64(), "rank that it waited for; null if for none"),
    Column("waits_for_action", pa.string(), "that rank's action that it waited for"),
    Column("account", pa.string(), "all this in words"),
)
"""Of runs that failed. Their `spans` hold what the ranks had finished of their last steps."""
TABLES: dict[str, tuple[Column, ...]] = {
    "runs": RUNS,
    "steps": STEPS,
    "ranks": RANKS,
    "spans": SPANS,
    "planned": PLANNED,
    "attribution": ATTRIBUTION,
    "edges": EDGES,
    "memory": MEMORY,
    "telemetry": TELEMETRY,
    "flight": FLIGHT,
}


def schema_of(name: str, columns: Iterable[str] | None = None) -> pa.Schema:
    """The columns of a table as arrow has them: all, or `run_id` and the given ones."""
    wanted = None if columns is None else {RUN_ID, *columns}
    return pa.schema(
        [(one.name, one.type) for one in TABLES[name] if wanted is None or one.name in wanted]
    )


def columns_as_markdown() -> str:
    """Every table's columns and what they hold."""
    parts = []
    for name, columns in TABLES.items():
        rows = "".join(f"| `{c.name}` | {c.type} | {c.meaning} |\n" for c in columns)
        parts.append(f"## {name}\n\n| column | type | meaning |\n|---|---|---|\n{rows}")
    return "\n".join(parts)
