"""Readings of a machine that is written down: files as Linux has them."""

import os

import pytest

from ppbench.run.machine.counters import (
    Host,
    PackageEnergy,
    cpu_groups,
    cpu_seconds,
    mean_mhz,
    memory_used_bytes,
    throttled_s,
)

TICK = 1 / os.sysconf("SC_CLK_TCK")

STAT = """\
cpu  999 999 999 999 999 999 999 999 0 0
cpu0 100 10 20 800 50 1 2 17 5 0
cpu1 200 0 0 700 0 0 0 100 0 0
cpu12 7 7 7 7 7 7 7 7 7 7
intr 1 2 3
"""


def test_waiting_for_disks_is_idle_and_stolen_time_is_not_busy():
    for cores, ticks in (({0}, (1000, 133, 17)), ({0, 1}, (2000, 333, 117))):
        assert list(cpu_seconds(STAT, cores).values()) == pytest.approx([n * TICK for n in ticks])


def test_a_sandbox_that_counts_nothing_has_no_times():
    assert cpu_seconds("cpu  0 0 0 0 0 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0 0 0\n", {0}) == {}
    assert cpu_seconds("", {0}) == {}


def test_the_frequency_is_the_mean_of_the_named_cores():
    lines = [f"processor\t: {i}\nmodel name\t: x\ncpu MHz\t\t: {1000 * i}.5\n" for i in range(4)]
    assert mean_mhz("\n".join(lines), {1, 3}) == 2000.5
    assert mean_mhz("processor\t: 0\nBogoMIPS\t: 50.00\n", {0}) is None


def test_used_memory_is_what_is_not_available():
    assert memory_used_bytes("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\n") == 614400
    assert memory_used_bytes("MemTotal: 1000 kB\n") is None


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def process(root, pid, parent, ticks, children_ticks=0, name="python"):
    counts = f"{ticks} 0 {children_ticks} 0"
    fields = f"S {parent} 1 1 0 -1 4194304 1 2 3 4 {counts} 20 0 1 0 12345"
    write(root / f"proc/{pid}/stat", f"{pid} ({name}) {fields}\n")


def own_s(host):
    return host.read()["own_s"]


def test_the_launch_is_the_agent_and_all_its_descendants(tmp_path):
    process(tmp_path, 1, 0, 1000)
    process(tmp_path, 10, 1, 5)
    process(tmp_path, 11, 10, 7, name="a (strange) name")
    process(tmp_path, 3, 11, 11)  # numbers start again when they run out
    process(tmp_path, 20, 1, 2000)
    assert own_s(Host({10}, {0}, tmp_path)) == pytest.approx(23 * TICK)


def test_what_a_child_used_stays_when_it_has_ended(tmp_path):
    process(tmp_path, 10, 1, 5)
    process(tmp_path, 11, 10, 7)
    host = Host({10}, {0}, tmp_path)
    before = own_s(host)
    (tmp_path / "proc/11/stat").unlink()
    (tmp_path / "proc/11").rmdir()
    process(tmp_path, 10, 1, 5, children_ticks=7)
    assert own_s(host) == before == pytest.approx(12 * TICK)


def test_a_later_and_an_orphaned_process_belong_to_the_launch(tmp_path):
    process(tmp_path, 10, 1, 5)
    host = Host({10}, {0}, tmp_path)
    assert own_s(host) == pytest.approx(5 * TICK)
    process(tmp_path, 12, 10, 1)
    assert own_s(host) == pytest.approx(6 * TICK)
    process(tmp_path, 12, 1, 4)
    assert own_s(host) == pytest.approx(9 * TICK)


def test_quotas_of_all_groups_around_count(tmp_path):
    write(tmp_path / "a/b/cpu.stat", "usage_usec 5\nthrottled_usec 1500000\n")
    write(tmp_path / "a/cpu.stat", "usage_usec 5\nthrottled_usec 250000\n")
    write(tmp_path / "cpu.stat", "usage_usec 5\n")
    groups = list(cpu_groups("4:memory:/x\n0::/a/b\n", tmp_path))
    assert groups == [tmp_path, tmp_path / "a/b", tmp_path / "a"]
    assert throttled_s(groups) == 1.75
    assert throttled_s(cpu_groups("0::/\n", tmp_path)) is None


def test_a_launch_in_a_group_of_version_1_is_seen_to_be_throttled(tmp_path):
    write(tmp_path / "proc/self/cgroup", "3:cpu,cpuacct:/docker/x\n2:memory:/docker/x\n")
    text = "nr_periods 9\nnr_throttled 3\nthrottled_time 250000000\n"
    write(tmp_path / "sys/fs/cgroup/cpu/docker/x/cpu.stat", text)
    assert Host({1}, {0}, tmp_path).read()["throttled_s"] == 0.25


def test_energy_is_that_of_all_packages_and_survives_the_counters_wrap(tmp_path):
    for number, name in enumerate(("package-0", "package-1", "psys")):
        write(tmp_path / f"intel-rapl:{number}/name", f"{name}\n")
        write(tmp_path / f"intel-rapl:{number}/energy_uj", "900000\n")
        write(tmp_path / f"intel-rapl:{number}/max_energy_range_uj", "999999\n")
    energy = PackageEnergy(tmp_path)
    assert energy.joules() == 0
    write(tmp_path / "intel-rapl:0/energy_uj", "950000\n")
    write(tmp_path / "intel-rapl:1/energy_uj", "100000\n")
    write(tmp_path / "intel-rapl:2/energy_uj", "950000\n")
    assert energy.joules() == pytest.approx(0.05 + 0.2)


def test_what_a_machine_does_not_tell_is_none_and_says_why(tmp_path):
    host = Host({10}, {0, 1}, tmp_path)
    reading = host.read()
    assert {name for name, value in reading.items() if value is not None} == {"num_cores"}
    assert host.absent.keys() == {"cpu_load", "cpu_energy"}
    write(tmp_path / "sys/class/powercap/intel-rapl:0/name", "package-0\n")
    assert "may not be read" in Host({10}, {0}, tmp_path).absent["cpu_energy"]


def test_the_frequency_files_come_before_cpuinfo(tmp_path):
    write(tmp_path / "proc/cpuinfo", "processor\t: 0\ncpu MHz\t\t: 1.0\n")
    assert Host({1}, {0}, tmp_path).read()["clock_mhz"] == 1
    for core, khz in enumerate((2_000_000, 3_000_000)):
        write(tmp_path / f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq", f"{khz}\n")
    assert Host({1}, {0, 1}, tmp_path).read()["clock_mhz"] == 2500
