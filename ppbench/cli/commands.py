"""The catalogue of commands, in the order of `ppbench --help`: group, name, place, sentence.

A new command is a line here. Its sentence is the first paragraph of its function's docstring, so
that the help of all commands imports none of them.
"""

from __future__ import annotations

from typing import NamedTuple

MEASURE, LOOK, COMPARE = "Measure", "Look at runs", "Compare commits"
PLAN, EXCHANGE = "Plan", "Exchange with other tools"


class Entry(NamedTuple):
    """A command, and where it is: `module:function`, or `module:commands` for a group of them."""

    group: str
    name: str
    place: str
    sentence: str


COMMANDS = [
    Entry(
        *(MEASURE, "init", "init:init"),
        "Write a commented sweep file for this machine, and list its cases.",
    ),
    Entry(
        *(MEASURE, "sweep", "sweep:sweep"),
        "Run every case of a sweep file and write a report.",
    ),
    Entry(
        *(MEASURE, "noise", "noise:noise"),
        sentence="Measure the noise of this machine, which hides changes.",
    ),
    Entry(
        *(MEASURE, "models", "models:commands"),
        "Check which architectures can be split exactly.",
    ),
    Entry(
        *(MEASURE, "env", "env:env"),
        "Show the hardware and software that timings depend on.",
    ),
    Entry(
        *(LOOK, "ls", "runs:list_runs"),
        "List the runs in the store, oldest first; a table shows the newest 200.",
    ),
    Entry(
        *(LOOK, "show", "runs:show"),
        "Show everything that is stored of a run: figures, ranks, settings, steps.",
    ),
    Entry(
        *(LOOK, "explain", "explain:explain"),
        "Explain where runs' idle time went, and how long their steps would take otherwise.",
    ),
    Entry(
        *(LOOK, "stragglers", "stragglers:stragglers"),
        "Say who slows a job down: a worker, stage, replica, link, op type or sequence lengths.",
    ),
    Entry(
        *(LOOK, "report", "report:report"),
        "Write an HTML report of runs.",
    ),
    Entry(
        *(LOOK, "timeline", "report:timeline"),
        "Write the Gantt timelines of runs as an HTML page, or draw them in the terminal.",
    ),
    Entry(
        *(LOOK, "figure", "figure:figure"),
        "Draw one figure into a file.",
    ),
    Entry(
        *(LOOK, "query", "runs:query"),
        sentence="Query the store in SQL: `SELECT schedule, max(tokens_per_s) FROM runs GROUP BY "
        "schedule`.",
    ),
    Entry(
        *(COMPARE, "compare", "compare:compare"),
        "Compare two sides, or the cases that differ in one setting: figures, and what changed.",
    ),
    Entry(
        *(COMPARE, "check", "check:check"),
        "CI gate: exits 1 on a regression, 3 on insufficient data, 4 on failed runs.",
    ),
    Entry(
        *(COMPARE, "history", "history:history"),
        "Show a metric over commits: levels per case and machine, and what changed them.",
    ),
    Entry(
        *(COMPARE, "backfill", "backfill:backfill"),
        sentence="Measure past commits in work trees: newest, oldest, then the middle of the "
        "largest gap.",
    ),
    Entry(
        *(COMPARE, "bisect", "bisect:bisect"),
        "Find the first bad commit with as few launches as the noise allows.",
    ),
    Entry(
        *(PLAN, "plan", "plan:plan"),
        "Find the best pipeline for a model, devices and memory, and say how sure that is.",
    ),
    Entry(
        *(PLAN, "simulate", "simulate:simulate"),
        "Predict makespan, bubble and peak activations of a schedule, or of all.",
    ),
    Entry(
        *(PLAN, "schedules", "schedules:commands"),
        "List, draw, check and export schedules.",
    ),
    Entry(
        *(EXCHANGE, "import", "traces:import_traces"),
        "Store a training run from its ranks' torch.profiler traces.",
    ),
    Entry(
        *(EXCHANGE, "export", "export:export"),
        "Export a table of the store, or figures for Bencher.",
    ),
    Entry(
        *(EXCHANGE, "trace", "export:trace"),
        "Write a run as a Chrome trace, for Perfetto and other viewers.",
    ),
    Entry(
        *(EXCHANGE, "compact", "runs:compact"),
        sentence="Merge the store's many small files into few large ones, which are read much "
        "faster.",
    ),
]
