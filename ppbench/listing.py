"""Tables as text, in the four formats that every listing takes.

`table` and `markdown` are for people: chosen columns, figures in their usual units. `json` and
`csv` are for programs: every column, raw, under the store's own names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pandas as pd
from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from ppbench.error_text import printable
from ppbench.errors import first_line
from ppbench.format import Format


@dataclass(frozen=True)
class Field:
    """A column for people: its heading and how a value is written."""

    heading: str
    write: Callable[[object], str] = str
    is_number: bool = True


def _number(pattern: str, factor: float = 1.0) -> Callable[[object], str]:
    pattern = re.sub(r"\{:(\+?)", r"{:\1z", pattern)  # no -0.0

    def write(value: object) -> str:
        return pattern.format(float(str(value)) * factor)

    return write


def _short(length: int) -> Callable[[object], str]:
    return lambda value: str(value)[:length]


def _headline(text: object) -> str:
    line = first_line(text)
    return line if len(line) <= _LONGEST_HEADLINE else f"{line[: _LONGEST_HEADLINE - 1]}…"


MIB = 1 / 2**20
_GAP = 3
_UNBOUNDED = 10_000
_LONGEST_HEADLINE = 90
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
    "since_s": Field("for s", _number("{:,.3f}")),
    "schedule": Field("schedule", is_number=False),
    "runtime": Field("runtime", is_number=False),
    "world_size": Field("ranks", _number("{:.0f}")),
    "num_microbatches": Field("microbatches", _number("{:.0f}")),
    "seq_len": Field("seq len"),  # a number, or "variable"
    "num_tokens": Field("tokens", _number("{:,.0f}")),
    "tokens_per_s": Field("tokens/s", _number("{:,.0f}")),
    "step_ns": Field("step ms", _number("{:,.1f}", 1e-6)),
    "planned_step_ns": Field("planned ms", _number("{:,.1f}", 1e-6)),
    "stages_per_rank": Field("stages/rank", _number("{:.0f}")),
    "optimizer_ns": Field("optimizer ms", _number("{:,.1f}", 1e-6)),
    "step_with_optimizer_ns": Field("with optimizer ms", _number("{:,.1f}", 1e-6)),
    "compute_ns": Field("compute ms", _number("{:,.1f}", 1e-6)),
    "bubble_fraction": Field("bubble", _number("{:.1f} %", 100)),
    "bubble_fraction_theory": Field("in theory", _number("{:.1f} %", 100)),
    "makespan": Field("makespan s", _number("{:,.6g}")),
    "num_actions": Field("actions", _number("{:,.0f}")),
    "peak_activations": Field("peak held", _number("{:.6g}")),
    "bubble_idle_over_ideal": Field("idle/ideal", _number("{:.3f}")),
    "bubble_max_stage_span": Field("by longest span", _number("{:.1f} %", 100)),
    "idle_fraction": Field("idle", _number("{:.1f} %", 100)),
    "step_relative_deviation": Field("deviation", _number("{:.1f} %", 100)),
    "peak_memory_bytes": Field("peak MiB", _number("{:,.1f}", MIB)),
    "reserved_bytes": Field("reserved MiB", _number("{:,.1f}", MIB)),
    "process_peak_bytes": Field("process MiB", _number("{:,.1f}", MIB)),
    "peak_held_microbatches": Field("held", _number("{:.0f}")),
    "planned_peak_held_microbatches": Field("held, planned", _number("{:.0f}")),
    "num_parameters": Field("parameters", _number("{:,.0f}")),
    "loss": Field("loss", _number("{:.4f}")),
    "first_loss": Field("first loss", _number("{:.4f}")),
    "last_loss": Field("last loss", _number("{:.4f}")),
    "verified": Field("verified", is_number=False),
    "verified_difference": Field("verified to", _number("{:.1e}")),
    "commit": Field("commit", _short(9), is_number=False),
    "fingerprint": Field("fingerprint", is_number=False),
    "cautions": Field("cautions", is_number=False),
    "stages": Field("stages", is_number=False),
    "stage": Field("stage", _number("{:.0f}")),
    "num_layers": Field("layers", _number("{:.0f}")),
    "stage_share": Field("share", _number("{:.1f} %", 100)),
    "architecture": Field("architecture", is_number=False),
    "loss_difference": Field("loss differs by", _number("{:.1e}")),
    "gradient_difference": Field("gradient differs by", _number("{:.1e}")),
    "seconds": Field("s", _number("{:,.1f}")),
    "device": Field("device", is_number=False),
    "part": Field("part", is_number=False),
    "per_step_ns": Field("rank-ms per step", _number("{:,.2f}", 1e-6)),
    "share_of_bubble": Field("of the bubble", _number("{:.1f} %", 100)),
    "share_of_rank_time": Field("of rank-time", _number("{:.2f} %", 100)),
    "idle_ns": Field("idle ms", _number("{:,.2f}", 1e-6)),
    "structure_ns": Field("schedule", _number("{:,.2f}", 1e-6)),
    "imbalance_ns": Field("imbalance", _number("{:,.2f}", 1e-6)),
    "transfer_ns": Field("transfer", _number("{:,.2f}", 1e-6)),
    "jitter_ns": Field("jitter", _number("{:,.2f}", 1e-6)),
    "launch_gap_ns": Field("launch gaps", _number("{:,.2f}", 1e-6)),
    "warmup_ns": Field("warm-up", _number("{:,.2f}", 1e-6)),
    "steady_ns": Field("steady", _number("{:,.2f}", 1e-6)),
    "cooldown_ns": Field("cool-down", _number("{:,.2f}", 1e-6)),
    "is_outlier": Field("", lambda value: "outlier" if value else "", is_number=False),
    "predicted_peak_memory_bytes": Field("predicted MiB", _number("{:,.1f}", MIB)),
    "parameter_bytes": Field("parameters MiB", _number("{:,.1f}", MIB)),
    "gradient_bytes": Field("gradients MiB", _number("{:,.1f}", MIB)),
    "optimizer_bytes": Field("optimizer MiB", _number("{:,.1f}", MIB)),
    "buffer_bytes": Field("buffers MiB", _number("{:,.1f}", MIB)),
    "activation_bytes": Field("activations MiB", _number("{:,.1f}", MIB)),
    "hostname": Field("node", is_number=False),
    "other_load_cores": Field("other load, cores", _number("{:.2f}")),
    "watched_cores": Field("of", _number("{:.0f}")),
    "steal_fraction": Field("steal", _number("{:.1f} %", 100)),
    "cpu_throttled_fraction": Field("held back", _number("{:.1f} %", 100)),
    "cpu_mhz": Field("CPU MHz", _number("{:,.0f}")),
    "cpu_energy_j": Field("CPU J", _number("{:,.1f}")),
    "gpu_power_w": Field("GPU W", _number("{:,.0f}")),
    "gpu_energy_j": Field("GPU J", _number("{:,.1f}")),
    "gpu_utilization": Field("GPU busy", _number("{:.0f} %", 100)),
    "gpu_sm_mhz": Field("GPU MHz", _number("{:,.0f}")),
    "gpu_temperature_c": Field("GPU °C", _number("{:.0f}")),
    "gpu_throttle_reasons": Field("GPU slowed by", is_number=False),
    "gpu_memory_used_bytes": Field("GPU MiB", _number("{:,.0f}", MIB)),
    "clock": Field("clock", is_number=False),
    "clock_error_ns": Field("off by at most us", _number("{:,.1f}", 1e-3)),
    "edge": Field("stages", is_number=False),
    "num_bytes": Field("KiB", _number("{:,.1f}", 1 / 2**10)),
    "moving_ns": Field("moving ms", _number("{:,.3f}", 1e-6)),
    "bytes_per_s": Field("MB/s", _number("{:,.1f}", 1e-6)),
    "sender_waiting_ns": Field("sender waits ms", _number("{:,.2f}", 1e-6)),
    "receiver_waiting_ns": Field("receiver waits ms", _number("{:,.2f}", 1e-6)),
    "what_if": Field("what if", is_number=False),
    "change": Field("change", _number("{:+.1f} %", 100)),
    "held": Field("held", _number("{:.4g}")),
    "num_rounds": Field("rounds", _number("{:.0f}")),
    "num_launches": Field("launches", _number("{:.0f}")),
    "deviation": Field("noise", _number("{:.2f} %", 100)),
    "deviation_low": Field("noise from", _number("{:.2f} %", 100)),
    "deviation_high": Field("noise to", _number("{:.2f} %", 100)),
    "floor": Field("floor", _number("{:.2f} %", 100)),
    "detectable_change": Field("found by 5 launches", _number("{:.1f} %", 100)),
    "step_off_ns": Field("all off, ms", _number("{:,.2f}", 1e-6)),
    "flight_ratio": Field("flight/off", _number("{:.4f}")),
    "flight_ratio_low": Field("flight/off from", _number("{:.4f}")),
    "flight_ratio_high": Field("flight/off to", _number("{:.4f}")),
    "spans_ratio": Field("on/off", _number("{:.4f}")),
    "spans_ratio_low": Field("on/off from", _number("{:.4f}")),
    "spans_ratio_high": Field("on/off to", _number("{:.4f}")),
    "profiler_ratio": Field("profiler/off", _number("{:.4f}")),
    "profiler_ratio_low": Field("profiler/off from", _number("{:.4f}")),
    "profiler_ratio_high": Field("profiler/off to", _number("{:.4f}")),
}


def render(
    frame: pd.DataFrame, how: Format, columns: list[str], fields: Mapping[str, Field] = FIELDS
) -> str:
    """The table as text. `columns` are those that people see; programs get all of them.

    `fields` say how people see a column; one without a field is written as it is.
    """
    match how:
        case Format.json:
            return json.dumps(as_records(frame), indent=2, allow_nan=False)
        case Format.csv:
            return frame.to_csv(index=False).rstrip("\n")
        case Format.markdown:
            return _markdown(frame, _fields_of(columns, fields))
        case Format.table:
            return _table(frame, _fields_of(columns, fields))


def as_records(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Rows as plain values, unrounded; missing ones are None, whole numbers stay whole."""
    plain = frame.convert_dtypes()
    rows = plain.astype(object).where(plain.notna(), None).to_dict("records")
    return [{str(column): value for column, value in row.items()} for row in rows]


