"""Folders in which commands are run to be recorded: every number, name and date in them is chosen.

`swept`      two small sweeps that were run once, of four and three cases; runs that failed
`by_hand`    seven runs of two schedules on one, two and four ranks; one ran out of memory
`tracked`    two commits, one of which is slower; noise, thresholds, an accepted change
`history`    eight commits, of which one makes a case slower
`bisected`   seven commits as if measured on this machine, of which the fifth is slower
`traces`     what torch.profiler wrote on two ranks
`sweeps`     the sweep files that come with ppbench
`empty`      nothing
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from histories import CASE, OTHER, CommitFacts, Runs, five, repository
from measured import TWO_CASES, add_measured, around, now, sweep_in
from recordings import STORE, ppbench
from repositories import commit, commits, make_repository
from stored_runs import NASTY, demo_store, run_row, store_failed
from traces import two_ranks
from tracked import STEADY, SWEEP, add_launches, slower, store_in

SWEEPS = Path(__file__).parents[2] / "sweeps"
GOOD, BAD = 1000.0, 930.0
FEW = STEADY[:3]


def swept(folder: Path) -> None:
    shutil.copytree(STORE, folder, dirs_exist_ok=True)
    runs = Runs(folder / "results")
    hung = {**run_row(1, CASE), "run_id": "20260102T000000001-abcdef", "resume_key": "hung"}
    store_failed(runs.store, hung)
    runs.add(CommitFacts("c0ffee", 1), OTHER, None, error=f"{NASTY}\nits trace", status="oom")


def by_hand(folder: Path) -> None:
    demo_store(folder / "results")


def tracked(folder: Path) -> None:
    make_repository(folder)
    (folder / ".git" / "info" / "exclude").write_text("results/\nreports/\n*.md\n")
    thresholds = '[track.thresholds]\ndefault = "3%"\n"schedule=afab" = "20%"\n'
    commit(folder, {"demo.toml": f"{SWEEP}{thresholds}"}, "The sweep")
    _, base, head = [commit(folder, {}, "Before", day=1), *commits(folder, 2, first=2)]
    afab, wide = replace(CASE, schedule="afab"), replace(CASE, world_size=4)
    memory = {"peak_memory_bytes": 104 * 2**20}
    store = store_in(folder)
    add_launches(store, FEW, base, CASE, stretch={})
    add_launches(store, FEW, base, afab)
    add_launches(store, FEW[:1], base, wide)
    add_launches(store, slower(0.08, FEW), head, CASE, stretch={(1, "F"): 1.08, (1, "B"): 1.1})
    add_launches(store, slower(-0.05, FEW), head, afab, **memory)
    add_launches(store, [None], head, wide, status="oom", error="too big\nmore")
    add_launches(store, FEW[:2], head, replace(CASE, seq_len=64), cautions="busy_machine")


def history(folder: Path) -> None:
    shas = repository(folder, [f"change {n}" for n in range(8)])
    runs = Runs(folder / "results")
    for number, sha in enumerate(shas):
        told = CommitFacts(sha, number, NASTY if number == 5 else f"change {number}")
        level = 1000.0 if number < 5 else 920.0
        if number != 4:
            figures = [None] if number == 2 else five(level, number)[:3]
            runs.add_launches(told, CASE, figures)
        if number % 4 == 1:
            runs.add_launches(told, OTHER, five(2000.0, number)[:2])
    runs.add(CommitFacts(shas[-1], 7, is_dirty=True, changes="c1c2"), CASE, 950.0)
    runs.add(CommitFacts("ab12" * 10, 3, "of another branch"), CASE, 940.0)


def bisected(folder: Path) -> None:
    shas = commits(make_repository(folder), 7)
    file = sweep_in(folder, TWO_CASES)
    with (folder / ".git" / "info" / "exclude").open("a") as excluded:
        excluded.write("reports/\n")
    for number, sha in enumerate(shas):
        speeds = around(GOOD) if number < 4 else around(BAD)[::-1]
        add_measured(file, sha, [None] if number == 1 else speeds, **now())
        if number in (0, 6):
            add_measured(file, sha, around(GOOD), place=1, **now())
    for launch in (3, 4, 5):  # of the newest, alone
        alone = {"launch": launch, "process_start": f"alone {launch}", **now()}
        for place, speed in enumerate((BAD, GOOD)):
            add_measured(file, shas[6], [speed], place=place, **alone)


def traces(folder: Path) -> None:
    two_ranks(folder, clock=5, hosts=("one", "two"))
    (folder / "other").mkdir()
    two_ranks(folder / "other", num_steps=1)


def empty(folder: Path) -> None:
    pass


def sweeps(folder: Path) -> None:
    shutil.copytree(SWEEPS, folder, dirs_exist_ok=True)


def compacted(folder: Path) -> None:
    """Its runs in one file, which is read faster than many, and often."""
    done = ppbench(["compact"], folder)
    assert done.exit_code == 0, done.stderr


SCENES = {
    scene.__name__: scene
    for scene in (swept, by_hand, tracked, history, bisected, traces, empty, sweeps)
}
HAS_MANY_RUNS = ("tracked", "history", "bisected")
OF_THIS_MACHINE = ("bisected", "traces")
"""Whose runs tell something of where they were stored, and when."""


def make_scene(name: str, folder: Path) -> None:
    SCENES[name](folder)
    if name in HAS_MANY_RUNS:
        compacted(folder)
