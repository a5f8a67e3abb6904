"""The user's folder in shared memory: real mounts, a second user, processes that are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import warm

from engine.flight import RECORD_BYTES, FlightRecord, read_record
from ppbench.errors import StoreError
from ppbench.run.failures.evidence import node_folder
from ppbench.run.machine import private_folder
from ppbench.run.machine.private_folder import Claim, bases, choose_place, make_folder, remove_dead
from ppbench.run.sweep.open_runs import close_abandoned
from ppbench.store import Store

pytestmark = pytest.mark.usefixtures("warm_starts")

PATIENCE_S = 120.0
NOBODY = 65534
OURS = f"ppbench-{os.geteuid()}"
NAMESPACE = ["unshare", "--mount", "--propagation", "private"]
MAIN = [sys.executable, "-c", "from ppbench.cli import main; main()"]
USES_FOLDER = """
import os, sys
from ppbench.errors import StoreError
from ppbench.run.sweep.open_runs import close_abandoned
from ppbench.run.failures.evidence import node_folder
from ppbench.run.machine.private_folder import Claim, choose_place, make_folder
os.umask(int(sys.argv[1], 8))
try:
    choice = choose_place(2**23)
    print(*choice.problems)
    folder = choice.base / "launch-0"
    Claim(folder)
    make_folder(folder)
    print(folder, *(oct(path.stat().st_mode & 0o7777) for path in (folder.parent, folder)))
except StoreError as error:
    print("error:", error)
