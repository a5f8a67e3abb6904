"""What is claimed of speed, measured. `python -m benchmarks` runs all, `… benchmarks.NAME` one.

    NAME.py --arms--> turns.py --ratios--> outcome.py --results/NAME.json--> page.py --> README.md

Every figure is a ratio of two things measured in turn in one run. Why not pytest-benchmark or asv?
Both time one function by itself, and compare it with what it took on another day.
"""

BENCHMARKS: tuple[str, ...] = (
    "runtimes",
    "limit",
    "zero_bubble",
    "overhead",
    "case_cost",
    "simulate",
    "split_backward",
    "report",
    "timeline",
    "starting",
    "store",
)
"""In the order in which they run and stand on the page. Each is a module here with a `main()` that
takes no argument it needs, and leaves `results/NAME.json`."""
