"""A policy of launches: until it is known which case to take, or the time is spent.

    launch 1    all cases
    launch 2    all cases
    launch 3    all cases      a look: what is decided has no part in the next launch
    launch 4    cases of questions that are open, without those that are beaten
    ...

Cases of one launch take turns in the same processes, and launches are the replicate above them. A
question is a group of cases that do the same work on as many ranks (`report.pages.judgement`).
Where no two do, none is to be chosen, and the question is what each axis changes, as
`compare --across` has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pandas as pd

from ppbench.comparison.lines import Line
from ppbench.comparison.measurement import Budget
from ppbench.config.sweep import Sweep
from ppbench.display.cases import FAILED_FINALLY, varying_axes
from ppbench.display.units import counted, duration, percent
from ppbench.judge.differences import FEWEST_LAUNCHES
from ppbench.judge.verdicts import Verdict
from ppbench.report.pages.judgement import Judged, judge
from ppbench.store import Store
from ppbench.store.folder import begun_at


class UntilAnswered:
    """Says after each launch which cases have a part in the next one."""

    def __init__(
        self,
        sweep: Sweep,
        store: Store,
        budget_s: float,
        say: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
        *,
        are_ranks_free: bool = False,
        retries_failed: bool = False,
    ) -> None:
        """`are_ranks_free` is that of `judge`; `retries_failed`: whatever failed is run again."""
        self._cases = [case.case_id for case, _ in sweep.cases]
        self._store, self._are_ranks_free = store, are_ranks_free
        self._retries_failed = retries_failed
        self._budget, self._say, self._last_s = Budget(budget_s, now), say, 0.0
        self._num_wanted, self._is_first = len(self._cases), True
        self.stop = ""
        """Why no further launch is made, once none is."""

    def __call__(self, runs: pd.DataFrame) -> frozenset[str]:
        """Return the ids of the cases to launch again; none if no further launch is made."""
        runs, passed_s = runs[runs["case_id"].isin(self._cases)], self._budget.passed_s
        launch_s, self._last_s = passed_s - self._last_s, passed_s
        good = runs[runs["status"] == "ok"]
        num_launches = 0 if good.empty else int(good.groupby("case_id").size().max())
        is_first, self._is_first = self._is_first, False  # nothing was launched yet
        if good.empty and is_first:
            return frozenset(self._cases)
        along: list[Line] | None = None
        if num_launches < FEWEST_LAUNCHES:
            wanted, text = frozenset(self._cases) - failing_cases(runs), ""
        else:
            axes, is_free = varying_axes(runs), self._are_ranks_free
            judged = judge(runs, axes, [self._store], are_ranks_free=is_free)
            wanted, text = open_cases(judged), progress_text(judged)
            if all(one.lead is None for one in judged.judgements):
                along = [line for comparison in judged.along for line in comparison.lines]
                wanted, text = open_sides(along), changes_text(along)
        if is_first:  # a case that crashed in an earlier sweep is run again
            left_out = set() if self._retries_failed else _finally_failed(runs)
            wanted |= frozenset(self._cases) - frozenset(good["case_id"]) - left_out
        if not wanted:
            launches = counted(num_launches, "launch")
            self.stop = "every case failed" if good.empty else f"decided after {launches}"
            if along:
                self.stop += f"; {text}; no two cases do the same work, so none is the best"
            elif along is not None:
                why = "no other case is ok" if len(self._cases) > 1 else "there is only one case"
                if len(set(good["case_id"])) > 1:
                    why = "no two cases do the same work, so none is the best"
                self.stop = f"made {launches}: {why}"
            self._say(self.stop)
            return wanted
        share = len(wanted) / max(self._num_wanted, 1)
        next_s = 0.0 if is_first else min(launch_s, seconds_of_last_launch(runs)) * share
        if text:
            self._say(f"after {counted(num_launches, 'launch')}: {text}")
        if not self._budget.allows(next_s):
            self.stop = (
                f"stopped after {counted(num_launches, 'launch')}: another takes about "
                f"{duration(next_s)}, and {duration(self._budget.left_s)} of the budget are left"
            )
            if num_launches < FEWEST_LAUNCHES and len(wanted) > 1:
                self.stop += f"; an answer needs {FEWEST_LAUNCHES} launches: raise the budget"
            self._say(self.stop)
            return frozenset()
        self._num_wanted = len(wanted)
        return wanted


def seconds_of_last_launch(runs: pd.DataFrame) -> float:
    """How long the last launch took from its first case on.

    The start of its processes is left out, as only the first launch of a command imports anything,
    and so are verifications, which later launches do not repeat.
    """
    last = runs[runs["launch"] == runs["launch"].max()]
    ends = pd.to_datetime(last["created_at"], utc=True, format="ISO8601")
    took_s = float((ends.max() - min(map(begun_at, last["run_id"]))).total_seconds())
    return took_s - float(last["verification_s"].sum())


def failing_cases(runs: pd.DataFrame) -> frozenset[str]:
    """Return the cases that would fail again: by what they are, or as they have crashed twice."""
    num_failed = runs.loc[runs["status"] != "ok", "case_id"].value_counts()
    twice = set(num_failed[num_failed > 1].index) - set(runs.loc[runs["status"] == "ok", "case_id"])
    return frozenset(twice | _finally_failed(runs))


def _finally_failed(runs: pd.DataFrame) -> set[str]:
    return set(runs.loc[runs["status"].isin(FAILED_FINALLY), "case_id"])


def open_cases(judged: Judged) -> frozenset[str]:
    """Return the cases of open questions, without those that are beaten."""
    wanted: set[str] = set()
    for judgement in judged.judgements:
        if judgement.lead is not None and not judgement.is_decided:
            places = [0, *judgement.places(Verdict.open), *judgement.places(Verdict.same)]
            wanted |= {judgement.arms[place] for place in places}
    return frozenset(wanted)


def open_sides(lines: Sequence[Line]) -> frozenset[str]:
    """Return the cases of changes that are open."""
    opened = (line.series for line in lines if not line.change.is_decided)
    return frozenset(key[0] for one in opened for key in (one.base_key, one.head_key))


def changes_text(lines: Sequence[Line]) -> str:
    """Return how many changes are decided, and some of them, open ones before others."""
    num_decided = sum(line.change.is_decided for line in lines)
    parts = [f"{num_decided} of {counted(len(lines), 'change')} decided"]
    for line in sorted(lines, key=lambda line: line.change.is_decided)[:_MOST_SHOWN]:
        ratio, verdict = line.change.ratio, line.change.verdict
        if ratio is not None:
            low, high = percent(ratio.low - 1), percent(ratio.high - 1)
            names = ", ".join((line.series.pair, *line.series.common))
            parts.append(f"{names}: {verdict}, between {low} and {high}")
    return "; ".join(parts)


def progress_text(judged: Judged) -> str:
    """Return how many questions are decided, and the interval of each that is open."""
    every = (*judged.judgements, *filter(None, [judged.whole]))
    questions = [judgement for judgement in every if judgement.lead is not None]
    opened = [judgement for judgement in questions if not judgement.is_decided]
    parts = [f"{len(questions) - len(opened)} of {counted(len(questions), 'question')} decided"]
    for judgement in opened[:_MOST_SHOWN]:
        change = judgement.to_rival
        if change is not None and change.ratio is not None:
            low, high = (percent(end - 1) for end in (change.ratio.low, change.ratio.high))
            names = f"{judgement.names[0]} over {judgement.names[judgement.rival_place]}"
            where = f"{judgement.where}: " if judgement.where else ""
            parts.append(f"{where}{names}{judgement.over} between {low} and {high}")
    return "; ".join(parts)


_MOST_SHOWN = 3
