"""Hand-written samples, exact expected figures."""

import pytest

from ppbench.run.machine.sampler import Sample
from ppbench.run.machine.telemetry import (
    FIGURES,
    ROW_COLUMNS,
    is_disturbed,
    is_throttled,
    node_figures,
    sample_rows,
    summarize,
)

S = 1_000_000_000
NO_ENERGY = {"cpu_energy": "no CPU energy: not allowed"}
NO_DRIVER = {"gpu": "no NVIDIA driver: not found"}


def sample(at_s, *gpus, absent=None, **host):
    return Sample(round(at_s * S), {"num_cores": 4, **host}, gpus, absent or {})


def counted(at_s, *gpus, busy=0.0, own=0.0, steal=0.0, throttled=0.0, energy=0.0, mhz=1000.0):
    """Four cores since second 0, on which the named times were spent."""
    times = {"total_s": 4 * at_s, "busy_s": busy, "own_s": own, "steal_s": steal}
    rest = {"throttled_s": throttled, "energy_j": energy, "clock_mhz": mhz, "memory_used_bytes": 7}
    return sample(at_s, *gpus, **times, **rest)


def whole(**known):
    return dict.fromkeys(FIGURES) | known


TWO_SECONDS = [
    counted(9, busy=1, own=1),
    counted(10, busy=2, own=2, steal=0.25, throttled=1, energy=100, mhz=5000),
    counted(11, busy=5, own=4, steal=0.5, throttled=1, energy=130, mhz=2000),
    counted(12, busy=9, own=7, steal=0.75, throttled=2, energy=160, mhz=3000),
    counted(13, busy=99, own=7, mhz=5000),
]


def test_loads_and_energy_are_differences_over_the_window():
    summary = summarize(TWO_SECONDS, [(10 * S, 12 * S)], None)
    assert summary == whole(
        other_load_cores=(7 - 5) / 2,
        watched_cores=4,
        steal_fraction=0.5 / 8,
        cpu_throttled_fraction=1 / (5 + 1),
        cpu_energy_j=60,
        cpu_mhz=2500,
        load_window_s=2,
        telemetry_note="no GPU figures: this rank computes on the CPU",
    )


def test_energy_is_of_the_window_even_if_the_samples_reach_beyond_it():
    assert summarize(TWO_SECONDS, [(int(10.5 * S), int(11.5 * S))], None)["cpu_energy_j"] == 30


def test_a_short_window_takes_its_load_from_samples_before_it_and_says_so():
    samples = [
        counted(10, busy=1, own=1),
        counted(10.4),
        counted(10.5),
        counted(10.6, busy=2, own=1),
    ]
    summary = summarize(samples, [(int(10.5 * S), int(10.55 * S))], None)
    assert summary["other_load_cores"] == pytest.approx(1 / 0.6)
    words = "CPU load is of the 0.60 s that end with a shorter window"
    assert summary["telemetry_note"].startswith(words)


def test_samples_of_long_before_do_not_lengthen_a_short_window():
    samples = [counted(4, busy=1), counted(10, busy=9), counted(10.25, busy=9.5)]
    assert summarize(samples, [(10 * S, int(10.25 * S))], None)["other_load_cores"] == 0.5 / 0.25


def test_samples_too_close_together_tell_no_load():
    samples = [counted(10, busy=1), counted(10.05, busy=2)]
    summary = summarize(samples, [(10 * S, int(10.05 * S))], None)
    assert (summary["other_load_cores"], summary["cpu_mhz"]) == (None, 1000)
    assert "too close together" in summary["telemetry_note"]


def test_without_samples_everything_is_none_and_the_note_says_why():
    summary = summarize([], [(0, S)], "GPU-a")
    assert [name for name, value in summary.items() if value is not None] == ["telemetry_note"]
    assert tuple(summary) == FIGURES
    assert "the supervisor took none" in summary["telemetry_note"]


def test_a_machine_that_tells_nothing_gives_none_and_its_reasons():
    samples = [sample(at, absent=NO_ENERGY | NO_DRIVER) for at in (10, 11)]
    summary = summarize(samples, [(10 * S, 11 * S)], None)
    note = "no CPU energy: not allowed; no NVIDIA driver: not found"
    assert summary == whole(watched_cores=4, load_window_s=1, telemetry_note=note)
    assert summarize(samples, [(10 * S, 11 * S)], "GPU-a")["telemetry_note"] == note


