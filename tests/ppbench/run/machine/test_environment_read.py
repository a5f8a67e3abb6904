"""Cores that control groups leave a process, and names of CPUs that tell machines apart."""

from __future__ import annotations

import math

from ppbench.run.machine.counters import cpu_groups, quota_of_cores
from ppbench.run.machine.environment import name_of_cpu


def groups(tmp_path, own, **files):
    for name, text in files.items():
        path = tmp_path / "groups" / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return quota_of_cores(list(cpu_groups(own, tmp_path / "groups")))


def test_the_own_groups_limit_counts_and_those_above_it(tmp_path):
    own = "0::/a.slice/b.service\n"
    assert groups(tmp_path, own) == math.inf
    files = {"cpu_DOT_max": "max 100000", "a.slice__cpu_DOT_max": "400000 100000"}
    assert groups(tmp_path, own, **files) == 4
    assert groups(tmp_path, own, **{"a.slice__b.service__cpu_DOT_max": "150000 100000"}) == 1.5


def test_the_limit_of_a_containers_root_counts(tmp_path):
    assert groups(tmp_path, "0::/not/here\n", cpu_DOT_max="200000 100000") == 2


def test_limits_of_version_1_count(tmp_path):
    quota, period = ("cpu__docker__x__cpu.cfs_quota_us", "cpu__docker__x__cpu.cfs_period_us")
    own = "3:cpu,cpuacct:/docker/x\n2:memory:/docker/x\n"
    assert groups(tmp_path, own, **{quota: "300000", period: "100000"}) == 3
    assert groups(tmp_path, own, **{quota: "-1", period: "100000"}) == math.inf


def test_two_arm_machines_of_other_cores_have_other_names(tmp_path):
    def named(part):
        text = f"processor : 0\nCPU implementer\t: 0x41\nCPU part\t: {part}\n"
        (tmp_path / "cpuinfo").write_text(text)
        return name_of_cpu(tmp_path / "cpuinfo")

    assert named("0xd0c") != named("0xd4f")
    assert named("0xd0c").endswith("0x41 0xd0c")
