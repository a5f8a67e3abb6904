"""Made-up launches: the median step of each, under several models of the noise between launches.

    normal        lognormal, with a deviation of 0.8 %
    t3            Student's t with three degrees of freedom, of the same deviation
    exponential   slower than the fastest possible one by 0.8 % in the mean
    disturbed     normal, and in 10 % or 20 % of launches 10 to 35 % longer
    bimodal       normal, and in some share of launches on a level that is 1, 3 or 10 % slower
    drift         normal, and a level that goes 1 % up and down in the course of a day
    correlated    normal, and each launch correlated by 0.6 with the one before it

Steps within a launch differ by 0.8 %; they follow an AR(1) of 0.4, and 2 % of them take 1.5 to 3
times as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter

BETWEEN, WITHIN, AUTOREGRESSION, OUTLYING = 0.008, 0.008, 0.4, 0.02
OUTLIERS = (1.5, 3.0)  # factors by which an outlier is longer
DISTURBANCE = (0.10, 0.35)
DRIFT = 0.01  # amplitude
NEIGHBOURS = 0.6  # correlation of a launch with the one before it
LEVELS, SHARES = (0.01, 0.03, 0.10), (0.1, 0.3, 0.5, 0.7, 0.9)
_BURN_IN = 30

Floats = npt.NDArray[np.float64]
Figures = dict[str, float]
Model = Callable[[np.random.Generator, tuple[int, ...]], Floats]
"""Draws the logarithm of how much longer each launch takes; the last axis is time."""


@dataclass(frozen=True)
class Settings:
    """The options of the command line."""

    seed: int
    series: int
    searches: int
    steps: int
    json: Path | None
    parts: list[str] | None = None  # all

    def draw(self, what: str) -> np.random.Generator:
        """A generator for one part, independent of the others."""
        return np.random.default_rng([self.seed, *what.encode()])


@dataclass(frozen=True)
class Demand:
    """A bound of a figure that must hold, or the exit code is 1."""

    figure: str
    at_most: float | None = None
    at_least: float | None = None

    def is_held(self, value: float) -> bool:
        return (self.at_most is None or value <= self.at_most) and (
            self.at_least is None or value >= self.at_least
        )

    def __str__(self) -> str:
        sign, bound = ("<=", self.at_most) if self.at_least is None else (">=", self.at_least)
        assert bound is not None
        return f"{self.figure} {sign} {in_words(self.figure, bound).strip()}"


def in_words(figure: str, value: float) -> str:
    return f"{value:8.2f}" if ", number" in figure else f"{value:8.2%}"


def change_in_words(change: float) -> str:
    return f"{change * 100:.0f} %" if change else "A/A"


def normal(draw: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return draw.normal(0, BETWEEN, shape)


def t3(draw: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return np.asarray(draw.standard_t(3, shape) * BETWEEN / np.sqrt(3))


def exponential(draw: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return draw.exponential(BETWEEN, shape)


def disturbed(share: float) -> Model:
    """Launches of which some are disturbed."""

    def model(draw: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        slowed = np.where(draw.random(shape) < share, draw.uniform(*DISTURBANCE, shape), 0.0)
        return normal(draw, shape) + np.log1p(slowed)

    return model


def bimodal(level: float, share: float) -> Model:
    """Launches of which some lie on a slower level."""

    def model(draw: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        return normal(draw, shape) + math.log1p(level) * (draw.random(shape) < share)

    return model


def bimodal_name(level: float, share: float) -> str:
    return f"bimodal {level:.0%} in {share:.0%}"


def drift(draw: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Launches spread over one day, that may begin at any hour."""
    hours = np.arange(shape[-1]) / shape[-1] + draw.random((*shape[:-1], 1))
    return normal(draw, shape) + DRIFT * np.sin(2 * np.pi * hours)


def correlated(draw: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    fresh = draw.normal(
        0, BETWEEN * np.sqrt(1 - NEIGHBOURS**2), (*shape[:-1], _BURN_IN + shape[-1])
    )
    return np.asarray(lfilter([1.0], [1.0, -NEIGHBOURS], fresh, axis=-1)[..., _BURN_IN:])


SEARCHED: dict[str, Model] = {
    "normal": normal,
    "t3": t3,
    "exponential": exponential,
    "10 % disturbed": disturbed(0.1),
    "20 % disturbed": disturbed(0.2),
}
"""Models with demands on the changes that are found."""
BIMODAL: dict[str, Model] = {
    bimodal_name(level, share): bimodal(level, share) for level in LEVELS for share in SHARES
}
ALL_MODELS: dict[str, Model] = {**SEARCHED, **BIMODAL, "drift": drift, "correlated": correlated}


def made_up_steps(
    draw: np.random.Generator, shape: tuple[int, ...], num_steps: int, model: Model = normal
) -> Floats:
    """Step times with a deviation per launch, as an array of the given shape and the steps."""
    fresh = draw.normal(0, WITHIN * np.sqrt(1 - AUTOREGRESSION**2), (*shape, _BURN_IN + num_steps))
    within = lfilter([1.0], [1.0, -AUTOREGRESSION], fresh, axis=-1)[..., _BURN_IN:]
    between = model(draw, shape)[..., None]
    is_outlier = draw.random(within.shape) < OUTLYING
    slowed = np.where(is_outlier, draw.uniform(*OUTLIERS, within.shape), 1.0)
    return np.asarray(np.exp(within + between) * slowed, dtype=float)


Part = Callable[[Settings], Iterator[tuple[str, float]]]
"""Yields figures with their names."""
