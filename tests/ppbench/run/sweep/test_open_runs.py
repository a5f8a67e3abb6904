"""What is done about launches that are over."""

from __future__ import annotations

import os
import time

from stored_runs import run_row

from ppbench.config.case import Case
from ppbench.run.job import Journal
from ppbench.run.sweep.open_runs import AGE_S, RUNNING, prune_launches
from ppbench.store import Store


def test_folders_of_launches_go_unless_they_run_or_a_failed_run_needs_their_logs(tmp_path):
    store = Store(tmp_path)
    failed = run_row(1, Case(), status="error", error="broken")
    store.write_run(failed, {})
    launches = {
        "done": ("ok", "some run"),
        "failed": ("error", failed["run_id"]),
        "failed, and its run was removed": ("error", "20260101T000000000-000000"),
        "running": ("ok", "some run"),
        "new": ("ok", "some run"),
    }
    for name, (status, run_id) in launches.items():
        folder = tmp_path / "launches" / name
        (folder / "logs").mkdir(parents=True)
        Journal(folder).add({"event": "row", "index": 0, "run_id": run_id, "status": status})
        if name == "running":
            (folder / RUNNING).touch()
        if name != "new":
            old_s = time.time() - 2 * AGE_S
            os.utime(folder, (old_s, old_s))
    prune_launches(store)
    left = sorted(folder.name for folder in (tmp_path / "launches").iterdir())
    assert left == ["failed", "new", "running"]
