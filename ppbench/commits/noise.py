"""Measures how much launches of one case differ on this machine."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ppbench.commits.advice import sweep_command
from ppbench.commits.gate import THRESHOLD
from ppbench.comparison.lines import listed
from ppbench.comparison.notes import cautions
from ppbench.comparison.sessions import BREAK, drifts_like
from ppbench.comparison.slowdowns import recorded, slowdowns_by_run
from ppbench.config.reader import read_sweep
from ppbench.display.cases import case_text, without_not_finite
from ppbench.display.changes import discount_text
from ppbench.display.metrics import METRICS
from ppbench.errors import ExitCode
from ppbench.judge.differences import FEWEST_LAUNCHES
from ppbench.judge.evidence import DiscountReason
from ppbench.judge.forecast import found_by
from ppbench.judge.noise import noise_of_launches
from ppbench.judge.slowdowns import NOT_KNOWN, is_disturbed
from ppbench.judge.verdicts import SPEED
from ppbench.run.machine.environment import default_device
from ppbench.run.sweep.control import run_sweep
from ppbench.run.sweep.plan import Choice
from ppbench.run.sweep.progress import Display
from ppbench.store import Store, check_writable

NUM_LAUNCHES = 5
"""Launches per side assumed for the detectable change."""


@dataclass(frozen=True, repr=False)
class NoiseResult:
    """The noise of a sweep's cases, as it was measured."""

    frame: pd.DataFrame  # a row per case: its last run, and the noise of its throughput
    axes: tuple[str, ...]  # settings in which the cases differ
    num_planned: int  # launches of all cases
    num_ok: int
    notes: tuple[str, ...] = ()  # cautions of the launches, and noise that hides changes

    def __repr__(self) -> str:
        launches = f"{self.num_ok} of {self.num_planned} launches ok"
        noises = ", ".join(f"{deviation:.2%}" for deviation in self.frame.get("deviation", []))
        return f"<NoiseResult {noises or 'of no case'}: {launches}>"

    @property
    def has_drift(self) -> bool:
        """Whether the drift between sessions is known of any case."""
        return not self.frame.empty and bool(self.frame["drift"].notna().any())

    @property
    def num_discounted(self) -> int:
        """Launches that are no part of the noise, since something slowed them."""
        return 0 if self.frame.empty else int(self.frame["num_discounted"].sum())

    @property
    def exit_code(self) -> ExitCode:
        if self.num_ok < self.num_planned:
            return ExitCode.failed_runs
        return ExitCode.insufficient if self.frame.empty else ExitCode.ok


def noise(
    sweep: Path | str,
    *,
    launches: int = 10,
    overrides: Sequence[str] = (),
    results: Path | str = Path("results"),
    display: Display | None = None,
) -> NoiseResult:
    """Launch every case of a sweep file so often, and say by how much its launches differ.

    Raises what running a sweep raises.
    """
    settings = [*overrides, f"measure.launches={launches}"]
    read, store = read_sweep(Path(sweep), settings, default_device()), Store(Path(results))
    check_writable(store.folder, "--results")
    to_repeat = sweep_command(str(sweep), settings, store.folder)
    done = run_sweep(read, store, Choice(), display, to_repeat=to_repeat)
    runs = without_not_finite(done.frame)
    good = runs[runs["status"] == "ok"]
    slowdowns = slowdowns_by_run(recorded(store, set(good["fingerprint"])))
    rows: list[dict[Hashable, Any]] = []
    left_out: list[str] = []
    for _, of_case in good.groupby("case_id", sort=False):
        if len(of_case) < FEWEST_LAUNCHES:
            continue
        # Launches that comparisons would discount do not count; those whose machine was slow do if
        # too few others are left.
        ids = of_case["run_id"]
        is_slow = [is_disturbed(slowdowns.get(str(run_id), NOT_KNOWN)) for run_id in ids]
        has_others = len(of_case) - sum(is_slow) >= FEWEST_LAUNCHES
        slow = of_case[is_slow] if has_others else of_case.iloc[:0]
        usual = of_case.drop(slow.index)
        level = noise_of_launches(METRICS[SPEED], [usual[SPEED].tolist()])
        if level is None:
            continue
        apart = usual["run_id"].iloc[list(level.left_out[0])]
        reasons = dict.fromkeys(map(str, slow["run_id"]), DiscountReason.reference)
        reasons |= dict.fromkeys(map(str, apart), DiscountReason.apart)
        last = dict(of_case.iloc[-1])
        speed = METRICS[SPEED]
        drift = drifts_like(of_case.tail(1), [speed], store).get(SPEED)
        rows.append(
            {
                **last,
                "num_launches": len(of_case),
                "num_discounted": len(reasons),
                "deviation": level.noise.deviation,
                "deviation_low": level.low,
                "deviation_high": level.high,
                "detectable_change": found_by(level.noise, NUM_LAUNCHES),
                "num_sessions": 1 if drift is None else drift.num_sessions,
                "drift": None if drift is None else drift.deviation,
                "drift_low": None if drift is None else drift.low,
                "drift_high": None if drift is None or math.isinf(drift.high) else drift.high,
            }
        )
        for row in of_case.to_dict("records"):
            if reason := reasons.get(str(row["run_id"])):
                why = discount_text(reason, slowdowns.get(str(row["run_id"]), NOT_KNOWN))
                launch = f"{case_text(pd.Series(row), read.axes)}, launch {row['launch']}"
                left_out.append(f"{launch} is no part of the noise: {why}")
    texts: list[str] = []
    if rows:
        texts += [*cautions(good), *left_out]
        large = [
            f"{case_text(pd.Series(row), read.axes)} ({row['detectable_change']:.1%})"
            for row in rows
            if row["detectable_change"] > THRESHOLD
        ]
        if large:  # changes of the size that the gate allows cannot be seen
            texts.append(
                f"{NUM_LAUNCHES} launches a side do not find the usual threshold of "
                f"{THRESHOLD:.0%}: {listed(large)}: measure in turns, or again while nothing else "
                "runs"
            )
        if all(row["drift"] is None for row in rows):
            texts.append(
                "the drift between sessions is not known: it takes launches of one commit in two; "
                f"after a break of {BREAK.total_seconds() / 3600:.0f} hours: {to_repeat} --rerun"
            )
    planned = len(done.plan.items)
    return NoiseResult(pd.DataFrame(rows), tuple(read.axes), planned, len(good), tuple(texts))
