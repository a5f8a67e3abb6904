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
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.rows import Row, parser, run
from engine.flight import Phase, read_record
from ppbench.run.job import Journal, noted_node_folders
from ppbench.run.machine.node_folder import flight_path, last_start
from ppbench.store import TABLES, Store

SCHEDULES = ("afab", "1f1b", "zb_h1", "interleaved_1f1b", "zbv")
STEPS = 6
SWEEP = """\
name = "faults"
device = "emulated"
num_microbatches = 4
seq_len = 16
model.preset = "llama-tiny"
emulated = {{F_ms = 3, I_ms = 3, W_ms = 3}}
measure = {{warmup_steps = 1, max_warmup_steps = 1, steps = {steps}, timeout_s = 120}}
[grid]
"emulated.seed" = {seeds}
world_size = [1, 2]
schedule = {schedules}
"""
VICTIMS = ("controller", "supervisor", "worker", "all")
MOMENTS = ("start-up", "step", "store", "between")
SUPERVISOR = "ppbench.run.launch.supervisor"
START_UP_S, STEPS_S, STORE_S = 10.0, 0.6, 0.1  # how long a moment lasts, with a kill at random
MOST_ROWS = 2  # between two kills, so that a sweep comes to its end
PATIENCE_S, GONE_S, LOOK_S, POLL_S = 600.0, 20.0, 0.05, 0.005
FAILED_RUNS = 4  # exit code


def kills(asked: argparse.Namespace) -> Iterator[Row]:
    """Kill until all kills are used up, or the time; exits where any work was lost."""
    folder = asked.keep or Path(tempfile.mkdtemp(prefix="ppbench-faults-"))
    began_s, is_small = time.monotonic(), not (asked.seconds or asked.kills)
    until_s = math.inf if asked.kills or is_small else began_s + asked.seconds
    most, num_cases = asked.kills or (2 if is_small else 10**6), 4 if is_small else asked.cases
    chance, phases, problems, num_sweeps = random.Random(asked.seed), list[str](), list[str](), 0
    while len(phases) < most and time.monotonic() < until_s and not problems:
        num_sweeps += 1
        campaign = Campaign(folder / f"sweep-{num_sweeps}", num_cases, chance)
        problems += campaign.run(most - len(phases), until_s)
        phases += campaign.phases
    print(f"{len(phases)} kills in {time.monotonic() - began_s:.0f} s")
    for phase, num in Counter(phases).most_common():
        print(f"{num:5} while rank 0 {phase}")
    if problems:
        print(f"VIOLATED: {len(problems)}; all that is left is in {folder}")
        print("\n".join(f"  {problem}" for problem in problems))
        sys.exit(1)
    print("held: one ok run per case, each store reads clean, nothing is left over")
    if asked.keep is None:
        shutil.rmtree(folder)
    yield Row.exact("violations", 0, note=f"of {len(phases)} kills in {num_sweeps} sweeps")


