from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from tracked import CASE, STEADY, add_launches, store_in

from ppbench.commits import noise
from ppbench.judge.slowdowns import Slowdown
from ppbench.store import Store

SWEEP = 'name = "demo"\ndevice = "cpu"\n'


def measured(folder: Path, store: Store, monkeypatch) -> noise.NoiseResult:
    """A measurement that found the last five launches finished."""
    runs = pd.DataFrame(store.runs()).tail(5)
    asked: dict[str, str] = {}

    def finished(*_: object, **how: str) -> SimpleNamespace:
        asked.update(how)
        return SimpleNamespace(frame=runs, plan=SimpleNamespace(items=runs["run_id"]))

    monkeypatch.setattr(noise, "run_sweep", finished)
    file = folder / "demo.toml"
    file.write_text(SWEEP)
    result = noise.noise(file, launches=5, results=store.folder)
    assert asked["to_repeat"].startswith(f"ppbench sweep {file} --set measure.launches=5")
    return result


def notes_of(folder: Path, speeds: list[float], monkeypatch, **changes: object) -> tuple[str, ...]:
    store = store_in(folder)
    add_launches(store, speeds, "ba5e" * 10, CASE, **changes)
    return measured(folder, store, monkeypatch).notes


def test_quiet_launches_have_no_note(tmp_path, monkeypatch):
    (note,) = notes_of(tmp_path, STEADY, monkeypatch)
    assert note.startswith("the drift between sessions is not known: it takes launches of one ")


@pytest.mark.parametrize("spread", [1.0, 1.2])
def test_disturbed_launches_and_a_noise_that_hides_changes_are_noted(tmp_path, monkeypatch, spread):
    speeds = [speed * spread ** (n % 2) for n, speed in enumerate(STEADY)]
    notes = notes_of(tmp_path, speeds, monkeypatch, cautions="busy_machine")
    assert notes[0].startswith("5 of 5 runs carry the caution busy_machine: ")
    hidden = [note for note in notes if "do not find the usual threshold of 2%" in note]
    assert len(hidden) == (spread > 1)


def test_a_launch_that_is_no_part_of_the_noise_is_named_with_the_reason(tmp_path, monkeypatch):
    notes = notes_of(tmp_path, [*STEADY[:-1], 0.7 * STEADY[-1]], monkeypatch)
    (note,) = [text for text in notes if "no part of the noise" in text]
    reason = "it lies far from the others"
    assert note.endswith(f"launch 4 is no part of the noise: {reason}")


@pytest.mark.parametrize(("num_slow", "num_left_out"), [(2, 2), (3, 0)])
def test_a_slow_machine_is_no_part_of_the_noise_while_three_others_are_left(
    tmp_path, monkeypatch, num_slow, num_left_out
):
    def slowdowns_by_run(runs):
        ids = sorted(runs["run_id"])
        return {run_id: Slowdown(0.2) for run_id in ids[:num_slow]}

    monkeypatch.setattr(noise, "slowdowns_by_run", slowdowns_by_run)
    notes = notes_of(tmp_path, STEADY, monkeypatch)
    named = [note for note in notes if "no part of the noise" in note]
    assert len(named) == num_left_out
    assert all(note.endswith("its reference ran 20 % slower than usual") for note in named)


def test_the_drift_between_sessions_stands_beside_the_noise_of_launches(tmp_path, monkeypatch):
    store = store_in(tmp_path)
    for day, level in ((1, 1.0), (3, 1.03), (5, 0.97)):
        at = f"2026-01-{day:02d}T09:00:00+00:00"
        speeds = [level * speed for speed in STEADY]
        add_launches(store, speeds, "ba5e" * 10, CASE, created_at=at)
    result = measured(tmp_path, store, monkeypatch)
    (row,) = result.frame.to_dict("records")
    assert result.has_drift
    assert row["num_sessions"] == 3
    assert row["deviation"] < 0.004 < 0.02 < row["drift"] < 0.04
    assert row["drift_low"] < row["drift"] < row["drift_high"]
    assert result.notes == ()
