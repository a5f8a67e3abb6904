"""What would decide an answer that is open: what to do, and the one command that does it.

The command is the one that measured the runs, as its user wrote it, with everything that is missing
added at once: more launches or a larger budget, other settings, another measurement of what was
disturbed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from ppbench.cautions import MIN_STEPS, Caution
from ppbench.comparison.evidence import MOST_LAUNCHES as MOST_IN_TURNS
from ppbench.comparison.evidence import budget_seconds, launch_seconds
from ppbench.config.case import Measure
from ppbench.config.kinds import seconds_of
from ppbench.display.changes import beyond_reach
from ppbench.display.commands import BUDGET, LAUNCHES, larger_budget, repeated
from ppbench.display.units import duration
from ppbench.judge.differences import FEWEST_LAUNCHES
from ppbench.judge.estimates import Doubt
from ppbench.judge.forecast import MOST_LAUNCHES, launches_needed
from ppbench.judge.verdicts import Change, Verdict
from ppbench.report.pages.judgement import Judgement

NO_END = "24h"
"""The budget of launches that only their number bounds."""
_ADVISED = 5  # launches, where nothing is known of how much they differ
_WARMUP = ("measure_warmup_steps", "measure_max_warmup_steps")
_STOP_OTHERS = "stop other work on the machine"
_DEEDS = {
    Caution.oversubscribed.name: "use no more ranks than cores, or emulate them "
    '(device = "emulated")',
    Caution.time_sliced.name: 'use no more ranks than GPUs, or emulate them (device = "emulated")',
    Caution.throttled.name: "see to cooling, power limits or the CPU quota",
    Caution.busy_machine.name: _STOP_OTHERS,
    Caution.behind_plan.name: "raise the emulated times or use fewer ranks",
    Caution.noisy_steps.name: _STOP_OTHERS,
}
"""What a user does before measuring again; of the other cautions, settings say it."""
_OTHER_CASES = (
    Caution.oversubscribed.name,
    Caution.time_sliced.name,
    Caution.behind_plan.name,
)
"""Cautions that these cases keep, however often they are measured."""
_PASSING = (Caution.throttled.name, Caution.busy_machine.name)
"""Cautions that another measurement may not have."""


def advice(judgement: Judgement, runs: pd.DataFrame, command: str) -> tuple[str, str]:
    """Return what to do about an open answer, and the command that does it, if one does.

    `command` is the one that measured the runs; empty where it is not known.
    """
    cautions = judgement.cautions
    if judgement.is_decided:
        return "", ""
    if judgement.has_several_machines and not cautions:
        return "To decide it, measure both on one machine.", ""
    fewest = judgement.fewest_launches
    # The launches of each to measure; None if more of them would not help.
    wanted = max(judgement.needed or _ADVISED, fewest + 2, _ADVISED)
    num: int | None = wanted
    opened = [judgement.change(0, place) for place in judgement.places(Verdict.open)]
    if cautions:  # what these launches scatter says little of others
        num = _ADVISED if fewest < FEWEST_LAUNCHES else None
    elif (judgement.needed is None and fewest >= FEWEST_LAUNCHES) or wanted > _most(runs):
        reach = beyond_reach([change for change in opened if change], _most(runs))
        return f"Throughput decides it {reach}; take either, or choose by memory.", ""
    settings = dict(_settings(cautions, runs))
    deeds = list(dict.fromkeys(filter(None, (_DEEDS.get(name) for name in cautions))))
    deeds += [f"set {key} to {value}" for key, value in settings.items()]
    is_done_here = not set(cautions).intersection(_OTHER_CASES)
    if num is not None:
        deed, bounds = _measuring(num, runs, command)
        deeds.append(deed)
        settings |= bounds
    elif is_done_here:
        deeds.append("measure again")
    options = ["--rerun"] if set(cautions).intersection(_PASSING) else []
    again = repeated(command, settings, options) if is_done_here else ""
    what = " and ".join(filter(None, [", ".join(deeds[:-1]), *deeds[-1:]]))
    return f"To decide it, {what}{':' if again else '.'}", again


def more_launches(changes: Sequence[Change], runs: pd.DataFrame, command: str) -> tuple[str, str]:
    """Return how to decide those of some changes that are open, and the command that does it."""
    opened = [change for change in changes if not change.is_decided]
    opened = [change for change in opened if change.doubt is not Doubt.cautioned]
    if not opened:
        return "", ""
    known = [change for change in opened if change.has_interval]
    needed = [launches_needed(change, num_tests=len(changes)) for change in known]
    if None in needed:
        return f"What is open is decided {beyond_reach(known, _most(runs))}.", ""
    num = max(_ADVISED, *filter(None, needed))
    deed, settings = _measuring(num, runs, command)
    again = repeated(command, settings)
    return f"To decide what is open, {deed}{':' if again else '.'}", again


def _most(runs: pd.DataFrame) -> int:
    """The most launches of each that are worth their time, or that a budget allows."""
    return MOST_IN_TURNS if budget_seconds(runs) else MOST_LAUNCHES


def _measuring(num: int, runs: pd.DataFrame, command: str) -> tuple[str, dict[str, str]]:
    """Say how to measure so many launches of each, and return the settings that bound them.

    With a budget it is that, from the time of a launch; without, it says what the others take.
    """
    budget_s, settings = budget_seconds(runs), dict[str, str]()
    has_most = command.startswith("ppbench plan ")  # beside its budget
    deed, more = f"measure {num} launches of each", num - runs["launch"].nunique()
    if not budget_s and more > 0 and (launch_s := launch_seconds(runs)):
        deed = f"{deed}, which takes about {duration(more * launch_s)} more"
    if has_most or not budget_s:
        settings[LAUNCHES] = str(num)
    if 0 < budget_s < seconds_of(NO_END):
        settings[BUDGET] = larger_budget(num, launch_seconds(runs) or budget_s, budget_s)
        deed = f"measure for {settings[BUDGET]}, which is about {num} launches of each"
    return deed, settings


def _settings(cautions: Sequence[str], runs: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Yield the settings that the cautions ask for, with values."""
    if Caution.unsettled_steps.name in cautions:
        found = runs.reindex(columns=list(_WARMUP)).max().max()
        most = Measure().max_warmup_steps if pd.isna(found) else int(found)
        yield "measure.max_warmup_steps", str(2 * max(most, 1))
    if Caution.few_steps.name in cautions:
        yield "measure.steps", str(MIN_STEPS)
    if Caution.no_warmup.name in cautions:
        yield "measure.warmup_steps", "1"
