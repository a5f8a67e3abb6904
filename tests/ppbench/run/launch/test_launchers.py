"""Sweeps that others start: what torchrun and Slurm are given, and what is refused before."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command import ppbench, printed, words_of
from processes import free_port, naming, wait_until

from ppbench.config.case import Supervision
from ppbench.config.reader import read_sweep
from ppbench.errors import LaunchError, UsageError
from ppbench.run.launch.cluster import NodeLaunches, rendezvous_of

pytestmark = pytest.mark.usefixtures("warm_starts")

PATIENCE_S = 180
SWEEP = """\
device = "emulated"

[launch.slurm]
partition = "long"
account = "us"
nodes = 2
time = "1:30:00"
memory_gb = 1.5
gpus_per_node = 4
extra = {exclude = "n7", exclusive = true}

[measure]
launches = 2

[grid]
world_size = [2, 5]

[emulated]
F_ms = 1
I_ms = 1
W_ms = 1
"""


def written(folder: Path, text: str = SWEEP) -> Path:
    (folder / "a.toml").write_text(text)
    return folder / "a.toml"


def sweep(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return ppbench("sweep", "a.toml", *arguments, folder=folder, **environment)


def test_where_launches_run_is_no_part_of_a_case(tmp_path):
    there = read_sweep(written(tmp_path), [], "cpu")
    here = read_sweep(written(tmp_path, SWEEP.replace("nodes = 2", "nodes = 3")), [], "cpu")
    assert there.cases == here.cases


def test_several_nodes_need_a_place_to_meet(tmp_path):
    file = written(tmp_path)
    with pytest.raises(UsageError, match=r"launch\.torchrun\.rendezvous: not set, and 2 nodes"):
        rendezvous_of(read_sweep(file, ["launch.torchrun.nodes=2"], "cpu"))
    given = ["launch.torchrun.nodes=2", "launch.torchrun.rendezvous=[fe80::1]:2000"]
    assert rendezvous_of(read_sweep(file, given, "cpu")) == ("[fe80::1]", 2000)


def test_a_dry_run_prints_each_launchs_command_and_writes_nothing(tmp_path):
    written(tmp_path)
    how = ("--launcher", "torchrun", "--dry-run")
    done = sweep(tmp_path, *how, "--only", "world_size=2", "--patience-s", "30")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "--nodes=1 --ranks-per-node=5" in first
    assert "--patience-s=30.0" in first
    assert "--rendezvous=127.0.0.1:29400" in first
    assert "--rendezvous=127.0.0.1:29401" in second
    settings = "--set launch.patience_s=30 --only world_size=2"
    assert first.endswith(f"-m ppbench.run.worker a.toml --results results {settings}")
    assert [path.name for path in tmp_path.iterdir()] == ["a.toml"]


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--only", "world_size=3"], "--only world_size=3: no case has this"),
        (["--only", "world_sise=2"], 'did you mean "world_size"?'),
        (["--reports", "elsewhere"], "--no-report, --open and --live out"),
    ],
)
def test_what_no_node_can_do_is_refused_before_any_is_started(
    tmp_path, monkeypatch, launcher, arguments, told
):
    written(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=re.escape(told)):
        printed("sweep", "a.toml", "--launcher", launcher, *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["a.toml"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes under /proc")
def test_a_sweep_under_torchrun_that_is_stopped_ends_its_ranks_and_tells_how_to_go_on(tmp_path):
    text = SWEEP.replace("F_ms = 1", "F_ms = 1000").replace("[2, 5]", "[1]")
    file = tmp_path / f"stopped-{os.getpid()}.toml"
    file.write_text(text)
    process = subprocess.Popen(
        words_of(
            *("sweep", file.name),
            *("--set", f"launch.torchrun.rendezvous=127.0.0.1:{free_port()}"),
            *("--launcher", "torchrun", "--only", "world_size=1"),
        ),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: list(tmp_path.glob("results/launches/*/job.json")), "its job", PATIENCE_S)
    assert len(naming(file.name)) > 1
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert f"every node has to be started again. Go on with: ppbench sweep {file.name}" in stderr
    assert stderr.rstrip().endswith("--launcher torchrun --only world_size=1")
    assert naming(file.name) == []


def test_launches_are_run_in_turn_until_one_fails(tmp_path, monkeypatch, capfd):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    text = (
        "import os; from ppbench.config.case import Supervision\n"
        "print('one of', os.environ['WORLD_SIZE'], 'waits', Supervision.here().patience_s)\n"
    )
    (tmp_path / "tells_its_size.py").write_text(text)
    meeting = "127.0.0.1", free_port()
    NodeLaunches(2, 1, 2, 0, ("tells_its_size",), Supervision(patience_s=99.5)).run(*meeting)
    assert capfd.readouterr().out.splitlines() == ["one of 2 waits 99.5"] * 4
    with pytest.raises(LaunchError, match="the supervisor ended with exit code 1"):
        NodeLaunches(2, 1, 1, 0, ("there_is_none",)).run(*meeting)
    assert "launch 2 of 2" not in capfd.readouterr().out


@pytest.fixture
def slurm(tmp_path: Path) -> str:
    """PATH with commands that take a job as Slurm's do, and keep its script."""
    pytest.importorskip("submitit")
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {
        "sbatch": f'cp "$1" {tmp_path}/script; echo Submitted batch job 7',
        "srun": "exit 1",
    }.items():
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    return f"{commands}:{os.environ['PATH']}"


def test_slurm_is_given_the_script_that_a_dry_run_prints(tmp_path, slurm):
    written(tmp_path)
    dry = sweep(tmp_path, "--launcher", "slurm", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert not (tmp_path / "results").exists()
    done = sweep(tmp_path, "--launcher", "slurm", PATH=slurm)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "job 7; its logs: results/slurm\n"
    script = (tmp_path / "script").read_text()
    assert dry.stdout.startswith(script)
    lines = script.splitlines()
    for option in (
        *("--partition=long", "--account=us", "--nodes=2", "--time=90", "--gpus-per-node=4"),
        *("--cpus-per-task=3", "--mem=1536M", "--exclude=n7", "--exclusive", "--job-name=a"),
    ):
        assert f"#SBATCH {option}" in lines
    task = pickle.loads((tmp_path / "results" / "slurm" / "7_submitted.pkl").read_bytes()).function
    told = [line.removeprefix("#   ") for line in dry.stdout.splitlines()[-2:]]
    assert told == [" ".join(one) for one in task.launches.commands("FIRST_HOST", 20_000)]


def test_without_slurm_a_job_cannot_be_submitted(tmp_path):
    pytest.importorskip("submitit")
    written(tmp_path)
    done = sweep(tmp_path, "--launcher", "slurm", PATH=str(Path(sys.executable).parent))
    assert done.returncode == 4
    assert done.stderr == "error: no Slurm here: sbatch is not on PATH; submit from a login node\n"


def test_what_sbatch_says_when_it_refuses_is_told(tmp_path, slurm):
    written(tmp_path)
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho no such partition >&2; exit 1\n")
    done = sweep(tmp_path, "--launcher", "slurm", PATH=slurm)
    assert done.returncode == 4
    # submitit passes on what sbatch prints as well
    assert done.stderr.splitlines()[-1] == ("error: Slurm did not take the job: no such partition")
