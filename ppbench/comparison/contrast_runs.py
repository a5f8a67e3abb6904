"""The cases of a sweep launched in turns until those that differ in one setting are told apart.

    sweep file --rounds of launches, every case once in each--> chosen runs --> Across

Launches of the last hour count, so that a measurement that was stopped goes on; older ones do not,
since a machine drifts by more than launches differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ppbench.comparison.across import Across, AxisQuestion, compare_along
from ppbench.comparison.known import known_of
from ppbench.comparison.launches import FRESH_S
from ppbench.comparison.measurement import measure_until_decided
from ppbench.comparison.repeats import is_lacking
from ppbench.comparison.runs import choose_runs
from ppbench.comparison.slowdowns import find_disturbed, first_launches
from ppbench.config.reader import read_sweep
from ppbench.errors import UsageError
from ppbench.judge.looks import ONE_LOOK, Looks
from ppbench.judge.verdicts import SPEED
from ppbench.run.machine.environment import default_device
from ppbench.run.sweep.control import run_sweep
from ppbench.run.sweep.plan import Choice
from ppbench.run.sweep.progress import Display
from ppbench.store import Store, check_writable


def measure_across(
    question: AxisQuestion,
    names: Sequence[str],
    launches: int | None,
    max_launches: int | None,
    say: Callable[[str], None],
    display: Display | None = None,
) -> Across:
    """Launch the cases of a sweep file, so often each or until decided, and compare them.

    Raises UsageError for names other than one sweep file, and what running a sweep raises.
    """
    if len(names) != 1 or not names[0].endswith(".toml"):
        raise UsageError(
            f"--run: measures the cases of a sweep file; give one, got {' '.join(names) or 'none'}"
        )
    check_writable(question.results, "--results")
    sweep = read_sweep(Path(names[0]), [], default_device())
    an_hour_ago = (
        f"{datetime.now(UTC) - timedelta(seconds=FRESH_S):%Y%m%dT%H%M%S}"  # as run ids are
    )
    store = Store(question.results)
    num_planned = dict.fromkeys((case.case_id for case, _ in sweep.cases), 0)

    def launched() -> int:
        """Make the launches that are planned; return how many were missing."""
        planned = tuple(
            (case, replace(own, launches=num_planned[case.case_id])) for case, own in sweep.cases
        )
        choice = Choice(since=an_hour_ago)
        return len(run_sweep(replace(sweep, cases=planned), store, choice, display).plan.missing)

    def bring_to(num_launches: int) -> float:
        """Launch every case until it has so many undisturbed launches; return the rounds made."""
        num_planned.update(dict.fromkeys(num_planned, num_launches))
        num_made = launched()
        while True:
            runs = store.runs(["run_id", "case_id", "launch", "status"])
            is_ours = runs["case_id"].isin(num_planned) & (runs["run_id"] > an_hour_ago)
            made = runs[is_ours & (runs["status"] == "ok")].sort_values("launch")
            made["is_disturbed"] = find_disturbed(store, made)
            lacking = []  # cases with a disturbed launch that is to be made again
            for case_id, own in made.groupby("case_id", sort=False):
                disturbed = own["is_disturbed"].tolist()
                is_full = len(disturbed) >= num_planned[str(case_id)]
                if any(disturbed) and is_full and is_lacking(disturbed, num_launches):
                    lacking.append(str(case_id))
            if not lacking:
                return num_made / len(num_planned)
            for case_id in lacking:
                num_planned[case_id] += 1
            num_made += launched()

    def compared(num_launches: int, looks: Looks = ONE_LOOK) -> Across:
        """Compare the first launches of each case, so many undisturbed ones."""
        chosen = choose_runs(names, store)
        runs, failed = (rows[rows["run_id"] > an_hour_ago] for rows in (chosen.runs, chosen.failed))
        in_order = runs.sort_values("launch")
        ids = first_launches(store, in_order, in_order["case_id"], num_launches)
        own = replace(chosen, runs=runs[runs["run_id"].isin(ids)], failed=failed)
        return compare_along(question, own, looks)

    if max_launches is None:
        bring_to(launches or 0)
        return compared(launches or 0)
    result, stopped = measure_until_decided(
        max_launches,
        bring_to,
        lambda looks: compared(looks.last, looks),
        lambda across: across,
        set(question.metrics or (SPEED,)),
        known_of(sweep, question.results, num_sides=1),
        say,
    )
    return replace(result, stopped=stopped)
