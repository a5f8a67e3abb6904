"""A sweep across two nodes: network namespaces of this machine, with a supervisor each."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from command import TINY
from nodes import ADDRESSES, Node, needs_nodes, two_nodes
from processes import listened, wait_until

from ppbench.run.launch.cluster import NodeLaunches
from ppbench.run.launch.local import WORKER
from ppbench.run.machine.node_folder import read_events
from ppbench.store import Store

PATIENCE_S = 600
SWEEP = f"""
world_size = 4
{TINY}steps = 3

[grid]
"""
EMULATED = 'device = "emulated"\nemulated = {F_ms = 5, I_ms = 5, W_ms = 5}\n'
pytestmark = [needs_nodes, pytest.mark.usefixtures("warm_starts")]


class Cluster:
    """Two nodes with a file system each: only the first has the sweep file and the store."""

    def __init__(self, nodes: tuple[Node, Node], folder: Path) -> None:
        self.nodes, self._folder = nodes, folder
        self.results = folder / "node-a" / "results"
        for node in nodes:
            (folder / node.name).mkdir()

    def write_sweep(self, text: str) -> None:
        (self._folder / "node-a" / "a.toml").write_text(text)

    def start(self, node: Node, ranks_per_node: int, *options: str) -> subprocess.Popen[bytes]:
        """The command that each node is given, the same on both."""
        launches = NodeLaunches(1, 2, ranks_per_node, 10, (WORKER, "a.toml", *options))
        (command,) = launches.commands("node-a", 29400)
        return node.start(command, self._folder / node.name, self.log(node))

    def log(self, node: Node) -> Path:
        return self._folder / f"{node.name}.log"

    def run(self, ranks_per_node: int, *options: str) -> list[set[str]]:
        """The addresses on which each node has listened, until all is done."""
        started = [self.start(node, ranks_per_node, *options) for node in self.nodes]
        seen = listened(started, self.logs, PATIENCE_S)
        assert [self.exit_code(process) for process in started] == [0, 0], self.logs()
        return seen

    def exit_code(self, process: subprocess.Popen[bytes]) -> int:
        try:
            return process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it hangs.\n{self.logs()}") from None

    def logs(self) -> str:
        return "\n".join(f"{node.name}:\n{self.log(node).read_text()}" for node in self.nodes)


@pytest.fixture
def cluster(tmp_path: Path):
    with two_nodes(tmp_path / "hosts") as nodes:
        yield Cluster(nodes, tmp_path)


def hosts_of(store: Store, run_id: str) -> list[str]:
    return store.table("ranks", [run_id]).sort_values("rank")["hostname"].tolist()


@pytest.mark.parametrize("device", ["emulated", pytest.param("cpu", marks=pytest.mark.thorough)])
def test_a_sweep_runs_across_two_nodes_rank_by_rank_and_node_by_node(cluster, device):
    first = EMULATED if device == "emulated" else f'device = "{device}"'
    cluster.write_sweep(f"{first}{SWEEP}world_size = [2, 4]\n")
    cluster.run(1, "--only", "world_size=2")
    seen = cluster.run(2)
    assert seen == [{ADDRESSES["node-a"]}, {ADDRESSES["node-b"]}]
    store = Store(cluster.results)
    runs = store.runs().sort_values("world_size")
    assert runs[["world_size", "status"]].to_numpy().tolist() == [[2, "ok"], [4, "ok"]]
    hosts = [hosts_of(store, run_id) for run_id in runs["run_id"]]
    assert hosts == [["node-a", "node-b"], ["node-a", "node-a", "node-b", "node-b"]]
    assert "1 of 1 runs of this launch are ok" in cluster.log(cluster.nodes[0]).read_text()
    assert not list((cluster.results.parents[1] / "node-b").iterdir())


def begin(cluster: Cluster) -> list[subprocess.Popen[bytes]]:
    """A sweep of three cases that take turns; each node's supervisor."""
    text = SWEEP.replace("world_size = 4", "world_size = 2").replace("\nsteps = 3", "\nsteps = 12")
    cluster.write_sweep(f"{EMULATED}{text}num_microbatches = [4, 5, 6]\n")
    started = [cluster.start(node, 1) for node in cluster.nodes]
    journals = cluster.results.glob
    wait_until(
        lambda: any('"turn"' in j.read_text() for j in journals("launches/*/journal.jsonl")),
        cluster.logs,
        PATIENCE_S,
    )
    return started


def begin_and_kill(cluster: Cluster, killed: int) -> subprocess.Popen[bytes]:
    """The same when a node fails; the other node's supervisor."""
    started = begin(cluster)
    cluster.nodes[killed].kill()
    started[killed].wait()
    return started[1 - killed]


def endings_on(supervisor: subprocess.Popen[bytes]) -> list[str]:
    """Why ranks were ended on a node, by its own shared memory."""
    folders = Path(f"/proc/{supervisor.pid}/root/dev/shm").glob("ppbench-*")
    return [ending.cause for folder in folders for ending in read_events(folder).endings]


def test_a_node_that_is_killed_leaves_a_store_that_the_same_commands_finish(cluster):
    other = begin_and_kill(cluster, killed=0)
    other.terminate()
    other.wait()
    before = Store(cluster.results).runs()
    cluster.run(1)
    runs = Store(cluster.results).runs()
    assert sorted(runs[runs["status"] == "ok"]["num_microbatches"]) == [4, 5, 6]
    assert set(before["run_id"]) <= set(runs["run_id"])
    assert set(runs["status"]) <= {"ok", "crash", "interrupted"}


def test_a_node_whose_command_is_started_again_joins_the_one_that_waits(cluster):
    other = begin_and_kill(cluster, killed=1)
    before = Store(cluster.results).runs()
    again = cluster.start(cluster.nodes[1], 1)
    assert [cluster.exit_code(one) for one in (other, again)] == [0, 0], cluster.logs()
    assert len(list(cluster.results.glob("launches/*"))) == 1
    runs = Store(cluster.results).runs()
    assert set(before["run_id"]) <= set(runs["run_id"])
    # What the loss of the node cut short is a crash, which the same commands make anew.
    done = sorted(runs[runs["status"] == "ok"]["num_microbatches"])
    lost = sorted(runs[runs["status"] == "crash"]["num_microbatches"])
    assert (len(lost), sorted(done + lost)) == (1, [4, 5, 6])


def test_a_cable_that_is_cut_ends_the_case_and_all_goes_on_once_it_is_back(cluster):
    started = begin(cluster)
    cluster.nodes[1].set_link("down")
    for one in started:
        wait_until(lambda one=one: endings_on(one), cluster.logs, 60)
        assert set(endings_on(one)) <= {"elsewhere", "exit"}
    cluster.nodes[1].set_link("up")
    assert [cluster.exit_code(one) for one in started] == [0, 0], cluster.logs()
    runs = Store(cluster.results).runs()
    done = sorted(runs[runs["status"] == "ok"]["num_microbatches"])
    lost = sorted(runs[runs["status"] == "crash"]["num_microbatches"])
    assert (len(lost), sorted(done + lost)) == (1, [4, 5, 6])
