"""What is said of stored launches."""

from __future__ import annotations

import json

import numpy as np
import pytest
from measured import SWEEP, add_measured, now
from repositories import commits, make_repository
from tracked import STEADY

from ppbench.commits import bench, noise
from ppbench.comparison import evidence
from ppbench.comparison.rounds import starts_in
from ppbench.errors import UsageError
from ppbench.judge.slowdowns import Slowdown
from ppbench.store import Store


@pytest.fixture
def tree(tmp_path):
    """A repository whose only commit is checked out, and its sweep file."""
    folder = make_repository(tmp_path / "repository")
    (sha,) = commits(folder, 1)
    (folder / ".git" / "info" / "exclude").write_text("sweep.toml\nresults/\n")
    file = folder / "sweep.toml"
    file.write_text(SWEEP)
    return file, sha


def add_pairs(tree, speeds, others=STEADY, **changes):
    """Launches in which two sets of processes took turns; the rounds show the second ones."""
    file, sha = tree
    for at, (speed, other) in enumerate(zip(speeds, others, strict=True)):
        for place, own in enumerate((speed, other)):
            rounds = [own * (1 + step / 5000) for step in (-2, -1, 0, 1, 2, -2, -1, 0, 1, 2)]
            row = {
                "launch": 2 * at + place,
                "process_start": f"start {at}",
                "rounds": json.dumps({"round": list(range(10)), "tokens_per_s": rounds}),
                **now(),
                **changes,
            }
            add_measured(file, sha, [own], **row)


def measured(tree, launches=5, **options) -> noise.NoiseResult:
    file, _ = tree
    return noise.noise(file, launches=launches, results=file.parent / "results", **options)


def notes_of(tree, speeds, **changes: object) -> tuple[str, ...]:
    add_pairs(tree, speeds, **changes)
    return measured(tree).notes


def test_what_a_launch_decides_and_what_a_claim_needs_is_said(tree):
    first, second = notes_of(tree, STEADY)
    assert first.startswith("1f1b: a launch decides 0.")
    assert "a claim of 1, 2 or 5 % needs 3, 3 and 3 launches of each side in turns, or " in first
    assert second.startswith("the drift between sessions is not known: it takes launches of one ")


def test_a_machine_that_is_slow_from_start_to_start_is_noise_of_launches_alone(tree):
    """Both sides are slow then, so that turns show differences that launches alone do not."""
    levels = (1.0, 0.93, 1.05, 0.97, 1.02)
    sides = ([level * speed for level, speed in zip(levels, STEADY, strict=True)] for _ in "AB")
    add_pairs(tree, *sides)
    (row,) = measured(tree).frame.to_dict("records")
    assert row["num_launches"] == 5
    assert row["deviation"] > 0.03
    assert row["deviation_in_turns"] == pytest.approx(0.0, abs=1e-9)
    assert row["deviation_of_starts"] == pytest.approx(0.0, abs=1e-9)


def test_sides_that_differ_from_start_to_start_are_noise_in_turns(tree):
    ratios = np.array([1.0, 1.02, 0.99, 1.01, 0.98])
    add_pairs(tree, STEADY, STEADY * ratios)
    (row,) = measured(tree).frame.to_dict("records")
    expected = np.std(np.log(ratios), ddof=1)
    assert row["deviation_in_turns"] == pytest.approx(expected, rel=1e-3)
    assert row["deviation_of_starts"] == pytest.approx(expected, rel=1e-3)  # rounds agree


def test_the_noise_of_a_commit_tells_comparisons_what_starts_decide(tree):
    add_pairs(tree, STEADY, STEADY * np.array([1.0, 1.02, 0.99, 1.01, 0.98]))
    store = Store(tree[0].parent / "results")
    starts = starts_in(store.runs())
    assert starts is not None
    assert 0.01 < starts.deviation < 0.02


def test_cautions_of_the_launches_are_noted(tree):
    notes = notes_of(tree, STEADY, cautions="busy_machine")
    assert notes[1].startswith("10 of 10 runs carry the caution busy_machine: ")


def test_a_launch_far_from_the_others_is_no_part_of_the_noise(tree):
    add_pairs(tree, [*STEADY[:-1], 0.7 * STEADY[-1]])
    result = measured(tree)
    assert result.has_discounts
    assert list(result.frame["num_discounted"]) == [1]


@pytest.mark.parametrize(("num_slow", "num_left_out"), [(2, 2), (3, 0)])
def test_a_slow_machine_is_no_part_of_the_noise_while_three_others_are_left(
    tree, monkeypatch, num_slow, num_left_out
):
    def slowdowns_by_run(runs):
        ids = sorted(runs["run_id"])
        return {run_id: Slowdown(0.2) for run_id in ids[: 2 * num_slow]}

    monkeypatch.setattr(evidence, "slowdowns_by_run", slowdowns_by_run)
    add_pairs(tree, STEADY)
    assert list(measured(tree).frame["num_discounted"]) == [num_left_out]


def test_the_drift_between_sessions_stands_beside_the_noise_of_launches(tree):
    for day, level in ((1, 1.03), (3, 0.97)):
        at = f"2026-01-{day:02d}T09:00:00+00:00"
        speeds = [level * speed for speed in STEADY]
        add_pairs(tree, speeds, speeds, created_at=at)
    add_pairs(tree, STEADY)
    result = measured(tree)
    (row,) = result.frame.to_dict("records")
    assert result.has_drift
    assert row["num_sessions"] == 3
    assert row["deviation"] < 0.004 < 0.02 < row["drift"] < 0.04


def test_a_budget_that_is_too_short_for_one_launch_is_refused_and_what_was_made_is_kept(
    tree, monkeypatch
):
    file, sha = tree

    def start(_bench, targets, numbers, _num_launches):
        """As if ranks had been started: launches of both sides in turns."""
        for launch in numbers:
            add_measured(file, sha, [1000.0], launch=launch, **now())
        return dict.fromkeys(range(len(targets)))

    monkeypatch.setattr(bench.Bench, "_start", start)
    with pytest.raises(UsageError, match=r"--budget: 0:00 is too short for one round; the first"):
        measured(tree, budget_s=0.01)
    runs = Store(file.parent / "results").runs(["commit", "launch"])
    assert list(runs["commit"]) == [sha, sha], runs
    assert sorted(runs["launch"]) == [0, 1]