"""


def reason_against_namespaces() -> str | None:
    """Why no mounts can be made here; None where they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root, to mount shared memory"
    command = [*NAMESPACE, "mount", "-t", "tmpfs", "shm", "/dev/shm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"needs to mount: {done.stderr.strip()}"


needs_namespaces = pytest.mark.skipif(
    reason_against_namespaces() is not None, reason=reason_against_namespaces() or ""
)


def in_namespace(setup: str, *command: str) -> list[str]:
    """The command that runs another where shared memory is new and was set up by a script."""
    script = f'mount -t tmpfs -o mode=1777 shm /dev/shm; {setup}; exec "$@"'
    return warm.inside([*NAMESPACE, "sh", "-ec", script, "sh"], command)


def use_folder(setup: str, elsewhere: Path, umask: str = "022") -> list[str]:
    """Notes, then the launch's folder and its modes, with memory set up by `setup`."""
    elsewhere.mkdir(mode=0o700, exist_ok=True)
    done = subprocess.run(
        in_namespace(setup, sys.executable, "-c", USES_FOLDER, umask),
        env={**os.environ, "TMPDIR": str(elsewhere)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_namespaces
@pytest.mark.parametrize(
    "umask",
    ["000", *(pytest.param(one, marks=pytest.mark.thorough) for one in ("022", "077")), "777"],
)
def test_the_folder_is_the_users_own_whatever_the_umask(tmp_path, umask):
    note, folder = use_folder("true", tmp_path / "elsewhere", umask)
    assert (note, folder) == ("", f"/dev/shm/{OURS}/launch-0 0o700 0o700")


@needs_namespaces
def test_a_folder_that_others_could_read_is_closed_to_them(tmp_path):
    note, folder = use_folder(f"mkdir -m 755 /dev/shm/{OURS}", tmp_path / "elsewhere")
    assert (note, folder) == ("", f"/dev/shm/{OURS}/launch-0 0o700 0o700")


UNSAFE = {
    f"ln -s /tmp /dev/shm/{OURS}": f"/dev/shm/{OURS}: is a symbolic link, expected a folder",
    f"ln -s /nowhere /dev/shm/{OURS}": f"/dev/shm/{OURS}: is a symbolic link, expected a folder",
    f"touch /dev/shm/{OURS}": f"/dev/shm/{OURS}: is a file, expected a folder",
    f"mkfifo /dev/shm/{OURS}": f"/dev/shm/{OURS}: is a file, expected a folder",
    f"setpriv --reuid {NOBODY} mkdir -m 777 /dev/shm/{OURS}": (
        f"/dev/shm/{OURS}: belongs to another user (uid {NOBODY})"
    ),
    f"mkdir /dev/shm/{OURS}; chmod 777 /dev/shm/{OURS}": (
        f"/dev/shm/{OURS}: other users can write to it: it has mode 0777, expected 0700"
    ),
    f"mkdir /dev/shm/{OURS}; chmod 770 /dev/shm/{OURS}": (
        f"/dev/shm/{OURS}: other users can write to it: it has mode 0770, expected 0700"
    ),
    "mount -t tmpfs -o mode=777 shm /dev/shm": (
        "/dev/shm: other users can replace what is in it: it has mode 0777, expected 1777"
    ),
    f"chown {NOBODY} /dev/shm": (
        f"/dev/shm: belongs to another user (uid {NOBODY}), who can replace what is in it"
    ),
    "mount -t tmpfs -o size=64k,mode=1777 shm /dev/shm": (
        f"/dev/shm/{OURS}: has 0.1 MiB left, and 8.0 MiB are needed"
    ),
    "head -c 60M /dev/zero > /dev/shm/full; mount -o remount,size=64m /dev/shm": (
        f"/dev/shm/{OURS}: has 4.0 MiB left, and 8.0 MiB are needed"
    ),
    "mount -o remount,ro /dev/shm": f"/dev/shm/{OURS}: cannot be made: Read-only file system",
    f"mkdir -m 700 /dev/shm/{OURS}; mount -o remount,ro /dev/shm": (
        f"/dev/shm/{OURS}: cannot be written to: Read-only file system"
    ),
    "mount -t tmpfs dev /dev; mknod /dev/null c 1 3; mknod /dev/urandom c 1 9": (
        "/dev/shm: cannot be used: No such file or directory"
    ),
}


LIKE_OTHERS = ("ln -s /nowhere", "mkfifo", "chmod 770", "head -c", "mkdir -m 700")
"""Parts of the setups that are refused as others are."""


@needs_namespaces
@pytest.mark.parametrize(
    "setup",
    [
        pytest.param(
            setup,
            marks=pytest.mark.thorough if any(part in setup for part in LIKE_OTHERS) else (),
        )
        for setup in UNSAFE
    ],
)
def test_where_memory_cannot_be_used_that_is_said_and_another_place_is_used(tmp_path, setup):
    elsewhere = tmp_path / "elsewhere"
    note, folder = use_folder(setup, elsewhere)
    assert note == UNSAFE[setup]
    assert folder == f"{elsewhere / OURS}/launch-0 0o700 0o700"


@needs_namespaces
def test_where_no_place_can_be_used_one_error_names_each(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / OURS).touch()
    (line,) = use_folder(f"touch /dev/shm/{OURS}", elsewhere)
    assert line.startswith(
        f"error: there is no place for the ranks' flight records: /dev/shm/{OURS}: is a file, "
        f"expected a folder; {elsewhere / OURS}: is a file, expected a folder; remove"
    )


@pytest.fixture
def memory(tmp_path, monkeypatch) -> Path:
    """A folder that everybody can write to, in place of shared memory."""
    folder = tmp_path / "memory"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(private_folder, "SHARED_MEMORY", folder)
    return folder


SQUATS = """
cd "$1"
while :; do mkdir "$2"; rmdir "$2"; ln -s "$3" "$2"; rm "$2"; touch "$2"; rm "$2"; done
"""


@needs_namespaces
def test_another_user_who_makes_and_links_it_meanwhile_never_gets_it_used(memory, is_thorough):
    prey = memory / "prey"
    prey.mkdir(mode=0o777)
    command = ["setpriv", "--reuid", str(NOBODY), "sh", "-c", SQUATS, "sh", memory, OURS, prey]
    squatter = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        for _ in range(3000 if is_thorough else 100):
            base = choose_place(RECORD_BYTES).base
            about = base.lstat()
            assert (about.st_uid, about.st_mode & 0o7777) == (os.geteuid(), 0o700), base
            if base.parent == memory:
                base.rmdir()
        assert not list(prey.iterdir())
    finally:
        squatter.kill()
        squatter.wait()


def test_a_flight_record_follows_no_link_and_needs_its_room_first(tmp_path):
    other, path = tmp_path / "other", tmp_path / "flight-rank0"
    other.write_bytes(b"mine")
    path.symlink_to(other)
    FlightRecord(path, 0)
    assert other.read_bytes() == b"mine"
    assert path.stat().st_blocks * 512 >= RECORD_BYTES


HOLDS = """
import sys, time
from pathlib import Path
from ppbench.run.sweep.open_runs import close_abandoned
from ppbench.run.failures.evidence import node_folder
from ppbench.run.machine.private_folder import Claim, make_folder
make_folder(Path(sys.argv[1]))
Claim(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(1000)
"""


@contextlib.contextmanager
def holder(folder: Path, *inside: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a launch's folder."""
    command = [*inside, sys.executable, "-c", HOLDS, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("inside", [(), ("unshare", "--pid", "--fork", "--kill-child")])
def test_what_a_living_process_holds_stays_and_what_a_dead_one_held_is_removed(memory, inside):
    if inside and reason_against_namespaces() is not None:
        pytest.skip(reason_against_namespaces())
    folder = choose_place(RECORD_BYTES).base / "launch-0"
    with holder(folder, *inside):
        assert remove_dead() == []
        assert folder.is_dir()
    wait_until(remove_dead)
    assert list(folder.parent.iterdir()) == []


def wait_until(is_true: Callable[[], object]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_folders_of_an_agent_that_lives_stay_though_no_rank_holds_them(memory):
    folder = choose_place(RECORD_BYTES).base / "launch-0"
    with subprocess.Popen(["sleep", "1000"]) as agent:
        make_folder(folder)
        Claim(folder, agent_pid=agent.pid).release()
        assert remove_dead() == []
        agent.kill()
        os.waitid(os.P_PID, agent.pid, os.WEXITED | os.WNOWAIT)
        assert remove_dead() == [folder]  # the agent has ended, though nobody has asked how


def test_a_process_that_has_got_the_id_of_a_dead_agent_keeps_nothing(memory):
    folder = choose_place(RECORD_BYTES).base / "launch-0"
    make_folder(folder)
    Claim(folder, agent_pid=os.getpid()).release()
    lock = private_folder.lock_path(folder)
    lock.write_text(lock.read_text().replace('"began": "', '"began": "1'))
    assert remove_dead() == [folder]


def test_an_agent_of_another_container_is_given_an_hour(memory):
    folder = choose_place(RECORD_BYTES).base / "launch-0"
    make_folder(folder)
    Claim(folder, agent_pid=os.getpid()).release()
    lock = private_folder.lock_path(folder)
    lock.write_text(lock.read_text().replace('"pid:[', '"pid:[1'))
    (folder / "flight-rank0").touch()
    assert remove_dead() == []
    for path in (lock, folder / "flight-rank0"):
        os.utime(path, (time.time() - 4000,) * 2)
    assert remove_dead() == [folder]


def test_what_versions_without_locks_left_is_removed_unless_samples_are_taken(memory):
    base = choose_place(RECORD_BYTES).base
    for name in ("killed-0", ".collected-1", "living-0"):
        (base / name).mkdir()
        (base / name / "flight-rank0").write_bytes(bytes(RECORD_BYTES))
    (base / "living-0" / "telemetry-0-host.jsonl").touch()
    assert remove_dead() == [base / "collected-1", base / "killed-0"]
    assert [path.name for path in base.iterdir()] == ["living-0"]


def test_locks_that_are_left_alone_are_removed_and_can_be_made_anew_at_once(memory):
    folder = choose_place(RECORD_BYTES).base / "launch-0"
    Claim(folder).release()
    assert remove_dead() == [folder]
    claim = Claim(folder)
    assert remove_dead() == []
    claim.release()


def test_a_folder_that_was_removed_meanwhile_is_made_anew_safely(memory):
    folder = choose_place(RECORD_BYTES).base / "launch-0"
    folder.parent.rmdir()
    make_folder(folder)
    assert [path.stat().st_mode & 0o7777 for path in (folder, folder.parent)] == [0o700] * 2
    folder.rmdir()
    folder.parent.rmdir()
    folder.parent.symlink_to(memory)
    with pytest.raises(StoreError, match="is a symbolic link, expected a folder"):
        make_folder(folder)
    assert folder.parent not in bases()


ELSEWHERE = [
    (),
    pytest.param(  # of which a holder is shown above; a sweep there begins with all its imports
        ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
        marks=[pytest.mark.thorough, needs_namespaces],
    ),
]
"""Other process ids than those of the sweep that looks for what is left."""
SWEEP = """
device = "emulated"
world_size = 2
num_microbatches = 2
seq_len = 8

[model]
preset = "llama-tiny"

[emulated]
F_ms = {F_ms}
I_ms = 1
W_ms = 1

[measure]
warmup_steps = 0
steps = 2
"""


def written(folder: Path, name: str, F_ms: int) -> str:
    (folder / f"{name}.toml").write_text(SWEEP.format(F_ms=F_ms))
    return f"{name}.toml"


@needs_namespaces
def test_a_sweep_runs_with_64_kilobytes_of_shared_memory_and_says_where_its_records_are(tmp_path):
    setup = "mount -t tmpfs -o size=64k,mode=1777 shm /dev/shm"
    sweep = [*MAIN, "sweep", written(tmp_path, "small", 1), "--no-report"]
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    done = subprocess.run(
        in_namespace(setup, *sweep),
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "elsewhere")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"flight records go to {tmp_path}/elsewhere/{OURS} instead") == 1
    assert Store(tmp_path / "results").runs()["status"].tolist() == ["ok"]
    assert list((tmp_path / "elsewhere" / OURS).iterdir()) == []


@needs_namespaces
def test_memory_that_takes_no_semaphores_is_one_error(tmp_path):
    sweep = [*MAIN, "sweep", written(tmp_path, "none", 1), "--no-report"]
    done = subprocess.run(
        in_namespace("mount -o remount,ro /dev/shm", *sweep),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 4
    assert done.stderr == (
        "error: /dev/shm: no semaphore can be made there: Read-only file system; torch starts no "
        "workers without one; mount a writable tmpfs there\n"
    )


@contextlib.contextmanager
def sweep_under_way(
    folder: Path, file: str, inside: tuple[str, ...] = ()
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A sweep whose ranks are at their first step, and its launch's folder in memory."""
    results = folder / file.removesuffix(".toml")
    command = [*inside, *MAIN, "sweep", file, "--no-report", "--results", str(results)]
    with (folder / "log").open("ab") as log:
        sweep = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        wait_until(lambda: [path for path in _local(results) if _is_at_work(path)])
        yield sweep, _local(results)[0]
    finally:
        sweep.kill()
        sweep.wait()


def _local(results: Path) -> list[Path]:
    return [node_folder(path.name) for path in results.glob("launches/*")]


def _is_at_work(local: Path) -> bool:
    records = [read_record(local / f"flight-rank{rank}") for rank in range(2)]
    return all(
        one is not None and one.entries and one.entries[-1].index is not None for one in records
    )


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/shm")
@pytest.mark.parametrize("inside", ELSEWHERE)
def test_the_next_sweep_of_any_store_removes_what_a_killed_one_left_and_not_a_living_ones(
    tmp_path, inside
):
    long, short = written(tmp_path, "long", 100_000), written(tmp_path, "short", 1)
    with sweep_under_way(tmp_path, long) as (killed, left):
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    assert left.exists()
    other = written(tmp_path, "other", 100_000)
    with sweep_under_way(tmp_path, other, inside) as (_, living):
        again = [*MAIN, "sweep", short, "--no-report", "--results", "short"]
        done = subprocess.run(again, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert living.exists()
        assert not list(left.parent.glob(f"*{left.name}*"))
    close_abandoned(Store(tmp_path / "long"))
    (run,) = Store(tmp_path / "long").runs().to_dict("records")
    assert run["status"] == "interrupted"
    assert run["last_actions"] == '["0F0", "1F0"]', "the other store's sweep kept what it removed"
    assert not list(tmp_path.glob("long/launches/*/left"))
