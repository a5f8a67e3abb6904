"""Whether the judge's error rates hold, and how soon it answers, on made-up rounds and launches.

    python -m benchmarks.judging [--sequences 2400] [--seed 38] [--only NAME...]

A launch has rounds of two sides that take turns, base first and head first alternately. The head's
turns differ from the base's by the true difference, by what the start of the launch decided, and by
what each turn scatters:

    turns 3 %, 8 %, 15 %    noise of a turn; starts differ by 0.5 % (launches by 0.5 %, 3 %: more)
    disturbed 10 %, 20 %    so many of the turns are 10 to 35 % longer
    stretches               another job makes turns 10 to 60 % longer for some 6 at a time, a third
                            of all
    correlated              a turn's noise is correlated by 0.5 with that of the one before it
    drift                   the machine gets 6 % slower in the course of a launch

One looks after every eighth round until the verdict, or until eight launches of 24 rounds are
spent. The starts are known from ten launches of the same kind before, or unknown. `False claims`
are `faster` or `slower` for equal sides, at any look; `wrong same` is `same` where the true
difference is the resolution of 2 % (the hardest: larger ones are confused less). Intervals are
those of 95 % at a single look after the whole budget, and at all looks together.

Launches of one side each (`alone`) are judged after every launch of both sides, up to twelve, with
a deviation of 0.8 %: normal, Student's t of three degrees of freedom, exponential, on a slow level
in some share, a tenth and a fifth disturbed by 10 to 35 %, drifting by 1 % in a day, correlated
by 0.6 with the one before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter

from benchmarks.outcome import Figure, Goal, Ratio, parser, write
from benchmarks.surroundings import read_surroundings
from ppbench.display.metrics import METRICS
from ppbench.judge.evidence import RESOLUTION, Evidence, Launches, Noise, Rounds
from ppbench.judge.looks import looks_at
from ppbench.judge.noise import noise_of_launches, noise_of_rounds
from ppbench.judge.verdicts import Change, Verdict, judge

Floats = npt.NDArray[np.float64]
STEP = METRICS["step_ns"]
NUM_LAUNCHES, NUM_ROUNDS, A_LOOK = 8, 24, 8
NUM_BEFORE = 10
"""Launches that have measured how much starts differ, or launches of one side."""
NUM_BATCHES = 12
DISTURBANCE = (0.10, 0.35)
FALSE, WRONG, HOLDS = Goal(at_most=0.01), Goal(at_most=0.01), Goal(at_least=0.94, at_most=0.96)


@dataclass(frozen=True)
class Turns:
    """How turns scatter, in a launch and between launches."""

    turn: float = 0.03
    start: float = 0.005
    disturbed: float = 0.0  # share of the turns
    stretches: float = 0.0  # share of the turns, some at a time
    correlation: float = 0.0  # with the turn before
    drift: float = 0.0  # over a launch

    def launch(self, draw: np.random.Generator, difference: float) -> Rounds:
        """One launch's rounds."""
        num = 2 * NUM_ROUNDS
        fresh = draw.normal(0, self.turn * math.sqrt(1 - self.correlation**2), num + 20)
        logs = lfilter([1.0], [1.0, -self.correlation], fresh)[20:]
        logs = logs + self.drift * np.linspace(0, 1, num)
        slowed = draw.random(num) < self.disturbed
        logs += np.where(slowed, np.log1p(draw.uniform(*DISTURBANCE, num)), 0.0)
        if self.stretches:  # it begins and ends at random, 6 turns long in the mean
            place = 0
            while place < num:
                idle = draw.geometric(self.stretches / (1 - self.stretches) / 6)
                busy = draw.geometric(1 / 6)
                logs[place + idle : place + idle + busy] += np.log1p(draw.uniform(0.1, 0.6))
                place += idle + busy
        turns = logs.reshape(NUM_ROUNDS, 2)
        turns[1::2] = turns[1::2, ::-1]
        head = turns[:, 1] + difference + draw.normal(0, self.start)
        return Rounds(tuple(np.exp(turns[:, 0]).tolist()), tuple(np.exp(head).tolist()))


