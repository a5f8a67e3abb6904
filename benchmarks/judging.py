"""Whether the judge's error rates hold, and how soon it answers, on made-up rounds and launches.

    python -m benchmarks.judging [--sequences 1200] [--seed 38] [--only NAME...]

A launch has rounds of two sides that take turns, base first and head first alternately. The head's
turns differ from the base's by the true difference, by what the start of the launch decided, and by
what each turn scatters:

    turns 3 %, 8 %, 15 %    noise of a turn; starts differ by 0.5 % (launches by 0.5 %, 3 %: more)
    disturbed 10 %, 20 %    so many of the turns are 10 to 35 % longer
    stretches               another job makes turns 10 to 60 % longer for some 6 at a time, a third
                            of all
    correlated              a turn's noise is correlated by 0.5 with that of the one before it
    drift                   the machine gets 6 % slower in the course of a launch

One looks after every twelfth round until the verdict, or until eight launches of 24 rounds are
spent. The starts are known from ten launches of the same kind before, or unknown. `False claims`
are `faster` or `slower` for equal sides, at any look; `wrong same` is `same` where the true
difference is the resolution of 2 % (the hardest: larger ones are confused less). Intervals are
those of 95 % at a single look after the whole budget, and at all looks together.

Launches of one side each (`alone`, the models of `benchmarks/made_up_launches.py`) are judged after
every launch of both sides, up to twelve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.signal import lfilter

from benchmarks.made_up_launches import ALL_MODELS, SEARCHED, Model, bimodal_name
from benchmarks.outcome import Figure, Goal, Ratio, parser, write
from benchmarks.surroundings import read_surroundings
from ppbench.display.metrics import METRICS
from ppbench.judge.evidence import RESOLUTION, Evidence, Launches, Noise, Rounds
from ppbench.judge.looks import Looks
from ppbench.judge.noise import noise_of_launches, noise_of_rounds
from ppbench.judge.verdicts import Change, Verdict, judge

STEP = METRICS["step_ns"]
NUM_LAUNCHES, NUM_ROUNDS, A_LOOK = 8, 24, 12
NUM_BEFORE = 10
"""Launches that have measured how much starts differ, or launches of one side."""
NUM_BATCHES = 12
LARGE = 0.05  # a difference that is soon found
KEPT = ("false claims", "wrong same")  # of each kind, beside what all of a group have
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
ALONES: Mapping[str, Model] = {
    name: ALL_MODELS[name] for name in (*SEARCHED, bimodal_name(0.03, 0.3), "drift", "correlated")
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
    options.add_argument("--sequences", type=int, default=1200, help="of each kind")
    options.add_argument("--seed", type=int, default=38)
    options.add_argument("--only", nargs="+", help="kinds, by the beginnings of their names")
    settings, surroundings = options.parse_args(), read_surroundings()
    rates: dict[str, list[tuple[float, ...]]] = {}  # of each measure, over kinds, in batches
    figures: list[Figure] = []
    for group, name, simulate in kinds():
        if settings.only and not name.startswith(tuple(settings.only)):
            continue
        for difference in (0.0, RESOLUTION, LARGE):
            draw = np.random.default_rng([settings.seed, *f"{name}{difference}".encode()])
            log = math.log1p(difference)
            found = [simulate(draw, log) for _ in range(settings.sequences)]
            batches = np.array_split(np.arange(len(found)), NUM_BATCHES)
            for measure, is_so in measures(difference):
                by_batch = tuple(
                    float(np.mean([is_so(found[at]) for at in batch])) for batch in batches
                )
                rates.setdefault(f"{group}: {measure}", []).append(by_batch)
                rate = float(np.mean(by_batch))
                print(f"  {name}: {measure}: {rate:.4g}", flush=True)
                if measure in KEPT:
                    figures.append(Figure(f"{name}: {measure}", (rate,)))
            for unit in ("launches", "rounds"):
                median = float(np.median([getattr(one, f"num_{unit}") for one in found]))
                if median:
                    text = f"{name}: {unit} for {difference:.0%}"
                    print(f"  {text}: {median:g}", flush=True)
                    if difference == LARGE:
                        figures.append(Figure(text, (median,)))
    goals = {"false claims": FALSE, "wrong same": WRONG, "interval holds": HOLDS}
    ratios = [
        Ratio(name, tuple(np.mean(of_kinds, axis=0).tolist()), goal=goals.get(name.split(": ")[1]))
        for name, of_kinds in rates.items()
    ]
    write("judging", settings, surroundings, ratios, figures)


def measures(difference: float) -> Iterator[tuple[str, Callable[[Looked], bool]]]:
    """Count the verdicts of comparisons of sides that differ by so much."""
    if difference == 0:
        yield "false claims", lambda one: one.verdict.is_claim
        yield "interval holds", lambda one: one.held_at_end
        yield "interval holds at all looks", lambda one: one.always_held
        yield "same", lambda one: one.verdict is Verdict.same
    elif difference == RESOLUTION:
        yield "wrong same", lambda one: one.verdict is Verdict.same
        yield "2 % found", lambda one: one.verdict is Verdict.slower
    else:
        yield "5 % found", lambda one: one.verdict is Verdict.slower


Simulate = Callable[[np.random.Generator, float], Looked]


def kinds() -> Iterator[tuple[str, str, Simulate]]:
    """The kinds of comparisons, with the groups that they are in, and their names."""
    for name, turns in TURNS.items():
        for is_known in (True, False):
            known = "known" if is_known else "unknown"
            yield (
                f"in turns, starts {known}",
                f"{name}, starts {known}",
                partial(in_turns, turns, is_known=is_known),
            )
    for name, model in ALONES.items():
        for is_known in (True, False):
            known = "known" if is_known else "unknown"
            yield (
                f"alone, noise {known}",
                f"alone: {name}, noise {known}",
                partial(side_by_side, model, is_known=is_known),
            )


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
        looks = Looks(tuple(counts[: place + 1]), counts[-1])
        (change,) = judge(STEP, [Evidence(paired=tuple(parts), starts=starts)], looks)
        if change.is_decided and first is None:
            first = change.verdict, len(parts), count
        always = always and holds(change, difference)
        if first is not None and difference:
            break
    verdict, num_launches, num_rounds = first or (Verdict.open, NUM_LAUNCHES, counts[-1])
    return Looked(verdict, num_launches, num_rounds, always, holds(whole, difference))


def side_by_side(
    model: Model,
    draw: np.random.Generator,
    difference: float,
    *,
    is_known: bool,
) -> Looked:
    """Look at launches of either side until the verdict."""
    noise: Noise | None = None
    if is_known:
        level = noise_of_launches(STEP, [np.exp(model(draw, (2 * NUM_BEFORE,))).tolist()])
        noise = None if level is None else level.noise
    logs = model(draw, (2 * MOST_ALONE,))
    base, head = np.exp(logs[::2]).tolist(), np.exp(logs[1::2] + difference).tolist()
    counts = range(FEWEST_ALONE, MOST_ALONE + 1)
    (whole,) = judge(STEP, [Evidence(Launches(tuple(base)), Launches(tuple(head)), noise=noise)])
    first: tuple[Verdict, int] | None = None
    always = True
    for place, num in enumerate(counts):
        sides = Launches(tuple(base[:num])), Launches(tuple(head[:num]))
        looks = Looks(tuple(counts[: place + 1]), MOST_ALONE)
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


if __name__ == "__main__":
    main()
