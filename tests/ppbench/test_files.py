"""Where `-o` writes: never over what is no regular file, and never half a file."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from stored_runs import demo_store

from ppbench.errors import StoreError
from ppbench.files import is_stream, whole_file

ROOT = Path(__file__).parents[2]
CODE = "from ppbench.cli import main; main()"


def write(path: Path, content: bytes = b"new") -> None:
    with whole_file(path, "-o") as file:
        file.write(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def ppbench(*words: object, **how: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", CODE, *map(str, words)]
    return subprocess.run(command, check=False, timeout=600, cwd=ROOT, **how)  # type: ignore[call-overload, no-any-return]  # options of run


def test_a_regular_file_is_replaced_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"old")
    path.chmod(0o640)
    write(path)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert names(tmp_path) == ["out"]


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target = tmp_path / "folder" / "target"
    first, second = tmp_path / "first", tmp_path / "second"
    second.symlink_to("folder/target")
    first.symlink_to(second)
    for _ in range(2):  # the target is not there at first
        write(first)
        assert first.is_symlink()
        assert second.is_symlink()
        assert target.read_bytes() == b"new"
        assert names(tmp_path / "folder") == ["target"]


def test_links_in_a_circle_and_folders_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "folder").mkdir()
    long = tmp_path / ("x" * 300)
    blocked = tmp_path / "file" / "out"
    (tmp_path / "file").touch()
    for path, reason in (
        (tmp_path / "a", "Too many levels of symbolic links"),
        (tmp_path / "folder", "Is a directory"),
        (Path(), "Is a directory"),
        (long, "File name too long"),
        (blocked, "Not a directory"),
    ):
        with pytest.raises(StoreError) as error:
            write(path)
        assert str(error.value) == (
            f"{path}: cannot be written: {reason}; choose another path with -o FILE"
        )
    assert names(tmp_path) == ["a", "b", "file", "folder"]


def test_what_fails_halfway_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), whole_file(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["out"]


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write(pipe)
    assert os.read(reader, 100) == b"new"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert is_stream(pipe)
    assert names(tmp_path) == ["pipe"]


def test_a_reader_that_has_gone_is_one_clear_error(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    gone = pytest.raises(StoreError, match="cannot be written: its reader has gone")
    with gone, whole_file(pipe) as file:
        os.close(reader)
        file.write(bytes(2**20))


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize("how", [pytest.param("csv", marks=pytest.mark.thorough), "parquet"])
def test_standard_output_holds_the_export_and_nothing_else(tmp_path: Path, how: str) -> None:
    store = demo_store(tmp_path / "results")
    stdout = tmp_path / "stdout"  # a link as /dev/stdout is, which a machine need not have
    stdout.symlink_to("/proc/self/fd/1")
    words = ["export", "--format", how, "--results", store.folder, "-o"]
    done = ppbench(*words, stdout, capture_output=True)
    assert (done.returncode, done.stderr) == (0, f"{stdout}\n".encode())
    assert stdout.is_symlink()
    ppbench(*words, tmp_path / "file", capture_output=True)
    assert done.stdout == (tmp_path / "file").read_bytes()
