"""Whether workers may be forked, and that they are spawned where they may not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ppbench.run.launch.forking import has_started_driver, may_fork


def test_a_process_that_has_used_no_device_may_be_forked():
    assert may_fork()


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_process_in_which_torch_has_started_a_device_may_not(monkeypatch, kind):
    monkeypatch.setattr(getattr(torch, kind), "is_initialized", lambda: True)
    assert not may_fork()


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