def gpu(power, energy=None, **values):
    return {"power_w": power, "energy_j": energy, "uuid": "GPU-a", **values}


def on_gpus(*pairs):
    return [counted(10 + at, *gpus) for at, gpus in enumerate(pairs)]


def test_a_rank_has_the_figures_of_its_own_gpu():
    other = gpu(1, 1, uuid="GPU-b")
    samples = on_gpus(
        (
            other,
            gpu(50, 1000, utilization=0.0, clock_mhz=500, temperature_c=90, memory_used_bytes=1),
        ),
        (
            other,
            gpu(400, 1300, utilization=0.9, clock_mhz=1900, temperature_c=60, memory_used_bytes=9),
        ),
        (
            other,
            gpu(300, 1600, utilization=0.7, clock_mhz=1700, temperature_c=70, memory_used_bytes=8),
        ),
    )
    summary = summarize(samples, [(10 * S, 12 * S)], "a")  # as torch writes it
    assert (summary["gpu_power_w"], summary["gpu_energy_j"]) == (350, 600)
    assert (summary["gpu_utilization"], summary["gpu_sm_mhz"]) == (pytest.approx(0.8), 1800)
    assert (summary["gpu_temperature_c"], summary["gpu_memory_used_bytes"]) == (70, 9)
    assert (summary["gpu_throttle_reasons"], summary["telemetry_note"]) == (None, "")


def test_a_gpu_that_does_not_count_its_energy_has_none():
    summary = summarize(on_gpus([gpu(100)], [gpu(300)], [gpu(500)]), [(10 * S, 12 * S)], "GPU-a")
    assert (summary["gpu_energy_j"], summary["gpu_power_w"]) == (None, 400)
    assert summary["telemetry_note"] == "no GPU energy: the GPU does not count it"


def test_ranks_that_share_a_gpu_have_a_part_of_its_energy_each():
    samples = on_gpus([gpu(100, 0)], [gpu(300, 150)], [gpu(300, 600)])
    whole = summarize(samples, [(10 * S, 12 * S)], "GPU-a")
    parts = [summarize(samples, [(10 * S, 12 * S)], "GPU-a", num_sharing=3) for _ in range(3)]
    assert sum(part["gpu_energy_j"] for part in parts) == whole["gpu_energy_j"] == 600
    assert parts[0]["gpu_power_w"] == whole["gpu_power_w"]
    assert "one of 3 ranks that share the GPU" in parts[0]["telemetry_note"]


def test_a_slice_has_no_energy_and_its_note_says_why():
    samples = on_gpus(*([gpu(None, clock_mhz=1500, note="all slices together")] for _ in range(3)))
    summary = summarize(samples, [(10 * S, 12 * S)], "GPU-a")
    assert (summary["gpu_energy_j"], summary["gpu_power_w"], summary["gpu_sm_mhz"]) == (
        None,
        None,
        1500,
    )
    assert summary["telemetry_note"] == "all slices together"


def test_a_short_window_says_that_a_gpus_averages_are_longer():
    samples = on_gpus([gpu(100, 10)], [gpu(300, 40)])
    summary = summarize(samples, [(int(10.5 * S), int(10.6 * S))], "GPU-a")
    assert (summary["gpu_power_w"], summary["gpu_energy_j"]) == (300, pytest.approx(3))
    assert "the window was short" in summary["telemetry_note"]


def test_a_gpu_that_nvml_does_not_see_is_named():
    summary = summarize(on_gpus([gpu(1)], [gpu(1)]), [(10 * S, 11 * S)], "GPU-c")
    assert summary["gpu_power_w"] is None
    assert "no figures of GPU GPU-c" in summary["telemetry_note"]


def test_reasons_are_those_seen_in_the_window_once_each():
    seen = [("hw_slowdown",), ("sw_power_cap", "gpu_idle"), (), ("sw_power_cap",)]
    samples = on_gpus(*([gpu(1, throttle_reasons=names)] for names in seen))
    assert (
        summarize(samples, [(10 * S, 13 * S)], "GPU-a")["gpu_throttle_reasons"]
        == "gpu_idle,sw_power_cap"
    )
    assert summarize(samples[1:3], [(11 * S, 12 * S)], "GPU-a")["gpu_throttle_reasons"] == ""