def field_of(column: str, fields: Mapping[str, Field] = FIELDS) -> Field:
    return fields.get(column) or Field(column.replace("_", " "), is_number=False)


def _fields_of(columns: list[str], fields: Mapping[str, Field]) -> dict[str, Field]:
    return {column: field_of(column, fields) for column in columns}


def _cells(frame: pd.DataFrame, fields: Mapping[str, Field]) -> list[list[str]]:
    return [
        [
            "" if pd.isna(value) else printable(field.write(value))
            for field, value in zip(fields.values(), row, strict=True)
        ]
        for row in frame[list(fields)].itertuples(index=False)
    ]


def _markdown(frame: pd.DataFrame, fields: Mapping[str, Field]) -> str:
    lines = [
        "| " + " | ".join(field.heading for field in fields.values()) + " |",
        "|" + "|".join("---:" if field.is_number else "---" for field in fields.values()) + "|",
    ]
    lines += ["| " + " | ".join(map(escaped, row)) + " |" for row in _cells(frame, fields)]
    return "\n".join(lines)


def escaped(cell: str) -> str:
    """Text for a cell of a markdown table: one line, and no markup of HTML."""
    line = " ".join(cell.splitlines())
    return line.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def _table(frame: pd.DataFrame, fields: Mapping[str, Field]) -> str:
    """Headings may wrap; cells never do, even if the terminal is too narrow and wraps the line."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    cells = _cells(frame, fields)
    needed = 0
    for position, field in enumerate(fields.values()):
        words = [*(row[position] for row in cells), *field.heading.split()]
        width = max(map(len, words), default=0)
        side: JustifyMethod = "right" if field.is_number else "left"
        table.add_column(field.heading, justify=side, min_width=width)
        needed += width + _GAP
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    console = Console(highlight=False)
    # A file or a pipe has no edge.
    width = max(console.width, needed) if console.is_terminal else _UNBOUNDED
    console = Console(highlight=False, width=width)
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    return "\n".join(line for line in lines if line)


def facts(values: dict[str, object], how: Format) -> str:
    """One thing's facts, a line each."""
    if how is Format.json:
        return json.dumps(values, indent=2, allow_nan=False)
    frame = pd.DataFrame({"key": list(values), "value": [_plain(v) for v in values.values()]})
    return render(frame, how, ["key", "value"])


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
