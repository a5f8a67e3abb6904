"""Made-up launches and rounds, and what the judge says of them: rates of false and right claims.

Launches of one side each deviate by 0.8 %: lognormal, Student's t with three degrees of freedom,
slower than the fastest one (exponential), some 10 to 35 % longer (disturbed), 30 % of them on a
level that is 3 % slower (bimodal), with a level that goes 1 % up and down in a day (drift), or each
correlated by 0.6 with the one before it.

In rounds in turns (`Turns`), base first and head first alternately, a turn scatters, a start
decides something for the difference, another job makes turns longer at random or for a stretch, a
turn's noise is correlated with that of the turn before, or the machine gets slower meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter

from ppbench.display.metrics import METRICS
from ppbench.judge.evidence import Evidence, Launches, Noise, Rounds
from ppbench.judge.looks import Looks
from ppbench.judge.noise import noise_of_launches, noise_of_rounds
from ppbench.judge.verdicts import Verdict, judge

STEP = METRICS["step_ns"]
BETWEEN, NEIGHBOURS = 0.008, 0.6
DISTURBANCE = (0.10, 0.35)
NUM_LAUNCHES, NUM_ROUNDS, A_LOOK = 8, 24, 12
FEWEST_ALONE, MOST_ALONE = 3, 12
NUM_BEFORE = 10  # launches that have measured how much starts or launches of one side differ

Floats = npt.NDArray[np.float64]
Model = Callable[[np.random.Generator, int], Floats]
"""Draws the logarithm of how much longer each launch takes, in the order of time."""


def normal(draw: np.random.Generator, num: int) -> Floats:
    return draw.normal(0, BETWEEN, num)


def disturbed(share: float) -> Model:
    """Launches of which some are disturbed."""

    def model(draw: np.random.Generator, num: int) -> Floats:
        slowed = np.where(draw.random(num) < share, draw.uniform(*DISTURBANCE, num), 0.0)
        return normal(draw, num) + np.log1p(slowed)

    return model


def drift(draw: np.random.Generator, num: int) -> Floats:
    """Launches spread over one day, that may begin at any hour."""
    hours = np.arange(num) / num + draw.random()
    return normal(draw, num) + 0.01 * np.sin(2 * np.pi * hours)


def correlated(draw: np.random.Generator, num: int) -> Floats:
    fresh = draw.normal(0, BETWEEN * math.sqrt(1 - NEIGHBOURS**2), 30 + num)
    return np.asarray(lfilter([1.0], [1.0, -NEIGHBOURS], fresh)[30:])


MODELS: Mapping[str, Model] = {
    "normal": normal,
    "t3": lambda draw, num: np.asarray(draw.standard_t(3, num) * BETWEEN / math.sqrt(3)),
    "exponential": lambda draw, num: draw.exponential(BETWEEN, num),
    "10 % disturbed": disturbed(0.1),
    "20 % disturbed": disturbed(0.2),
    "bimodal": lambda draw, num: normal(draw, num) + math.log(1.03) * (draw.random(num) < 0.3),
    "drift": drift,
    "correlated": correlated,
}


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


@dataclass(frozen=True)
class Looked:
    """One comparison that was looked at until its verdict."""

    verdict: Verdict
    num_launches: int
    held: bool  # the interval of 95 % after the whole budget has the true difference


def kinds() -> Iterator[tuple[str, Callable[[np.random.Generator, float], Looked]]]:
    """Every kind of comparison: what draws one whose sides differ by so much, and judges it."""
    for is_known in (True, False):
        known = "known" if is_known else "unknown"
        for name, turns in TURNS.items():
            yield f"{name}, starts {known}", partial(in_turns, turns, is_known)
        for name, model in MODELS.items():
            yield f"alone: {name}, noise {known}", partial(side_by_side, model, is_known)


def in_turns(turns: Turns, is_known: bool, draw: np.random.Generator, difference: float) -> Looked:
    """Look after every twelfth round, until the verdict or eight launches of 24 rounds."""
    starts: Noise | None = None
    if is_known:
        before = [turns.launch(draw, 0.0) for _ in range(NUM_BEFORE)]
        starts = noise_of_rounds(STEP, [before]).starts
    launches = [turns.launch(draw, difference) for _ in range(NUM_LAUNCHES)]

    def until(num_rounds: int) -> Evidence:
        full, rest = divmod(num_rounds, NUM_ROUNDS)
        parts = launches[:full]
        if rest:
            own = launches[full]
            parts = [*parts, Rounds(own.base[:rest], own.head[:rest])]
        return Evidence(paired=tuple(parts), starts=starts)

    counts = range(A_LOOK, NUM_LAUNCHES * NUM_ROUNDS + 1, A_LOOK)
    return _looked(until, counts, difference, a_launch=NUM_ROUNDS)


def side_by_side(
    model: Model, is_known: bool, draw: np.random.Generator, difference: float
) -> Looked:
    """Look after every launch of both sides, until the verdict or twelve launches of each."""
    noise: Noise | None = None
    if is_known:
        level = noise_of_launches(STEP, [np.exp(model(draw, 2 * NUM_BEFORE)).tolist()])
        noise = None if level is None else level.noise
    logs = model(draw, 2 * MOST_ALONE)
    base, head = np.exp(logs[::2]).tolist(), np.exp(logs[1::2] + difference).tolist()

    def until(num: int) -> Evidence:
        return Evidence(Launches(tuple(base[:num])), Launches(tuple(head[:num])), noise=noise)

    return _looked(until, range(FEWEST_ALONE, MOST_ALONE + 1), difference)


def _looked(
    until: Callable[[int], Evidence], counts: Sequence[int], difference: float, a_launch: int = 1
) -> Looked:
    (whole,) = judge(STEP, [until(counts[-1])])
    held = whole.ratio is None or whole.ratio.low <= math.exp(difference) <= whole.ratio.high
    for place, num in enumerate(counts):
        looks = Looks(tuple(counts[: place + 1]), counts[-1])
        (change,) = judge(STEP, [until(num)], looks)
        if change.is_decided:
            return Looked(change.verdict, -(-num // a_launch), held)
    return Looked(Verdict.open, -(-counts[-1] // a_launch), held)
