"""Placement and fingerprint of ranks on machines that are written down."""

from __future__ import annotations

import dataclasses

import pytest

from ppbench.run.machine.environment import Environment, Gpu, fingerprint_here, read_environment
from ppbench.run.machine.placement import (
    Place,
    has_too_few_cores,
    machine_id,
    needs_host_memory,
    on_cores,
    ranks_on_devices,
    shares_device,
)

EIGHT = tuple(Gpu("NVIDIA H100 80GB HBM3", 80 << 30) for _ in range(8))
MACHINE = Environment(
    *("node", "Linux", "3.12", "Some CPU", 64, 1 << 40, EIGHT, "18 NVLink", "550.1", "2.11"),
    *("12.8", "2.27", "4.57"),
)


def on_two_machines(num_ranks, per_machine=8):
    return [
        Place(f"m{rank // 8}", 64, f"{rank // 8}-{rank % 8 % per_machine}", f"0000:{rank % 8}")
        for rank in range(num_ranks)
    ]


def test_sixteen_ranks_on_two_machines_of_eight_gpus_have_one_each():
    places = on_two_machines(16)
    assert not shares_device(places)
    assert not needs_host_memory(places)
    assert set(ranks_on_devices(places).values()) == {1}


def test_a_machine_with_fewer_gpus_than_ranks_shares_them_whatever_the_other_has():
    places = [*on_two_machines(8), *on_two_machines(16, per_machine=4)[8:]]
    assert shares_device(places)
    assert needs_host_memory(places)
    assert not shares_device(places[:12])


def test_parts_of_one_gpu_are_devices_of_their_own_that_nccl_refuses_to_join():
    parts = [Place("m", 8, f"MIG-{part}", "0000:c1:00.0") for part in "ab"]
    assert not shares_device(parts)
    assert needs_host_memory(parts)
    apart = [dataclasses.replace(part, machine=part.device) for part in parts]
    assert not needs_host_memory(apart)


def test_ranks_without_gpus_need_cores_of_their_own_machine():
    places = [Place(f"m{rank // 4}", 8) for rank in range(8)]
    assert not has_too_few_cores(places, 2)  # 16 threads on twice 8 cores
    assert has_too_few_cores(places, 3)
    assert not has_too_few_cores(on_two_machines(16), 1000)


def test_a_case_on_cores_among_cases_on_gpus_is_judged_by_its_cores():
    places = on_cores([Place("m", 2, "GPU-1", "0000:c1:00.0")] * 4)
    assert not shares_device(places)
    assert not needs_host_memory(places)
    assert has_too_few_cores(places, 1)


def fingerprint(num_ranks, machines=1, device="cuda", **changes):
    return dataclasses.replace(MACHINE, **changes).fingerprint(device, num_ranks, 1, machines)


def test_the_fingerprint_of_two_machines_is_that_of_nccl_and_of_their_network():
    shared = fingerprint(16)
    assert fingerprint(16, 2) != shared
    assert fingerprint(8, 2) != fingerprint(8)  # the network is in between
    assert fingerprint(8) == fingerprint(2)
    assert fingerprint(4, 2, device="cpu") == fingerprint(4, device="cpu")


def test_the_fingerprint_of_a_part_of_a_gpu_is_its_own():
    whole = fingerprint(1, gpus=EIGHT[:1])
    part = fingerprint(1, gpus=(Gpu("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 20 << 30),))
    smaller = fingerprint(1, gpus=(Gpu("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5 << 30),))
    assert len({whole, part, smaller}) == 3


def test_the_order_of_devices_is_not_part_of_the_fingerprint():
    two = (Gpu("A", 1), Gpu("B", 2))
    assert fingerprint(2, gpus=two) == fingerprint(2, gpus=two[::-1])


@pytest.mark.parametrize(
    ("per_machine", "num_ranks", "num_machines"),
    [
        (None, 16, 1),  # the controller of a launch on this machine
        ("8", 16, 2),
        ("8", 9, 2),
        ("8", 8, 1),
    ],
)
def test_a_rank_has_the_fingerprint_of_its_machines(
    monkeypatch, per_machine, num_ranks, num_machines
):
    if per_machine is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", per_machine)
    known = read_environment().fingerprint("cuda", num_ranks, 1, num_machines)
    assert fingerprint_here("cuda", num_ranks, 1) == known


def test_containers_of_a_machine_share_its_id(tmp_path):
    (tmp_path / "boot_id").write_text("12-34\n")
    assert machine_id(tmp_path / "boot_id") == "12-34"
    assert machine_id(tmp_path / "none")
