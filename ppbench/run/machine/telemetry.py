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
    samples: Sequence[Sample],
    windows: Sequence[tuple[int, int]],
    gpu: str | None,
    num_sharing: int = 1,
) -> Summary:
    """Summarize windows of CLOCK_MONOTONIC, each from its begin to its end, in their order.

    All figures are of the windows alone, between which other arms may have had their turns.
    `samples` come from `read_samples` for that time; `gpu` is the UUID of the rank's, None for a
    rank without one. Of a GPU that `num_sharing` ranks share, each has an equal part of the energy.
    """
    begin_ns, end_ns = windows[0][0], windows[-1][1]
    around = samples_around(samples, begin_ns, end_ns)
    if not around:
        return Summary(telemetry_note="no samples of this time: the supervisor took none")
    of_windows = [samples_around(samples, begin, end) for begin, end in windows]
    begun = zip(of_windows, windows, strict=True)
    inside = [s for own, (begin, _) in begun for s in own if s.time_ns > begin] or around
    seconds = [(end - begin) / NS_PER_S for begin, end in windows]
    # Samples from before the window make it `MIN_LOAD_NS` long for loads. Much older ones are left
    # out: between them and the window another sampler may have ended.
    loaded = [own for own in of_windows if own]
    loaded_ns = sum(own[-1].time_ns - own[0].time_ns for own in loaded)
    notes = []
    if loaded_ns < MIN_LOAD_NS:
        last_ns = around[-1].time_ns
        oldest_ns = around[0].time_ns - LOOK_BACK_NS
        recent = [s for s in samples if oldest_ns <= s.time_ns <= last_ns]
        longer = samples_around(recent, min(around[0].time_ns, last_ns - MIN_LOAD_NS), last_ns)
        if longer[-1].time_ns - longer[0].time_ns > loaded_ns:
            loaded, loaded_ns = [longer], longer[-1].time_ns - longer[0].time_ns
            notes.append(
                f"CPU load is of the {loaded_ns / NS_PER_S:.2f} s that end with a shorter window"
            )
    if loaded_ns < MIN_RATE_NS:
        notes.append("no CPU load: the samples are too close together")
    notes += around[-1].absent.values()
    if gpu is None and "gpu" not in around[-1].absent:
        notes.append("no GPU figures: this rank computes on the CPU")
    host: Figures = {
        **_loads(loaded),
        "load_window_s": loaded_ns / NS_PER_S,
        "watched_cores": around[-1].host.num_cores,
        "cpu_mhz": _mean(s.host.mhz for s in inside),
        "cpu_energy_j": _sum(
            _times(_host_rate(own, "energy_j"), s)
            for own, s in zip(of_windows, seconds, strict=True)
        ),
    }
    of_gpu: Figures = {}
    if gpu is not None and "gpu" not in around[-1].absent:
        timed = _readings(around, gpu)
        readings = [reading for _, reading in _readings(inside, gpu)]
        counted = [(t, r.energy_j) for t, r in timed if r.energy_j is not None]
        energies: list[float | None] = []
        for own, window_s in zip(of_windows, seconds, strict=True):
            of_own = _readings(own, gpu)
            power_w = _rate([(t, r.energy_j) for t, r in of_own if r.energy_j is not None])
            if power_w is None:
                powers = [(t, r.power_w) for t, r in of_own if r.power_w is not None]
                power_w = _mean_over_time(powers)
            energies.append(_times(power_w, window_s / num_sharing))
        reasons = [r.throttle_reasons for r in readings if r.throttle_reasons is not None]
        of_gpu = {
            "gpu_power_w": _mean(reading.power_w for reading in readings),
            "gpu_energy_j": _sum(energies),
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
            if min(end - begin for begin, end in windows) < GPU_AVERAGING_NS:
                notes.append(
                    "the window was short: GPU power and utilisation are means over up to a "
                    "second, and reasons for a lower clock are those at its end"
                )
            if len(counted) < 2:
                notes.append("GPU energy is the integral of sampled power")
    figures = {**host, **of_gpu, "telemetry_note": "; ".join(notes)}
    return Summary(**figures)  # type: ignore[arg-type]  # named as its fields


def _loads(windows: Sequence[Sequence[Sample]]) -> Figures:
    """Return the loads of windows, each from its first sample to its last."""
    took_s = [(own[-1].time_ns - own[0].time_ns) / NS_PER_S for own in windows]
    whole_s = sum(took_s)
    if whole_s < MIN_RATE_NS / NS_PER_S:
        return {}

    def rate(counter: str) -> float | None:
        each = zip(windows, took_s, strict=True)
        return _times(_sum(_times(_host_rate(w, counter), s) for w, s in each if s), 1 / whole_s)

    counters = ("busy_s", "own_s", "total_s", "steal_s", "throttled_s")
    busy, own, total, steal, throttled = map(rate, counters)
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


def _sum(values: Iterable[float | None]) -> float | None:
    """Return the sum; None where one of them is not known."""
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


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
            **_loads([pair]),
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
