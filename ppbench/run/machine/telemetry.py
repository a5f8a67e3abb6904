"""Load, power and clocks of a node during a measurement, from samples of its counters.

Pure functions of samples (`sampler` takes them): a rank's summary, the samples as rows of a table,
and whether the measurement was disturbed.

    samples        |     |     |     |  |     |     |     |  |     |
    window                              [...................]
    counters                            x -- difference ---- x         loads, shares, energy
    gauges                                    x     x     x  x         power, clocks, temperatures

A counter's difference is taken between the last sample before the window and the first after it. A
gauge looks back (NVML averages power and utilisation over up to a second), so the sample at the
beginning is about the time before, and is left out.
"""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ppbench.run.machine.accelerators.devices import GpuReading, find_reading
from ppbench.run.machine.sampler import LOOK_BACK_NS, Sample, samples_around

MAX_OTHER_LOAD = 0.1
"""Share of the cores that other processes may use before a run counts as disturbed."""
MAX_STEAL = 0.01
MAX_CPU_THROTTLED = 0.01
FEWEST_TICKS = 5
"""Least time over which stolen time differs from chance: one tick is 10 ms."""

HARMLESS_REASONS = {"gpu_idle", "applications_clocks_setting", "display_clock_setting"}
"""Reasons for a GPU's clock that are no slowdown: it is idle, or a user has set the clock."""

TICK_S = 0.01
MIN_LOAD_NS = 500_000_000
"""CPU time is counted in ticks of 10 ms per process: over less, the error is more than a few %."""
MIN_RATE_NS = 100_000_000
"""Least time for the rows of single samples, which are for display and not for verdicts."""
GPU_AVERAGING_NS = 1_000_000_000

NS_PER_S = 1e9

Figures = dict[str, float | str | None]


@dataclass(frozen=True)
class Summary:
    """A window on one rank's node and GPU; None where a figure is not known: see the note."""

    other_load_cores: float | None = None  # kept busy by processes outside the launch
    watched_cores: int | None = None  # cores of that load: those that the launch may run on
    steal_fraction: float | None = None  # of those cores' time, taken by the hypervisor
    load_window_s: float | None = None  # time of these two
    cpu_mhz: float | None = None  # mean over cores and time
    cpu_throttled_fraction: float | None = None  # of the CPU time asked for, held back by quotas
    cpu_energy_j: float | None = None  # of all the node's packages
    gpu_power_w: float | None = None  # mean
    gpu_energy_j: float | None = None
    gpu_utilization: float | None = None  # mean, 0..1
    gpu_sm_mhz: float | None = None  # mean
    gpu_temperature_c: float | None = None  # highest
    gpu_throttle_reasons: str | None = None  # those seen, with commas between; "" for none
    gpu_memory_used_bytes: int | None = None  # highest, of all processes
    telemetry_note: str = ""  # figures that are absent or not exact, and why


def is_disturbed(summary: Summary) -> bool:
    """Whether processes outside the launch used more than `MAX_OTHER_LOAD` of its cores."""
    load, cores = summary.other_load_cores, summary.watched_cores
    return load is not None and cores is not None and load > MAX_OTHER_LOAD * cores


def is_throttled(summary: Summary) -> bool:
    """Whether the GPU slowed down, or the hypervisor or a quota held the CPU back."""
    reasons = {name for name in (summary.gpu_throttle_reasons or "").split(",") if name}
    stolen, window_s = summary.steal_fraction or 0.0, summary.load_window_s or 0.0
    stolen_s = stolen * window_s * (summary.watched_cores or 1)
    return (
        bool(reasons - HARMLESS_REASONS)
        or (stolen > MAX_STEAL and stolen_s >= FEWEST_TICKS * TICK_S)
        or (summary.cpu_throttled_fraction or 0) > MAX_CPU_THROTTLED
    )


def node_figures(ranks: Sequence[tuple[str, Summary]], cores_per_rank: int) -> Figures:
    """Return the worst figure of any node, from each rank's node and summary; None if unknown.

    `cores_short` counts the cores that the node's ranks and other processes wanted beyond those
    that the launch may use, over the ranks' own.
    """
    num_ranks = collections.Counter(node for node, _ in ranks)
    short = []
    for node, summary in ranks:
        load, cores = summary.other_load_cores, summary.watched_cores
        num_wanted = num_ranks[node] * cores_per_rank
        if load is not None and cores is not None and num_wanted > 0:
            short.append(max(0.0, min(load, load + num_wanted - cores)) / num_wanted)
    return {
        "cores_short": _highest(short),
        "steal_fraction": _highest(summary.steal_fraction for _, summary in ranks),
        "cpu_throttled_fraction": _highest(summary.cpu_throttled_fraction for _, summary in ranks),
        "cpu_mhz": _lowest(summary.cpu_mhz for _, summary in ranks),
        "gpu_sm_mhz": _lowest(summary.gpu_sm_mhz for _, summary in ranks),
    }


