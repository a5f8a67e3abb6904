"""The catalogue of figures: heading, unit, direction and meaning of every column that is shown.

Tables, pages, charts, exports and `docs/reference/figures.md` take them from here. JSON and CSV
keep the store's own names and raw values.

    "step_ns": number("step", ",.1f", MS, lower)
                      |       |      |   |
                      |       |      |   which direction is better
                      |       |      the unit: part of the heading or, for %, of every value
                      |       digits, as Python's format specification has them
                      the heading, less the unit: `step (ms)`

The meaning of a stored column is declared once, in `store.columns`; only what is computed for
display has its meaning here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ppbench.display.units import (
    CELSIUS,
    CORES,
    JOULES,
    JOULES_PER_TOKEN,
    KIBIBYTES,
    MB_PER_S,
    MEBIBYTES,
    MHZ,
    MS,
    NO_UNIT,
    PERCENT,
    RANK_MS,
    SECONDS,
    TOKENS_PER_S,
    US,
    WATTS,
    Unit,
    formatted,
    size,
    written,
)
from ppbench.errors import first_line, shortened


class Direction(Enum):
    """Which values of a figure are better."""

    higher = "higher"
    lower = "lower"
    neither = ""


higher, lower, neither = Direction


@dataclass(frozen=True)
class Field:
    """How a column is shown. Without digits its values are written as they are."""

    label: str
    unit: Unit = NO_UNIT
    digits: str = ""
    direction: Direction = neither
    meaning: str = ""  # empty for a stored column: see `meaning_of`
    is_number: bool = False
    shorten: Callable[[object], str] = str

    @property
    def heading(self) -> str:
        """The label and the unit, unless every value is written with its unit."""
        return self.unit.heading(self.label)

    def cell(self, value: object) -> str:
        """Write a value for a column under `heading`; text stays as it is."""
        if not self.digits or isinstance(value, str):
            return self.shorten(value)
        text = formatted(value, self.digits, self.unit.factor)
        return f"{text} {self.unit.name}" if self.unit.is_in_cells else text

    def text(self, value: object) -> str:
        """Write a value with its unit, for a sentence; sizes in MiB or GiB."""
        if self.unit == MEBIBYTES:
            return size(value)
        if not self.digits:
            return written(value, ",.5g")
        return written(value, self.digits, self.unit.name, self.unit.factor)


def words(
    label: str,
    meaning: str = "",
    *,
    shorten: Callable[[object], str] = str,
    is_number: bool = False,
) -> Field:
    """Return the field of a column of text; `is_number` aligns it like one."""
    return Field(label, meaning=meaning, shorten=shorten, is_number=is_number)


def number(
    label: str,
    digits: str,
    unit: Unit = NO_UNIT,
    direction: Direction = neither,
    meaning: str = "",
) -> Field:
    """Return the field of a figure."""
    return Field(label, unit, digits, direction, meaning, is_number=True)


def _first(length: int) -> Callable[[object], str]:
    return lambda value: str(value)[:length]


def _at_most(length: int) -> Callable[[object], str]:
    return lambda value: shortened(first_line(value), length)


WORKLOAD = ("schedule", "world_size", "num_microbatches", "seq_len")
"""The settings that identify a run where no sweep file says which vary."""
OF_REPLICAS = (*WORKLOAD[:2], "replicas", "sharding_policy", *WORKLOAD[2:])
"""These settings where some runs have several replicas."""
DISPENSABLE = (
    *("created_at", "launches", "num_launches", "fingerprint", "gaps", "unmeasured", "author_date"),
    *("commit", "subject", "sweep_name", "seconds", "aliases", "source", "bubble_max_stage_span"),
    *("num_rounds", "profiler_ratio_low", "profiler_ratio_high", "flight_ratio_low"),
    *("flight_ratio_high", "spans_ratio_low", "spans_ratio_high"),
    *("deviation_low", "deviation_high", "ratio_low", "ratio_high"),
    *("bubble_idle_over_ideal", "num_actions", "num_parameters", "dtype"),
    *("bubble_fraction_theory", "verdict", "allowed", "base", "head", "model_preset", "runtime"),
    *("planned_step_ns", "launch", "step_ns", "cautions", "error"),
)
"""Columns that a table leaves out first where it has no room, the least important first."""
IDENTIFYING = ("commit", "launch")
"""Columns that are none of the settings, and without which rows that differ would look alike."""
SPEAKING = ("schedule", "device", "model_preset", "status")
"""Columns whose values speak for themselves: they need no name where all rows share them."""
COMMIT_COLUMNS = ("author_date", "commit", "subject")
"""The columns that identify a commit in a table of commits."""
SETTINGS: dict[str, Field] = {
    "schedule": words("schedule"),
    "runtime": words("runtime"),
    "world_size": number("ranks", ".0f"),
    "replicas": number("replicas", ".0f"),
    "sharding_policy": words("sharding policy"),
    "num_microbatches": number("microbatches", ".0f"),
    "seq_len": words("seq len", is_number=True),  # a number, or `variable`
    "stages_per_rank": number("stages per rank", ".0f"),
    "model_preset": words("model"),
    "device": words("device"),
}
"""Settings that are shown as columns; others are headed by their names."""
CIRCUMSTANCES = (*SETTINGS, "sweep_name", "status", "commit", "fingerprint", "created_at")
"""Columns that describe a run and are none of its figures."""
STORED: dict[str, Field] = {
    "run_id": words("run"),
    "case_id": words("case"),
    "created_at": words("when", shorten=lambda value: str(value)[:16].replace("T", " ")),
    "sweep_name": words("sweep"),
    "status": words("status"),
    "error": words("error", shorten=_at_most(90)),
    "error_rank": number("failed rank", ".0f"),
    "launch": number("launch", ".0f"),
    "round": number("round", ".0f"),
    "position": number("position", ".0f"),
    "attempt": number("attempt", ".0f"),
    "schema_version": number("schema version", ".0f"),
    "settings_told": words("known settings"),
    "commit": words("commit", shorten=_first(9)),
    "author_date": words("date", shorten=_first(10)),
    "subject": words("subject", shorten=_at_most(50)),
    "fingerprint": words("machine"),
    "cautions": words("cautions"),
    # Speed
    "tokens_per_step": number("tokens per step", ",.0f"),
    "num_tokens": number("tokens", ",.0f"),
    "tokens_per_s": number("tokens/s", ",.0f", TOKENS_PER_S, higher),
    "tokens_per_s_low": number("tokens/s, low", ",.0f", TOKENS_PER_S, higher),
    "tokens_per_s_high": number("tokens/s, high", ",.0f", TOKENS_PER_S, higher),
    "step_ns": number("step", ",.1f", MS, lower),
    "step_ns_low": number("step, low", ",.1f", MS, lower),
    "step_ns_high": number("step, high", ",.1f", MS, lower),
    "optimizer_ns": number("optimizer", ",.1f", MS, lower),
    "makespan_ns": number("makespan", ",.1f", MS, lower),
    "planned_step_ns": number("planned", ",.1f", MS, lower),
    "modelled_step_ns": number("modelled", ",.1f", MS, lower),
    "model_residual": number("residual", "+.1f", PERCENT),
    "compute_ns": number("compute", ",.1f", MS, lower),
    "step_relative_deviation": number("deviation", ".1f", PERCENT, lower),
    "op_variation": number("variation", ".1f", PERCENT, lower),
    "num_warmup_steps": number("warm-up steps", ".0f"),
    "num_outliers": number("outliers", ".0f", direction=lower),
    "is_outlier": words("outlier", shorten=lambda value: "outlier" if value else ""),
    "mfu": number("MFU", ".1f", PERCENT, higher),
    "model_flops_per_token": number("FLOPs per token", ".4g"),
    "peak_flops_per_s": number("peak FLOP/s", ".4g"),
    "energy_per_token_j": number("J/token", ",.3g", JOULES_PER_TOKEN, lower),
    # Bubble and idle time
    "bubble_fraction": number("bubble", ".1f", PERCENT, lower),
    "bubble_fraction_theory": number("theory", ".1f", PERCENT, lower),
    "modelled_bubble_fraction": number("modelled bubble", ".1f", PERCENT, lower),
    "bubble_idle_over_ideal": number("idle over ideal", ".1f", PERCENT, lower),
    "bubble_max_stage_span": number("bubble of the longest stage", ".1f", PERCENT, lower),
    "bubble_mean": number("idle", ".1f", PERCENT, lower),
    "bubble_structure": number("schedule", ".1f", PERCENT, lower),
    "bubble_imbalance": number("imbalance", ".1f", PERCENT, lower),
    "bubble_transfer": number("transfer", ".1f", PERCENT, lower),
    "bubble_collective": number("collectives", ".1f", PERCENT, lower),
    "bubble_skew": number("replica skew", ".1f", PERCENT, lower),
    "bubble_jitter": number("jitter", ".1f", PERCENT, lower),
    "bubble_launch_gap": number("launch gaps", ".1f", PERCENT, lower),
    "bubble_between": number("between steps", ".1f", PERCENT, lower),
    "idle_fraction": number("idle", ".1f", PERCENT, lower),
    "idle_ns": number("idle", ",.2f", MS, lower),
    "structure_ns": number("schedule", ",.2f", MS, lower),
    "imbalance_ns": number("imbalance", ",.2f", MS, lower),
    "transfer_ns": number("transfer", ",.2f", MS, lower),
    "collective_ns": number("collectives", ",.2f", MS, lower),
    "skew_ns": number("replica skew", ",.2f", MS, lower),
    "jitter_ns": number("jitter", ",.2f", MS, lower),
    "launch_gap_ns": number("launch gaps", ",.2f", MS, lower),
    "between_ns": number("between steps", ",.2f", MS, lower),
    "warmup_ns": number("warm-up", ",.2f", MS, lower),
    "steady_ns": number("steady", ",.2f", MS, lower),
    "cooldown_ns": number("cool-down", ",.2f", MS, lower),
    # Memory
    "peak_memory_bytes": number("peak", ",.1f", MEBIBYTES, lower),
    "predicted_peak_memory_bytes": number("predicted", ",.1f", MEBIBYTES, lower),
    "parameter_bytes": number("parameters", ",.1f", MEBIBYTES, lower),
    "gradient_bytes": number("gradients", ",.1f", MEBIBYTES, lower),
    "optimizer_bytes": number("optimizer", ",.1f", MEBIBYTES, lower),
    "buffer_bytes": number("buffers", ",.1f", MEBIBYTES, lower),
    "activation_bytes": number("activations", ",.1f", MEBIBYTES, lower),
    "active_bytes": number("active", ",.1f", MEBIBYTES, lower),
    "reserved_bytes": number("reserved", ",.1f", MEBIBYTES, lower),
    "in_flight_bytes": number("in flight", ",.1f", MEBIBYTES, lower),
    "outside_bytes": number("outside the allocator", ",.1f", MEBIBYTES, lower),
    "process_peak_bytes": number("process", ",.1f", MEBIBYTES, lower),
    "peak_held_microbatches": number("held", ".0f", direction=lower),
    "planned_peak_held_microbatches": number("held, planned", ".0f", direction=lower),
    # The model and how it learns
    "num_parameters": number("parameters", ",.0f"),
    "num_stages": number("stages", ".0f"),
    "num_layers": number("layers", ".0f"),
    "loss": number("loss", ".4f", direction=lower),
    "first_loss": number("first loss", ".4f", direction=lower),
    "last_loss": number("last loss", ".4f", direction=lower),
    "not_finite_step": number("not finite, step", ".0f"),
    "not_finite_rank": number("not finite, rank", ".0f"),
    "verified": words("verified"),
    "verified_difference": number("verified to", ".1e", direction=lower),
    # The reference beside the steps
    "reference": words("reference work"),
    "reference_ns": number("reference", ",.3f", MS, lower),
    "reference_spread": number("reference spread", ".1f", PERCENT, lower),
    "reference_share": number("reference cost", ".2f", PERCENT, lower),
    "cores_short": number("cores short", ".1f", PERCENT, lower),
    # Ranks and their machines
    "step": number("step", ".0f"),
    "replica": number("replica", ".0f"),
    "rank": number("rank", ".0f"),
    "hostname": words("node"),
    "cores": words("bound to"),
    "stages": words("stages"),
    "other_load_cores": number("other load", ".2f", CORES, lower),
    "watched_cores": number("cores", ".0f"),
    "steal_fraction": number("steal", ".1f", PERCENT, lower),
    "load_window_s": number("load sampled", ",.1f", SECONDS),
    "cpu_mhz": number("CPU", ",.0f", MHZ),
    "cpu_throttled_fraction": number("CPU throttled", ".1f", PERCENT, lower),
    "cpu_energy_j": number("CPU", ",.1f", JOULES, lower),
    "gpu_power_w": number("GPU", ",.0f", WATTS),
    "gpu_energy_j": number("GPU", ",.1f", JOULES, lower),
    "gpu_utilization": number("GPU busy", ".0f", PERCENT),
    "gpu_sm_mhz": number("GPU", ",.0f", MHZ),
    "gpu_temperature_c": number("GPU", ".0f", CELSIUS),
    "gpu_throttle_reasons": words("throttle reasons"),
    "gpu_memory_used_bytes": number("GPU used", ",.0f", MEBIBYTES),
    "clock": words("clock"),
    "clock_offset_ns": number("clock offset", ",.1f", US),
    "clock_drift_ppb": number("clock drift", ",.0f", Unit("ppb")),
    "clock_error_ns": number("clock error", ",.1f", US, lower),
    # Spans, messages, memory and telemetry over time
    "stage": number("stage", ".0f"),
    "microbatch": number("microbatch", ".0f"),
    "start_ns": number("start", ",.3f", MS),
    "end_ns": number("end", ",.3f", MS),
    "waiting_ns": number("waiting", ",.3f", MS, lower),
    "time_ns": number("time", ",.3f", MS),
    "source_rank": number("source rank", ".0f"),
    "target": number("target", ".0f"),
    "target_rank": number("target rank", ".0f"),
    "num_messages": number("messages", ".0f"),
    "num_collectives": number("collectives", ".0f"),
    "num_bytes": number("size", ",.1f", KIBIBYTES),
    "moving_ns": number("moving", ",.3f", MS, lower),
    "bytes_per_s": number("bandwidth", ",.1f", MB_PER_S, higher),
    "sender_waiting_ns": number("sender waits", ",.2f", MS, lower),
    "receiver_waiting_ns": number("receiver waits", ",.2f", MS, lower),
    "utilization": number("busy", ".0f", PERCENT),
    "power_w": number("power", ",.0f", WATTS),
    "clock_mhz": number("clock", ",.0f", MHZ),
    "memory_clock_mhz": number("memory clock", ",.0f", MHZ),
    "temperature_c": number("temperature", ".0f", CELSIUS),
    "memory_used_bytes": number("used", ",.0f", MEBIBYTES),
    # Failures
    "process": words("process"),
    "phase": words("phase"),
    "action": words("action"),
    "since_ns": number("since", ",.3f", MS),
    "until_ns": number("until", ",.3f", MS),
    "waits_for_rank": number("waits for rank", ".0f"),
}
"""Columns of the store; a column of text that is not here is headed by its name."""
COMPUTED: dict[str, dict[str, Field]] = {
    "A run (`show`)": {
        "stage_share": number(
            "share", ".1f", PERCENT, meaning="the stage's share of what the partition balances"
        ),
        "replica_shown": words("replica", "replica of the rank, or `median` over all of them"),
        "waits_for": words("waits for", "action and rank that a failed run's rank waited for"),
        "since_s": number("for", ",.3f", SECONDS, meaning="how long the rank had been there"),
        "key": words("key", "name of a fact: a column of the store, or a property"),
        "value": words("value", "value of the fact, or of the metric in one launch"),
    },
    "Idle time (`explain`)": {
        "part": words("part", "cause of idle time"),
        "per_step_ns": number(
            "per step", ",.2f", RANK_MS, lower, "idle time of all ranks together, mean of a step"
        ),
        "share_of_bubble": number(
            "of the bubble", ".1f", PERCENT, lower, "the part's share of all idle time"
        ),
        "share_of_rank_time": number(
            "of rank-time", ".2f", PERCENT, lower, "the part's share of step time x ranks"
        ),
        "edge": words("stages", "sending and receiving stage of a message"),
        "mean_step_ns": number(
            "mean step",
            ",.1f",
            MS,
            lower,
            "mean over the measured steps, with which the modelled one is compared",
        ),
        "what_if": words("what if", "costs or schedule with which the step is modelled"),
        "change": number(
            "change", "+.1f", PERCENT, lower, "difference from the step as modelled, or the level"
        ),
        "held": number(
            "held",
            ".4g",
            direction=lower,
            meaning="most microbatches whose activations one rank held at once, for its whole "
            "share of the model",
        ),
    },
    "Stragglers (`stragglers`)": {
        "straggler": words("straggler", "who is replayed with times like the others'"),
        "cost_ns": number(
            "costs", ",.2f", MS, lower, "the step less what it would take with these times"
        ),
        "share_of_step": number("of the step", ".1f", PERCENT, lower, "the same over the step"),
        "explained": number(
            "of the slowness", ".1f", PERCENT, meaning="the same over all that is beyond ideal, M"
        ),
        "slowness": number(
            "S", ".3f", direction=lower, meaning="step with these times alone over the ideal one"
        ),
        "wasted": number(
            "wasted", ".1f", PERCENT, lower, "1 - 1/S: the part of the job lost by it"
        ),
        "share": number("share", ".1f", PERCENT, lower, "S beyond 1 over that of all of the table"),
    },
    "Schedules (`schedules list`, `simulate`)": {
        "name": words("name", "name of the schedule"),
        "aliases": words("aliases", "other names that mean the same schedule"),
        "placement": words("placement", "how stages are placed on ranks: `loop` or `v`"),
        "source": words("source", "paper or code that the schedule is taken from"),
        "constraint": words("constraint", "what the settings must meet"),
        "makespan": number(
            "makespan",
            ",.6g",
            SECONDS,
            lower,
            "simulated time from the first action's start to the last one's end",
        ),
        "period": number(
            "period",
            ",.6g",
            SECONDS,
            lower,
            "simulated time of a step in a running training: each rank goes on when it is done",
        ),
        "bubble_of_period": number(
            "bubble of the period", ".1f", PERCENT, lower, "1 - compute / (ranks x period)"
        ),
        "exposed_collective": number(
            "exposed collective",
            ",.6g",
            SECONDS,
            lower,
            "simulated time by which collectives make the step of equal replicas longer",
        ),
        "replica_skew": number(
            "replica skew",
            ",.6g",
            SECONDS,
            lower,
            "simulated time by which replicas that differ make the step longer",
        ),
        "num_actions": number("actions", ",.0f", meaning="actions of a step on all ranks"),
        "peak_activations": number(
            "peak held",
            ".6g",
            direction=lower,
            meaning="most activations held by a rank at once, in microbatches of its share",
        ),
        "reason": words("reason", "why the case was refused or is not exact"),
    },
    "Two sides (`compare`, `check`)": {
        "case": words("case", "settings in which the case differs from the others"),
        "axis": words("setting", "setting along which cases are compared"),
        "base_value": words("base", "value of the setting on the side of base"),
        "head_value": words("head", "value of the setting on the side of head"),
        "base_case_id": words("case of base", "hash of the workload of base"),
        "head_case_id": words("case of head", "hash of the workload of head"),
        "metric": words("metric", "column of `runs` that is compared"),
        "figure": words("figure", "heading of the metric"),
        "base": words("base", "median over launches of base", is_number=True),
        "head": words("head", "median over launches of head", is_number=True),
        "ratio": number("ratio", ".4f", meaning="head over base, with a 95 % interval"),
        "ratio_low": number("ratio, low", ".4f", meaning="lower end of the interval"),
        "ratio_high": number("ratio, high", ".4f", meaning="upper end of the interval"),
        "difference": number(
            "difference", "+.2f", PERCENT, meaning="head minus base, of a metric compared in points"
        ),
        "difference_low": number(
            "difference, low", "+.2f", PERCENT, meaning="lower end of its 95 % interval"
        ),
        "difference_high": number(
            "difference, high", "+.2f", PERCENT, meaning="upper end of its 95 % interval"
        ),
        "change_text": words(
            "change", "change in percent, or in points for a bubble, with its 95 % interval"
        ),
        "verdict": words("verdict", "`faster`, `slower`, `same` (within the resolution) or `open`"),
        "resolution": number(
            "resolution", ".2f", PERCENT, meaning="difference within which two sides are the same"
        ),
        "within": number(
            "within",
            ".2f",
            PERCENT,
            meaning="the two sides are known to differ by no more; wrong in at most 1 % either way",
        ),
        "launches": words("launches", "launches of base, of head; or of a series", is_number=True),
        "p": number(
            "p (Holm)",
            ".2g",
            meaning="p-value of the difference, corrected for several cases by Holm's method",
        ),
        "num_base": number("launches of base", ".0f", meaning="launches of base with the metric"),
        "num_head": number("launches of head", ".0f", meaning="launches of head with the metric"),
        "noise": number("noise", ".2f", PERCENT, lower, "noise that the verdict uses"),
        "discounts": words(
            "discounts",
            "launches that do not count, JSON list: side, run, launch, reason (`apart`: "
            "far from the others on the slow side; `reference`: its machine was slow), slowdown, "
            "and what shows it (`reference`, `steal`, `quota`, `cores`, `clock`)",
        ),
        "allowed": words("allowed", "how much worse head may be", is_number=True),
        "gate": words("gate", "`ok`, `regression`, `accepted`, or why it is not gated"),
        "threshold": number("threshold", ".2f", PERCENT, meaning="how much worse head may be"),
        "num_looks": number(
            "looks", ".0f", meaning="how often the launches were looked at, with --max-launches"
        ),
        "level_spent": number(
            "level spent", ".2f", PERCENT, lower, "chance of a false claim that these looks spent"
        ),
        "is_decided": words("is decided", "whether the verdict needs no further launches"),
        "worse": number("worse", "+.2f", PERCENT, lower, "how much worse head is than base"),
        "is_gated": words("is gated", "whether the metric can fail the gate"),
        "is_regression": words("is regression", "whether head is worse than allowed"),
        "accepted_by": words("accepted by", "commit whose entry accepts the change"),
    },
    "Commits (`history`, `backfill`, `bisect`)": {
        "number": words("series", "number of the series: a case on a machine", is_number=True),
        "kind": words("kind", "`launch`, `change`, `spike` or `level`"),
        "commits": words(
            "commits", "measured commits, or those that may have made a change", is_number=True
        ),
        "failed": words("failed launches", "launches that failed", is_number=True),
        "gaps": words(
            "unmeasured commits",
            "commits between the first and last that are not measured",
            is_number=True,
        ),
        "num_discounted": number(
            "discounted",
            ".0f",
            direction=lower,
            meaning="launches that count for nothing: their machine was slow, or they lie far from "
            "the others on the slow side",
        ),
        "slowdown": number(
            "slowdown",
            "+.1f",
            PERCENT,
            lower,
            "by how much the launch's machine was slower than usual; null: unknown",
        ),
        "slowdown_cause": words(
            "slowdown by", "what shows it: `reference`, `steal`, `quota`, `cores` or `clock`"
        ),
        "discount": words(
            "discount",
            "why a launch counts for nothing: `apart` (far from the others) or "
            "`reference` (its machine was slow); null: it counts",
        ),
        "level": words("level", "median of the launches since the last change"),
        "state": words("state", "whether the series changed, is steady, or cannot be judged"),
        "interval": words("interval", "95 % interval of the change"),
        "unmeasured": words(
            "unmeasured commits", "those of its possible commits without a launch", is_number=True
        ),
        "since": words("after", "last commit that certainly lacks the change"),
        "last": words("up to", "first commit that certainly has the change"),
        "likeliest": words("most likely", "commit that most likely made the change"),
        "after": words("after", "last commit that certainly lacks the change"),
        "up_to": words("up to", "first commit that certainly has the change"),
        "num_commits": number("commits", ".0f", meaning="commits that may have made the change"),
        "num_unmeasured": number(
            "unmeasured commits", ".0f", meaning="those of them without a launch"
        ),
        "low": number(
            "change, low",
            "+.2f",
            PERCENT,
            meaning="lower end of the change's interval; of a level in the metric's unit",
        ),
        "high": number("change, high", "+.2f", PERCENT, meaning="its upper end"),
        "is_in_points": words("in points", "whether the change is in percentage points"),
        "is_better": words("is better", "whether the change is for the better; null: no direction"),
        "chance": number(
            "probability",
            ".1f",
            PERCENT,
            meaning="probability that the commit is the first bad one",
        ),
    },
    "Noise (`noise`)": {
        "num_launches": number("launches", ".0f", meaning="launches with a figure"),
        "deviation": number(
            "noise", ".2f", PERCENT, lower, "relative standard deviation of launches of one commit"
        ),
        "deviation_low": number("noise, low", ".2f", PERCENT, lower, "lower end of its interval"),
        "deviation_high": number("noise, high", ".2f", PERCENT, lower, "upper end of its interval"),
        "deviation_in_turns": number(
            "noise in turns",
            ".2f",
            PERCENT,
            lower,
            "standard deviation between launches of the difference of two sides of one commit that "
            "take turns",
        ),
        "deviation_of_starts": number(
            "of starts", ".2f", PERCENT, lower, "the part of it that starts of processes decide"
        ),
        "num_sessions": number(
            "sessions", ".0f", meaning="sessions from which the drift between sessions is known"
        ),
        "drift": number(
            "drift",
            ".2f",
            PERCENT,
            lower,
            "relative standard deviation of sessions, beyond that of their launches",
        ),
        "detectable_change": number(
            "detectable (5 launches)",
            ".1f",
            PERCENT,
            lower,
            "smallest change that 5 launches a side detect in 4 of 5 comparisons",
        ),
    },
    "Models (`models check`)": {
        "architecture": words("architecture", "architecture of the model"),
        "dtype": words("dtype", "data type of the weights"),
        "difference": number(
            "differs by",
            ".1e",
            direction=lower,
            meaning="largest relative difference of a loss or gradient from the unsplit model's",
        ),
        "seconds": number("time", ",.1f", SECONDS, lower, "duration"),
    },
    "The store (`compact`)": {
        "table": words("table", "table of the store"),
        "files_before": number("files before", ",.0f", meaning="files of the table before"),
        "files_after": number("files after", ",.0f", meaning="files of the table after"),
        "bytes_before": number("before", ",.0f", KIBIBYTES, meaning="size of the table before"),
        "bytes_after": number("after", ",.0f", KIBIBYTES, meaning="size of the table after"),
    },
}
"""Columns that are computed for display, by the commands that show them."""
FIELDS: dict[str, Field] = {
    **SETTINGS,
    **STORED,
    **{column: field for group in COMPUTED.values() for column, field in group.items()},
}


def field_of(column: str) -> Field:
    """Return the column's field; a column without one is text, headed by its name."""
    return FIELDS.get(column) or words(column.replace("_", " "))


def figure(column: str, value: object) -> str:
    """Write a value of a column with its unit: `58.1 ms`, `920 tokens/s`, `1.20 GiB`."""
    return field_of(column).text(value)


def meaning_of(column: str, table: str = "runs") -> str:
    """Return a column's meaning: as the store's table declares it, else as the catalogue does."""
    from ppbench.store.columns import TABLES

    stored = {declared.name: declared.meaning for declared in TABLES.get(table, ())}
    return stored.get(column) or field_of(column).meaning