TURNS: Mapping[str, Turns] = {
    "turns 3 %": Turns(),
    "turns 8 %": Turns(0.08),
    "turns 15 %": Turns(0.15),
    "turns 3 %, starts 3 %": Turns(start=0.03),
    "turns 8 %, starts 1 %": Turns(0.08, 0.01),
    "disturbed 10 %": Turns(disturbed=0.1),
    "disturbed 20 %": Turns(disturbed=0.2),
    "turns 8 %, disturbed 20 %": Turns(0.08, disturbed=0.2),
    "stretches": Turns(stretches=1 / 3),
    "correlated": Turns(0.08, correlation=0.5),
    "drift": Turns(drift=0.06),
}
ALONE = 0.008


def alone(
    draw: np.random.Generator, num: int, *, kind: str = "normal", share: float = 0.0
) -> Floats:
    """Logarithms of the steps of launches of one side or of both in turn, in the order of time."""
    logs = draw.normal(0, ALONE, num)
    if kind == "t3":
        logs = draw.standard_t(3, num) * ALONE / math.sqrt(3)
    elif kind == "exponential":
        logs = draw.exponential(ALONE, num)
    elif kind == "disturbed":
        logs += np.where(draw.random(num) < share, np.log1p(draw.uniform(*DISTURBANCE, num)), 0)
    elif kind == "two levels":
        logs += 0.03 * (draw.random(num) < share)
    elif kind == "drift":
        logs += 0.01 * np.sin(2 * np.pi * (np.arange(num) / num + draw.random()))
    elif kind == "correlated":
        fresh = draw.normal(0, ALONE * 0.8, num + 30)
        logs = lfilter([1.0], [1.0, -0.6], fresh)[30:]
    return np.asarray(logs)


ALONES: Mapping[str, Callable[[np.random.Generator, int], Floats]] = {
    "normal": alone,
    "t3": partial(alone, kind="t3"),
    "exponential": partial(alone, kind="exponential"),
    "disturbed 10 %": partial(alone, kind="disturbed", share=0.1),
    "disturbed 20 %": partial(alone, kind="disturbed", share=0.2),
    "3 % slower in 30 %": partial(alone, kind="two levels", share=0.3),
    "drift": partial(alone, kind="drift"),
    "correlated": partial(alone, kind="correlated"),
}
MOST_ALONE, FEWEST_ALONE = 12, 3


@dataclass(frozen=True)
class Looked:
    """One comparison that was looked at until its verdict."""

    verdict: Verdict
    num_launches: int
    num_rounds: int
    always_held: bool  # the interval of 95 % held the true difference at all looks
    held_at_end: bool  # that of a single look after the whole budget


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sequences", type=int, default=2400, help="of each kind")
    options.add_argument("--seed", type=int, default=38)
    options.add_argument("--only", nargs="+", help="kinds, by the beginnings of their names")
    settings, surroundings = options.parse_args(), read_surroundings()
    ratios: list[Ratio] = []
    figures: list[Figure] = []
    for name, simulate in kinds():
        if settings.only and not name.startswith(tuple(settings.only)):
            continue
        for difference in (0.0, RESOLUTION, 0.05):
            draw = np.random.default_rng([settings.seed, *f"{name}{difference}".encode()])
            log = math.log1p(difference)
            found = [simulate(draw, log) for _ in range(settings.sequences)]
            for figure in figures_of(f"{name}, {difference:.0%}", difference, found):
                (ratios if isinstance(figure, Ratio) else figures).append(figure)
                print(f"  {figure.name}: {float(np.mean(figure.values)):.4g}", flush=True)
    write("judging", settings, surroundings, ratios, figures)


Simulate = Callable[[np.random.Generator, float], Looked]


def kinds() -> Iterator[tuple[str, Simulate]]:
    """The kinds of comparisons, with their names."""
    for name, turns in TURNS.items():
        for is_known in (True, False):
            known = "known" if is_known else "unknown"
            yield f"{name}, starts {known}", partial(in_turns, turns, is_known=is_known)
    for name, model in ALONES.items():
        for is_known in (True, False):
            known = "known" if is_known else "unknown"
            yield f"alone: {name}, noise {known}", partial(side_by_side, model, is_known=is_known)


