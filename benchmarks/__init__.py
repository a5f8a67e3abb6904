"""Every claim of speed, measured. `python -m benchmarks` runs all, `… benchmarks.NAME` one.

    NAME.py --arms--> turns.py --ratios--> outcome.py --results/NAME.json--> page.py --> README.md

Every figure is a ratio of two things measured in turn in one run. Why not pytest-benchmark or asv?
Both time a single function, and compare its time with that of another day.
"""

BENCHMARKS: tuple[str, ...] = (
    "runtimes",
    "running",
    "limit",
    "zero_bubble",
    "overhead",
    "case_cost",
    "simulate",
    "core",
    "solver",
    "memory_limits",
    "planning",
    "worlds",
    "split_backward",
    "stragglers",
    "replicas",
    "replica_memory",
    "without_replicas",
    "report",
    "timeline",
    "starting",
    "store",
    "controls",
    "disturbed",
    "judging",
)
"""The benchmarks in the order in which they run and are shown on the page. Each is a module of this
package with a `main()` that needs no argument and writes `results/NAME.json`."""
MEASURED_ON: tuple[str, ...] = ("runtimes", "limit")
"""Those that measure further rounds while a goal is not decided."""
