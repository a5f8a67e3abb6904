"""Ranks that meet and train listen on one address: read from the kernel's own tables."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from command import EMULATED_SWEEP, words_of
from nodes import ADDRESSES, needs_nodes, two_nodes
from processes import free_port, is_loopback, listened

from ppbench.run.launch.cluster import NodeLaunches
from ppbench.run.launch.local import SUPERVISOR, WORKER
from ppbench.store import Store

PATIENCE_S = 300.0
SWEEP = f"{EMULATED_SWEEP}steps = 20\n"
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.usefixtures("warm_starts"),
]


def seen_while(processes: Sequence[subprocess.Popen[bytes]], log: Path) -> list[set[str]]:
    """The addresses that each process and its descendants ever listened on, until they end."""
    try:
        return listened(processes, log.read_text, PATIENCE_S)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def started(folder: Path, *command: str, **environment: str) -> subprocess.Popen[bytes]:
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env={**os.environ, **environment},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def run(folder: Path, *command: str, **environment: str) -> tuple[int, str, set[str]]:
    """Exit code, what was said, and where was listened."""
    process = started(folder, *command, **environment)
    (seen,) = seen_while([process], folder / "log")
    return process.returncode, (folder / "log").read_text(), seen


def test_a_sweep_under_torchrun_on_one_machine_listens_on_loopback_alone(tmp_path):
    (tmp_path / "a.toml").write_text(SWEEP)
    code, log, seen = run(
        tmp_path,
        *words_of("sweep", "a.toml", "--launcher", "torchrun")[1:],
        *("--set", f"launch.torchrun.rendezvous=localhost:{free_port()}"),
    )
    assert code == 0, log
    assert "listens on 127.0.0.1 (lo) alone" in log
    assert Store(tmp_path / "results").runs()["status"].tolist() == ["ok"]
    assert seen
    assert all(map(is_loopback, seen)), seen


TRAIN = ["engine.train", "--model", "llama-tiny", "--seq-len", "32", "--global-batch-size", "4"]
TRAIN += ["--threads", "1", "--max-steps", "2", "--device", "cpu"]


def test_ranks_that_are_started_without_torchrun_listen_where_they_meet_alone(tmp_path):
    met = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        started(
            *(tmp_path, "-m", *TRAIN),
            **{**met, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    seen = set.union(*seen_while(ranks, tmp_path / "log"))
    assert [rank.returncode for rank in ranks] == [0, 0], (tmp_path / "log").read_text()
    assert seen
    assert all(map(is_loopback, seen)), seen


@needs_nodes
def test_a_machine_whose_own_name_is_loopback_there_needs_the_interfaces_name(tmp_path):
    """Debian's /etc/hosts maps the machine's name to loopback."""
    (tmp_path / "a.toml").write_text(SWEEP)
    (command,) = NodeLaunches(1, 2, 1, 10, (WORKER, "a.toml")).commands("node-a", 29400)
    with two_nodes(tmp_path / "hosts") as (first, second):
        others = tmp_path / "hosts-of-b"
        others.write_text((tmp_path / "hosts").read_text())
        second.use_hosts(others)
        (tmp_path / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 node-a\n10.77.0.2 node-b\n")
        refused = first.start(command, tmp_path, tmp_path / "log")
        assert refused.wait(PATIENCE_S) == 2
        assert (
            "error: --rendezvous node-a:29400: node-a: is 127.0.1.1 here, where other machines "
            "do not come; give an address that they reach in place of the name, or name the "
            "interface: GLOO_SOCKET_IFNAME=eth0"
        ) in (tmp_path / "log").read_text()
        assert "Traceback" not in (tmp_path / "log").read_text()
        named = {"GLOO_SOCKET_IFNAME": "eth0"}
        started = [
            node.start(command, tmp_path, tmp_path / "log", **named) for node in (first, second)
        ]
        seen = seen_while(started, tmp_path / "log")
    assert [one.returncode for one in started] == [0, 0], (tmp_path / "log").read_text()
    assert seen == [{ADDRESSES["node-a"]}, {ADDRESSES["node-b"]}]


@pytest.mark.parametrize(
    ("options", "variables", "said"),
    [
        (
            *(["--rendezvous", "0.0.0.0:29400"], {}),
            "error: --rendezvous 0.0.0.0:29400: 0.0.0.0: means every interface; expected",
        ),
        (
            *(["--rendezvous", "no.such.invalid:1"], {}),
            "error: --rendezvous no.such.invalid:1: no.such.invalid: has no address that",
        ),
        ([], {}, "--rendezvous: not set, and 2 nodes must meet; give HOST:PORT"),
        (
            *(["--rendezvous", "127.0.0.1:1"], {"GLOO_SOCKET_IFNAME": "eth77"}),
            "GLOO_SOCKET_IFNAME: no interface 'eth77' with an address here; known: lo",
        ),
    ],
)
def test_what_would_listen_everywhere_or_nowhere_is_refused(tmp_path, options, variables, said):
    command = ("-m", SUPERVISOR, "--nodes", "2", *options, "-m", "there_is_none")
    code, log, seen = run(tmp_path, *command, **variables)
    assert (code, seen) == (2, set())
    assert said in log
    assert "Traceback" not in log
