"""The output and the files of every command, compared byte for byte with the recorded ones.

The texts are in `recorded/`. Where a change of them is meant, `--record` writes them anew.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from recorded_errors import ERRORS
from recordings import (
    RECORD_AGAIN,
    RECORDED,
    STORE,
    Command,
    commands,
    difference,
    ppbench,
    transcript,
)
from scenes import OF_THIS_MACHINE, SWEEPS, make_scene

from ppbench.cli.app import app

FORMATS = ("table", "json", "csv", "markdown")
LONG_LISTING_FORMATS = FORMATS[:2]
HUNG, OOM, ZBV, MEASURED = "20260102", "20260101", "20261122T222717", "20261122T222659"
REAL = "20261122T222656 20261122T222659 20261122T2227008 20261122T2227023"

LISTINGS = {
    "ls-empty": ("empty", "ls"),
    "query": (
        "swept",
        (
            "query 'SELECT schedule, world_size, status, count(*) AS n, max(tokens_per_s) AS best "
            "FROM runs GROUP BY ALL ORDER BY ALL'"
        ),
    ),
    "show-emulated": ("swept", "show last"),
    "explain-emulated": ("swept", "explain last"),
    "stragglers": ("swept", f"stragglers {MEASURED}"),
    "compare": ("tracked", "compare HEAD~1 HEAD"),
    "check": ("tracked", "check"),
    "history": ("history", "history --no-page"),
    "backfill-plan": ("bisected", "backfill main~6.. sweep.toml --dry-run"),
    "backfill-stored": (
        "bisected", "backfill main~2..main sweep.toml --set schedule=1f1b --launches 3"
    ),
    "bisect": ("bisected", "bisect main~6 main sweep.toml --only schedule=1f1b"),
    "import": ("traces", "import rank0.json rank1.json --name mine --tokens-per-step 1000"),
    "schedules-list": ("empty", "schedules list"),
    "simulate": ("empty", "simulate --schedule zbv -p 4 -m 8 --cost F=1,I=1.1,W=0.7"),
    "cases": ("sweeps", "sweep quick.toml --dry-run --set device=cpu"),
}  # fmt: skip
"""What takes `--format`: a name, where it is run, and what."""
LONG_LISTINGS = {
    "show-real": ("swept", f"show {MEASURED}"),
    "show-hung": ("swept", f"show {HUNG}"),
    "explain-real": ("swept", f"explain {MEASURED}"),
    "compare-across": ("tracked", "compare --across schedule"),
    "simulate-all": (
        "empty",
        "simulate --schedule all -p 4 -m 8 --latency 0.1 --bandwidth 1e3 --message-bytes 100",
    ),
}  # fmt: skip
"""More of the same commands, in the formats that do not only repeat the rows of another."""

TABLES = {
    **dict.fromkeys(("runs", "steps", "ranks", "attribution", "edges"), ZBV),
    "telemetry": MEASURED,
    "flight": HUNG,
}
"""Each short one with a run that has rows of it."""
CHARTS = ("throughput", "scaling", "bubble", "idle", "memory", "pareto", "steps")

OTHERS: dict[str, tuple[str, list[Command]]] = {
    "version": ("empty", commands("--version")),
    "ls": ("swept", commands("ls --format table")),
    "ls-where": ("by_hand", commands(
        "ls --where 'status=ok and world_size>=2' --where schedule=1f1b",
        "ls --where 'tokens_per_s>1000'",
        "ls --limit 0 --format markdown",
    )),
    "show": ("swept", commands(f"show {OOM}", "show 20261122T222714")),
    "compare": ("tracked", commands(
        "compare HEAD~1 worktree demo.toml --metric step_ns",
    )),
    "compare-page": ("tracked", commands(
        "compare HEAD~1 HEAD demo.toml -o page.html",
        "compare --across schedule demo.toml -o page.html",
    )),
    "compare-runs": ("swept", commands(
        f"compare 20261122T2227008 {MEASURED}",
        f"compare {MEASURED} {MEASURED} --format markdown",
        "compare results results",
    )),
    "check": ("tracked", commands(
        "check demo.toml --base HEAD~1 --metric tokens_per_s --format csv",
        "check --threshold 15%",
    )),
    "history": ("history", commands(
        "history --no-page --metric peak_memory_bytes",
        "history --no-page --all --dirty --where num_microbatches=8",
        "history --no-page --where num_microbatches=16 --format markdown",
    )),
    "history-empty": ("empty", commands(
        *(f"history --no-page --format {how}" for how in FORMATS)
    )),
    "backfill": ("bisected", commands(
        "backfill main~6..main sweep.toml --dry-run --max 3",
        "backfill main~6..main sweep.toml --dry-run --every 4 --launches 2 --retry-failed",
    )),
    "bisect": ("bisected", commands(
        "bisect main~6 main sweep.toml --only schedule=afab --max-launches 1",
    )),
    "cases": ("sweeps", commands(
        "sweep schedules_emulated.toml --dry-run --only world_size=4 --format table", *(
        f"sweep {path.name} --dry-run" + ("" if "emulated" in path.stem else " --set device=cpu")
        for path in sorted(SWEEPS.glob("*.toml"))
    ))),
    "compact": ("by_hand", commands(
        "ls --format csv", "compact", "compact --format csv", "ls --format csv",
    )),
    **{
        f"export-{table}": ("swept", commands(f"export --format csv --table {table} {run}"))
        for table, run in TABLES.items()
    },
    "export-as-markdown": ("swept", commands(*(
        f"export --format markdown --table {table} {ZBV}" for table in ("runs", "steps", "edges")
    ))),
    "export-all-runs": ("by_hand", commands("export --format markdown", "export --format csv")),
    "export-to-files": ("by_hand", [
        Command("export --format parquet --table steps -o s.parquet", ["s.parquet"]),
        Command("export --format csv --table ranks -o ranks.csv", ["ranks.csv"]),
    ]),
    "export-for-bencher": ("history", commands("export --format bencher")),
    "timeline-in-terminal": ("swept", commands(
        "timeline last --terminal",
        f"timeline {MEASURED} --terminal --step slowest",
        "timeline last 20261122T222716 --terminal --planned",
        f"timeline {HUNG} --terminal",
    )),
    "trace": ("swept", commands(
        "trace last -o trace.json", f"trace {MEASURED} --step median -o small.json.gz",
    )),
    "figures": ("swept", commands(
        *(f"figure {name} -o light.json {REAL}" for name in CHARTS),
        "figure bubble --theme dark --width 700 -o dark.json",
        "figure idle --height 300 -o idle.html",
        "figure timeline --planned --path -o t.json",
        f"figure timeline --step slowest -o s.json {MEASURED}",
        f"figure levels_of_memory -o m.json {MEASURED}",
    )),
    "pages": ("swept", commands(
        f"report {REAL} {HUNG} {OOM} -o page.html", "report",
        f"timeline last {MEASURED} --planned -o page.html", f"timeline {HUNG}",
    )),
    "history-page": ("history", commands("history")),
    "check-summary": ("tracked", [
        Command("check --summary summary.md", ["summary.md"]),
        Command(
            "check demo.toml", files={"demo.accept.toml":
            '[[accept]]\ncommit = "HEAD"\nreason = "more exact"\nmetric = "tokens_per_s"\n'
            'cases = "schedule=1f1b"\nup_to = "10%"\n'
            '[[accept]]\ncommit = "abcdef1"\nreason = "rebased away"\n'},
        ),
    ]),
    "imported": ("traces", [
        *commands(
            "import rank0.json rank1.json --name mine --set model.preset=llama-8b --step 0 "
            "--step 1",
            "show last", "explain last", "timeline last --terminal", "show last --format csv",
            "import other/rank0.json other/rank1.json --schedule ours",
        ),
    ]),
    "schedules-draw": ("empty", [
        *(
            Command(f"schedules draw {name} -p 4 -m 8")
            for name in (
                "afab", "1f1b", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_h2",
                "interleaved_zb", "zbv", "dualpipev", "v_half", "v_min",
            )
        ),
        Command("schedules draw zb_h1 -p 2 -m 3 --cost F=1,I=1,W=0"),
        Command("schedules draw 1f1b -p 2 -m 3 --cost F=1,I=1.5,W=0.25 --html page.html"),
    ]),
    "schedules-export": ("empty", [
        *commands(
            "schedules export zbv -p 4 -m 8 -o -",
            "schedules export zbv -p 2 -m 4 -o - --with-communication",
            "schedules export 1f1b -p 2 -m 4 -o - --with-communication --policy just_in_time",
            "schedules export interleaved_1f1b -v 3 -p 2 -m 4 -o - --with-communication "
            "--look-ahead 2",
        ),
        Command("schedules export 1f1b -p 2 -m 4 -o program.csv", ["program.csv"]),
        *commands(
            "schedules check program.csv", "schedules check program.csv --max-held 1",
            "schedules draw csv:program.csv", "simulate --schedule csv:program.csv --format csv",
        ),
    ]),
    "simulate-held": ("empty", commands(
        "simulate --schedule 1f1b -p 2 -m 3 --held --format json",
        "simulate --schedule 1f1b -p 2 -m 3 --no-overlap --latency 0.5",
    )),
    "sweep-elsewhere": ("sweeps", commands(
        "sweep quick.toml --launcher torchrun --dry-run",
        "sweep quick.toml --launcher slurm --dry-run --set launch.slurm.nodes=2 "
        "--set launch.slurm.time=90 --only schedule=1f1b --rerun",
    )),
}  # fmt: skip
"""What is printed or written in one form."""


def all_commands() -> Iterator[tuple[str, ...]]:
    """Every command and group of them, found in the program itself."""
    found = [((), typer.main.get_command(app))]
    while found:
        words, command = found.pop()
        yield words
        found += [((*words, name), one) for name, one in getattr(command, "commands", {}).items()]


HELP = {"-".join(("ppbench", *words)): words for words in sorted(all_commands())}
RECORDS: dict[str, tuple[str, list[Command]]] = {
    **{
        f"help/{name}": ("empty", commands(" ".join((*words, "--help"))))
        for name, words in HELP.items()
    },
    **{
        f"listings/{name}": (scene, commands(*(f"{words} --format {how}" for how in FORMATS)))
        for name, (scene, words) in LISTINGS.items()
    },
    **{
        f"listings/{name}": (
            scene,
            commands(*(f"{words} --format {how}" for how in LONG_LISTING_FORMATS)),
        )
        for name, (scene, words) in LONG_LISTINGS.items()
    },
    **{f"outputs/{name}": one for name, one in OTHERS.items()},
    **{f"errors/{name}": one for name, one in ERRORS.items()},
}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], Path]:
    """Makes a copy of a scene in a folder; the scene itself is made when it is first asked for."""
    made: dict[str, Path] = {}

    def copied(name: str, to: Path) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            make_scene(name, made[name])
        return Path(shutil.copytree(made[name], to))

    return copied


@pytest.mark.parametrize("name", RECORDS)
def test_what_is_printed_and_written_is_what_was_recorded(
    name: str, scene: Callable[[str, Path], Path], tmp_path: Path, is_recording: bool
) -> None:
    where, todo = RECORDS[name]
    now = transcript(
        todo, scene(where, tmp_path / "here"), is_of_this_machine=where in OF_THIS_MACHINE
    )
    path = RECORDED / f"{name}.txt"
    if is_recording:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(now.encode())
    if not path.exists():
        pytest.fail(f"{name}: there is no record of this; make one: {RECORD_AGAIN}", pytrace=False)
    recorded = path.read_bytes().decode()
    if now != recorded:
        pytest.fail(difference(name, recorded, now), pytrace=False)


def test_every_recorded_file_is_of_a_command(is_recording: bool) -> None:
    known = {f"{name}.txt" for name in RECORDS}
    kept = {"README.md", *(str(path.relative_to(RECORDED)) for path in STORE.rglob("*"))}
    for path in sorted(path for path in RECORDED.rglob("*") if path.is_file()):
        name = str(path.relative_to(RECORDED))
        if name in known or name in kept:
            continue
        if not is_recording:
            pytest.fail(f"{name}: no command has this record any more: {RECORD_AGAIN}")
        path.unlink()


def test_every_format_tells_the_recorded_facts_of_a_machine(tmp_path: Path) -> None:
    """Their values are this machine's own."""
    facts = [
        *("hostname", "platform", "python", "cpu", "num_cores", "memory_bytes", "gpus"),
        *("interconnect", "driver", "torch", "cuda", "nccl", "transformers", "rocm"),
        *("device_variables", "refused_variable", "default_device", "fingerprint"),
    ]
    table, as_json, csv, markdown = (
        ppbench(["env", "--format", how], tmp_path).stdout for how in FORMATS
    )
    assert list(json.loads(as_json)) == facts
    assert csv.splitlines()[0] == "key,value"
    assert [line.partition(",")[0] for line in csv.splitlines()[1:]] == facts
    assert [line.split()[0] for line in table.splitlines() if line[1] != " "] == facts
    assert markdown.splitlines()[:2] == ["| key | value |", "|---|---|"]
    assert [line.split()[1] for line in markdown.splitlines()[2:]] == facts
