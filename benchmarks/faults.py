"""Kills processes of sweeps at random moments, and checks that no work is lost.

    python -m benchmarks.faults [--kills 50] [--cases 20] [--seed 0] [--keep FOLDER]

A sweep of short emulated cases is started as a user would start it, again and again, until nothing
is missing. Meanwhile SIGKILL is sent to the controller, the supervisor, a worker, or all of them at
once: while they start, in a step, while a run is stored, between cases. Sweeps follow each other,
each into a store of its own, until the kills are used up, or without `--kills` the time. After
each, its store must hold exactly one ok run per case and nothing that is broken or left over. Only
processes that were started in the folders of these sweeps are ever killed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.loop import within
from benchmarks.rows import Row, parser, run
from engine.flight import Phase, read_record
from ppbench.run.job import Event, Journal, noted_node_folders
from ppbench.run.machine.node_folder import flight_path, last_start
from ppbench.store import TABLES, Store

SCHEDULES = ("afab", "1f1b", "zb_h1", "interleaved_1f1b", "zbv")
STEPS = 6
SWEEP = """\
name = "faults"
device = "emulated"
num_microbatches = 4
seq_len = 16

[model]
preset = "llama-tiny"

[emulated]
F_ms = 3
I_ms = 3
W_ms = 3

[measure]
warmup_steps = 1
max_warmup_steps = 1
steps = {steps}
timeout_s = 120

[grid]
"emulated.seed" = {seeds}
world_size = [1, 2]
schedule = {schedules}
"""
VICTIMS = ("controller", "supervisor", "worker", "all")
WEIGHTS = (4, 4, 4, 4)
INSTEAD = "instead"
"""Kills of the controller in place of a victim that had not started yet."""
SUPERVISOR = "ppbench.run.launch.supervisor"
MOMENTS = ("start-up", "step", "store", "between")
START_UP_S = 10.0
STEPS_S = 0.6
STORE_S = 0.1
MOST_ROWS = 2
"""Most rows between two kills, so that a sweep comes to its end."""
PATIENCE_S = 600.0
GONE_S = 20.0
POLL_S = 0.005
LOOK_S = 0.05
"""Between two looks that take long, at all journals or all processes, for what lasts."""
FAILED_RUNS = 4


@dataclass
class Tally:
    """Counts of all that has happened so far."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)  # (victim, phase)
    rows: Counter[str] = field(default_factory=Counter)  # by status
    num_starts: int = 0
    num_sweeps: int = 0
    num_asides: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def num_kills(self) -> int:
        return sum(self.kills.values())


def kills(asked: argparse.Namespace) -> Iterator[Row]:
    """Kill until all kills are used up, or the time; exits where any work was lost."""
    folder = asked.keep or Path(tempfile.mkdtemp(prefix="ppbench-faults-"))
    most = asked.kills or (10**6 if asked.seconds else 2)
    num_cases = asked.cases if asked.seconds or asked.kills else 4
    tally, chance, began_s = Tally(), random.Random(asked.seed), time.monotonic()
    seconds = math.inf if asked.kills else asked.seconds
    for number in within(seconds, itertools.count(1)):
        until_s = began_s + seconds if asked.seconds else math.inf
        Campaign(folder / f"sweep-{number}", num_cases, chance, tally).run(most, until_s)
        tally.num_sweeps += 1
        if tally.num_kills >= most or tally.problems:
            break
    print(f"{tally.num_kills} kills in {time.monotonic() - began_s:.0f} s")
    for (victim, phase), num in sorted(tally.kills.items()):
        print(f"{num:5} x {victim} while rank 0 {phase}")
    print(f"starts: {tally.num_starts}; rows: {dict(tally.rows.most_common())}")
    print(f"unfinished files that kills left, which are never read: {tally.num_asides}")
    if tally.problems:
        print(f"VIOLATED: {len(tally.problems)}; all that is left is in {folder}")
        print("\n".join(f"  {problem}" for problem in tally.problems))
        sys.exit(1)
    print("held: one ok run per case, each store reads clean, nothing is left over")
    if asked.keep is None:
        shutil.rmtree(folder)
    repeated = tally.rows.total() - tally.rows["ok"]
    note = f"of {tally.num_kills} kills in {tally.num_sweeps} sweeps; {repeated} runs repeated"
    yield Row.exact("violations", len(tally.problems), note=note)