def summarize(
    samples: Sequence[Sample], begin_ns: int, end_ns: int, gpu: str | None, num_sharing: int = 1
) -> Summary:
    """Summarize the window from `begin_ns` to `end_ns` of CLOCK_MONOTONIC.

    `samples` come from `read_samples` for it; `gpu` is the UUID of the rank's, None for a rank
    without one. Of a GPU that `num_sharing` ranks share, each has an equal part of the energy.
    """
    around = samples_around(samples, begin_ns, end_ns)
    if not around:
        return Summary(telemetry_note="no samples of this time: the sampler did not run")
    inside = [s for s in around if s.time_ns > begin_ns] or around
    window_s = (end_ns - begin_ns) / NS_PER_S
    # Samples from before the window make it `MIN_LOAD_NS` long for loads. Much older ones are left
    # out: between them and the window another sampler may have ended.
    last_ns = around[-1].time_ns
    oldest_ns = around[0].time_ns - LOOK_BACK_NS
    recent = [s for s in samples if oldest_ns <= s.time_ns <= last_ns]
    loaded = samples_around(recent, min(around[0].time_ns, last_ns - MIN_LOAD_NS), last_ns)
    loaded_ns = loaded[-1].time_ns - loaded[0].time_ns
    notes = []
    if loaded_ns < MIN_RATE_NS:
        notes.append("no CPU load: the samples are too close together")
    elif len(loaded) > len(around):
        notes.append(
            f"CPU load is of the {loaded_ns / NS_PER_S:.2f} s that end with a shorter window"
        )
    notes += around[-1].absent.values()
    if gpu is None and "gpu" not in around[-1].absent:
        notes.append("no GPU figures: this rank computes on the CPU")
    host: Figures = {
        **_loads(loaded),
        "load_window_s": loaded_ns / NS_PER_S,
        "watched_cores": around[-1].host.num_cores,
        "cpu_mhz": _mean(s.host.mhz for s in inside),
        "cpu_energy_j": _times(_host_rate(around, "energy_j"), window_s),
    }
    of_gpu: Figures = {}
    if gpu is not None and "gpu" not in around[-1].absent:
        timed = _readings(around, gpu)
        readings = [reading for _, reading in _readings(inside, gpu)]
        counted = [(t, r.energy_j) for t, r in timed if r.energy_j is not None]
        power_w = _rate(counted)
        if power_w is None:
            power_w = _mean_over_time([(t, r.power_w) for t, r in timed if r.power_w is not None])
        reasons = [r.throttle_reasons for r in readings if r.throttle_reasons is not None]
        of_gpu = {
            "gpu_power_w": _mean(reading.power_w for reading in readings),
            "gpu_energy_j": _times(power_w, window_s / num_sharing),
            "gpu_utilization": _mean(reading.utilization for reading in readings),
            "gpu_sm_mhz": _mean(reading.sm_mhz for reading in readings),
            "gpu_temperature_c": _highest(reading.temperature_c for reading in readings),
            "gpu_throttle_reasons": _names(reasons) if reasons else None,
            "gpu_memory_used_bytes": _highest(reading.memory_used_bytes for reading in readings),
        }
        if not timed:
            notes.append(f"no figures of GPU {gpu}: the library of its vendor does not see it")
        elif timed[-1][1].note:
            notes.append(timed[-1][1].note)
        else:
            if num_sharing > 1:
                notes.append(
                    f"GPU energy is the part of one of {num_sharing} ranks that share the GPU"
                )
            if end_ns - begin_ns < GPU_AVERAGING_NS:
                notes.append(
                    "the window was short: GPU power and utilisation are means over up to a "
                    "second, and reasons for a lower clock are those at its end"
                )
            if len(counted) < 2:
                notes.append("GPU energy is the integral of sampled power")
    figures = {**host, **of_gpu, "telemetry_note": "; ".join(notes)}
    return Summary(**figures)  # type: ignore[arg-type]  # named as its fields


