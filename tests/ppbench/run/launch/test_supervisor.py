"""Ranks that die, are stopped, or lose their supervisor: what is left and what is known."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from processes import children, descendants, is_alive, wait_until

from ppbench.errors import StoreError
from ppbench.run.launch.local import GAVE_UP, SUPERVISOR, Begin, Supervisor
from ppbench.run.machine.node_folder import read_events, remove_node_folder

pytestmark = pytest.mark.usefixtures("warm_starts")

START = """
import os, signal, sys, time
from pathlib import Path
rank, own = int(os.environ["RANK"]), Path(os.environ["PPBENCH_START_FOLDER"])
start = int(own.name.removeprefix("start-"))
here = Path(sys.argv[1])

def wait_for(*names):
    while not all((here / name).exists() for name in names): time.sleep(0.01)
"""


def begun(
    folder: Path, here: Path, num_ranks: int = 2, max_restarts: int = 0, num_threads: int = 1
):
    """A launch of the text, which is told where `here` is."""
    module, variables = "some_worker", {"OMP_NUM_THREADS": str(num_threads)}
    node = str(folder / "node")
    return Begin(str(folder), node, num_ranks, max_restarts, module, [str(here)], variables)


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Starts two workers that run a text of Python, and ends them."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    launches = []

    def begin(text: str, max_restarts: int = 0, preloaded: str = "json") -> Supervisor:
        write_worker(tmp_path, text)
        launches.append(Supervisor())
        launches[-1].begin(begun(tmp_path, tmp_path, max_restarts=max_restarts), preloaded)
        return launches[-1]

    yield begin
    for one in launches:
        one.stop()


def write_worker(folder: Path, text: str) -> None:
    """A file that only does something when it is run."""
    body = textwrap.indent(START + text, "    ")
    (folder / "some_worker.py").write_text(f'if __name__ == "__main__":\n{body}')


def exit_code_of(launch: Supervisor) -> int:
    wait_until(lambda: launch.poll() is not None, "the launch's end")
    code = launch.poll()
    assert code is not None
    return code


def test_who_failed_and_how_is_told_start_by_start(launch, tmp_path):
    text = """
if rank == 1 and start == 0: os.kill(os.getpid(), signal.SIGKILL)
if rank == 0 and start == 1: os.abort()
if rank == 1 and start == 2: sys.exit("no more")
if start < 3: time.sleep(1000)
"""
    ended = launch(text, max_restarts=3)
    assert exit_code_of(ended) == 0
    events = read_events(tmp_path / "node")
    told = [(one.start, one.rank, one.exitcode) for one in events.exits]
    assert told[:3] == [(0, 1, -signal.SIGKILL), (1, 0, -signal.SIGABRT), (2, 1, 1)]
    assert sorted(told[3:]) == [(3, 0, 0), (3, 1, 0)]
    assert [(one.start, one.cause, one.states) for one in events.endings] == [
        (0, "exit", {0: "alive", 1: "dead"}),
        (1, "exit", {0: "dead", 1: "alive"}),
        (2, "exit", {0: "alive", 1: "dead"}),
    ]
    assert ended.num_starts() == 4
    assert ended.last_lines() == ["no more"]


def test_a_rank_that_gives_up_ends_the_launch(launch):
    ended = launch(f"sys.exit({GAVE_UP} if rank else time.sleep(1000))", max_restarts=3)
    assert exit_code_of(ended) == GAVE_UP
    assert ended.num_starts() == 1


def test_ranks_whose_case_takes_too_long_are_ended_and_their_states_noted(launch, tmp_path):
    text = """
from engine.flight import FlightRecord
record = FlightRecord(own / f"flight-rank{rank}", rank)
record.begin_case(7, 0.0 if rank else 0.5)
if start == 0:
    if rank: os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)
"""
    assert exit_code_of(launch(text, max_restarts=1)) == 0
    (ending,) = read_events(tmp_path / "node").endings
    assert (ending.cause, ending.states) == ("timeout", {0: "alive", 1: "stopped"})


def test_the_nodes_first_rank_has_samples_taken_when_it_asks_and_between(launch, tmp_path):
    text = """
if rank == 0:
    import socket
    asks = socket.socket(fileno=int(os.environ["PPBENCH_SAMPLES"]))
    file = here / "node" / "samples.jsonl"
    def ask(what):
        asks.sendall(what)
        assert asks.recv(1) == b"."
        return num_samples()
    def num_samples():
        return len(file.read_text().splitlines())
    first = ask(b"[]")
    while num_samples() < first + 3: time.sleep(0.01)  # which come by themselves
    last = ask(b"null")
    time.sleep(1)
    (here / "nums").write_text(str([ask(b"null") - last, ask(b"[]") - last]))
"""
    ended = launch(text)
    assert exit_code_of(ended) == 0, ended.last_lines()
    assert (tmp_path / "nums").read_text() == "[0, 1]"


TOUCHES = """
import torch
torch.cuda.is_initialized = lambda: True
"""


def test_workers_are_spawned_where_an_imported_package_has_used_the_device(launch, tmp_path):
    (tmp_path / "package_of_somebody.py").write_text(TOUCHES)
    text = """
