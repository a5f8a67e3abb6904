"""The overhead of measuring: steps with flight record, spans or torch.profiler, over bare ones.

    python -m benchmarks.overhead [--rounds 48]

Two CPU ranks train 8 microbatches of 128 tokens. One trainer steps on one batch, in an order that
favours no arm: with nothing recorded; with the flight record that every run has; with flight record
and the spans of every action, as in a sweep; under torch.profiler with its default settings. The
time of a step is that of the slowest rank.

    sweep file --> cases --job file--> benchmarks.overhead_ranks --journal--> rounds --> ratios

Nothing goes into a store, which holds steps with spans: these rounds measure the cost of spans.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.outcome import Figure, Goal, Ratio, parser, write
from benchmarks.surroundings import ROOT, read_surroundings
from ppbench.config.case import Case, Measure
from ppbench.config.reader import read_sweep
from ppbench.config.sweep import Sweep
from ppbench.errors import LaunchError
from ppbench.run.job import Event, Job, PlannedRun, write_job
from ppbench.run.launch.local import Supervisor
from ppbench.run.machine.node_folder import make_node_folder, remove_node_folder
from ppbench.run.sweep.control import begin_ranks, follow
from ppbench.run.sweep.plan import check_devices
from ppbench.store import new_run_id

SWEEP = ROOT / "sweeps" / "1f1b_vs_afab.toml"
SETTINGS = ["world_size=2", "num_microbatches=8", "seq_len=128"]


@dataclass
class Rounds:
    """The times of a step of a case in each round, on its slowest rank, in nanoseconds."""

    case: Case
    off_ns: list[int] = field(default_factory=list)  # nothing recorded
    flight_ns: list[int] = field(default_factory=list)  # the flight record alone
    on_ns: list[int] = field(default_factory=list)  # with spans as well, as in a sweep
    profiler_ns: list[int] = field(default_factory=list)  # under torch's profiler, if asked for


def measure_overhead(sweep: Sweep, num_rounds: int, *, has_profiler: bool = False) -> list[Rounds]:
    """Run every case of a sweep for this many rounds. Raises LaunchError if a rank dies.

    `has_profiler`: a step of each round runs under torch's profiler. Of the settings of the
    measurement only `warmup_steps` counts.
    """
    check_devices(sweep)
    cases = [Rounds(case) for case, _ in sweep.cases]
    items = tuple(
        PlannedRun(
            case,
            Measure(
                warmup_steps=measure.warmup_steps,
                steps=num_rounds,
                profile_steps=int(has_profiler),
            ),
            0,
            "",
        )
        for case, measure in sweep.cases
    )
    current = cases[0]

    def take(event: Event) -> None:
        nonlocal current
        if event["event"] == "case":
            current = cases[int(event["index"] or 0)]
        elif event["event"] == "round":
            current.off_ns.append(int(event["off_ns"] or 0))
            current.flight_ns.append(int(event["flight_ns"] or 0))
            current.on_ns.append(int(event["on_ns"] or 0))
            if has_profiler:
                current.profiler_ns.append(int(event["profiler_ns"] or 0))

    with tempfile.TemporaryDirectory(prefix="ppbench-overhead-") as name:
        folder, local = Path(name) / "launch", make_node_folder()
        job = Job(new_run_id(), name, "", sweep.name, sweep.file, None, items)
        program = ["benchmarks.overhead_ranks", str(write_job(folder, job))]
        try:
            with Supervisor(sweep.supervision.variables()) as supervisor:
                begin_ranks(supervisor, folder, program, items, 0, local)
                if not follow(supervisor, folder, take, local):
                    raise LaunchError("\n".join(supervisor.last_lines()))
        finally:
            remove_node_folder(local)
    return cases


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=48)
    settings, surroundings = options.parse_args(), read_surroundings()
    sweep = read_sweep(SWEEP, SETTINGS, "cpu")
    cases = measure_overhead(sweep, settings.rounds, has_profiler=True)
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