def _loads(samples: Sequence[Sample]) -> Figures:
    if samples[-1].time_ns - samples[0].time_ns < MIN_RATE_NS:
        return {}
    counters = ("busy_s", "own_s", "total_s", "steal_s", "throttled_s")
    busy, own, total, steal, throttled = (_host_rate(samples, name) for name in counters)
    used = None if own is None else max(0.0, own)  # it falls when an orphan ends
    wanted = None if used is None or throttled is None else used + throttled
    return {
        "other_load_cores": None if busy is None or used is None else max(0.0, busy - used),
        "steal_fraction": _ratio(steal, total),
        "cpu_throttled_fraction": 0.0 if throttled == 0 else _ratio(throttled, wanted),
    }


def _readings(samples: Sequence[Sample], gpu: str) -> list[tuple[int, GpuReading]]:
    found = ((sample.time_ns, find_reading(sample.gpus, gpu)) for sample in samples)
    return [(time_ns, reading) for time_ns, reading in found if reading is not None]


def _names(seen: Iterable[Iterable[str]]) -> str:
    return ",".join(sorted({name for names in seen for name in names}))


def _host_rate(samples: Sequence[Sample], counter: str) -> float | None:
    """Return the rate per second of a field of HostReading."""
    values = ((sample.time_ns, getattr(sample.host, counter)) for sample in samples)
    return _rate([(time_ns, value) for time_ns, value in values if value is not None])


def _rate(values: Sequence[tuple[int, float]]) -> float | None:
    """Return the rate of a counter per second."""
    if len(values) < 2 or values[-1][0] == values[0][0]:
        return None
    (first_ns, first), (last_ns, last) = values[0], values[-1]
    return (last - first) / ((last_ns - first_ns) / NS_PER_S)


def _mean_over_time(values: Sequence[tuple[int, float]]) -> float | None:
    """Return the mean of a gauge over time, by trapezia."""
    if len(values) < 2 or values[-1][0] == values[0][0]:
        return values[0][1] if values else None
    pairs = itertools.pairwise(values)
    area = sum((t1 - t0) * (v0 + v1) / 2 for (t0, v0), (t1, v1) in pairs)
    return area / (values[-1][0] - values[0][0])


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _highest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _lowest(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _times(rate: float | None, seconds: float) -> float | None:
    return None if rate is None else rate * seconds


ROW_COLUMNS = (
    "time_ns",
    "device",
    "other_load_cores",
    "steal_fraction",
    "cpu_throttled_fraction",
    "utilization",
    "power_w",
    "clock_mhz",
    "memory_clock_mhz",
    "temperature_c",
    "throttle_reasons",
    "memory_used_bytes",
)


def sample_rows(samples: Sequence[Sample], begin_ns: int, end_ns: int) -> list[Figures]:
    """Return the samples of a window as rows of `ROW_COLUMNS`.

    The devices are `cpu`, the node, and `gpu0`, `gpu1`, …. `time_ns` is CLOCK_MONOTONIC. A counter
    of the node (loads, power) is given as its mean since the last sample that is `MIN_RATE_NS`
    older. `utilization` of the CPU includes all processes.
    """
    rows: list[Figures] = []
    times_ns = [sample.time_ns for sample in samples]
    for sample in samples:
        if not begin_ns <= sample.time_ns <= end_ns:
            continue
        num_old = bisect.bisect_right(times_ns, sample.time_ns - MIN_RATE_NS)
        pair = [samples[max(0, num_old - 1)], sample]
        host: Figures = {
            **_loads(pair),
            "time_ns": sample.time_ns,
            "device": "cpu",
            "utilization": _ratio(_host_rate(pair, "busy_s"), sample.host.num_cores),
            "power_w": _host_rate(pair, "energy_j"),
            "clock_mhz": sample.host.mhz,
            "memory_used_bytes": sample.host.memory_used_bytes,
        }
        rows.append(host)
        for index, gpu in enumerate(sample.gpus):
            reasons = gpu.throttle_reasons
            of_gpu: Figures = {
                "time_ns": sample.time_ns,
                "device": f"gpu{index}",
                "utilization": gpu.utilization,
                "power_w": gpu.power_w,
                "clock_mhz": gpu.sm_mhz,
                "memory_clock_mhz": gpu.memory_mhz,
                "temperature_c": gpu.temperature_c,
                "throttle_reasons": None if reasons is None else _names([reasons]),
                "memory_used_bytes": gpu.memory_used_bytes,
            }
            rows.append(of_gpu)
    return [dict.fromkeys(ROW_COLUMNS) | row for row in rows]
