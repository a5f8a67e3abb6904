"""A claim: what a comparison of two sides says, with all that is needed to judge or repeat it.

    Claim ---- Side, Side       what was compared: commits, uncommitted changes, measuring code
      |------- Machine          its fingerprint, and the facts behind it
      |------- Case             every setting of a case that both sides have
      |------- Launch           all of them, failed ones too: when, which session, figures, cautions
      |------- Session          launches made close in time
      `------- Effect           a figure of a case: the change, its interval, what was detectable,
                                launches that count for less, and the change in each session

`commits.claim_file` writes and reads them, `commits.claim_check` measures them again.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal

import pandas as pd

from ppbench import __version__
from ppbench.commits import sides
from ppbench.commits.comparison import Comparison, Series
from ppbench.comparison.launches import SETTINGS, keys_of
from ppbench.comparison.lines import SHOWN, Line, Pairing, lines_of
from ppbench.comparison.sessions import UNKNOWN, moments_of, number_sessions, sessions_of
from ppbench.config.case import Case as CaseSettings
from ppbench.display.cases import cautions_of
from ppbench.display.metrics import METRICS
from ppbench.display.units import is_missing
from ppbench.statistics.noise import detectable_change, measure_noise
from ppbench.statistics.replication import CHANGES, Outcome, judge_again
from ppbench.statistics.significance import Ratio
from ppbench.statistics.verdicts import Change, Discount, Metric, Noise, Verdict

Scalar = str | int | float | bool | None
BASE, HEAD = "base", "head"
_CONTROLS = (
    *("reference", "reference_ns", "reference_spread"),
    *("cores_short", "steal_fraction", "cpu_throttled_fraction", "cpu_mhz", "gpu_sm_mhz"),
)
"""Columns that say how the machine was: fixed work beside the steps, stolen and missing cores."""


@dataclass(frozen=True)
class Side:
    """One side of a claim."""

    name: str  # as it was typed
    commit: str | None  # the full hash
    subject: str | None
    author_date: str | None
    is_dirty: bool | None
    changes: str  # hash of the uncommitted changes, empty when clean
    code: tuple[str, ...]  # hashes of the code that measured
    runtime_code: tuple[str, ...]
    ppbench_version: tuple[str, ...]

    @property
    def revision(self) -> str | None:
        """The name by which it can be measured again; None where it is no commit."""
        if self.is_dirty:
            return sides.WORKTREE if self.name == sides.WORKTREE else None
        return self.commit


@dataclass(frozen=True)
class Machine:
    """A machine with its software."""

    fingerprint: str
    facts: dict[str, object]  # what is stored of it, as in `runs.environment`


@dataclass(frozen=True)
class Case:
    """A case on a machine, and how it was measured."""

    case_id: str
    fingerprint: str
    text: str
    settings: dict[str, Scalar]
    measure: dict[str, Scalar]

    @property
    def key(self) -> tuple[str, ...]:
        """What must be equal for launches to be compared, but for the machine."""
        return (self.case_id, *("" if v is None else str(v) for v in self.measure.values()))


@dataclass(frozen=True)
class Launch:
    """One launch of a case on one side."""

    side: Literal["base", "head"]
    case: int  # index in `Claim.cases`
    run_id: str
    launch: int
    status: str
    ended_at: str | None  # ISO 8601, UTC
    session: int  # number in `Claim.sessions`; -1 where the time is not known
    figures: dict[str, float]
    controls: dict[str, Scalar]  # how the machine was, as far as that is stored
    cautions: tuple[str, ...]


@dataclass(frozen=True)
class Session:
    """Launches that were made close in time on one machine."""

    number: int
    fingerprint: str
    begin: str  # when its first launch ended, ISO 8601, UTC
    end: str
    num_launches: int


@dataclass(frozen=True)
class Estimate:
    """A change between the sides: head / base, or head - base of a figure in points."""

    verdict: Verdict
    base: float | None  # medians
    head: float | None
    estimate: float | None
    low: float | None  # the ends of the 95 % interval
    high: float | None
    p: float | None
    floor: float
    num_base: int
    num_head: int

    def as_change(self, metric: Metric) -> Change:
        """The same as the statistics have it."""
        ends = (self.estimate, self.low, self.high)
        found = None if None in ends else Ratio(*(float(end or 0.0) for end in ends))
        return Change(
            *(self.base, self.head, None if metric.in_points else found, self.p, self.verdict),
            *(self.num_base, self.num_head, self.floor),
            difference=found if metric.in_points else None,
        )


@dataclass(frozen=True)
class Discounted:
    """A launch that counts for less than the others of its side."""

    side: Literal["base", "head"]
    run_id: str
    weight: float
    reason: str


@dataclass(frozen=True)
class InSession:
    """The change between the launches of one session."""

    session: int
    change: Estimate


@dataclass(frozen=True)
class Effect:
    """The change of one figure of a case."""

    case: int  # index in `Claim.cases`
    metric: str
    change: Estimate
    noise: float | None  # relative deviation between launches, measured beforehand
    detectable: float | None  # the change that 80 % of such comparisons find
    discounts: tuple[Discounted, ...]
    sessions: tuple[InSession, ...]  # those in which both sides were measured


@dataclass(frozen=True)
class Claim:
    """All that a comparison says and rests on."""

    made_at: str
    ppbench_version: str
    command: str  # repeats it
    sweep_file: str | None
    base: Side
    head: Side
    machines: tuple[Machine, ...]
    cases: tuple[Case, ...]
    sessions: tuple[Session, ...]
    launches: tuple[Launch, ...]
    effects: tuple[Effect, ...]

    @property
    def claimed(self) -> list[Effect]:
        """What is claimed: the changes, or if nothing changed, that it did not."""
        changes = [effect for effect in self.effects if effect.change.verdict in CHANGES]
        same = [effect for effect in self.effects if effect.change.verdict is Verdict.same]
        return changes or same

    @property
    def newest(self) -> datetime | None:
        """When its last launch ended."""
        return max((moment for moment in self.moments if moment), default=None)

    @property
    def moments(self) -> list[datetime | None]:
        """When each launch ended."""
        ended = (launch.ended_at for launch in self.launches)
        return [None if moment is None else datetime.fromisoformat(moment) for moment in ended]


def replications_of(effect: Effect) -> list[tuple[int, Outcome, Change]]:
    """What each later session says of the change that the first one has shown."""
    metric = METRICS[effect.metric]
    if len(effect.sessions) < 2 or effect.change.verdict not in (*CHANGES, Verdict.same):
        return []
    first, *others = effect.sessions
    claimed = first.change.as_change(metric)
    if claimed.verdict not in (*CHANGES, Verdict.same):
        claimed = replace(claimed, verdict=effect.change.verdict)
    again = [(other.session, other.change.as_change(metric)) for other in others]
    return [(number, judge_again(metric, claimed, change), change) for number, change in again]


def claim_of(
    comparison: Comparison, command: str, sweep_file: str | None, begins: Iterable[datetime] = ()
) -> Claim:
    """Make the claim of a comparison; `command` repeats it.

    `begins` are moments at which a session was begun on purpose.
    """
    series, begun = comparison.series(), list(begins)
    places = {one.key: place for place, one in enumerate(series)}
    full = _full_rows(comparison, places)
    numbers, found = _sessions(full, begun)
    full = full.assign(session=numbers)
    return Claim(
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        ppbench_version=__version__,
        command=command,
        sweep_file=sweep_file,
        base=_side(comparison.base, full[full["side"] == BASE]),
        head=_side(comparison.head, full[full["side"] == HEAD]),
        machines=tuple(_machines(full)),
        cases=tuple(_case(one, full[full["case"] == place]) for place, one in enumerate(series)),
        sessions=tuple(found),
        launches=tuple(_launches(full, comparison)),
        effects=tuple(_effects(comparison, places, full)),
    )


def _full_rows(comparison: Comparison, places: dict[tuple[str, ...], int]) -> pd.DataFrame:
    """All columns of every launch of the cases compared, with its side and its case's place."""
    parts = []
    for word, side in ((BASE, comparison.base), (HEAD, comparison.head)):
        rows = pd.concat([side.runs, side.failed]).sort_values("run_id")
        is_compared = [key in places for key in keys_of(rows)]
        rows = rows[pd.Series(is_compared, rows.index, dtype=bool)]
        stored = side.store.table("runs", rows["run_id"])
        whole = stored[stored["run_id"].isin(rows["run_id"])].sort_values("run_id")
        statuses = dict(zip(rows["run_id"], rows["status"], strict=True))  # NaN counts as failed
        whole = whole.assign(side=word, status=whole["run_id"].map(statuses))
        parts.append(whole.assign(case=[places[key] for key in keys_of(whole)]))
    return pd.concat(parts, ignore_index=True)


