"""Load, power and clocks of a node during a measurement, from samples of its counters.

Pure functions of samples (`sampler` takes them): a rank's figures, the samples as rows of a table,
and whether the measurement was disturbed. `counters.py` and `gpus.py` say which
figure is made of which reading, and how; only the loads, which need several, are made here.

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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ppbench.run.machine.counters import HOST_FIGURES, By, Figure, Reading
from ppbench.run.machine.gpus import GPU_FIGURES, bare
from ppbench.run.machine.sampler import LOOK_BACK_NS, Sample, samples_around
from ppbench.store.columns import TABLES

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

Figures = dict[str, Any]
"""Figures by column, numbers or text; None where one is not known."""

_LOADS = ("other_load_cores", "steal_fraction", "cpu_throttled_fraction")
FIGURES = (
    *(*_LOADS, "watched_cores", "load_window_s"),
    *(*HOST_FIGURES, *GPU_FIGURES, "telemetry_note"),
)
"""The columns of `ranks` that telemetry fills; the note says which are missing, and why."""
ROW_COLUMNS = tuple(c.name for c in TABLES["telemetry"] if c.name not in ("run_id", "hostname"))


def is_disturbed(figures: Mapping[str, Any]) -> bool:
    """Whether processes outside the launch used more than `MAX_OTHER_LOAD` of its cores."""
    load, cores = figures.get("other_load_cores"), figures.get("watched_cores")
    return load is not None and cores is not None and load > MAX_OTHER_LOAD * cores


def is_throttled(figures: Mapping[str, Any]) -> bool:
    """Whether the GPU slowed down, or the hypervisor or a quota held the CPU back."""
    reasons = {name for name in (figures.get("gpu_throttle_reasons") or "").split(",") if name}
    stolen, window_s = figures.get("steal_fraction") or 0.0, figures.get("load_window_s") or 0.0
    stolen_s = stolen * window_s * (figures.get("watched_cores") or 1)
    return (
        bool(reasons - HARMLESS_REASONS)
        or (stolen > MAX_STEAL and stolen_s >= FEWEST_TICKS * TICK_S)
        or (figures.get("cpu_throttled_fraction") or 0) > MAX_CPU_THROTTLED
    )


def node_figures(ranks: Sequence[tuple[str, Mapping[str, Any]]], cores_per_rank: int) -> Figures:
    """Return the worst figure of any node, from each rank's node and figures; None if unknown.

    `cores_short` counts the cores that the node's ranks and other processes wanted beyond those
    that the launch may use, over the ranks' own.
    """
    num_ranks = collections.Counter(node for node, _ in ranks)
    short = []
    for node, figures in ranks:
        load, cores = figures.get("other_load_cores"), figures.get("watched_cores")
        num_wanted = num_ranks[node] * cores_per_rank
        if load is not None and cores is not None and num_wanted > 0:
            short.append(max(0.0, min(load, load + num_wanted - cores)) / num_wanted)

    def known(column: str) -> list[float]:
        return [own[column] for _, own in ranks if own.get(column) is not None]

    return {
        "cores_short": max(short, default=None),
        "steal_fraction": max(known("steal_fraction"), default=None),
        "cpu_throttled_fraction": max(known("cpu_throttled_fraction"), default=None),
        "cpu_mhz": min(known("cpu_mhz"), default=None),
        "gpu_sm_mhz": min(known("gpu_sm_mhz"), default=None),
    }


def summarize(
    samples: Sequence[Sample],
    windows: Sequence[tuple[int, int]],
    gpu: str | None,
    num_sharing: int = 1,
) -> Figures:
    """Summarize windows of CLOCK_MONOTONIC, each from its begin to its end: all of `FIGURES`.

    The figures are of the windows alone, between which other arms may have had their turns.
    `samples` come from `read_samples` for that time; `gpu` is the UUID of the rank's, None for a
    rank without one. Of a GPU that `num_sharing` ranks share, each has an equal part of the energy.
    """
    begin_ns, end_ns = windows[0][0], windows[-1][1]
    around = samples_around(samples, begin_ns, end_ns)
    figures: Figures = dict.fromkeys(FIGURES)
    if not around:
        note = "no samples of this time: the supervisor took none"
        return {**figures, "telemetry_note": note}
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
    figures |= _loads(loaded)
    figures["load_window_s"] = loaded_ns / NS_PER_S
    figures["watched_cores"] = around[-1].host["num_cores"]
    timed = list(zip(map(_of_host, of_windows), seconds, strict=True))
    for column, how in HOST_FIGURES.items():
        figures[column] = _figure(how, _of_host(inside), timed)
    if gpu is not None and "gpu" not in around[-1].absent:
        timed = [
            (_of_gpu(own, gpu), window_s / num_sharing)
            for own, window_s in zip(of_windows, seconds, strict=True)
        ]
        for column, how in GPU_FIGURES.items():
            figures[column] = _figure(how, _of_gpu(inside, gpu), timed)
        readings = _of_gpu(around, gpu)
        if not readings:
            notes.append(f"no figures of GPU {gpu}: the library of its vendor does not see it")
        elif readings[-1][1].get("note"):
            notes.append(readings[-1][1]["note"])
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
            if len(_known(readings, "energy_j")) < 2:
                notes.append("no GPU energy: the GPU does not count it")
    return {**figures, "telemetry_note": "; ".join(notes)}


_Timed = tuple[int, Reading]
"""A reading of the host or of one GPU, and when it was taken."""


def _of_host(samples: Iterable[Sample]) -> list[_Timed]:
    return [(sample.time_ns, sample.host) for sample in samples]


def _of_gpu(samples: Iterable[Sample], gpu: str) -> list[_Timed]:
    """Return the readings of the GPU with a UUID, however it is written."""
    return [(s.time_ns, r) for s in samples for r in s.gpus if bare(r["uuid"]) == bare(gpu)]


def _known(readings: Iterable[_Timed], name: str) -> list[tuple[int, Any]]:
    return [(at_ns, reading[name]) for at_ns, reading in readings if reading.get(name) is not None]


def _figure(
    how: Figure, inside: Sequence[_Timed], windows: Iterable[tuple[Sequence[_Timed], float]]
) -> float | str | None:
    """Make a figure of the readings inside windows, or of those around each and its seconds."""
    values = [value for _, value in _known(inside, how.reading)]
    match how.by:
        case By.mean:
            return sum(values) / len(values) if values else None
        case By.highest:
            return max(values, default=None)
        case By.names:
            return _names(itertools.chain(*values)) if values else None
    amounts = []
    for readings, seconds in windows:
        rate = _rate(readings, how.reading)
        if rate is None:
            return None
        amounts.append(rate * seconds)
    return sum(amounts)


def _loads(windows: Sequence[Sequence[Sample]]) -> Figures:
    """Return the loads of windows, each from its first sample to its last."""
    took_s = [(own[-1].time_ns - own[0].time_ns) / NS_PER_S for own in windows]
    whole_s = sum(took_s)
    if whole_s < MIN_RATE_NS / NS_PER_S:
        return {}
    timed = [(_of_host(own), s) for own, s in zip(windows, took_s, strict=True) if s]

    def spent(counter: str) -> Any:
        return _figure(Figure(counter, By.amount), (), timed)

    counters = ("busy_s", "own_s", "total_s", "steal_s", "throttled_s")
    busy, own, total, steal, throttled = map(spent, counters)
    used = None if own is None else max(0.0, own)  # it falls when an orphan ends
    wanted = None if used is None or throttled is None else used + throttled
    return {
        "other_load_cores": None
        if busy is None or used is None
        else max(0.0, busy - used) / whole_s,
        "steal_fraction": _ratio(steal, total),
        "cpu_throttled_fraction": 0.0 if throttled == 0 else _ratio(throttled, wanted),
    }


def _names(seen: Iterable[str]) -> str:
    return ",".join(sorted(set(seen)))


def _rate(readings: Iterable[_Timed], name: str) -> float | None:
    """Return the rate of a counter per second."""
    values = _known(readings, name)
    if len(values) < 2 or values[-1][0] == values[0][0]:
        return None
    (first_ns, first), (last_ns, last) = values[0], values[-1]
    return float(last - first) / ((last_ns - first_ns) / NS_PER_S)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def sample_rows(samples: Sequence[Sample], begin_ns: int, end_ns: int) -> list[Figures]:
    """Return the samples of a window as rows of `ROW_COLUMNS`.

    The devices are `cpu`, the node, and `gpu0`, `gpu1`, …. `time_ns` is CLOCK_MONOTONIC. A column
    has the reading of its name. A counter of the node (loads, power) is given as its mean since the
    last sample that is `MIN_RATE_NS` older. `utilization` of the CPU includes all processes.
    """
    rows: list[Figures] = []
    times_ns = [sample.time_ns for sample in samples]
    for sample in samples:
        if not begin_ns <= sample.time_ns <= end_ns:
            continue
        num_old = bisect.bisect_right(times_ns, sample.time_ns - MIN_RATE_NS)
        pair = [samples[max(0, num_old - 1)], sample]
        node = {
            **sample.host,
            **_loads([pair]),
            "device": "cpu",
            "utilization": _ratio(_rate(_of_host(pair), "busy_s"), sample.host["num_cores"]),
            "power_w": _rate(_of_host(pair), "energy_j"),
        }
        gpus = [{**gpu, "device": f"gpu{index}"} for index, gpu in enumerate(sample.gpus)]
        for reading in (node, *gpus):
            row = {column: reading.get(column) for column in ROW_COLUMNS}
            if (reasons := row["throttle_reasons"]) is not None:
                row["throttle_reasons"] = _names(reasons)
            rows.append({**row, "time_ns": sample.time_ns})
    return rows
