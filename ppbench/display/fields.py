"""The catalogue of figures: what a column is called for people, and how its values are written.

heading   short, with the unit: `step ms`
write     a value as text, in that unit
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ppbench.display.units import KIB, MIB
from ppbench.errors import first_line


@dataclass(frozen=True)
class Field:
    """A column for people: its heading and how a value is written."""

    heading: str
    write: Callable[[object], str] = str
    is_number: bool = True


def number(pattern: str, factor: float = 1.0) -> Callable[[object], str]:
    """How to write a number by a format such as `{:,.1f}`, times `factor`."""
    pattern = re.sub(r"\{:(\+?)", r"{:\1z", pattern)  # no -0.0

    def write(value: object) -> str:
        return pattern.format(float(str(value)) * factor)

    return write


def _short(length: int) -> Callable[[object], str]:
    return lambda value: str(value)[:length]


def _headline(text: object) -> str:
    line = first_line(text)
    return line if len(line) <= _LONGEST_HEADLINE else f"{line[: _LONGEST_HEADLINE - 1]}…"


_LONGEST_HEADLINE = 90
WORKLOAD = ("schedule", "world_size", "num_microbatches", "seq_len")
"""The columns that say what a run did, where no sweep file says what varies."""
FIELDS: dict[str, Field] = {
    "run_id": Field("run", is_number=False),
    "case_id": Field("case", is_number=False),
    "created_at": Field("when", lambda value: str(value)[:16].replace("T", " "), is_number=False),
    "sweep_name": Field("sweep", is_number=False),
    "status": Field("status", is_number=False),
    "model_preset": Field("model", is_number=False),
    "error": Field("error", _headline, is_number=False),
    "process": Field("process", is_number=False),
    "phase": Field("phase", is_number=False),
    "action": Field("action", is_number=False),
    "waits_for": Field("waits for", is_number=False),
    "since_s": Field("for s", number("{:,.3f}")),
    "schedule": Field("schedule", is_number=False),
    "runtime": Field("runtime", is_number=False),
    "world_size": Field("ranks", number("{:.0f}")),
    "num_microbatches": Field("microbatches", number("{:.0f}")),
    "seq_len": Field("seq len"),  # a number, or "variable"
    "num_tokens": Field("tokens", number("{:,.0f}")),
    "tokens_per_s": Field("tokens/s", number("{:,.0f}")),
    "step_ns": Field("step ms", number("{:,.1f}", 1e-6)),
    "planned_step_ns": Field("planned ms", number("{:,.1f}", 1e-6)),
    "stages_per_rank": Field("stages/rank", number("{:.0f}")),
    "optimizer_ns": Field("optimizer ms", number("{:,.1f}", 1e-6)),
    "step_with_optimizer_ns": Field("with optimizer ms", number("{:,.1f}", 1e-6)),
    "compute_ns": Field("compute ms", number("{:,.1f}", 1e-6)),
    "bubble_fraction": Field("bubble", number("{:.1f} %", 100)),
    "bubble_fraction_theory": Field("in theory", number("{:.1f} %", 100)),
    "makespan": Field("makespan s", number("{:,.6g}")),
    "num_actions": Field("actions", number("{:,.0f}")),
    "peak_activations": Field("peak held", number("{:.6g}")),
    "bubble_idle_over_ideal": Field("idle/ideal", number("{:.3f}")),
    "bubble_max_stage_span": Field("by longest span", number("{:.1f} %", 100)),
    "idle_fraction": Field("idle", number("{:.1f} %", 100)),
    "step_relative_deviation": Field("deviation", number("{:.1f} %", 100)),
    "peak_memory_bytes": Field("peak MiB", number("{:,.1f}", 1 / MIB)),
    "reserved_bytes": Field("reserved MiB", number("{:,.1f}", 1 / MIB)),
    "process_peak_bytes": Field("process MiB", number("{:,.1f}", 1 / MIB)),
    "peak_held_microbatches": Field("held", number("{:.0f}")),
    "planned_peak_held_microbatches": Field("held, planned", number("{:.0f}")),
    "num_parameters": Field("parameters", number("{:,.0f}")),
    "loss": Field("loss", number("{:.4f}")),
    "first_loss": Field("first loss", number("{:.4f}")),
    "last_loss": Field("last loss", number("{:.4f}")),
    "verified": Field("verified", is_number=False),
    "verified_difference": Field("verified to", number("{:.1e}")),
    "commit": Field("commit", _short(9), is_number=False),
    "fingerprint": Field("fingerprint", is_number=False),
    "cautions": Field("cautions", is_number=False),
    "stages": Field("stages", is_number=False),
    "stage": Field("stage", number("{:.0f}")),
    "num_layers": Field("layers", number("{:.0f}")),
    "stage_share": Field("share", number("{:.1f} %", 100)),
    "architecture": Field("architecture", is_number=False),
    "loss_difference": Field("loss differs by", number("{:.1e}")),
    "gradient_difference": Field("gradient differs by", number("{:.1e}")),
    "seconds": Field("s", number("{:,.1f}")),
    "device": Field("device", is_number=False),
    "part": Field("part", is_number=False),
    "per_step_ns": Field("rank-ms per step", number("{:,.2f}", 1e-6)),
    "share_of_bubble": Field("of the bubble", number("{:.1f} %", 100)),
    "share_of_rank_time": Field("of rank-time", number("{:.2f} %", 100)),
    "idle_ns": Field("idle ms", number("{:,.2f}", 1e-6)),
    "structure_ns": Field("schedule", number("{:,.2f}", 1e-6)),
    "imbalance_ns": Field("imbalance", number("{:,.2f}", 1e-6)),
    "transfer_ns": Field("transfer", number("{:,.2f}", 1e-6)),
    "jitter_ns": Field("jitter", number("{:,.2f}", 1e-6)),
    "launch_gap_ns": Field("launch gaps", number("{:,.2f}", 1e-6)),
    "warmup_ns": Field("warm-up", number("{:,.2f}", 1e-6)),
    "steady_ns": Field("steady", number("{:,.2f}", 1e-6)),
    "cooldown_ns": Field("cool-down", number("{:,.2f}", 1e-6)),
    "is_outlier": Field("", lambda value: "outlier" if value else "", is_number=False),
    "predicted_peak_memory_bytes": Field("predicted MiB", number("{:,.1f}", 1 / MIB)),
    "parameter_bytes": Field("parameters MiB", number("{:,.1f}", 1 / MIB)),
    "gradient_bytes": Field("gradients MiB", number("{:,.1f}", 1 / MIB)),
    "optimizer_bytes": Field("optimizer MiB", number("{:,.1f}", 1 / MIB)),
    "buffer_bytes": Field("buffers MiB", number("{:,.1f}", 1 / MIB)),
    "activation_bytes": Field("activations MiB", number("{:,.1f}", 1 / MIB)),
    "hostname": Field("node", is_number=False),
    "other_load_cores": Field("other load, cores", number("{:.2f}")),
    "watched_cores": Field("of", number("{:.0f}")),
    "steal_fraction": Field("steal", number("{:.1f} %", 100)),
    "cpu_throttled_fraction": Field("held back", number("{:.1f} %", 100)),
    "cpu_mhz": Field("CPU MHz", number("{:,.0f}")),
    "cpu_energy_j": Field("CPU J", number("{:,.1f}")),
    "gpu_power_w": Field("GPU W", number("{:,.0f}")),
    "gpu_energy_j": Field("GPU J", number("{:,.1f}")),
    "gpu_utilization": Field("GPU busy", number("{:.0f} %", 100)),
    "gpu_sm_mhz": Field("GPU MHz", number("{:,.0f}")),
    "gpu_temperature_c": Field("GPU °C", number("{:.0f}")),
    "gpu_throttle_reasons": Field("GPU slowed by", is_number=False),
    "gpu_memory_used_bytes": Field("GPU MiB", number("{:,.0f}", 1 / MIB)),
    "clock": Field("clock", is_number=False),
    "clock_error_ns": Field("off by at most us", number("{:,.1f}", 1e-3)),
    "edge": Field("stages", is_number=False),
    "num_bytes": Field("KiB", number("{:,.1f}", 1 / KIB)),
    "moving_ns": Field("moving ms", number("{:,.3f}", 1e-6)),
    "bytes_per_s": Field("MB/s", number("{:,.1f}", 1e-6)),
    "sender_waiting_ns": Field("sender waits ms", number("{:,.2f}", 1e-6)),
    "receiver_waiting_ns": Field("receiver waits ms", number("{:,.2f}", 1e-6)),
    "what_if": Field("what if", is_number=False),
    "change": Field("change", number("{:+.1f} %", 100)),
    "held": Field("held", number("{:.4g}")),
    "num_rounds": Field("rounds", number("{:.0f}")),
    "num_launches": Field("launches", number("{:.0f}")),
    "deviation": Field("noise", number("{:.2f} %", 100)),
    "deviation_low": Field("noise from", number("{:.2f} %", 100)),
    "deviation_high": Field("noise to", number("{:.2f} %", 100)),
    "floor": Field("floor", number("{:.2f} %", 100)),
    "detectable_change": Field("found by 5 launches", number("{:.1f} %", 100)),
    "step_off_ns": Field("all off, ms", number("{:,.2f}", 1e-6)),
    "flight_ratio": Field("flight/off", number("{:.4f}")),
    "flight_ratio_low": Field("flight/off from", number("{:.4f}")),
    "flight_ratio_high": Field("flight/off to", number("{:.4f}")),
    "spans_ratio": Field("on/off", number("{:.4f}")),
    "spans_ratio_low": Field("on/off from", number("{:.4f}")),
    "spans_ratio_high": Field("on/off to", number("{:.4f}")),
    "profiler_ratio": Field("profiler/off", number("{:.4f}")),
    "profiler_ratio_low": Field("profiler/off from", number("{:.4f}")),
    "profiler_ratio_high": Field("profiler/off to", number("{:.4f}")),
}
_LONGEST_SUBJECT = 50


def _cut(text: object) -> str:
    line = str(text)
    return line if len(line) <= _LONGEST_SUBJECT else f"{line[: _LONGEST_SUBJECT - 1]}…"


COMMIT_COLUMNS = ["author_date", "commit", "subject"]
COMMIT_FIELDS: Mapping[str, Field] = {
    **FIELDS,
    "author_date": Field("date", _short(10), is_number=False),
    "subject": Field("subject", _cut, is_number=False),
    "chance": Field("chance", number("{:.1f} %", 100)),
}
"""Fields of a table of commits."""


def field_of(column: str, fields: Mapping[str, Field] = FIELDS) -> Field:
    return fields.get(column) or Field(column.replace("_", " "), is_number=False)