def _sessions(full: pd.DataFrame, begins: list[datetime]) -> tuple[list[int], list[Session]]:
    """The number of each launch's session, and the sessions: machine after machine."""
    numbers, found = [UNKNOWN] * len(full), list[Session]()
    for fingerprint, rows in full.groupby("fingerprint", sort=False):
        moments, offset = moments_of(rows), len(found)
        for place, number in zip(rows.index, number_sessions(moments, begins), strict=True):
            numbers[place] = number if number == UNKNOWN else offset + number
        found += [
            Session(
                *(offset + index, str(fingerprint), _iso(one.begin), _iso(one.end)),
                one.num_launches,
            )
            for index, one in enumerate(sessions_of(moments, begins))
        ]
    return numbers, found


def _side(side: sides.Side, rows: pd.DataFrame) -> Side:
    def only(name: str) -> str | None:
        return next(iter(_texts(rows[name])), None) if side.commit else None

    dirty = rows["is_dirty"].dropna()
    return Side(
        name=side.name,
        commit=side.commit,
        subject=only("subject"),
        author_date=only("author_date"),
        is_dirty=bool(dirty.any()) if len(dirty) else None,
        changes=next(iter(_texts(rows["changes"])), ""),
        code=_texts(rows["code"]),
        runtime_code=_texts(rows["runtime_code"]),
        ppbench_version=_texts(rows["ppbench_version"]),
    )