def test_more_than_a_tenth_of_the_cores_is_a_disturbance():
    assert is_disturbed({"other_load_cores": 0.41, "watched_cores": 4})
    assert not is_disturbed({"other_load_cores": 0.4, "watched_cores": 4})
    assert not is_disturbed({})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, False),
        ({"gpu_throttle_reasons": "applications_clocks_setting,gpu_idle"}, False),
        ({"gpu_throttle_reasons": "gpu_idle,sw_power_cap"}, True),
        ({"steal_fraction": 0.01, "cpu_throttled_fraction": 0.01}, False),
        ({"steal_fraction": 0.02, "load_window_s": 2, "watched_cores": 2}, True),
        ({"steal_fraction": 0.02, "load_window_s": 0.6, "watched_cores": 2}, False),  # 2 ticks
        ({"cpu_throttled_fraction": 0.02}, True),
    ],
)
def test_throttling_is_what_nobody_set(values, expected):
    assert is_throttled(values) == expected


def test_every_sample_of_the_window_is_a_row_for_the_node_and_for_each_gpu():
    names = ("sw_power_cap", "gpu_idle")
    reading = gpu(
        *(250, 9),
        utilization=0.5,
        clock_mhz=1900,
        memory_clock_mhz=2600,
        temperature_c=60,
        throttle_reasons=names,
        memory_used_bytes=3,
    )
    samples = [
        counted(10, reading, busy=1, own=1, energy=50),
        counted(12, reading, busy=5, own=3, energy=250, mhz=2000),
        counted(12.05, reading, busy=6, own=3),
        counted(13, reading),
    ]
    rows = sample_rows(samples, 11 * S, int(12.5 * S))
    assert [(row["time_ns"], row["device"]) for row in rows] == [
        (12 * S, "cpu"),
        (12 * S, "gpu0"),
        (int(12.05 * S), "cpu"),
        (int(12.05 * S), "gpu0"),
    ]
    assert all(tuple(row) == ROW_COLUMNS for row in rows)
    assert tuple(rows[0].values()) == (
        *(12 * S, "cpu", 1.0, 0.0, 0.0, 0.5, 100.0, 2000, None, None, None, 7),
    )
    assert tuple(rows[1].values()) == (
        *(12 * S, "gpu0", None, None, None, 0.5, 250, 1900, 2600, 60, "gpu_idle,sw_power_cap", 3),
    )
    assert rows[2]["other_load_cores"] == pytest.approx((5 - 2) / 2.05)  # ticks: since 10, not 12
    assert sample_rows(samples, 10 * S, 11 * S)[0]["other_load_cores"] is None


def test_a_run_has_the_worst_figure_of_any_node():
    quiet = {"other_load_cores": 0.5, "watched_cores": 4, "steal_fraction": 0.0, "cpu_mhz": 3000}
    busy = {"other_load_cores": 3.0, "watched_cores": 4, "steal_fraction": 0.1, "cpu_mhz": 2500}
    figures = node_figures([("a", quiet), ("a", quiet), ("b", busy), ("b", busy)], 1)
    # node b has 4 cores, of which 3 are used by others and 2 wanted by ranks
    assert figures["cores_short"] == (3 + 2 - 4) / 2
    assert (figures["steal_fraction"], figures["cpu_mhz"]) == (0.1, 2500)
    assert figures["gpu_sm_mhz"] is None


def test_no_more_cores_are_short_than_others_use():
    crowded = {"other_load_cores": 1.0, "watched_cores": 2}
    ranks = [("a", crowded)] * 4  # four ranks want two cores: the case itself is short of two
    assert node_figures(ranks, 1)["cores_short"] == 1 / 4


@pytest.mark.parametrize(
    ("summary", "cores"), [({}, 1), ({"other_load_cores": 1.0, "watched_cores": 2}, 0)]
)
def test_cores_are_short_of_nobody_without_a_load_or_among_ranks_that_sleep(summary, cores):
    assert node_figures([("a", summary)], cores)["cores_short"] is None
