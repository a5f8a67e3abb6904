"""Where a node's ranks keep their files, whoever has started them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ppbench.run.machine import node_folder
from ppbench.run.machine.node_folder import make_node_folder, node_folder_of_rank


def test_ranks_of_plain_torchrun_share_a_folder_that_none_was_handed_down(monkeypatch):
    monkeypatch.delenv("PPBENCH_NODE_FOLDER", raising=False)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")  # as it is without a folder for logs
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "trial")
    folder = node_folder_of_rank()
    assert folder.parent.parent == Path(tempfile.gettempdir())
    assert folder.parent.name == f"ppbench-trial-{os.getppid()}"


def test_the_folder_is_on_disk_where_shared_memory_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(node_folder, "ROOM_BYTES", 2**62)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert make_node_folder("a").parent.parent == tmp_path