def in_turns(
    turns: Turns, draw: np.random.Generator, difference: float, *, is_known: bool
) -> Looked:
    """Look at rounds until the verdict."""
    starts: Noise | None = None
    if is_known:
        before = [turns.launch(draw, 0.0) for _ in range(NUM_BEFORE)]
        starts = noise_of_rounds(STEP, [before]).starts
    launches = [turns.launch(draw, difference) for _ in range(NUM_LAUNCHES)]
    (whole,) = judge(STEP, [Evidence(paired=tuple(launches), starts=starts)])
    counts = range(A_LOOK, NUM_LAUNCHES * NUM_ROUNDS + 1, A_LOOK)
    first: tuple[Verdict, int, int] | None = None
    always = True
    for place, count in enumerate(counts):
        full, rest = divmod(count, NUM_ROUNDS)
        parts = [*launches[:full]]
        if rest:
            parts.append(Rounds(launches[full].base[:rest], launches[full].head[:rest]))
        looks = looks_at(counts[: place + 1], counts[-1])
        (change,) = judge(STEP, [Evidence(paired=tuple(parts), starts=starts)], looks)
        if change.is_decided and first is None:
            first = change.verdict, len(parts), count
        always = always and holds(change, difference)
        if first is not None and difference:
            break
    verdict, num_launches, num_rounds = first or (Verdict.open, NUM_LAUNCHES, counts[-1])
    return Looked(verdict, num_launches, num_rounds, always, holds(whole, difference))


def side_by_side(
    model: Callable[[np.random.Generator, int], Floats],
    draw: np.random.Generator,
    difference: float,
    *,
    is_known: bool,
) -> Looked:
    """Look at launches of either side until the verdict."""
    noise: Noise | None = None
    if is_known:
        level = noise_of_launches(STEP, [np.exp(model(draw, 2 * NUM_BEFORE)).tolist()])
        noise = None if level is None else level.noise
    logs = model(draw, 2 * MOST_ALONE)
    base, head = np.exp(logs[::2]).tolist(), np.exp(logs[1::2] + difference).tolist()
    counts = range(FEWEST_ALONE, MOST_ALONE + 1)
    (whole,) = judge(STEP, [Evidence(Launches(tuple(base)), Launches(tuple(head)), noise=noise)])
    first: tuple[Verdict, int] | None = None
    always = True
    for place, num in enumerate(counts):
        sides = Launches(tuple(base[:num])), Launches(tuple(head[:num]))
        looks = looks_at(counts[: place + 1], MOST_ALONE)
        (change,) = judge(STEP, [Evidence(*sides, noise=noise)], looks)
        if change.is_decided and first is None:
            first = change.verdict, num
        always = always and holds(change, difference)
        if first is not None and difference:
            break
    verdict, num_launches = first or (Verdict.open, MOST_ALONE)
    return Looked(verdict, num_launches, 0, always, holds(whole, difference))


def holds(change: Change, difference: float) -> bool:
    """Whether the interval of 95 % has the true difference in it; an unknown one has."""
    if change.ratio is None:
        return True
    return change.ratio.low <= math.exp(difference) <= change.ratio.high


def figures_of(name: str, difference: float, found: Sequence[Looked]) -> Iterator[Figure | Ratio]:
    """The rates of one kind, in batches of comparisons, and how long they took."""
    batches = np.array_split(np.arange(len(found)), NUM_BATCHES)

    def rates(is_so: Callable[[Looked], bool]) -> tuple[float, ...]:
        return tuple(float(np.mean([is_so(found[at]) for at in batch])) for batch in batches)

    if difference == 0:
        yield Ratio(f"{name}: false claims", rates(lambda one: one.verdict.is_claim), goal=FALSE)
        yield Ratio(f"{name}: interval holds", rates(lambda one: one.held_at_end), goal=HOLDS)
        yield Ratio(f"{name}: interval holds at all looks", rates(lambda one: one.always_held))
    if difference == RESOLUTION:
        same = rates(lambda one: one.verdict is Verdict.same)
        yield Ratio(f"{name}: wrong same", same, goal=WRONG)
    words = ("same",) if difference == 0 else ("slower",)
    for verdict in words:
        found_so = rates(lambda one, verdict=verdict: str(one.verdict) == verdict)
        yield Ratio(f"{name}: {verdict}", found_so)
    yield Figure(f"{name}: launches", (float(np.median([one.num_launches for one in found])),))
    if found[0].num_rounds:
        yield Figure(f"{name}: rounds", (float(np.median([one.num_rounds for one in found])),))


if __name__ == "__main__":
    main()
