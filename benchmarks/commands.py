"""The time of commands: to start, to read a large store, to show a report, to simulate, of a case.

    python -m benchmarks.commands [start] [store] [report] [simulate] [case_cost]

`start`: whole processes in turns: `ppbench --help`, `ppbench ls` of 20 runs and `import ppbench`,
beside `import torch`, which none of them needs. `store`: questions to a compacted store of 100,000
runs with 12 million spans, beside the shortest program that answers them from the same files with
pandas or DuckDB. `report`: one headless Chromium opens the report of a sweep of 80 cases
beside a page of plotly.js and two bars, until the first figure is on the screen. `simulate`: a plan
of interleaved_zb on 8 ranks is simulated with all proofs that it is legal, beside the dry run of
torch.distributed.pipelining, which plays the same actions in steps of equal length. `case_cost`:
what a case takes beside its steps, in a sweep and with a start of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pandas as pd

from benchmarks.loop import in_turns, ppbench, run_python, seconds_of, sides, swept, within
from benchmarks.made_up_stores import SPANS_PER_RUN, rows_of_runs, spans_of_run
from benchmarks.ranks import on_ranks
from benchmarks.rows import NO_STARTS, ROOT, Row, run
from engine.plan.lower import Policy, lower
from engine.plan.predict import predict, uniform
from engine.plan.schedules.registry import build_program
from engine.plan.table import Table
from engine.plan.walk import TransferModel
from engine.run.p2p.fabric import Fabric
from ppbench.judge.evidence import Rounds
from ppbench.store import Store, write_rows

PPBENCH = "from ppbench.cli import main; main()"


def _timed(work: Callable[[], object]) -> Callable[[], float]:
    return partial(seconds_of, work)


def _rows(turns: Mapping[str, list[float]], base: str, heads: Sequence[str]) -> Iterator[Row]:
    """Each head over the base, and the seconds of it."""
    for head in heads:
        note = f"{1000 * statistics.median(turns[head]):,.0f} ms"
        rounds = [sides(turns, base, head)]
        yield Row.ratio(f"{head} over {base}", rounds, starts=NO_STARTS, note=note)


def start(asked: argparse.Namespace) -> Iterator[Row]:
    """Start each command in turns with the import of torch."""
    with tempfile.TemporaryDirectory() as name:
        store = Store(Path(name))
        for row in rows_of_runs(20):
            store.write_run(row, {})
        codes: dict[str, tuple[str, ...]] = {
            "import torch": ("import torch",),
            "ppbench --help": (PPBENCH, "--help"),
            "ppbench ls": (PPBENCH, "ls", "--results", name),
            "import ppbench": ("import ppbench",),
        }
        arms = {arm: _timed(partial(run_python, "-c", *code)) for arm, code in codes.items()}
        turns = in_turns(arms, within(asked.seconds, range(40), fewest=4))
    base, *heads = codes
    yield from _rows(turns, base, heads)


# Questions to a store

PART = 5000
BY_RUN = "SELECT schedule, median(tokens_per_s) FROM runs GROUP BY 1"
BY_SPAN = "SELECT op, sum(end_ns - start_ns) FROM spans GROUP BY 1"
PANDAS = (
    "import sys, pandas as pd; print(pd.read_parquet(sys.argv[1] + '/runs')"
    ".sort_values('created_at').tail(20).to_string())"
)
DUCKDB = (
    "import sys, duckdb; files = sys.argv[1] + '/{table}/**/*.parquet'; "
    "{table} = duckdb.read_parquet(files); print(duckdb.sql({query!r}))"
)


def store(asked: argparse.Namespace) -> Iterator[Row]:
    """Ask a store and its files the same questions in turns."""
    questions = (  # the name, our words, the library, its code
        ("ls, last 20", ("ls", "--limit", "20"), "pandas", PANDAS),
        ("query, runs", ("query", BY_RUN), "DuckDB", DUCKDB.format(table="runs", query=BY_RUN)),
        ("query, spans", ("query", BY_SPAN), "DuckDB", DUCKDB.format(table="spans", query=BY_SPAN)),
    )
    num_runs = 100_000 if asked.seconds else 1000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "results"
        make_compacted(folder, num_runs)
        for question, ours, library, code in questions:
            arms = {
                library: _timed(partial(run_python, "-c", code, folder)),
                f"`{question}`": _timed(partial(ppbench, *ours, "--results", folder)),
            }
            turns = in_turns(arms, within(asked.seconds / len(questions), range(8), fewest=4))
            yield from _rows(turns, library, [f"`{question}`"])


def make_compacted(folder: Path, num_runs: int) -> None:
    """Make a store: write it a part at a time, then merge it by `compact` itself."""
    rows = list(rows_of_runs(num_runs))
    for first in range(0, num_runs, PART):
        part = rows[first : first + PART]
        ids = [str(row["run_id"]) for row in part]
        write_rows("runs", pd.DataFrame(part), folder / "runs" / "compacted" / f"{ids[0]}.parquet")
        spans = pd.concat([spans_of_run(ids[0])] * len(ids), ignore_index=True)
        spans["run_id"] = [run_id for run_id in ids for _ in range(SPANS_PER_RUN)]
        write_rows("spans", spans, folder / "spans" / "compacted" / f"{ids[0]}.parquet")
    list(Store(folder).compact(print))


# Pages in a browser

DRAWN = """(async () => {
  const find = () => document.querySelector(".js-plotly-plot .main-svg");
  while (!find()) await new Promise((done) => setTimeout(done, 1));
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now();
})()"""
OPENED = """\
name = "opened"
device = "emulated"
world_size = 2
model.preset = "llama-tiny"
emulated = {{F_ms = 1, I_ms = 1, W_ms = 1}}
measure = {{warmup_steps = 1, max_warmup_steps = 1, steps = 5}}
[grid]
schedule = ["afab", "1f1b", "zb_h1", "zbv"]
num_microbatches = [4, 8]
seq_len = {lengths}
"""


def report(asked: argparse.Namespace) -> Iterator[Row]:
    """Open pages in turns."""
    import plotly.graph_objects as go

    sys.path.append(str(ROOT / "tests" / "browser"))
    from chromium import CHROMIUM, Browser, Tab

    if CHROMIUM is None:
        sys.exit("commands report: Chromium was not found; install it: apt-get install chromium")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lengths = [16 * n for n in range(1, 11 if asked.seconds else 2)]
        (folder / "opened.toml").write_text(OPENED.format(lengths=lengths))
        ppbench("sweep", "opened.toml", folder=folder)
        (written,) = set((folder / "reports").glob("*.html")) - {folder / "reports" / "index.html"}
        pages = {"plotly.js alone": folder / "alone.html", "report of 80 runs": written}
        go.Figure(go.Bar(y=[1, 2])).write_html(folder / "alone.html", include_plotlyjs=True)
        with Browser(folder) as browser:

            def opened(page: Path) -> float:
                tab = Tab(browser, page, 1440)
                took_ms = float(str(tab.evaluate(DRAWN)))
                assert tab.problems() == []
                tab.close()
                return took_ms / 1000

            arms = {arm: partial(opened, page) for arm, page in pages.items()}
            turns = in_turns(arms, within(asked.seconds, range(24), fewest=4), num_warmup=2)
    base, *heads = pages
    yield from _rows(turns, base, heads)


# The simulator beside torch's

OURS, DRY_RUN = "ours", "torch's dry run"


def simulate(asked: argparse.Namespace) -> Iterator[Row]:
    """Simulate a plan in turns with torch, in three processes one after the other."""
    num_actions = 1_000_000 if asked.seconds else 20_000
    launches, rates = list[Rounds](), list[float]()
    for _ in within(asked.seconds, range(8), fewest=3):
        counted, turns = on_ranks(1, "cpu", simulated, num_actions, is_shared=True)[0]
        launches.append(sides(turns, OURS, DRY_RUN))  # seconds: the ratio of rates is the inverse
        rates += [counted / seconds for seconds in turns[OURS]]
    note = f"{statistics.median(rates):,.0f} actions/s"
    yield Row.ratio(f"actions/s over {DRY_RUN}, {counted:,} actions", launches, note=note)


def simulated(_fabric: Fabric, num_actions: int) -> tuple[int, dict[str, list[float]]]:
    """The number of actions, and the seconds of both simulators in each round."""
    from torch.distributed.pipelining.schedules import _Action, _simulate_comms_compute

    smallest = lower(build_program("interleaved_zb", 8, 8, 2), Policy.JUST_IN_TIME)
    groups = max(1, num_actions // smallest.table.num_actions)
    program = build_program("interleaved_zb", 8, 8 * groups, 2)
    lowered, ranks = lower(program, Policy.JUST_IN_TIME), program.placement.ranks
    rows = [[_Action.from_str(str(action)) for action in row] for row in lowered.actions]
    durations = uniform(program.placement, 3000, 3000, 3000)
    gc.collect()
    gc.freeze()  # torch's actions are no simulator's garbage

    def ours() -> object:  # with all proofs, as of a program that was never seen
        unproved = replace(program, actions=Table(*program.table.arrays))
        return predict(unproved, durations, TransferModel(latency_ns=1000))

    def dry_run() -> object:
        return _simulate_comms_compute(dict(enumerate(rows)), lambda s: ranks[s], len(ranks))

    turns = in_turns({OURS: _timed(ours), DRY_RUN: _timed(dry_run)}, range(4))
    return lowered.table.num_actions, turns


# The cost of a case

CASES = """\
name = "case_cost"
device = "cpu"
world_size = 2
model.preset = "llama-tiny"
measure = {{warmup_steps = 1, max_warmup_steps = 1, steps = 3}}
[grid]
schedule = {schedules}
num_microbatches = {counts}
seq_len = {lengths}
"""


def case_cost(asked: argparse.Namespace) -> Iterator[Row]:
    """Sweep all cases at once, and one of them alone, in turns."""
    lengths = [32 * n for n in range(1, 5)] if asked.seconds else [32]
    every: dict[str, Sequence[object]] = {"counts": [4, 8], "lengths": lengths}
    every["schedules"] = ["afab", "1f1b", "zb_h1"]
    draw, numbers = random.Random(0), count()
    with tempfile.TemporaryDirectory() as name:

        def cost(axes: Mapping[str, Sequence[object]]) -> float:
            folder = Path(name) / str(next(numbers))
            text = CASES.format(**{axis: json.dumps(values) for axis, values in axes.items()})
            wall_s = seconds_of(lambda: swept(folder, text))
            return _beside_steps_s(folder, wall_s)

        arms = {
            "a case alone": lambda: cost({axis: [draw.choice(of)] for axis, of in every.items()}),
            "a case of a sweep": lambda: cost(every),
        }
        turns = in_turns(arms, within(asked.seconds, range(6), fewest=4), num_warmup=0)
    base, head = arms
    yield from _rows(turns, base, [head])
    yield Row.median(f"cost of {base}", turns[base], "s")


def _beside_steps_s(folder: Path, wall_s: float) -> float:
    """Seconds of each case beside its steps, warm-up included."""
    store = Store(folder / "results")
    runs = store.runs()
    assert set(runs["status"]) == {"ok"}, "not every case was run"
    steps_ns = float(store.table("steps", runs["run_id"])["step_ns"].sum())
    steps_ns += sum(sum(json.loads(text)) for text in runs["warmup_step_ns"])
    return (wall_s - steps_ns / 1e9) / len(runs)


PARTS = {"start": start, "store": store, "report": report, "simulate": simulate}
PARTS |= {"case_cost": case_cost}

if __name__ == "__main__":
    run("commands", __doc__, PARTS)