class Campaign:
    """One sweep into one store, from its first start to its end."""

    def __init__(self, folder: Path, num_cases: int, chance: random.Random, tally: Tally) -> None:
        folder.mkdir(parents=True)
        self._folder, self._num_cases = folder, num_cases
        self._chance, self._tally = chance, tally
        seeds = list(range(-(-num_cases // (2 * len(SCHEDULES)))))
        schedules = list(SCHEDULES)
        if num_cases < 2 * len(SCHEDULES):
            schedules = schedules[: num_cases // 2]
        text = SWEEP.format(steps=STEPS, seeds=seeds, schedules=schedules).replace("'", '"')
        (folder / "faults.toml").write_text(text)
        self._began_s = time.monotonic()
        self._known_ok: dict[str, str] = {}
        self._until_s = math.inf

    def run(self, num_kills: int, until_s: float) -> None:
        """Start the sweep until it is done; kill until so many kills are used up, or the time."""
        self._until_s = until_s
        for start in itertools.count(1):
            self._tally.num_starts += 1
            exit_code = self._start(start, num_kills)
            self._check_kept()
            if exit_code == 0 or self._tally.problems:
                break
            if exit_code not in (FAILED_RUNS, -signal.SIGKILL):
                self._accuse(f"start {start} ended with exit code {exit_code}")
                break
        self._check_end()

    def _start(self, start: int, num_kills: int) -> int:
        """Run the same command once more; returns its exit code."""
        command = [sys.executable, "-c", "from ppbench.cli import main; main()"]
        with (self._folder / f"start-{start}.log").open("wb") as log:
            controller = subprocess.Popen(
                [*command, "sweep", "faults.toml", "--no-report"],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._say(f"start {start}")
        try:
            while (
                controller.poll() is None
                and self._tally.num_kills < num_kills
                and time.monotonic() < self._until_s
            ):
                self._kill_someone(controller)
            return controller.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._accuse(f"start {start} was not over after {PATIENCE_S:.0f} s")
            with self._processes(controller.pid) as there:
                for process in there:
                    process.kill()
            return controller.wait()
        finally:
            if b"Traceback" in (self._folder / f"start-{start}.log").read_bytes():
                self._accuse(f"start {start} printed a traceback: start-{start}.log")

    def _kill_someone(self, controller: subprocess.Popen[bytes]) -> None:
        """Wait for a random moment, then kill a random victim, unless the sweep ends before."""
        moment = self._chance.choice(MOMENTS)
        victim = self._chance.choices(VICTIMS, WEIGHTS)[0]
        num_rows = self._num("row") + self._chance.randint(0, MOST_ROWS)
        if not self._wait_until_near(moment, num_rows, controller):
            return
        with self._processes(controller.pid) as there:
            is_there = victim in {"all", *(process.role for process in there)}
            wanted = victim if is_there else "controller"
            chosen = [process for process in there if wanted in ("all", process.role)]
            if wanted == "worker":
                chosen = [self._chance.choice(chosen)]
            self._chance.shuffle(chosen)
            if not self._wait_for(moment, num_rows, controller):
                return
            phase = self._phase()
            killed = [process for process in chosen if process.kill()]
        if killed:
            self._tally.kills[victim if is_there else INSTEAD, phase] += 1
            role = victim if is_there else f"controller (no {victim} yet)"
            whom = ", ".join(str(process) for process in killed)
            self._say(f"kill {self._tally.num_kills}: {role}, while rank 0 {phase} ({whom})")
        if wanted in ("controller", "all"):
            controller.wait(PATIENCE_S)
            time.sleep(self._chance.choice((0.0, 0.5)))

    def _wait_until_near(
        self, moment: str, num_rows: int, controller: subprocess.Popen[bytes]
    ) -> bool:
        """Wait until shortly before the moment; False if the sweep ends before."""
        if moment == "start-up":
            return self._sleep(self._chance.uniform(0, START_UP_S), controller)
        while self._num("row") < num_rows:
            if not self._sleep(LOOK_S, controller):
                return False
        return moment != "step" or self._sleep(self._chance.uniform(0, STEPS_S), controller)

    def _wait_for(self, moment: str, num_rows: int, controller: subprocess.Popen[bytes]) -> bool:
        """Wait for the moment; False if the sweep ends before.

        Finding the processes takes longer than the short moments last, so it is done before this.
        """
        while moment == "store" and self._phase() != Phase.STORES.words:
            if not self._sleep(POLL_S, controller):
                return False
        while moment == "between" and self._num("row") <= num_rows:
            if not self._sleep(4 * POLL_S, controller):
                return False
        is_sudden = moment in ("store", "between")
        return not is_sudden or self._sleep(self._chance.uniform(0, STORE_S), controller)

    @staticmethod
    def _sleep(seconds: float, controller: subprocess.Popen[bytes]) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            controller.wait(seconds)
        return controller.poll() is None

    def _launches(self) -> list[Path]:
        return sorted((self._folder / "results" / "launches").glob("*"))

    def _events(self) -> list[Event]:
        return [event for launch in self._launches() for event in Journal(launch).new_events()]

    def _num(self, name: str) -> int:
        return sum(event["event"] == name for event in self._events())

    def _phase(self) -> str:
        """The phase that rank 0 is in, in words."""
        launches = self._launches()
        folders = noted_node_folders(launches[-1]) if launches else []
        start = last_start(folders[0]) if folders else None
        record = None if start is None else read_record(flight_path(start, 0))
        if record is None:
            return "starts"
        last = record.entries[-1] if record.entries else None
        if last is None or record.number is None:
            return "is between cases"
        return "runs a step" if last.phase is None else last.phase.words

    @contextlib.contextmanager
    def _processes(self, controller: int | None) -> Iterator[list[Process]]:
        """The sweep's living processes: the controller, and all others in its folder."""
        roles = dict(_roles(self._folder))
        if controller is not None:
            roles[controller] = "controller"
        with contextlib.ExitStack() as stack:
            living = []
            for pid, role in roles.items():
                with contextlib.suppress(ProcessLookupError):
                    living.append(Process(pid, role, os.pidfd_open(pid)))
                    stack.callback(os.close, living[-1].fd)
            yield living

    def _check_kept(self) -> None:
        """Check that every ok run of the start before is still there and was not replaced."""
        runs = self._store().runs()
        good = runs[runs["status"] == "ok"]
        now = dict(zip(good["resume_key"], good["run_id"], strict=True))
        for key, run_id in self._known_ok.items():
            if now.get(key) != run_id:
                self._accuse(f"run {run_id} was done, and now it is {now.get(key)}")
        self._known_ok = now

    def _check_end(self) -> None:
        runs = self._store().runs()
        self._tally.rows.update(runs["status"])
        good = Counter(runs.loc[runs["status"] == "ok", "case_id"])
        if len(good) != self._num_cases:
            self._accuse(f"{len(good)} of {self._num_cases} cases have an ok run")
        self._accuse(*(f"case {case}: {n} ok runs" for case, n in good.items() if n != 1))
        self._accuse(*problems_of(self._folder / "results"), *self._left_over())
        tables = [self._folder / "results" / name for name in TABLES]
        self._tally.num_asides += sum(len(list(table.glob(".*"))) for table in tables)
        self._say(f"done, {len(runs)} rows")

    def _left_over(self) -> Iterator[str]:
        """Markers, processes and folders in shared memory that are left over."""
        until_s = time.monotonic() + GONE_S
        while (left := self._names_left()) and time.monotonic() < until_s:
            time.sleep(LOOK_S)
        yield from (f"{name} is left" for name in left)
        for launch in self._launches():
            if (launch / "running").exists():
                yield f"{launch.name}/running is left"
            yield from (f"{folder.parent} is left" for folder in noted_node_folders(launch))

    def _names_left(self) -> list[str]:
        with self._processes(None) as left:
            return [str(process) for process in left]

    def _store(self) -> Store:
        return Store(self._folder / "results", self._accuse)

    def _accuse(self, *problems: str) -> None:
        self._tally.problems += [f"{self._folder.name}: {problem}" for problem in problems]

    def _say(self, text: str) -> None:
        seconds = time.monotonic() - self._began_s
        print(f"{self._folder.name} {seconds:7.1f} s  {text}", flush=True)


@dataclass(frozen=True)
class Process:
    """A process of a sweep, held by a descriptor, because the system reuses ids."""

    pid: int
    role: str
    fd: int

    def kill(self) -> bool:
        """Kill the process; returns False if it had ended already."""
        try:
            signal.pidfd_send_signal(self.fd, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def __str__(self) -> str:
        return f"{self.role} {self.pid}"


def _roles(folder: Path) -> Iterator[tuple[int, str]]:
    """Every living process that was started in a folder, and its role.

    Workers are forks of the supervisor, and have its command line.
    """
    parents: dict[int, int] = {}
    supervisors = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            if (path / "cwd").samefile(folder):
                pid, stat = int(path.name), (path / "stat").read_text().rpartition(")")[2].split()
                if stat[0] not in "ZX":
                    parents[pid] = int(stat[1])
                if SUPERVISOR in (path / "cmdline").read_bytes().decode(errors="replace"):
                    supervisors.add(pid)
    for pid, parent in parents.items():
        is_worker = parent in supervisors
        yield pid, "worker" if is_worker else "supervisor" if pid in supervisors else "other"


def problems_of(results: Path) -> Iterator[str]:
    """The problems of a store in which every sweep has come to its end."""
    runs = Store(results).runs()
    if runs["run_id"].duplicated().any():
        yield "a run id is there twice"
    good = set(runs.loc[runs["status"] == "ok", "run_id"])
    for name in TABLES:
        for path in sorted((results / name).glob("*.parquet")):
            try:
                ids = pq.read_table(path, columns=["run_id"])["run_id"].to_pylist()
            except (OSError, pa.ArrowException) as error:
                yield f"{path}: {error}"
                continue
            if strangers := set(ids) - set(runs["run_id"]):
                yield f"{path}: rows of {sorted(strangers)}, which are no runs"
            if name in ("steps", "ranks") and not set(ids) <= good:
                yield f"{path}: {name} of a run that is not ok"
    steps = Store(results).table("steps", good)
    for run_id, count in Counter(dict.fromkeys(good, 0) | Counter(steps["run_id"])).items():
        if count != STEPS:
            yield f"run {run_id} is ok and has {count} of {STEPS} steps"


PARTS = {"kills": kills}

if __name__ == "__main__":
    options = parser(__doc__, PARTS)
    options.add_argument("--kills", type=int, default=0, help="default: as many as the time allows")
    options.add_argument("--cases", type=int, default=20, help="of a sweep")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--keep", type=Path, metavar="FOLDER", help="Keep the stores, here.")
    run("faults", __doc__, PARTS, options)
