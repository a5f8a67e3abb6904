"""Whether a report and `compare` say the same of every pair of cases, on made-up stores.

    python -m benchmarks.agreement [--stores 2000] [--seed 38]

A store has 2 to 4 schedules, in one or two settings, with 1 to 8 launches each. Launches were made
in turns or alone, in one session or two, some are disturbed, missing or carry a caution, and
schedules are equally fast or not. Its report judges all cases of a setting (`judgement.judge`), and
`compare --across schedule --all-pairs` reads the same files. A pair disagrees as

    claims contradict    if both are decided, and differently
    only compare         if only `compare` decides
    only report          if only the report does

Pairs of which the report forbids a verdict by a caution are not counted, as `compare` only notes
it. With one setting both judge the same family of pairs; with two, `compare` judges the pairs of
both together, so that its bounds are wider. These stores have figures of their own.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from benchmarks.outcome import Figure, Goal, Ratio, parser, write
from benchmarks.surroundings import read_surroundings
from ppbench.comparison.across import compare_across
from ppbench.comparison.starts import starts_beside
from ppbench.config.case import Case
from ppbench.display.cases import varying_axes
from ppbench.judge.verdicts import SPEED, Verdict
from ppbench.report.pages.judgement import judge
from ppbench.store import Store
from ppbench.store.columns import SCHEMA_VERSION
from ppbench.store.parquet import row_as_table, storable, write_parquet

SCHEDULES = ("afab", "1f1b", "zb_h1", "interleaved_1f1b")
DIFFERENCES = (0.0, 0.01, 0.03, 0.08)
NUM_ROUNDS, TOKENS = 8, 4096
BEGAN = pd.Timestamp("2026-01-01T00:00:00Z")
CONTRADICT, ONLY_COMPARE, ONLY_REPORT = "claims contradict", "only compare", "only report"


def made_up_store(draw: np.random.Generator, folder: Path) -> tuple[Store, int]:
    """Write a store of one sweep; return it with its number of settings."""
    schedules = SCHEDULES[: draw.integers(2, 5)]
    lengths = (64, 128)[: draw.integers(1, 3)]
    num_launches = int(draw.integers(1, 9))
    in_turns, has_two_sessions = draw.random(2) < (0.5, 0.3)
    disturbed, missing, cautioned = draw.choice((0.0, 0.2), 3, p=(0.6, 0.4))
    spread = draw.choice((0.003, 0.01, 0.03))
    gains = {name: draw.choice(DIFFERENCES) for name in schedules}
    peaks = {name: int(draw.integers(80, 120)) * 2**20 for name in schedules}
    tables = []
    for launch in range(num_launches):
        hours = 12 if has_two_sessions and launch >= num_launches / 2 else 0
        for place, schedule in enumerate(schedules):
            for length in lengths:
                if launch and draw.random() < missing:
                    continue
                case = Case(schedule=schedule, seq_len=length)
                if schedule.startswith("interleaved"):
                    case = Case(schedule=schedule, seq_len=length, stages_per_rank=2)
                at = BEGAN + pd.Timedelta(hours=hours, minutes=launch, seconds=10 * place)
                slow = np.log1p(draw.uniform(0.1, 0.35)) if draw.random() < disturbed else 0.0
                log = np.log1p(gains[schedule]) + draw.normal(0, spread) - slow
                turns = 1000 * np.exp(log + draw.normal(0, 0.02, NUM_ROUNDS))
                speed = float(np.median(turns))
                row = {
                    "run_id": f"{at:%Y%m%dT%H%M%S}{length:06}-abcdef",
                    "sweep_id": "s",
                    "sweep_name": "made_up",
                    "sweep_file": "made_up.toml",
                    "case_id": case.case_id,
                    "launch": launch,
                    "status": "ok",
                    "created_at": at.isoformat(),
                    **case.settings(),
                    SPEED: speed,
                    "step_ns": TOKENS / speed * 1e9,
                    "peak_memory_bytes": peaks[schedule],
                    "last_loss": 4.0,
                    "cautions": "busy_machine" if draw.random() < cautioned else "",
                    "commit": "c0ffee",
                    "branch": "main",
                    "is_dirty": False,
                    "fingerprint": "f1f2",
                    "environment": json.dumps({"cpu": "made up", "num_cores": 2, "gpus": []}),
                    "ppbench_version": "0.1.0",
                    "schema_version": SCHEMA_VERSION,
                }
                if in_turns:
                    rounds = {"round": list(range(NUM_ROUNDS)), SPEED: turns.tolist()}
                    rounds["step_ns"] = (TOKENS / turns * 1e9).tolist()
                    row |= {"process_start": f"{launch}-{length}", "rounds": json.dumps(rounds)}
                tables.append(row_as_table(storable(row), "runs"))
    write_parquet(pa.concat_tables(tables), folder / "runs" / "compacted" / "all.parquet")
    return Store(folder), len(lengths)


def disagreements(store: Store) -> tuple[Counter[str], int]:
    """Count the pairs of cases of which the two differ, by kind, and all that both judge."""
    runs = store.runs()
    judged = judge(runs, varying_axes(runs), starts_beside(runs, [store]))
    named = ["made_up"]
    compared = compare_across(
        "schedule", named, all_pairs=True, metrics=[SPEED], results=store.folder
    )
    by_compare = {
        (line.series.head_key[0], line.series.base_key[0]): line.change.verdict
        for line in compared.lines
    }
    found: Counter[str] = Counter()
    num = 0
    for judgement in judged.judgements:
        ids = judgement.case_ids
        for place, head in enumerate(ids):
            for other, base in enumerate(ids):
                verdict = by_compare.get((head, base))
                change = judgement.change(place, other)
                kinds = judged.known.forbidding(head, base)
                if verdict is None or change is None:
                    continue
                if any(judged.known.disturbing(case, kinds) for case in (head, base)):
                    continue
                num += 1
                if change.verdict is verdict:
                    continue
                kind = CONTRADICT
                if Verdict.open in (change.verdict, verdict):
                    kind = ONLY_COMPARE if change.verdict is Verdict.open else ONLY_REPORT
                found[kind] += 1
    return found, num


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--stores", type=int, default=2000)
    options.add_argument("--seed", type=int, default=38)
    settings, surroundings = options.parse_args(), read_surroundings()
    found: dict[int, Counter[str]] = {1: Counter(), 2: Counter()}
    nums: Counter[int] = Counter()
    for number in range(settings.stores):
        draw = np.random.default_rng([settings.seed, number])
        with tempfile.TemporaryDirectory() as folder:
            store, num_settings = made_up_store(draw, Path(folder))
            own, num = disagreements(store)
        found[num_settings] += own
        nums[num_settings] += num
    figures, ratios = [], []
    for num_settings, own in found.items():
        where = "one setting" if num_settings == 1 else "two settings"
        figures.append(Figure(f"{where}: pairs", (nums[num_settings],)))
        for kind in (CONTRADICT, ONLY_COMPARE, ONLY_REPORT):
            goal = Goal(at_most=0.0) if kind == CONTRADICT else None
            share = own[kind] / max(nums[num_settings], 1)
            ratios.append(Ratio(f"{where}: {kind}", (share,), goal=goal))
    write("agreement", settings, surroundings, ratios, figures)


if __name__ == "__main__":
    main()
