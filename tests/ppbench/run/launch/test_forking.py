"""Whether workers may be forked, and that they are spawned where they may not."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from ppbench.run.launch import forking
from ppbench.run.launch.forking import FORK, SPAWN, has_started_driver, is_child_sound, start_method


def touch(monkeypatch, kind="cuda"):
    """Do as torch does when a device is started: say so in every fork of this process."""
    pid = os.getpid()
    module = getattr(torch, kind)
    monkeypatch.setattr(module, "_is_in_bad_fork", lambda: os.getpid() != pid)


def test_a_process_that_has_used_no_device_may_be_forked():
    assert is_child_sound()
    assert start_method() == FORK


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_child_notices_that_its_parent_has_used_a_device(monkeypatch, kind):
    touch(monkeypatch, kind)
    assert not forking.is_in_bad_fork()  # of this process itself
    assert not is_child_sound()
    assert start_method() == SPAWN


@pytest.mark.parametrize(
    ("maps", "code", "is_started"),
    [
        ("7f00 r-xp /usr/lib/libcuda.so.550\n", 0, True),
        ("7f00 r-xp /usr/lib/libcuda.so.550\n", 3, False),  # CUDA_ERROR_NOT_INITIALIZED
        ("7f00 r-xp /usr/lib/libc.so.6\n", 0, False),
    ],
)
def test_a_driver_that_another_package_has_started_is_noticed(tmp_path, maps, code, is_started):
    (tmp_path / "maps").write_text(maps)
    asked = []

    def load(name):
        asked.append(name)
        return SimpleNamespace(cuDeviceGetCount=lambda _count: code)

    assert has_started_driver(tmp_path / "maps", load) == is_started
    assert asked == (["libcuda.so.1"] if "libcuda" in maps else [])  # never loaded by asking


def test_where_nothing_says_what_is_loaded_no_driver_is(tmp_path):
    assert not has_started_driver(tmp_path / "none")
