"""Measures how much launches of one case differ on this machine, and two sides in turns.

    start 1    A A' | A' A | A A' | ...      two sets of processes of the same code take turns
    start 2    A A' | A' A | ...

How A scatters is the noise of launches that are compared one by one. How A and A' differ, from
start to start, is the noise of sides that take turns, as those of `compare --run` do.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ppbench.commits.bench import SILENT, Bench, Part, Progress
from ppbench.commits.launches import Launches
from ppbench.comparison.evidence import Background
from ppbench.comparison.launches import keys_of
from ppbench.comparison.notes import cautions
from ppbench.comparison.rounds import shared_rounds
from ppbench.comparison.sessions import BREAK
from ppbench.config.reader import read_sweep
from ppbench.config.sweep import note_unmet
from ppbench.display.cases import case_text, without_not_finite
from ppbench.display.commands import command, near
from ppbench.display.metrics import METRICS
from ppbench.display.units import counted, written
from ppbench.errors import ExitCode
from ppbench.judge.differences import FEWEST_LAUNCHES
from ppbench.judge.evidence import Noise
from ppbench.judge.forecast import MOST_LAUNCHES, found_by, launches_to_find
from ppbench.judge.noise import noise_of_launches, noise_of_rounds
from ppbench.judge.slowdowns import NOT_KNOWN, is_disturbed
from ppbench.judge.verdicts import SPEED
from ppbench.run.machine.environment import default_device
from ppbench.store import Store

NUM_LAUNCHES = 5
"""Launches per side assumed for the detectable change."""
_CLAIMS = (0.01, 0.02, 0.05)
"""Changes for which it is said how many launches find them."""


@dataclass(frozen=True, repr=False)
class NoiseResult:
    """The noise of a sweep's cases, as it was measured."""

    frame: pd.DataFrame  # a row per case: its last run, and the noise of its throughput
    axes: tuple[str, ...]  # settings in which the cases differ
    num_planned: int  # launches of all cases
    num_ok: int
    notes: tuple[str, ...] = ()  # what the noise means, cautions, and what is missing

    def __repr__(self) -> str:
        launches = f"{self.num_ok} of {self.num_planned} launches ok"
        noises = ", ".join(f"{deviation:.2%}" for deviation in self.frame.get("deviation", []))
        return f"<NoiseResult {noises or 'of no case'}: {launches}>"

    @property
    def has_drift(self) -> bool:
        """Whether the drift between sessions is known of any case."""
        return not self.frame.empty and bool(self.frame["drift"].notna().any())

    @property
    def has_discounts(self) -> bool:
        """Whether launches are no part of the noise, since something slowed them."""
        return not self.frame.empty and bool(self.frame["num_discounted"].any())

    @property
    def exit_code(self) -> ExitCode:
        if self.num_ok < self.num_planned:
            return ExitCode.failed_runs
        return ExitCode.insufficient if self.frame.empty else ExitCode.ok


