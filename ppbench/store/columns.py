"""The tables of the store and their columns, with types and meanings."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from engine.plan.spans import COLUMNS as SPAN_COLUMNS
from ppbench.config.case import Case, Measure, settings_in

SCHEMA_VERSION = 1
"""Version of the columns; a store of another version is not read."""
RUN_ID = "run_id"
IMPORTED, ATTACHED = "imported", "attached"
"""Origins of runs that no sweep has made."""


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    name: str
    type: pa.DataType
    meaning: str
    absent: int | None = None  # value in rows that are stored without it


_ARROW = {bool: pa.bool_(), int: pa.int64(), float: pa.float64()}


def _columns_of(owner: type, prefix: str = "") -> list[Column]:
    """A column for each setting, typed as its default; what is no number or boolean is text."""
    default = owner()
    return [
        Column(
            f"{prefix}{name}",
            _ARROW.get(type(getattr(default, name)), pa.string()),
            declared.meaning,
        )
        for name, declared in settings_in(owner)
    ]


_RUN_ID = Column(RUN_ID, pa.string(), "identifies the run; sorts by time")
_VERSION = Column("schema_version", pa.int64(), "version of this table's columns")
_REPLICA = Column("replica", pa.int32(), "replica of the pipeline, from 0", absent=0)

RUNS: tuple[Column, ...] = (
    _RUN_ID,
    _VERSION,
    Column("sweep_id", pa.string(), "hash of the sweep's name, runs, commit and machine"),
    Column("sweep_name", pa.string(), "name of the sweep"),
    Column("sweep_file", pa.string(), "path of the sweep file as given"),
    Column("resume_key", pa.string(), "hash by which a sweep recognises runs that are done"),
    Column("case_id", pa.string(), "hash of the workload"),
    Column("launch", pa.int64(), "number of the start of the worker processes, from 0"),
    Column(
        "process_start",
        pa.string(),
        "identifies the start of the worker processes; runs of one start were alive together and "
        "took turns in the rounds that they share",
    ),
    Column(
        "position",
        pa.int64(),
        "index in the sweep file's order, which is not the order of execution",
    ),
    Column("attempt", pa.int64(), "number of the try of this launch, from 1; see `measure.retry`"),
    Column(
        "status",
        pa.string(),
        "`ok`, `oom`, `error`, `crash`, `timeout`, `invalid` or `interrupted`",
    ),
    Column(
        "error",
        pa.string(),
        "error message when status is not `ok`: at most 40,000 printable characters",
    ),
    Column("error_rank", pa.int64(), "rank where the error occurred; null if unknown"),
    Column(
        "last_actions",
        pa.string(),
        "last action of each rank of a failed run, JSON list in order of rank; see `flight`",
    ),
    Column("created_at", pa.string(), "when the run ended, ISO 8601, UTC"),
    Column(
        "origin",
        pa.string(),
        "`attached` or `imported`: training that ppbench did not start; null: run by a sweep",
    ),
    Column(
        "settings_told",
        pa.string(),
        "settings of such a run that are known, JSON list. The others hold placeholders: `unknown` "
        "for text, 0 for numbers, false for flags",
    ),
    *_columns_of(Case),
    *_columns_of(Measure, "measure_"),
    Column("tokens_per_step", pa.int64(), "tokens trained on in a step; median"),
    Column("tokens_per_s", pa.float64(), "tokens of a step over its period step_ns; median"),
    Column(
        "step_ns",
        pa.float64(),
        "period of consecutive steps of the running training, optimizer included; median",
    ),
    Column(
        "makespan_ns",
        pa.float64(),
        "first computation or gather of a step to its last action's end, without optimizer; median",
    ),
    Column("optimizer_ns", pa.float64(), "longest optimizer span of any rank; median over steps"),
    Column(
        "bubble_fraction",
        pa.float64(),
        "share of rank-time without work: 1 - (compute + optimizer) / (ranks x step_ns); median",
    ),
    Column("bubble_idle_over_ideal", pa.float64(), "idle over compute time; median"),
    Column("bubble_max_stage_span", pa.float64(), "1 - mean compute / longest rank span; median"),
    Column(
        "bubble_fraction_theory",
        pa.float64(),
        "bubble_fraction of steps in a row, simulated with free transfers: emulated times, else "
        "equal stages with F = I = W",
    ),
    Column("planned_step_ns", pa.int64(), "simulated period of steps of an emulated case"),
    Column("step_relative_deviation", pa.float64(), "median absolute deviation / median of steps"),
    Column("step_ns_low", pa.float64(), "95 % interval of the median step_ns: its lower end"),
    Column("step_ns_high", pa.float64(), "its upper end; null for fewer than 6 steps"),
    Column("tokens_per_s_low", pa.float64(), "95 % interval of the median tokens_per_s: lower end"),
    Column("tokens_per_s_high", pa.float64(), "its upper end; null for fewer than 6 steps"),
    Column(
        "rounds",
        pa.string(),
        "numbers of the rounds in which the case had a turn, with the median step_ns, tokens_per_s "
        "and bubble_fraction of each; JSON",
    ),
    Column("num_outliers", pa.int64(), "measured steps that are outliers; they are kept"),
    Column("num_warmup_steps", pa.int64(), "steps run before measuring"),
    Column("warmup_step_ns", pa.string(), "duration of each of them on rank 0's clock, JSON list"),
    Column(
        "modelled_step_ns",
        pa.int64(),
        "step predicted by walking over the program with the run's mean costs and transfer times",
    ),
    Column("modelled_bubble_fraction", pa.float64(), "bubble_fraction of that prediction"),
    Column("model_residual", pa.float64(), "mean step over modelled_step_ns, less 1"),
    Column(
        "following",
        pa.string(),
        "how steps follow each other in that prediction and in what-ifs: each rank's mean "
        "optimizer_ns, and whether ranks meet before it; JSON",
    ),
    Column("bubble_mean", pa.float64(), "idle time of all measured steps over their rank-time"),
    Column(
        "bubble_structure",
        pa.float64(),
        "part of bubble_mean due to the schedule: equal stages, free transfers",
    ),
    Column(
        "bubble_imbalance", pa.float64(), "part added by differences between the stages' mean costs"
    ),
    Column("bubble_transfer", pa.float64(), "part added by mean transfer times"),
    Column(
        "bubble_collective",
        pa.float64(),
        "part added by mean collectives, of replicas alike; null without replicas",
    ),
    Column(
        "bubble_skew",
        pa.float64(),
        "part added by differences between the replicas' mean costs; null without replicas",
    ),
    Column(
        "bubble_jitter", pa.float64(), "part added by the variation of single actions and messages"
    ),
    Column("bubble_launch_gap", pa.float64(), "the rest of the step: host between actions"),
    Column(
        "bubble_between",
        pa.float64(),
        "host time from step to step",
    ),
    Column(
        "op_costs_ns",
        pa.string(),
        "mean cost of one microbatch by op and stage, JSON; stages that do not differ "
        "significantly have one cost",
    ),
    Column(
        "replica_costs_ns",
        pa.string(),
        "the same for each replica, JSON list, with messages by sending stage; replicas that do "
        "not differ significantly have one cost; null without replicas",
    ),
    Column(
        "op_variation",
        pa.float64(),
        "relative root mean square deviation of actions from op_costs_ns",
    ),
    Column(
        "peak_memory_bytes",
        pa.int64(),
        "highest allocator peak of any rank; null: emulated",
    ),
    Column(
        "predicted_peak_memory_bytes", pa.int64(), "peak predicted from the program for that rank"
    ),
    Column(
        "peak_held_microbatches",
        pa.int64(),
        "most activations held by one rank at once, each of one microbatch and stage",
    ),
    Column("mfu", pa.float64(), "model FLOPs of the tokens per second over the devices' peak"),
    Column("mfu_formula", pa.string(), "formula of the model FLOPs, or why there is none"),
    Column("mfu_peak", pa.string(), "source of the peak: a datasheet or a measured matrix product"),
    Column(
        "model_flops_per_token",
        pa.float64(),
        "FLOPs of a token by mfu_formula, forward and backward",
    ),
    Column("peak_flops_per_s", pa.float64(), "peak FLOP/s of all devices together"),
    Column("energy_per_token_j", pa.float64(), "energy per token of the measured steps"),
    Column(
        "energy_source",
        pa.string(),
        "source of the energy: `gpus` or `cpu packages`; null: unknown",
    ),
    Column(
        "reference",
        pa.string(),
        "fixed work that the ranks ran beside the steps: its kind and version, ranks x threads",
    ),
    Column(
        "reference_ns",
        pa.float64(),
        "time of the reference on the slowest rank: mean of those before and after the steps, each "
        "the median of its repetitions; of emulated ranks, the fastest",
    ),
    Column(
        "reference_spread",
        pa.float64(),
        "median absolute deviation / median of its repetitions, of the rank with the largest",
    ),
    Column("reference_share", pa.float64(), "all its time over that of the measured steps"),
    Column(
        "cores_short",
        pa.float64(),
        "cores wanted by the ranks and by processes outside the launch beyond those of the node, "
        "over the ranks' own; highest of any node; null: emulated, or unknown",
    ),
    Column("steal_fraction", pa.float64(), "the highest `steal_fraction` of any rank"),
    Column(
        "cpu_throttled_fraction", pa.float64(), "the highest `cpu_throttled_fraction` of any rank"
    ),
    Column("cpu_mhz", pa.float64(), "the lowest `cpu_mhz` of any rank"),
    Column("gpu_sm_mhz", pa.float64(), "the lowest `gpu_sm_mhz` of any rank"),
    Column("first_loss", pa.float64(), "loss per token of the first step, warm-up included"),
    Column(
        "last_loss",
        pa.float64(),
        "loss per token of step measure_warmup_steps + measure_steps, which every run reaches",
    ),
    Column(
        "is_finite",
        pa.bool_(),
        "whether every loss, gradient and weight was finite in all steps, warm-up included; null: "
        "unknown, or nothing was computed",
    ),
    Column("not_finite_step", pa.int64(), "first step with a NaN or infinity; null: none"),
    Column("not_finite_rank", pa.int64(), "rank that saw it first"),
    Column("not_finite_what", pa.string(), "`loss`, or the gradient or weight concerned"),
    Column(
        "verified",
        pa.string(),
        "how training was compared with the author's unsplit module; `no: ` and the reason where "
        "it was not",
    ),
    Column(
        "verified_difference",
        pa.float64(),
        "largest relative difference found in a loss, gradient norm or gradient",
    ),
    Column("num_parameters", pa.int64(), "parameters of the model; tied weights count once"),
    Column("num_stages", pa.int64(), "stages of the pipeline"),
    Column("layers_per_stage", pa.string(), "layers of each stage, JSON list"),
    Column("parameters_per_stage", pa.string(), "parameters of each stage, JSON list"),
    Column(
        "stage_shares",
        pa.string(),
        "each stage's share of what the partition balances (layers, parameters or measured time), "
        "JSON list",
    ),
    Column(
        "transport", pa.string(), "transport of the messages: `memory`, `gloo`, `nccl`, `none`, ..."
    ),
    Column(
        "float32_precision",
        pa.string(),
        "precision of float32 products at the end of the run: `ieee`, which every run sets, or "
        "`tf32` or `bf16` where the model's own code has changed it; null: emulated, or older",
    ),
    Column(
        "device_variables",
        pa.string(),
        "variables of the accelerator's driver and libraries under which it ran, JSON object; "
        "null: it ran on none",
    ),
    Column("cautions", pa.string(), "names of the cautions, comma-separated; empty if none"),
    Column(
        "program",
        pa.string(),
        "the program that ran, JSON; before lowering, unless its file or runtime defines its own "
        "transfers",
    ),
    Column("commit", pa.string(), "commit of the tracked repository; null without one"),
    Column("branch", pa.string(), "branch that was checked out; null: none"),
    Column("author_date", pa.string(), "when the commit was written, ISO 8601"),
    Column("parent", pa.string(), "the commit's first parent; null for a root commit"),
    Column("subject", pa.string(), "first line of the commit's message"),
    Column("is_dirty", pa.bool_(), "whether the work tree had uncommitted changes"),
    Column(
        "changes", pa.string(), "hash of uncommitted changes to tracked files; empty when clean"
    ),
    Column(
        "fingerprint", pa.string(), "hash of the properties of the machine that timings depend on"
    ),
    Column("environment", pa.string(), "these properties and others, JSON"),
    Column("code", pa.string(), "hash of the measuring code, without its comments"),
    Column(
        "runtime_code",
        pa.string(),
        "package of the runtime, its version and a hash of its sources; null for ppbench's own",
    ),
    Column("ppbench_version", pa.string(), "version of ppbench that wrote the row"),
)
STEPS: tuple[Column, ...] = (
    _RUN_ID,
    _VERSION,
    Column("step", pa.int64(), "number of the step; warm-up steps come before the first"),
    Column(
        "round",
        pa.int64(),
        "round of its launch in which the step was measured; rounds are counted from 0, and cases "
        "that were measured in turns share them",
    ),
    Column(
        "step_ns",
        pa.int64(),
        "period: from the end of the step before to its own, mean over ranks; first start to last "
        "end where the step before is not known",
    ),
    Column(
        "makespan_ns", pa.int64(), "first computation or gather to last action's end, all ranks"
    ),
    Column("optimizer_ns", pa.int64(), "longest optimizer span of any rank"),
    Column("num_tokens", pa.int64(), "targets trained on in the step"),
    Column("tokens_per_s", pa.float64(), "num_tokens over step_ns"),
    Column(
        "bubble_fraction",
        pa.float64(),
        "share of rank-time without work: 1 - (compute + optimizer) / (ranks x step_ns)",
    ),
    Column("bubble_idle_over_ideal", pa.float64(), "idle over compute time"),
    Column("bubble_max_stage_span", pa.float64(), "1 - mean compute / longest rank span"),
    Column("loss", pa.float64(), "mean loss per token"),
    Column("is_outlier", pa.bool_(), "whether the step's period is an outlier"),
)
RANKS: tuple[Column, ...] = (
    _RUN_ID,
    _VERSION,
    Column("rank", pa.int64(), "rank in the pipeline"),
    Column("hostname", pa.string(), "machine of the rank"),
    Column("device", pa.string(), "device of the rank"),
    Column("cores", pa.string(), "cores it is bound to, JSON list; null: not bound"),
    Column("stages", pa.string(), "stages it owns, JSON list"),
    Column("num_layers", pa.int64(), "decoder layers it owns"),
    Column("num_parameters", pa.int64(), "parameters it holds"),
    Column("compute_ns", pa.float64(), "time in F, B, I and W; median over steps"),
    Column(
        "idle_fraction",
        pa.float64(),
        "share of its period without computation or optimizer; median over steps",
    ),
    Column("peak_memory_bytes", pa.int64(), "most bytes allocated to tensors during a step"),
    Column(
        "predicted_peak_memory_bytes",
        pa.int64(),
        "the same, predicted from the program and the measured bytes of a few actions",
    ),
    Column("parameter_bytes", pa.int64(), "of the peak: parameters"),
    Column("gradient_bytes", pa.int64(), "of the peak: gradients"),
    Column("optimizer_bytes", pa.int64(), "of the peak: optimizer state"),
    Column("buffer_bytes", pa.int64(), "of the peak: buffers of the model"),
    Column(
        "activation_bytes",
        pa.int64(),
        "of the peak: all else (activations, messages, the batch, temporaries)",
    ),
    Column(
        "active_bytes",
        pa.int64(),
        "most bytes that tensors had, or were freed while a stream still used them (GPUs)",
    ),
    Column("reserved_bytes", pa.int64(), "bytes held by the caching allocator (GPUs)"),
    Column(
        "in_flight_bytes",
        pa.int64(),
        "most bytes at once that were freed and a stream still used: messages on their way (GPUs)",
    ),
    Column(
        "outside_bytes",
        pa.int64(),
        "bytes of the device in use that its caching allocator does not hold: contexts, "
        "communicators, other processes (GPUs)",
    ),
    Column("process_peak_bytes", pa.int64(), "resident high-water mark of the process"),
    Column(
        "peak_held_microbatches",
        pa.int64(),
        "most activations held at once, each of one microbatch and stage",
    ),
    Column("other_load_cores", pa.float64(), "cores kept busy by processes outside the launch"),
    Column("watched_cores", pa.int64(), "cores of the node that the launch may run on"),
    Column("steal_fraction", pa.float64(), "share of their time taken by the hypervisor"),
    Column(
        "load_window_s",
        pa.float64(),
        "seconds around the measured steps over which load was sampled",
    ),
    Column("cpu_mhz", pa.float64(), "mean frequency over cores and time"),
    Column(
        "cpu_throttled_fraction",
        pa.float64(),
        "share of the requested CPU time withheld by a quota",
    ),
    Column("cpu_energy_j", pa.float64(), "energy of the node's CPU packages in the measured steps"),
    Column("gpu_power_w", pa.float64(), "mean power of the rank's GPU"),
    Column(
        "gpu_energy_j",
        pa.float64(),
        "energy of the rank's GPU in the measured steps; of ranks that share it, an equal part; "
        "null for a part of a GPU (MIG)",
    ),
    Column("gpu_utilization", pa.float64(), "mean utilization of the rank's GPU, 0 to 1"),
    Column("gpu_sm_mhz", pa.float64(), "mean clock of the GPU's multiprocessors"),
    Column("gpu_temperature_c", pa.float64(), "highest temperature of the GPU"),
    Column("gpu_throttle_reasons", pa.string(), "reasons seen for a lowered GPU clock"),
    Column("gpu_memory_used_bytes", pa.int64(), "most GPU memory in use, by all processes"),
    Column("telemetry_note", pa.string(), "which of these are missing or inexact, and why"),
    Column(
        "reference_times_ns",
        pa.string(),
        "times of the reference's repetitions before the steps and after them, two JSON lists",
    ),
    Column(
        "planned_peak_held_microbatches",
        pa.int64(),
        "peak_held_microbatches predicted from the program",
    ),
    Column(
        "clock",
        pa.string(),
        "`rank 0`, `shared with rank 0`, `aligned by pings` or, of traces, `aligned by messages`",
    ),
    Column(
        "clock_offset_ns",
        pa.int64(),
        "how far its clock was ahead of rank 0's, halfway through the run",
    ),
    Column(
        "clock_drift_ppb",
        pa.int64(),
        "nanoseconds that its clock gains on rank 0's per second; uncertain by up to twice the "
        "clock error over the duration of the steps",
    ),
    Column(
        "clock_error_ns",
        pa.int64(),
        "largest error of its times on rank 0's clock, device times included",
    ),
    _REPLICA,
)
_SPAN_MEANINGS = {
    "step": (pa.int32(), "number of the step"),
    "rank": (pa.int32(), "rank that ran the action"),
    "lane": (pa.string(), "`compute`, `send`, `recv` or `collective`"),
    "stage": (pa.int32(), "stage; -1 for the optimizer"),
    "op": (
        pa.string(),
        "F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B, OPT, UNSHARD, RESHARD or REDUCE_GRAD",
    ),
    "microbatch": (pa.int32(), "microbatch; -1 for the optimizer and for collectives"),
    "start_ns": (pa.int64(), "start on the clock of rank 0; a receive starts when it is posted"),
    "end_ns": (
        pa.int64(),
        "end on that clock; both ends of a message end at the earlier of the two observed ends",
    ),
    "num_bytes": (pa.int64(), "bytes moved by a transfer or a collective; 0 for compute"),
}
_OF_SPAN = tuple(
    _REPLICA if name == _REPLICA.name else Column(name, *_SPAN_MEANINGS[name])
    for name in SPAN_COLUMNS
)
SPANS: tuple[Column, ...] = (
    _RUN_ID,
    _VERSION,
    *_OF_SPAN,
    Column(
        "waiting_ns",
        pa.int64(),
        "how long a transfer waited for its peer or its channel, or a collective for the other "
        "replicas; the rest of it moved bytes",
    ),
)
PLANNED: tuple[Column, ...] = (
    _RUN_ID,
    _VERSION,
    *(column for column in _OF_SPAN if column.name != "num_bytes"),
)
ATTRIBUTION: tuple[Column, ...] = (
    _RUN_ID,
    _VERSION,
    Column("step", pa.int64(), "number of the step"),
    Column("rank", pa.int64(), "rank in the pipeline"),
    Column("idle_ns", pa.int64(), "step_ns - time in F, B, I and W"),
    Column("structure_ns", pa.int64(), "idle time with equal stages and free transfers"),
    Column("imbalance_ns", pa.int64(), "idle time added by the stages' mean costs"),
    Column("transfer_ns", pa.int64(), "idle time added by the channels' mean transfer times"),
    Column(
        "collective_ns", pa.int64(), "idle time added by mean collectives; null without replicas"
    ),
    Column(
        "skew_ns",
        pa.int64(),
        "idle time added by the replicas' own mean costs; null without replicas",
    ),
    Column(
        "jitter_ns", pa.int64(), "idle time added by the variation of single actions and messages"
    ),
    Column("launch_gap_ns", pa.int64(), "the rest of the step"),
    Column(
        "between_ns",
        pa.int64(),
        "host time from step to step; the parts add up to idle_ns",
    ),
    Column("warmup_ns", pa.int64(), "idle time before the rank's first backward begins"),
    Column(
        "steady_ns", pa.int64(), "idle time between the two; the three phases add up to idle_ns"
    ),
    Column("cooldown_ns", pa.int64(), "idle time after the rank's last forward and first backward"),
    _REPLICA,
)
EDGES: tuple[Column, ...] = (
    _RUN_ID,
    _VERSION,
    Column("source", pa.int64(), "sending stage"),
    Column("target", pa.int64(), "receiving stage"),
    Column("source_rank", pa.int64(), "rank of the sending stage"),
    Column("target_rank", pa.int64(), "rank of the receiving stage"),
    Column("num_messages", pa.int64(), "messages of a step"),
    Column("num_bytes", pa.float64(), "bytes of a message, mean"),
    Column("bytes_per_s", pa.float64(), "all bytes over the total time in which they moved"),
    Column(
        "moving_ns",
        pa.float64(),
        "time in which the bytes of a message moved until it was received, mean",
    ),
    Column(
        "sender_waiting_ns",
        pa.float64(),
        "time for which a send waited before its bytes moved, mean",
    ),
    Column(
        "receiver_waiting_ns",
        pa.float64(),
        "time for which a receive waited before its bytes moved, mean",
    ),
    _REPLICA,
)
COLLECTIVES: tuple[Column, ...] = (
    _RUN_ID,
    _VERSION,
    Column("rank", pa.int64(), "rank in the pipeline"),
    Column("stage", pa.int64(), "stage whose parameters or gradients are moved"),
    Column("op", pa.string(), "UNSHARD or REDUCE_GRAD"),
    _REPLICA,
    Column("num_collectives", pa.int64(), "collectives of a step"),
    Column("num_bytes", pa.float64(), "bytes of one, mean"),
    Column("bytes_per_s", pa.float64(), "all bytes over the total time in which they moved"),
    Column("moving_ns", pa.float64(), "time from when all replicas had begun one to its end, mean"),
    Column("waiting_ns", pa.float64(), "time for which it waited for the slowest replica, mean"),
)
"""Only runs with replicas have rows here."""
MEMORY: tuple[Column, ...] = (
    _RUN_ID,
    _VERSION,
    Column("rank", pa.int64(), "rank in the pipeline"),
    Column("time_ns", pa.int64(), "time since the first rank began the extra step for memory"),
    Column(
        "num_bytes", pa.int64(), "bytes allocated from then on; an envelope of at most 2,000 points"
    ),
    _REPLICA,
)
TELEMETRY: tuple[Column, ...] = (
    _RUN_ID,
    _VERSION,
    Column("time_ns", pa.int64(), "when, on the clock of the spans"),
    Column("hostname", pa.string(), "hostname of the node"),
    Column(
        "device",
        pa.string(),
        "`cpu` for the node itself, or `gpu0`, `gpu1`, ... in the order of its ranks",
    ),
    Column("other_load_cores", pa.float64(), "cores kept busy by processes outside the launch"),
    Column("steal_fraction", pa.float64(), "share of the cores' time taken by the hypervisor"),
    Column(
        "cpu_throttled_fraction",
        pa.float64(),
        "share of the requested CPU time withheld by a quota",
    ),
    Column(
        "utilization",
        pa.float64(),
        "utilization of the GPU, or of the node by all processes; 0 to 1",
    ),
    Column("power_w", pa.float64(), "power of the GPU or of the node's packages"),
    Column("clock_mhz", pa.float64(), "clock of the multiprocessors, or of the cores"),
    Column("memory_clock_mhz", pa.float64(), "clock of the GPU's memory"),
    Column("temperature_c", pa.float64(), "temperature of the GPU"),
    Column(
        "throttle_reasons", pa.string(), "the GPU's reasons for a lowered clock, comma-separated"
    ),
    Column("memory_used_bytes", pa.int64(), "memory in use"),
)
FLIGHT: tuple[Column, ...] = (
    _RUN_ID,
    _VERSION,
    Column("rank", pa.int64(), "rank in the pipeline"),
    Column("hostname", pa.string(), "machine of the rank"),
    Column("process", pa.string(), "`alive`, `stopped` or `dead` when the run was ended"),
    Column(
        "phase", pa.string(), "phase of the rank at that time: `steps`, `builds the model`, ..."
    ),
    Column("step", pa.int64(), "number of its step; null outside steps"),
    Column("action", pa.string(), "its action in that step, such as `2F0`; null outside steps"),
    Column("is_waiting", pa.bool_(), "whether it was waiting for the action's input"),
    Column("since_ns", pa.int64(), "start of that state, on the clock of the spans"),
    Column("until_ns", pa.int64(), "when the run was ended, on the same clock"),
    Column("waits_for_rank", pa.int64(), "rank that it waited for; null: none"),
    Column("waits_for_action", pa.string(), "action of that rank that it waited for"),
    Column("account", pa.string(), "this row in words"),
    _REPLICA,
)
"""Only failed runs have rows here; their `spans` hold what was finished of their last steps."""
TABLES: dict[str, tuple[Column, ...]] = {
    "runs": RUNS,
    "steps": STEPS,
    "ranks": RANKS,
    "spans": SPANS,
    "planned": PLANNED,
    "attribution": ATTRIBUTION,
    "edges": EDGES,
    "collectives": COLLECTIVES,
    "memory": MEMORY,
    "telemetry": TELEMETRY,
    "flight": FLIGHT,
}


def schema_of(name: str, columns: Iterable[str] | None = None) -> pa.Schema:
    """The arrow schema of a table: all columns, or `run_id` and the given ones."""
    return _schema_of(name, None if columns is None else frozenset({RUN_ID, *columns}))


@functools.cache
def _schema_of(name: str, wanted: frozenset[str] | None) -> pa.Schema:
    columns = TABLES[name]
    return pa.schema([(c.name, c.type) for c in columns if wanted is None or c.name in wanted])


def absent_in(name: str) -> dict[str, int]:
    """Values of those columns of a table that are not null where a row lacks them."""
    return {one.name: one.absent for one in TABLES[name] if one.absent is not None}


def columns_as_markdown() -> str:
    """Every table's columns with their types and meanings."""
    parts = []
    for name, columns in TABLES.items():
        rows = "".join(f"| `{c.name}` | {c.type} | {c.meaning} |\n" for c in columns)
        parts.append(f"## {name}\n\n| column | type | meaning |\n|---|---|---|\n{rows}")
    return "\n".join(parts)