def _texts(column: pd.Series) -> tuple[str, ...]:
    return tuple(sorted({str(value) for value in column if not is_missing(value) and value != ""}))


def _machines(full: pd.DataFrame) -> Iterable[Machine]:
    for fingerprint, rows in full.groupby("fingerprint", sort=False):
        facts: object = {}
        with contextlib.suppress(ValueError, TypeError):  # another program may have written it
            text = str(rows["environment"].iloc[-1])
            facts = json.loads(text, parse_constant=lambda _: None)
        yield Machine(str(fingerprint), facts if isinstance(facts, dict) else {})


def _case(series: Series, rows: pd.DataFrame) -> Case:
    row = rows.iloc[-1]
    return Case(
        series.case_id,
        series.fingerprint,
        series.text,
        {name: scalar(row[name]) for name in CaseSettings().settings()},
        {name: scalar(row[name]) for name in SETTINGS},
    )


def scalar(value: object) -> Scalar:
    """A cell of a table as JSON has it; None where it is missing or not finite."""
    if is_missing(value) or value is pd.NA:
        return None
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, float):
        if not math.isfinite(plain):
            return None
        return int(plain) if plain.is_integer() else plain  # a column with nulls is of floats
    return plain if isinstance(plain, str | int | bool) else str(plain)


def _launches(full: pd.DataFrame, comparison: Comparison) -> Iterable[Launch]:
    metrics = dict.fromkeys([*(line.metric.name for line in comparison.lines), *SHOWN])
    controls = [name for name in _CONTROLS if name in full]
    moments = moments_of(full)
    for (_, row), moment in zip(full.iterrows(), moments, strict=True):
        figures = {name: scalar(row[name]) for name in metrics}
        yield Launch(
            side="base" if row["side"] == BASE else "head",
            case=int(row["case"]),
            run_id=str(row["run_id"]),
            launch=int(row["launch"]) if scalar(row["launch"]) is not None else 0,
            status=str(row["status"]),
            ended_at=None if moment is None else _iso(moment),
            session=int(row["session"]),
            figures={name: float(value) for name, value in figures.items() if value is not None},
            controls={name: scalar(row[name]) for name in controls},
            cautions=tuple(cautions_of(row)),
        )