class Campaign:
    """One sweep into one store, from its first start to its end."""

    def __init__(self, folder: Path, num_cases: int, chance: random.Random) -> None:
        folder.mkdir(parents=True)
        self._folder, self._num_cases, self._chance = folder, num_cases, chance
        self.phases: list[str] = []  # of rank 0, at each kill
        self._problems: list[str] = []
        schedules = list(SCHEDULES[: max(1, num_cases // 2)])
        seeds = list(range(-(-num_cases // (2 * len(schedules)))))
        text = SWEEP.format(steps=STEPS, seeds=seeds, schedules=schedules).replace("'", '"')
        (folder / "faults.toml").write_text(text)
        self._began_s = time.monotonic()
        self._known_ok: dict[str, str] = {}

    def run(self, num_kills: int, until_s: float) -> list[str]:
        """Start the sweep until it is done, with so many kills until then; return what is wrong."""
        for start in itertools.count(1):
            exit_code = self._start(start, num_kills, until_s)
            self._check_kept()
            if exit_code == 0 or self._problems:
                break
            if exit_code not in (FAILED_RUNS, -signal.SIGKILL):
                self._accuse(f"start {start} ended with exit code {exit_code}")
                break
        self._check_end()
        return self._problems

    def _start(self, start: int, num_kills: int, until_s: float) -> int:
        """Run the same command once more; returns its exit code."""
        log_file = self._folder / f"start-{start}.log"
        with log_file.open("wb") as log:
            self._controller = controller = subprocess.Popen(
                [sys.executable, "-m", "ppbench", "sweep", "faults.toml", "--no-report"],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._say(f"start {start}")
        try:
            while len(self.phases) < num_kills and time.monotonic() < until_s and self._goes_on():
                self._kill_someone()
            return controller.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._accuse(f"start {start} was not over after {PATIENCE_S:.0f} s")
            with self._processes() as there:
                for fd in there.values():
                    killed(fd)
            return controller.wait()
        finally:
            if b"Traceback" in log_file.read_bytes():
                self._accuse(f"start {start} printed a traceback: {log_file.name}")

    def _kill_someone(self) -> None:
        """Wait for a random moment, then kill a random victim, unless the sweep ends before."""
        moment, victim = self._chance.choice(MOMENTS), self._chance.choice(VICTIMS)
        num_rows = self._num_rows() + self._chance.randint(0, MOST_ROWS)
        if not self._wait_until_near(moment, num_rows):
            return
        with self._processes() as there:  # which takes longer than the short moments last
            if victim not in {"all", *(role for role, _ in there)}:
                victim = "controller"
            chosen = [process for process in there if victim in ("all", process[0])]
            self._chance.shuffle(chosen)
            if not self._wait_for(moment, num_rows):
                return
            phase, most = self._phase(), 1 if victim == "worker" else len(chosen)
            whom = [f"{role} {pid}" for role, pid in chosen[:most] if killed(there[role, pid])]
        if whom:
            self.phases.append(phase)
            self._say(f"kill {len(self.phases)}: while rank 0 {phase} ({', '.join(whom)})")
        if victim in ("controller", "all"):
            self._controller.wait(PATIENCE_S)
            time.sleep(self._chance.choice((0.0, 0.5)))

    def _wait_until_near(self, moment: str, num_rows: int) -> bool:
        """Wait until shortly before the moment; False if the sweep ends before."""
        if moment == "start-up":
            return self._goes_on(self._chance.uniform(0, START_UP_S))
        while self._num_rows() < num_rows:
            if not self._goes_on(LOOK_S):
                return False
        return moment != "step" or self._goes_on(self._chance.uniform(0, STEPS_S))

    def _wait_for(self, moment: str, num_rows: int) -> bool:
        """Wait for the moment; False if the sweep ends before."""
        while moment == "store" and self._phase() != Phase.STORES.words:
            if not self._goes_on(POLL_S):
                return False
        while moment == "between" and self._num_rows() <= num_rows:
            if not self._goes_on(4 * POLL_S):
                return False
        is_sudden = moment in ("store", "between")
        return not is_sudden or self._goes_on(self._chance.uniform(0, STORE_S))

    def _goes_on(self, seconds: float = 0.0) -> bool:
        """Whether the sweep goes on after so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._controller.wait(seconds)
        return self._controller.poll() is None

    def _launches(self) -> list[Path]:
        return sorted((self._folder / "results" / "launches").glob("*"))

    def _num_rows(self) -> int:
        events = (Journal(launch).new_events() for launch in self._launches())
        return sum(event["event"] == "row" for own in events for event in own)

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
    def _processes(self) -> Iterator[dict[tuple[str, int], int]]:
        """The sweep's living processes: descriptors by role and id, since ids are used again."""
        roles = {**dict(_roles(self._folder)), self._controller.pid: "controller"}
        with contextlib.ExitStack() as stack:
            living = {}
            for pid, role in roles.items():
                with contextlib.suppress(ProcessLookupError):
                    living[role, pid] = os.pidfd_open(pid)
                    stack.callback(os.close, living[role, pid])
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
        good = Counter(runs.loc[runs["status"] == "ok", "case_id"])
        if len(good) != self._num_cases:
            self._accuse(f"{len(good)} of {self._num_cases} cases have an ok run")
        self._accuse(*(f"case {case}: {n} ok runs" for case, n in good.items() if n != 1))
        self._accuse(*problems_of(self._folder / "results"), *self._left_over())
        self._say(f"done, {len(runs)} rows")

    def _left_over(self) -> Iterator[str]:
        """Markers, processes and folders in shared memory that are left over."""
        until_s, left = time.monotonic() + GONE_S, dict(_roles(self._folder))
        while left and time.monotonic() < until_s:
            time.sleep(LOOK_S)
            left = dict(_roles(self._folder))
        yield from (f"{role} {pid} is left" for pid, role in left.items())
        for launch in self._launches():
            if (launch / "running").exists():
                yield f"{launch.name}/running is left"
            yield from (f"{folder.parent} is left" for folder in noted_node_folders(launch))

    def _store(self) -> Store:
        return Store(self._folder / "results", self._accuse)

    def _accuse(self, *problems: str) -> None:
        self._problems += [f"{self._folder.name}: {problem}" for problem in problems]

    def _say(self, text: str) -> None:
        seconds = time.monotonic() - self._began_s
        print(f"{self._folder.name} {seconds:7.1f} s  {text}", flush=True)


def killed(fd: int) -> bool:
    """Kill a process; returns False if it had ended already."""
    try:
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


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
