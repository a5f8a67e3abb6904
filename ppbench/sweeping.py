"""A sweep run to its end, with what the user is told meanwhile."""

from __future__ import annotations

import json
import shlex

from rich.console import Console

from ppbench.config.sweep import Sweep
from ppbench.errors import LaunchError, SweepInterruptedError
from ppbench.run.progress import display_for
from ppbench.run.sweep import Choice, Plan, alone, plan_sweep, run_plan, runs_of
from ppbench.store import Store
from ppbench.stored import tell


def run_missing(read: Sweep, store: Store, choice: Choice, command: str) -> Plan:
    """Run what is missing of a sweep; what there was to do.

    When the workers cannot go on, that is told, and what is finished stays. Raises
    SweepInterruptedError, which says how to go on: with `command` and the choice.
    """
    plan = plan_sweep(read, store, choice)
    try:
        with alone(read, store, choice, _tell_who_measures) as plan:
            _tell_what_is_done(plan)
            run_plan(plan, store, display_for(Console(stderr=True)), reruns=choice.reruns)
    except LaunchError as error:
        tell(f"error: {error}")
    except KeyboardInterrupt:
        whole = f"{command} {shlex.join(words_of(choice))}".strip()
        raise SweepInterruptedError(_how_to_go_on(plan, store, whole)) from None
    return plan


def _tell_who_measures(holder: str) -> None:
    tell(
        f"waiting for {holder or 'another sweep'}, which measures into the same results; "
        "two at once would disturb each other, or do the same twice"
    )


def _tell_what_is_done(plan: Plan) -> None:
    num_failed = sum(plan.failed.values())
    num_chosen = len(plan.chosen)
    if num_done := num_chosen - len(plan.missing) - num_failed:
        tell(f"{num_done} of {num_chosen} runs are done already; --rerun runs them again")
    if plan.failed:
        kinds = ", ".join(f"{count} {status}" for status, count in plan.failed.items())
        tell(f"{num_failed} failed before ({kinds}); --retry-failed runs them again")


def words_of(choice: Choice) -> list[str]:
    """The options that make the choice."""
    words = ["--rerun"] * choice.reruns + ["--retry-failed"] * choice.retries_failed
    for key, values in choice.only.allowed:
        for value in values:
            text = value if isinstance(value, str) else json.dumps(value)
            words += ["--only", f"{key}={text}"]
    return words


def _how_to_go_on(plan: Plan, store: Store, command: str) -> str:
    num_done = int((runs_of(plan, store)["status"] == "ok").sum())
    return (
        f"stopped; {num_done} of {len(plan.items)} runs are done, and kept. Go on with: {command}\n"
        "Report on what is done with: ppbench report"
    )