(here / f"imported-{rank}").write_text(str("package_of_somebody" in sys.modules))
"""
    ended = launch(text, preloaded="package_of_somebody")
    assert exit_code_of(ended) == 0, ended.last_lines()
    for rank in (0, 1):
        assert (tmp_path / f"imported-{rank}").read_text() == "False"
    assert "workers are spawned" in (tmp_path / "supervisor.log").read_text()


def test_a_signal_that_comes_while_a_rank_is_forked_is_not_lost(launch, tmp_path):
    signalled = "import os\nos.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), 15))\n"
    (tmp_path / "signalled.py").write_text(signalled)
    ended = launch("time.sleep(1000)", preloaded="signalled")
    assert exit_code_of(ended) == 128 + signal.SIGTERM
    (ending,) = read_events(tmp_path / "node").endings
    assert ending.cause == "stopped"


def test_what_a_worker_has_started_ends_with_it(launch, tmp_path):
    text = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
(here / f"unnamed-{rank}").write_text(str(child.pid))
(here / f"unnamed-{rank}").rename(here / f"child-{rank}")  # whole as soon as it is there
wait_for("child-0", "child-1")
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert exit_code_of(launch(text)) == 1
    children = [int((tmp_path / f"child-{rank}").read_text()) for rank in (0, 1)]
    wait_until(lambda: not any(map(is_alive, children)), "the end of the workers' children")


CONTROLLER = """
import sys, time
from pathlib import Path
from ppbench.run.launch.local import Begin, Supervisor
folder = Path(sys.argv[1])
begin = Begin(str(folder), str(folder / "node"), 2, 5, "some_worker", [str(folder)], {})
supervisor = Supervisor()
supervisor.begin(begin, "json")
time.sleep(1000)
"""


@pytest.mark.usefixtures("fresh_starts")
@pytest.mark.parametrize("killed", ["supervisor", "controller while starting"])
def test_nothing_outlives_a_controller_or_supervisor_that_is_killed(killed, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    write_worker(tmp_path, "\n(here / f'up-{rank}').touch()\ntime.sleep(1000)\n")
    controller = subprocess.Popen([sys.executable, "-c", CONTROLLER, str(tmp_path)])
    num_alive = 2 if killed == "controller while starting" else 4
    wait_until(lambda: len(descendants(controller.pid)) >= num_alive, "the processes")
    if killed != "controller while starting":
        wait_until(lambda: all((tmp_path / f"up-{r}").exists() for r in (0, 1)), "the workers")
    everyone = descendants(controller.pid) - {controller.pid}
    (supervisor,) = children()[controller.pid]
    os.kill(supervisor if killed == "supervisor" else controller.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, everyone)), "the end of all")
    controller.kill()
    controller.wait()


@pytest.mark.usefixtures("fresh_starts")
def test_a_process_whose_parent_is_gone_already_ends_at_once(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    command = [sys.executable, "-m", SUPERVISOR, "serve", str(gone.pid), ""]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL


def test_a_supervisor_runs_one_launch_after_another_each_with_its_own_logs(launch, tmp_path):
    text = """
(here / "imported").open("a").write(f"{rank} {os.getppid()} {os.environ['OMP_NUM_THREADS']}\\n")
print("said by", rank)
"""
    first = launch(text)
    assert exit_code_of(first) == 0
    folder = tmp_path / "second"
    folder.mkdir()
    first.begin(begun(folder, tmp_path, num_ranks=1, num_threads=3), "json")
    assert exit_code_of(first) == 0
    lines = [line.split() for line in (tmp_path / "imported").read_text().splitlines()]
    assert sorted((rank, threads) for rank, _, threads in lines) == [
        ("0", "1"),
        ("0", "3"),
        ("1", "1"),
    ]
    assert len({supervisor for _, supervisor, _ in lines}) == 1
    assert (folder / "logs/start-0/rank-0.out").read_text() == "said by 0\n"
    assert "spawned" not in (folder / "supervisor.log").read_text()
    assert first.num_starts() == 1


@pytest.mark.parametrize(("status", "stays"), [("store", True), ("error", False)])
def test_without_a_controller_a_store_that_fails_is_told_and_the_nodes_folder_stays(
    tmp_path, status, stays
):
    text = f"""
from engine.flight import FlightRecord
from ppbench.run.failures.evidence import write_rank_error
record = FlightRecord(own / f"flight-rank{{rank}}", rank)
write_rank_error(own, rank, OSError("no room"), lambda *_: {status!r}, "")
(here / "node").write_text(str(own.parent))
sys.exit({GAVE_UP})
"""
    write_worker(tmp_path, text)
    command = [sys.executable, "-m", SUPERVISOR, "-m", "some_worker"]
    paths = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [*command, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    node = Path((tmp_path / "node").read_text())
    try:
        assert done.returncode == StoreError.exit_code
        assert ("error: OSError: no room" in done.stderr.splitlines()) == stays
        assert node.exists() == stays
    finally:
        remove_node_folder(node)
