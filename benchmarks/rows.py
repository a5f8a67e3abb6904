"""Rows: what was measured, judged by the judge of the product, printed, and written as JSON.

A ratio is made of launches with rounds in turns, head over base. Its interval is that of
`ppbench compare`. A share has its exact interval, and a median that of order statistics.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.claims import CLAIMS, GPU_CHECKS, OTHERS, Goal, Standing
from ppbench.errors import RepositoryError
from ppbench.git import Repository
from ppbench.judge.evidence import Evidence, Metric, Noise, Rounds
from ppbench.judge.verdicts import judge, judge_means
from ppbench.run.machine.environment import read_environment
from ppbench.statistics.step_times import median_interval

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OWN_FILES = (
    "benchmarks/results",
    "benchmarks/README.md",
    "benchmarks/gpu.json",
    "benchmarks/gpu.md",
)
"""Files that benchmarks write, which do not count as changes of the code."""
TIME = Metric("time", higher_is_better=False, in_points=False)
NO_STARTS = Noise(0.0, 1)
"""Starts of processes add nothing where every turn is a process of its own."""
_SHORT_LIST = re.compile(r"\[\n([^\[\]{}]*?)\n\s*\]")


@dataclass(frozen=True)
class Row:
    """A measured value with its 95 % interval; without ends it is exact, or not known well."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    unit: str = ""
    note: str = ""
    goal: Goal | None = None
    values: tuple[tuple[float, ...], ...] = ()  # what it was made of: of a ratio, by round and side
    is_exact: bool = False  # counted or computed: measured again, it is the same

    @classmethod
    def ratio(
        cls, name: str, launches: Sequence[Rounds], goal: Goal | None = None, **how: Any
    ) -> Row:
        """The head over the base, by the judge; `how` is that of `mean_ratio`."""
        return cls.mean_ratio(name, [launches], goal, **how)

    @classmethod
    def mean_ratio(
        cls,
        name: str,
        families: Sequence[Sequence[Rounds]],
        goal: Goal | None = None,
        *,
        starts: Noise | None = None,
        note: str = "",
    ) -> Row:
        """The geometric mean of several ratios of heads over their bases, by the judge."""
        evidences = [Evidence(paired=tuple(launches), starts=starts) for launches in families]
        (change,) = judge(TIME, evidences) if len(families) == 1 else judge_means(TIME, [evidences])
        every = [rounds for launches in families for rounds in launches]
        pairs = [pair for one in every for pair in zip(one.base, one.head, strict=True)]
        if change.ratio is None:  # the launches are too few to tell how much they scatter
            value = statistics.geometric_mean(head / base for base, head in pairs)
            return cls(name, value, note=note, goal=goal, values=tuple(pairs))
        low, high = (
            end if math.isfinite(end) and end else None
            for end in (change.ratio.low, change.ratio.high)
        )
        value = change.ratio.estimate
        return cls(name, value, low, high, note=note, goal=goal, values=tuple(pairs))

    @classmethod
    def share(cls, name: str, num: int, total: int) -> Row:
        """How many of all: with the exact interval of Clopper and Pearson."""
        from scipy.stats import binomtest

        ends = binomtest(num, total).proportion_ci()
        note = f"{num:,} of {total:,}"
        return cls(name, num / total, float(ends.low), float(ends.high), note=note)

    @classmethod
    def median(
        cls, name: str, values: Sequence[float], unit: str, goal: Goal | None = None, note: str = ""
    ) -> Row:
        """The median of some values; the ends are all of them where they are fewer than six."""
        low: float | None
        high: float | None
        low, high = median_interval(values) or (min(values), max(values))
        if len(values) == 1:
            low = high = None
        value = statistics.median(values)
        return cls(name, value, low, high, unit, note, goal, (tuple(values),))

    @classmethod
    def exact(
        cls, name: str, value: float, goal: Goal | None = None, unit: str = "", note: str = ""
    ) -> Row:
        """Something that was counted, or the largest of all that were measured."""
        return cls(name, value, unit=unit, note=note, goal=goal, is_exact=True)

    @property
    def standing(self) -> Standing | None:
        """Whether the goal is reached; None without one."""
        if self.goal is None:
            return None
        if self.is_exact:
            return self.goal.standing(self.value, self.value)
        if self.low is None or self.high is None:
            return Standing.undecided
        return self.goal.standing(self.low, self.high)

    @property
    def amount(self) -> str:
        """The value with interval, unit and note: `1.012 [1.003, 1.020]`."""
        if math.isnan(self.value):
            return f"not known: {self.note}"
        ends = ""
        if self.low is not None and self.high is not None:
            ends = f" [{number(self.low)}, {number(self.high)}]"
        note = f" ({self.note})" if self.note else ""
        return f"{number(self.value)}{ends}{f' {self.unit}' if self.unit else ''}{note}"

    def __str__(self) -> str:
        goal = "" if self.goal is None else f"; goal {self.goal}: {self.standing}"
        return f"{self.name}: {self.amount}{goal}"


