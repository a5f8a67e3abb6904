"""The overhead of measuring: steps with flight record, spans or torch.profiler, over bare ones.

    python -m benchmarks.overhead [--rounds 48]

This is the measurement of `ppbench overhead sweeps/1f1b_vs_afab.toml`: two CPU ranks, 8
microbatches of 128 tokens. One trainer steps on one batch, in an order that favours no arm: with
nothing recorded; with the flight record that every run has; with flight record and the spans of
every action, as in a sweep; under torch.profiler with its default settings. The time of a step is
that of the slowest rank.
"""

from __future__ import annotations

from benchmarks.outcome import Figure, Goal, Ratio, parser, write
from benchmarks.surroundings import ROOT, read_surroundings
from ppbench.config.reader import read_sweep
from ppbench.run.sweep.overhead import Rounds, measure_overhead

SWEEP = ROOT / "sweeps" / "1f1b_vs_afab.toml"
SETTINGS = ["world_size=2", "num_microbatches=8", "seq_len=128"]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=48)
    settings, surroundings = options.parse_args(), read_surroundings()
    cases: list[Rounds] = []
    sweep = read_sweep(SWEEP, SETTINGS, "cpu")
    measure_overhead(sweep, settings.rounds, lambda _place, _count: None, cases.append)
    ratios = [ratio for rounds in cases for ratio in _ratios(rounds)]
    write("overhead", settings, surroundings, ratios, [_step(rounds) for rounds in cases])


def _ratios(rounds: Rounds) -> list[Ratio]:
    name, bare = f"step of {rounds.case.schedule}", rounds.off_ns
    return [
        Ratio.of(f"{name}, with spans over bare", rounds.on_ns, bare, Goal(at_most=1.01)),
        Ratio.of(f"{name}, with the flight record over bare", rounds.flight_ns, bare),
        Ratio.of(f"{name}, under torch.profiler over bare", rounds.profiler_ns, bare),
    ]


def _step(rounds: Rounds) -> Figure:
    name = f"bare step of {rounds.case.schedule}"
    return Figure(name, tuple(ns / 1e6 for ns in rounds.off_ns), "ms")


if __name__ == "__main__":
    main()
