"""Workers that die, are stopped, or lose their agent: what is left of them and what is known."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from processes import children, descendants, is_alive, wait_until

from ppbench.run.launch.agent import GRACE_S
from ppbench.run.launch.local import Exit, LocalLaunch, first_exit, note_exit, read_exits

pytestmark = pytest.mark.usefixtures("warm_starts")

START = """
import os, signal, sys, time
from pathlib import Path
rank, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
here = Path(sys.argv[1])

def wait_for(*names):
    while not all((here / name).exists() for name in names): time.sleep(0.01)
"""


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Starts two workers that run a text of Python, and ends them."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    launches = []

    def begin(text: str, max_restarts: int = 0, preloaded: str = "json") -> LocalLaunch:
        write_worker(tmp_path, text)
        program = ["some_worker", str(tmp_path)]
        settings = {"num_ranks": 2, "threads_per_rank": 1, "max_restarts": max_restarts}
        settings["preloaded"] = preloaded  # nothing that takes long
        launches.append(LocalLaunch(tmp_path, program, **settings))
        return launches[-1]

    yield begin
    for one in launches:
        one.stop()


def write_worker(folder: Path, text: str) -> None:
    """The agent imports what its workers run, so nothing may happen by that."""
    body = textwrap.indent(START + text, "    ")
    (folder / "some_worker.py").write_text(f'if __name__ == "__main__":\n{body}')


def exit_code_of(launch: LocalLaunch) -> int:
    wait_until(lambda: launch.poll() is not None, "the agent's end")
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
    told = [(one.attempt, one.rank, one.exitcode) for one in read_exits(tmp_path)]
    assert told == [(0, 1, -signal.SIGKILL), (1, 0, -signal.SIGABRT), (2, 1, 1)]
    assert ended.num_starts() == 4
    assert ended.last_lines() == ["no more"]


TOUCHES = """
import os, torch
pid = os.getpid()
torch.cuda._is_in_bad_fork = lambda: os.getpid() != pid  # as torch does once CUDA has begun
"""


def test_workers_are_spawned_where_an_imported_package_has_used_the_device(launch, tmp_path):
    (tmp_path / "package_of_somebody.py").write_text(TOUCHES)
    text = """
import multiprocessing, torch
(here / f"bad-{rank}").write_text(str(torch.cuda._is_in_bad_fork()))
(here / f"imported-{rank}").write_text(str("package_of_somebody" in sys.modules))
"""
    ended = launch(text, preloaded="package_of_somebody")
    assert exit_code_of(ended) == 0, ended.last_lines()
    for rank in (0, 1):
        assert (tmp_path / f"bad-{rank}").read_text() == "False"
        assert (tmp_path / f"imported-{rank}").read_text() == "False"
    assert "workers are spawned" in (tmp_path / "agent.log").read_text()


def test_a_worker_that_is_stopped_holds_up_a_restart_for_no_longer_than_the_grace(launch, tmp_path):
    text = """
if start == 0 and rank == 0:
    (here / "stopped").touch()
    os.kill(os.getpid(), signal.SIGSTOP)
if start == 0:
    wait_for("stopped")
    sys.exit(7)
"""
    ended = launch(text, max_restarts=1)
    wait_until(lambda: bool(read_exits(tmp_path)), "the failure of rank 1")
    failed_at = time.monotonic()
    assert exit_code_of(ended) == 0
    assert [(one.rank, one.exitcode) for one in read_exits(tmp_path)] == [(1, 7)]
    assert GRACE_S <= 2
    assert time.monotonic() - failed_at < 30, "torch's own grace"


def test_what_the_first_to_fail_wrote_is_shown_not_what_its_peers_wrote_after(launch):
    text = """
def complain(*_):
    print("a peer is gone", file=sys.stderr, flush=True)
    sys.exit(1)
if rank == 0:
    signal.signal(signal.SIGTERM, complain)
    (here / "ready").touch()
    time.sleep(1000)
wait_for("ready")
sys.exit("the cause")
"""
    ended = launch(text)
    assert exit_code_of(ended) == 1
    assert ended.last_lines() == ["the cause"]


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
from ppbench.run.launch.local import LocalLaunch
folder = Path(sys.argv[1])
program = ["some_worker", str(folder)]
LocalLaunch(folder, program, num_ranks=2, threads_per_rank=1, max_restarts=5, preloaded="json")
time.sleep(1000)
"""


@pytest.mark.usefixtures("fresh_starts")
@pytest.mark.parametrize("killed", ["agent", "controller while starting"])
def test_nothing_outlives_a_controller_or_an_agent_that_is_killed(killed, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    write_worker(tmp_path, "\n(here / f'up-{rank}').touch()\ntime.sleep(1000)\n")
    controller = subprocess.Popen([sys.executable, "-c", CONTROLLER, str(tmp_path)])
    num_alive = 2 if killed == "controller while starting" else 4
    wait_until(lambda: len(descendants(controller.pid)) >= num_alive, "the processes")
    if killed != "controller while starting":
        wait_until(lambda: all((tmp_path / f"up-{r}").exists() for r in (0, 1)), "the workers")
    everyone = descendants(controller.pid) - {controller.pid}
    (agent,) = children()[controller.pid]
    os.kill(agent if killed == "agent" else controller.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, everyone)), "the end of all")
    controller.kill()
    controller.wait()


@pytest.mark.usefixtures("fresh_starts")
def test_a_process_whose_parent_is_gone_already_ends_at_once(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    command = [sys.executable, "-m", "ppbench.run.launch.lifetime", str(gone.pid), "this"]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL


def test_a_line_that_a_kill_cut_short_is_passed_over(tmp_path):
    assert first_exit(tmp_path) is None
    first, second = Exit(0, 1, 10, -9, 1.0), Exit(1, 0, 11, 1, 2.0)
    note_exit(tmp_path, first)
    with (tmp_path / "exits.jsonl").open("a") as file:
        file.write('{"attempt": 1, "ra\n')
    note_exit(tmp_path, second)
    assert read_exits(tmp_path) == [first, second]
    assert first_exit(tmp_path) == second
    assert str(first) == "rank 1 (pid 10) was ended by SIGKILL"
    assert str(second) == "rank 0 (pid 11) ended with exit code 1"


def test_an_agent_runs_one_launch_after_another_each_with_its_own_logs(launch, tmp_path):
    text = """
(here / "imported").open("a").write(f"{rank} {os.getppid()} {os.environ['OMP_NUM_THREADS']}\\n")
print("said by", rank)
"""
    first = launch(text)
    assert exit_code_of(first) == 0
    assert first.agent.is_free
    folder = tmp_path / "second"
    folder.mkdir()
    program = ["some_worker", str(tmp_path)]
    settings = {"num_ranks": 1, "threads_per_rank": 3, "max_restarts": 0, "preloaded": "json"}
    second = LocalLaunch(folder, program, **settings, agent=first.agent)
    assert exit_code_of(second) == 0
    begun = [line.split() for line in (tmp_path / "imported").read_text().splitlines()]
    assert sorted((rank, threads) for rank, _, threads in begun) == [
        ("0", "1"),
        ("0", "3"),
        ("1", "1"),
    ]
    assert len({agent for _, agent, _ in begun}) == 1
    (log,) = folder.glob("logs/*/attempt_0/0/stdout.log")
    assert log.read_text() == "said by 0\n"
    assert second.num_starts() == 1
    second.stop()
    assert not second.agent.is_free