def noise(
    sweep: Path | str,
    *,
    launches: int = 10,
    budget_s: float = 0.0,
    overrides: Sequence[str] = (),
    results: Path | str = Path("results"),
    progress: Progress = SILENT,
) -> NoiseResult:
    """Launch every case of a sweep file so often in turns with itself, and say how it scatters.

    With a budget no launch is begun that would end after so many seconds. Launches of the last
    hour count. Raises UsageError, StoreError and SweepInterruptedError.
    """
    read, folder = read_sweep(Path(sweep), overrides, default_device()), Path(results)
    note_unmet(read)
    num_tried, cases = 0, range(len(read.cases))
    with Bench(
        read, folder, progress, overrides=overrides, is_fresh=True, budget_s=budget_s
    ) as bench:

        def policy(stored: list[Launches]) -> Part:
            """Two sets of processes of the tree, until all cases have their launches."""
            nonlocal num_tried
            (own,) = stored
            is_short = (own.num_pairs(at) < launches and not own.does_not_run(at) for at in cases)
            if num_tried == launches or not any(is_short):
                return Part()
            num_tried += 1
            return Part((0, 0), launches - num_tried + 1)

        (made,) = bench.measure([bench.target_here()], policy)
        is_spent = bench.budget.is_spent
    store = Store(folder)
    runs = without_not_finite(store.table("runs", made.rows["run_id"]))
    good = runs[runs["status"] == "ok"]
    background = Background(good, [store])
    slowdowns, speed = background.slowdowns, METRICS[SPEED]
    rows: list[dict[Hashable, Any]] = []
    meanings = list[str]()
    for _, of_case in good.groupby("case_id", sort=False):
        number = of_case.sort_values("launch").groupby("process_start").cumcount()
        # Beside launches of A there may be more of the last hour, which had no partner.
        firsts, seconds = of_case[number == 0], of_case[number == 1]
        if len(firsts) < FEWEST_LAUNCHES:
            continue
        # Launches that comparisons would discount do not count; those whose machine was slow do if
        # too few others are left.
        by_run = (slowdowns.get(str(run_id), NOT_KNOWN) for run_id in firsts["run_id"])
        is_slow = list(map(is_disturbed, by_run))
        has_others = len(firsts) - sum(is_slow) >= FEWEST_LAUNCHES
        slow = firsts[is_slow] if has_others else firsts.iloc[:0]
        usual = firsts.drop(slow.index)
        level = noise_of_launches(speed, [usual[SPEED].tolist()])
        if level is None:
            continue
        in_turns = noise_of_rounds(speed, [shared_rounds(firsts, seconds, SPEED)])
        last = dict(of_case.iloc[-1])
        name = case_text(pd.Series(last), read.axes)
        drift = background.drift(keys_of(of_case.tail(1))[0], speed)
        rows.append(
            {
                **last,
                "num_launches": len(firsts),
                "num_discounted": len(slow) + len(level.left_out[0]),
                "deviation": level.noise.deviation,
                "deviation_low": level.low,
                "deviation_high": level.high,
                "deviation_in_turns": in_turns.launches and in_turns.launches.deviation,
                "deviation_of_starts": in_turns.starts and in_turns.starts.deviation,
                "detectable_change": found_by(
                    in_turns.launches or level.noise,
                    NUM_LAUNCHES,
                    in_turns=in_turns.launches is not None,
                ),
                "num_sessions": 1 if drift is None else int(drift.freedom) + 1,
                "drift": None if drift is None else drift.deviation,
            }
        )
        if in_turns.launches and in_turns.starts:
            of_launch, of_start = (
                written(one.deviation, ".2f", "%", 100)
                for one in (in_turns.launches, in_turns.starts)
            )
            meanings.append(
                f"{name}: a launch decides {of_launch} of the difference of two sides in turns, "
                f"of which their start decides {of_start}; a claim of 1, 2 or 5 % needs "
                f"{_launches_text(in_turns.launches, in_turns=True)} launches of each side in "
                f"turns, or {_launches_text(level.noise)} of each side alone"
            )
    texts: list[str] = []
    planned = 2 * launches * len(read.cases)
    if is_spent:
        num_made = max(made.num_pairs(at) for at in cases)
        planned = 2 * num_made * len(read.cases)
        texts.append(
            f"--budget is spent after {counted(num_made, 'launch')}, and {launches} were asked "
            "for; the same command goes on"
        )
    if rows:
        texts += [*meanings, *cautions(good)]
        if all(row["drift"] is None for row in rows):
            again = command("noise", near(str(sweep)), set=list(overrides), results=store.folder)
            texts.append(
                "the drift between sessions is not known: it takes launches of one commit in two; "
                f"after a break of {BREAK.total_seconds() / 3600:.0f} hours: {again}"
            )
    return NoiseResult(pd.DataFrame(rows), tuple(read.axes), planned, len(good), tuple(texts))


def _launches_text(noise: Noise, *, in_turns: bool = False) -> str:
    """The launches that find each of the claims: `9, 4 and 3`."""
    nums = (launches_to_find(noise, change, in_turns=in_turns) for change in _CLAIMS)
    *most, last = (f"over {MOST_LAUNCHES}" if num is None else str(num) for num in nums)
    return f"{', '.join(most)} and {last}"