def _iso(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat()


def _effects(
    comparison: Comparison, places: dict[tuple[str, ...], int], full: pd.DataFrame
) -> Iterable[Effect]:
    metrics = list(dict.fromkeys(line.metric for line in comparison.lines))
    session_of = dict(zip(full["run_id"], full["session"], strict=True))
    by_session = {
        number: lines_of(metrics, [_within(pairing, number, session_of) for pairing in pairings])
        for number, pairings in _measured_in(comparison, session_of).items()
    }
    for line in comparison.lines:
        pairing, key = comparison.pairings[line.series], (line.series, line.metric)
        yield Effect(
            case=places[line.series.key],
            metric=line.metric.name,
            change=estimate_of(line.metric, line.change),
            noise=None if line.noise is None else line.noise.deviation,
            detectable=detectable_in(line, pairing, len(places)),
            discounts=tuple(
                _discounted(one, line.metric, pairing) for one in line.change.discounts
            ),
            sessions=tuple(
                InSession(number, estimate_of(other.metric, other.change))
                for number, lines in by_session.items()
                for other in lines
                if (other.series, other.metric) == key
            ),
        )


def _measured_in(
    comparison: Comparison, session_of: dict[str, int]
) -> dict[int, list[Pairing[Series]]]:
    """The pairings with launches of both sides in each session."""
    found: dict[int, list[Pairing[Series]]] = {}
    for pairing in comparison.pairings.values():
        base, head = ({session_of[run] for run in side["run_id"]} for side in _both(pairing))
        for number in base & head - {UNKNOWN}:
            found.setdefault(number, []).append(pairing)
    return dict(sorted(found.items()))


def _both(pairing: Pairing[Series]) -> tuple[pd.DataFrame, pd.DataFrame]:
    return pairing.base, pairing.head


def _within(pairing: Pairing[Series], number: int, session_of: dict[str, int]) -> Pairing[Series]:
    base, head = (side[side["run_id"].map(session_of) == number] for side in _both(pairing))
    return replace(pairing, base=base, head=head)


def _discounted(discount: Discount, metric: Metric, pairing: Pairing[Series]) -> Discounted:
    side = pairing.base if discount.side == BASE else pairing.head
    run_ids = side.loc[side[metric.name].notna(), "run_id"]  # the order of the statistics
    run_id = str(run_ids.iloc[discount.index])
    return Discounted(discount.side, run_id, discount.weight, str(discount.reason))


def estimate_of(metric: Metric, change: Change) -> Estimate:
    """A change as a claim has it; what is infinite is unknown."""
    found = change.difference if metric.in_points else change.ratio
    return Estimate(
        verdict=change.verdict,
        base=_finite(change.base),
        head=_finite(change.head),
        estimate=None if found is None else _finite(found.estimate),
        low=None if found is None else _finite(found.low),
        high=None if found is None else _finite(found.high),
        p=_finite(change.p),
        floor=change.floor,
        num_base=change.num_base,
        num_head=change.num_head,
    )


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def detectable_in(line: Line[Series], pairing: Pairing[Series], num_cases: int) -> float | None:
    """The change that 80 % of comparisons with as many launches find in this noise.

    The noise is the one measured beforehand, else that of the launches that count.
    """
    figures = _counted(line.metric, line.change, pairing)
    num = min(map(len, figures))
    noise = line.noise or _noise_of(line.metric, figures)
    if num < 2 or noise is None:
        return None
    found = detectable_change(noise, num, line.change.floor, num_cases)
    return _finite(found)


def _counted(
    metric: Metric, change: Change, pairing: Pairing[Series]
) -> tuple[list[float], list[float]]:
    """The figures of both sides without those of launches that do not count."""
    left_out = {(one.side, one.index) for one in change.discounts if one.weight == 0}
    base, head = (
        [
            float(value)
            for index, value in enumerate(side[metric.name].dropna())
            if (word, index) not in left_out
        ]
        for word, side in zip((BASE, HEAD), _both(pairing), strict=True)
    )
    return base, head


def _noise_of(metric: Metric, figures: Sequence[list[float]]) -> Noise | None:
    try:
        return measure_noise(figures, in_points=metric.in_points).noise
    except ValueError:  # one launch a side, or a figure that has no logarithm
        return None
