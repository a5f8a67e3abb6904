"""Runs and spans made by hand, and a store of them: every expected number is worked out here."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow as pa

from engine.plan.action import COMPUTE_OPS, Op, parse_action
from engine.plan.collectives import Zero3, with_collectives
from engine.plan.lower import lower
from engine.plan.predict import predict, timed, uniform
from engine.plan.program import to_json
from engine.plan.schedules.registry import build_program
from engine.plan.spans import Span, lane_of
from engine.plan.walk import TransferModel
from ppbench.analysis.transfers import waiting_ns
from ppbench.config.case import Case
from ppbench.display.cases import varying_axes
from ppbench.report.pages.conclusions import Conclusions, conclude
from ppbench.report.pages.judgement import judge
from ppbench.run.failures.post_mortem import RankState, flight_rows, post_mortem
from ppbench.store import TABLES, Store
from ppbench.store.columns import RUN_ID
from ppbench.store.parquet import as_table, row_as_table, storable, write_parquet
from ppbench.store.reader import COMPACTED, lock_of

MS = 1_000_000
ACTIONS = [  # rank, stage, op, microbatch, start ms, end ms; rank 1 posts its receive at 1
    (0, 0, Op.F, 0, 5, 15),
    (0, 0, Op.SEND_F, 0, 15, 17),
    (0, 0, Op.RECV_B, 0, 17, 41),
    (0, 0, Op.B, 0, 41, 61),
    (0, -1, Op.OPT, -1, 61, 65),
    (1, 1, Op.RECV_F, 0, 6, 17),
    (1, 1, Op.F, 0, 17, 27),
    (1, 1, Op.B, 0, 27, 39),
    (1, 1, Op.SEND_B, 0, 39, 41),
    (1, -1, Op.OPT, -1, 39, 43),
]
NASTY = "</script><script>alert(\"1\")</script> & 'ünïcode' <b>bold</b>"


def spans(step: int = 1, late_ms: int = 0) -> pd.DataFrame:
    return pd.DataFrame(
        [
            Span(
                step,
                rank,
                lane_of(op).value,
                stage,
                op.value,
                microbatch,
                (start + late_ms) * MS,
                (end + late_ms) * MS,
                4096 if lane_of(op).value != "compute" else 0,
            )
            for rank, stage, op, microbatch, start, end in ACTIONS
        ]
    )


def simulated_spans(
    schedule: str, ranks: int, microbatches: int, latency_ms: int = 0
) -> pd.DataFrame:
    """A step as simulated, in which every action takes 10 ms."""
    program = build_program(schedule, ranks, microbatches)
    durations = uniform(program.placement, 10 * MS, 10 * MS, 10 * MS)
    transfers = TransferModel(latency_ns=latency_ms * MS, message_bytes=4096)
    return pd.DataFrame(predict(program, durations, transfers).spans())


def traces(figure) -> dict:
    return {trace.name: trace for trace in figure.data if trace.name}


MEASURED_BY = "ppbench sweep sweeps/demo.toml"


def concluded(runs: pd.DataFrame | list[dict], command: str = MEASURED_BY) -> Conclusions:
    """What a report says of these runs, which the command measured."""
    runs = pd.DataFrame(runs)
    return conclude(judge(runs, varying_axes(runs)), runs, command)


def run_row(number: int, case: Case, **changes: object) -> dict:
    row = {
        "run_id": f"2026010{number // 10}T00000000{number % 10}-abcdef",
        "sweep_id": "s",
        "sweep_name": "demo",
        "sweep_file": "sweeps/demo.toml",
        "case_id": case.case_id,
        "launch": 0,
        "status": "ok",
        "created_at": "2026-01-01T00:00:00+00:00",
        **case.settings(),
        "tokens_per_s": 1000.0,
        "tokens_per_s_low": None,
        "tokens_per_s_high": None,
        "step_ns": 56.0 * MS,
        "bubble_fraction": 0.25,
        "bubble_idle_over_ideal": 1 / 3,
        "bubble_max_stage_span": 0.2,
        "bubble_fraction_theory": 1 / 9,
        "peak_memory_bytes": 100 * 2**20,
        "peak_held_microbatches": 2,
        "last_loss": 4.25,
        "cautions": "",
        "commit": "c0ffee",
        "branch": "main",
        "is_dirty": False,
        "fingerprint": "f1f2",
        "environment": json.dumps({"cpu": "Some <CPU>", "num_cores": 2, "gpus": [], "cuda": None}),
        "ppbench_version": "0.1.0",
    }
    return {**row, **changes}


def store_together(store: Store, runs: Sequence[tuple[dict, Mapping[str, pd.DataFrame]]]) -> None:
    """Store runs in one file a table, as after a compaction: files take longest to write and read.

    Tables without rows are left out.
    """
    parts: dict[str, list[pa.Table]] = defaultdict(list)
    for run, tables in runs:
        own = {RUN_ID: str(run[RUN_ID])}
        own_tables = {name: frame for name, frame in tables.items() if len(frame)}
        row = {**storable(run), **own}
        parts["runs"].append(row_as_table(row, "runs"))
        for name, frame in own_tables.items():
            parts[name].append(as_table(frame.assign(**own), name))
    for name, some in parts.items():
        path = store.folder / name / COMPACTED / f"{runs[0][0][RUN_ID]}.parquet"
        write_parquet(pa.concat_tables(some), path)
    lock_of(store.folder).touch()


def store_with(folder: Path, rows: list[dict]) -> Store:
    store = Store(folder)
    for row in rows:
        is_ok = row["status"] == "ok"
        steps = [{"step": n, "step_ns": n * MS} for n in (1, 2, 3)]
        ranks = [
            {"rank": rank, "peak_memory_bytes": row["peak_memory_bytes"] - rank * 2**20}
            for rank in range(row["world_size"])
        ]
        timed = pd.concat([spans(1), spans(2, 100), spans(3, 200)], ignore_index=True)
        tables = {"steps": pd.DataFrame(steps), "ranks": pd.DataFrame(ranks), "spans": timed}
        store.write_run(row, tables if is_ok else {})
    return store


def demo_store(folder: Path) -> Store:
    """AFAB and 1F1B at 1 and 2 ranks, one oversubscribed pair, one failure."""
    afab, other = Case(schedule="afab"), Case(schedule="1f1b")
    crowd = {"cautions": "oversubscribed", "tokens_per_s": 9000.0}
    return store_with(
        folder,
        [
            run_row(1, replace(afab, world_size=1), tokens_per_s=600.0),
            run_row(2, afab, tokens_per_s=1000.0, peak_memory_bytes=200 * 2**20),
            run_row(3, replace(afab, world_size=4), **crowd),
            run_row(4, replace(other, world_size=1), tokens_per_s=600.0),
            run_row(5, other, tokens_per_s=1100.0, peak_memory_bytes=100 * 2**20),
            run_row(6, replace(other, world_size=4), **crowd),
            run_row(7, replace(other, seq_len=512), status="oom", error=NASTY + "\nline two"),
        ],
    )


def store_failed(store: Store, row: dict, until_ms: int = 10_027, last_ms: int = 27) -> dict:
    """A run that hung, with what was finished up to `last_ms` of its step 1.

    Rank 1 was stopped in 1B0 of step 1, at 27 ms of `ACTIONS`, and rank 0 waits for it.
    """
    seen = [
        RankState(0, "node", "alive", "steps", 1, parse_action("0B0"), True, 17 * MS),
        RankState(1, "node", "stopped", "steps", 1, parse_action("1B0"), False, 27 * MS),
    ]
    diagnosis = post_mortem(seen, lower(build_program("1f1b", 2, 1)), until_ms * MS)
    error = f"{diagnosis.verdict}\nrank 1: last lines of its log"
    run = {
        **row,
        "status": "timeout",
        "error": error,
        "error_rank": diagnosis.rank,
        "attempt": 1,
        "last_actions": json.dumps(["0B0", "1B0"]),
        "tokens_per_s": None,
        "step_ns": None,
        "bubble_fraction": None,
        "peak_memory_bytes": None,
    }
    timed = spans(1)
    finished = timed[timed["end_ns"] <= last_ms * MS]
    store.write_run(run, {"flight": flight_rows(diagnosis, until_ms * MS), "spans": finished})
    return run


def rewrite(store: Store, run: pd.Series, tables: dict[str, pd.DataFrame]) -> None:
    """Store a run again with other tables; those that are not given stay."""
    names = TABLES.keys() - {"runs"}
    kept = {name: store.table(name, [run["run_id"]]) for name in names}
    store.write_run(dict(run), {**{n: t for n, t in kept.items() if len(t)}, **tables})


SLOW, FACTORS = 2, (1, 1, 1.5, 1)


def store_of_replicas(folder: Path) -> Store:
    """Four replicas of two ranks with ZeRO-3, one slower; gathering takes 2 ms, reducing 4."""
    program = build_program("1f1b", 2, 4)
    lowered = with_collectives(lower(program), program, Zero3())
    actions = [action for row in lowered.actions for action in row]
    moving = {Op.UNSHARD: 2 * MS, Op.REDUCE_GRAD: 4 * MS}
    took = [
        [round(10 * MS * f) if a.op in COMPUTE_OPS else moving.get(a.op, 0) for a in actions]
        for f in FACTORS
    ]
    replayed = timed(lowered, took)
    step = pd.DataFrame(replayed.spans()).assign(step=1)
    case = Case(replicas=4, num_microbatches=4, sharding_policy="zero3")
    store = store_with(folder, [run_row(1, case, program=to_json(program))])
    rewrite(store, store.runs().iloc[0], {"spans": step.assign(waiting_ns=waiting_ns(step))})
    return store