def number(value: float) -> str:
    """The value with three decimals, or three digits if it is small."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) >= 0.1 else f"{value:.3g}"


@dataclass(frozen=True)
class Surroundings:
    """The machine, the software and the commit on which figures depend."""

    date: str
    commit: str | None  # None outside a repository
    is_dirty: bool
    machine: str
    software: str
    load: float  # runnable processes, mean of the minute before

    @classmethod
    def here(cls) -> Surroundings:
        """Read them; called first, while the load is still that of other processes."""
        machine, commit, is_dirty = read_environment(), None, False
        try:
            state = Repository.around(ROOT).state(excluded=OWN_FILES)
            commit, is_dirty = state.commit, state.is_dirty
        except RepositoryError:
            pass
        return cls(
            f"{datetime.now(UTC):%Y-%m-%d}",
            commit,
            is_dirty,
            f"{machine.cpu}, {machine.num_cores} cores",
            f"{machine.platform}, Python {machine.python}, torch {machine.torch}",
            os.getloadavg()[0],
        )


@dataclass(frozen=True)
class Result:
    """The rows of a part of a benchmark, the one of its claim first."""

    claim: str  # its name
    seconds: float
    surroundings: Surroundings
    rows: tuple[Row, ...]

    def as_json(self) -> str:
        """JSON, in which a list of numbers is on one line."""
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        return _SHORT_LIST.sub(lambda match: f"[{' '.join(match[1].split())}]", text) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Result:
        fields = json.loads(text)
        rows = []
        for row in fields["rows"]:
            goal = None if row["goal"] is None else Goal(**row["goal"])
            values = tuple(map(tuple, row["values"]))
            rows.append(Row(**{**row, "goal": goal, "values": values}))
        surroundings = Surroundings(**fields["surroundings"])
        return cls(fields["claim"], fields["seconds"], surroundings, tuple(rows))


Part = Callable[[argparse.Namespace], Iterable[Row]]
"""Yields rows; `seconds` of what it is given is the time that it has."""


def parser(doc: str | None, parts: Mapping[str, Part]) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    options = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    options.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}; default: all"
    )
    options.add_argument("--seconds", type=float, help="time of a part; what has begun is ended")
    options.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    return options


def run(
    module: str,
    doc: str | None,
    parts: Mapping[str, Part],
    options: argparse.ArgumentParser | None = None,
) -> None:
    """Run parts of a benchmark as the command line says, print their rows and write them."""
    options = options or parser(doc, parts)
    asked = options.parse_args()
    for part in asked.parts:
        if part not in parts:
            options.error(f"{part}: no such part; expected {', '.join(parts)}")
    claims = {one.part: one for one in (*CLAIMS, *OTHERS, *GPU_CHECKS) if one.module == module}
    for part in asked.parts or parts:
        claim, surroundings = claims[part], Surroundings.here()
        seconds = claim.seconds if asked.seconds is None else asked.seconds
        rows: list[Row] = []
        for row in parts[part](argparse.Namespace(**{**vars(asked), "seconds": seconds})):
            rows.append(row if rows else replace(row, goal=claim.goal or row.goal))
            print(f"  {rows[-1]}", flush=True)
        if not rows:
            sys.exit(f"{module} {part}: measured nothing in {seconds:g} s; give it more --seconds")
        asked.results.mkdir(parents=True, exist_ok=True)
        result = Result(claim.name, seconds, surroundings, tuple(rows))
        (asked.results / f"{claim.name}.json").write_text(result.as_json(), encoding="utf-8")
