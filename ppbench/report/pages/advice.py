"""What would decide an answer that is open: what to do, and the one command that does it.

The command is the one that measured the runs, as its user wrote it, with everything that is missing
added at once: more launches, other settings, another measurement of what was disturbed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from ppbench.cautions import MIN_STEPS, Caution
from ppbench.config.case import Measure
from ppbench.judge.differences import FEWEST_LAUNCHES
from ppbench.judge.forecast import MOST_LAUNCHES, launches_needed
from ppbench.judge.verdicts import Change
from ppbench.report.pages.judgement import Judgement

TOO_SMALL = (
    f"Throughput would decide it after more than {MOST_LAUNCHES} launches of each, if at all: "
    "choose by memory instead."
)
_ADVISED = 5  # launches, where nothing is known of how much they differ
_LAUNCHES = "measure.launches"
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
    num: int | None = max(judgement.needed or _ADVISED, fewest + 2, _ADVISED)
    if cautions:  # what these launches scatter says little of others
        num = _ADVISED if fewest < FEWEST_LAUNCHES else None
    elif judgement.needed is None and fewest >= FEWEST_LAUNCHES:
        num = None
    if num is None and not cautions:
        return TOO_SMALL, ""
    settings = dict(_settings(cautions, runs))
    known_deeds = (
        _DEEDS.get(name, "") if name in Caution.__members__ else "see the cautions below"
        for name in cautions
    )
    deeds = list(dict.fromkeys(filter(None, known_deeds)))
    deeds += [f"set {key} to {value}" for key, value in settings.items()]
    is_done_here = all(name in Caution.__members__ for name in cautions)
    is_done_here = is_done_here and not set(cautions).intersection(_OTHER_CASES)
    if num is not None:
        deeds.append(f"measure {num} launches of each")
        settings[_LAUNCHES] = str(num)
    elif is_done_here:
        deeds.append("measure again")
    options = ["--rerun"] if set(cautions).intersection(_PASSING) else []
    again = repeated(command, settings, options) if is_done_here else ""
    what = " and ".join(filter(None, [", ".join(deeds[:-1]), *deeds[-1:]]))
    return f"To decide it, {what}{':' if again else '.'}", again


def more_launches(change: Change, command: str) -> tuple[str, str]:
    """Return how many launches of each would decide a change, and the command for that."""
    needed = launches_needed(change)
    if needed is None and change.has_interval:
        return TOO_SMALL, ""
    num = max(needed or _ADVISED, change.num_base + 2, _ADVISED)
    again = repeated(command, {_LAUNCHES: str(num)}, [])
    return f"To decide it, measure {num} launches of each{':' if again else '.'}", again


def repeated(command: str, settings: Mapping[str, str], options: Sequence[str]) -> str:
    """Return a command that measures with these settings, in place of its own, and more options.

    `plan` has an option for the number of launches. Any command but that and `sweep` measures
    nothing, so that the answer is empty.
    """
    words = shlex.split(command)
    if words[:2] not in (["ppbench", "sweep"], ["ppbench", "plan"]):
        return ""
    most = settings.get(_LAUNCHES) if words[1] == "plan" else None
    added = [
        word
        for key, value in settings.items()
        for word in (
            ("--max-launches", value) if most and key == _LAUNCHES else ("--set", f"{key}={value}")
        )
    ]
    is_dropped = [  # an option of these keys
        (word == "--set" and after.partition("=")[0].strip() in settings)
        or (word == "--max-launches" and most is not None)
        for word, after in zip(words, [*words[1:], ""], strict=True)
    ]
    marked = zip(words, is_dropped, [False, *is_dropped], strict=False)
    kept = [word for word, *is_out in marked if not any(is_out) and word not in options]
    return shlex.join([*kept, *added, *options])


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
