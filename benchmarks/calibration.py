"""How the constants of `ppbench.judge.disturbances` were chosen: rates for other values.

    python -m benchmarks.calibration [--comparisons 5000] [--only APART INFLATION ...]

One constant at a time is changed. The figures are the rate of false `slower`, the worst over all
models of noise, and the changes found; five launches a side, noise unknown. A lower APART discounts
more launches: more changes are found among disturbed launches and more false ones. A lower
INFLATION does the same. The chosen values are those with the most changes found among which no
model has over 1 % of false alarms.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.made_up_launches import ALL_MODELS, Floats, Settings, made_up_steps
from benchmarks.robustness import verdicts_of
from ppbench.judge import disturbances
from ppbench.statistics.verdicts import Verdict

VALUES: Mapping[str, Sequence[float]] = {
    "APART": (4.0, 4.75, 5.25, 6.0, 7.0),
    "APART_ALONE": (0.0, 3.0, 3.5, 4.0, 5.0),
    "SHARE_KEPT": (0.5, 0.6, 0.7),
    "INFLATION": (0.0, 15.0, 30.0, 60.0),
    "NEAR": (1.0, 2.5, 4.0),
    "DISTANT": (0.0, 4.0, 6.0, 8.0),
    "BROKEN_OUT": (3.0, 5.0, 8.0, 100.0),
}
FOUND = (
    ("normal", 0.02),
    ("exponential", 0.02),
    ("10 % disturbed", 0.05),
    ("10 % disturbed", 0.10),
    ("20 % disturbed", 0.05),
    ("20 % disturbed", 0.10),
)


@dataclass(frozen=True)
class Rates:
    """False alarms, and the changes found."""

    worst_model: str
    worst: float
    found: tuple[float, ...]

    def __str__(self) -> str:
        found = "  ".join(f"{share:6.1%}" for share in self.found)
        return f"{self.worst:6.2%} ({self.worst_model:20})  {found}"


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--comparisons", type=int, default=5000)
    options.add_argument("--only", nargs="+", choices=VALUES, default=list(VALUES))
    arguments = options.parse_args()
    launches = _launches(arguments.comparisons)
    print("false `slower`, worst; found:", *(f"{name}, {change:.0%};" for name, change in FOUND))
    for name in arguments.only:
        chosen = getattr(disturbances, name)
        for value in VALUES[name]:
            setattr(disturbances, name, value)
            mark = "chosen" if value == chosen else ""
            print(f"  {name:12} {value:6g} {mark:6}  {_rates(launches)}", flush=True)
        setattr(disturbances, name, chosen)


def _launches(num: int) -> dict[str, Floats]:
    settings = Settings(8, num, 0, 0, 0, 20, 5, None)
    return {
        name: np.median(made_up_steps(settings.draw(name), (num, 10), 20, model), axis=-1)
        for name, model in ALL_MODELS.items()
    }


def _rates(launches: Mapping[str, Floats]) -> Rates:
    alarms = {name: _slower(drawn, 0.0) for name, drawn in launches.items()}
    worst = max(alarms, key=lambda name: alarms[name])
    found = tuple(_slower(launches[name], change) for name, change in FOUND)
    return Rates(worst, alarms[worst], found)


def _slower(launches: Floats, change: float) -> float:
    verdicts = Counter(verdicts_of(launches, change))
    return verdicts[Verdict.slower] / len(launches)


if __name__ == "__main__":
    main()
