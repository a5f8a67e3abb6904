"""Which files a source of text is made of, and in which order."""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from engine.model.data import DataSpec, TextLoader
from engine.model.local_files import local_files
from engine.model.tokens import DataError, FileTokens, open_tokens
from ppbench.config.reader import read_sweep
from ppbench.errors import SweepFileError


@pytest.fixture
def books(tmp_path):
    """A folder of texts with folders in it; written in another order than that of their names."""
    folder = tmp_path / "books"
    for name in ["b/2.txt", "c.md", "b/1.txt", ".hidden.txt", "a/deep/0.txt", ".git/config"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name}\nsays this.\n\nAnd {name} ends.\n")
    (folder / "empty.txt").touch()
    return folder


def _names(source, folder):
    return [str(path.relative_to(folder)) for path in local_files(source)]


def _text(source):
    tokens = open_tokens(source, None)
    return bytes(tokens.read(0, len(tokens)).astype(np.uint8))


def test_a_folder_is_all_its_files_in_the_order_of_their_paths(books):
    names = ["a/deep/0.txt", "b/1.txt", "b/2.txt", "c.md", "empty.txt"]
    assert _names(f"text:{books}", books) == names
    assert _names(f"text:{books}/", books) == names
    assert _text(f"text:{books}") == b"".join((books / name).read_bytes() for name in names)


def test_a_pattern_is_what_it_matches_in_the_order_of_paths(books):
    assert _names(f"text:{books}/b/*.txt", books) == ["b/1.txt", "b/2.txt"]
    names = ["a/deep/0.txt", "b/1.txt", "b/2.txt", "empty.txt"]
    assert _names(f"text:{books}/**/*.txt", books) == names
    assert _text(f"text:{books}/b/?.txt") == _text(f"text:{books}/b")


def test_windows_cross_the_borders_of_more_files_than_are_mapped_at_once(tmp_path):
    for number in range(200):
        (tmp_path / f"{number:03}.txt").write_text("ab" * (number % 3))
    text = "".join("ab" * (number % 3) for number in range(200)).encode()
    tokens = FileTokens("text:x", local_files(f"text:{tmp_path}"))
    for start in range(0, len(text), 7):
        for length in (1, 5, 64):
            window = tokens.read(start, min(start + length, len(text)))
            assert bytes(window.astype(np.uint8)) == text[start : start + length]


@pytest.mark.parametrize("seq_len", [8, "variable"])
def test_a_folder_trains_like_one_file_of_the_same_text(books, tmp_path, seq_len):
    whole = tmp_path / "whole.txt"
    texts = [path.read_bytes() for path in local_files(f"text:{books}")]
    whole.write_bytes(
        b"\n".join(text for text in texts if text) if seq_len != 8 else b"".join(texts)
    )
    specs = (DataSpec(f"text:{place}", seq_len=seq_len, max_seq_len=64) for place in (books, whole))
    folder, file = (TextLoader(spec, 256).step(3) for spec in specs)
    assert [t.tolist() for t in folder.inputs] == [t.tolist() for t in file.inputs]


@pytest.mark.parametrize("kind", ["text", "files"])
@pytest.mark.parametrize("name", ["nothing/*.txt", "none", "nothing"])
def test_what_matches_no_file_is_refused_before_and_on_the_ranks(tmp_path, kind, name):
    (tmp_path / "nothing").mkdir()
    source = f"{kind}:{tmp_path}/{name}"
    what = "no file in the folder" if name == "nothing" else "no such file"
    with pytest.raises(DataError, match=f"{what}; expected the path of a"):
        open_tokens(source, None)
    with pytest.raises(SweepFileError, match=rf"data\.source: {what}"):
        _read(tmp_path, source)


def test_a_folder_of_empty_files_is_too_short_before_and_on_the_ranks(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "empty.txt").touch()
    source = f"text:{tmp_path}/texts"
    with pytest.raises(DataError, match="0"):
        TextLoader(DataSpec(source, seq_len=8), 256)
    with pytest.raises(SweepFileError, match="has 0 bytes"):
        _read(tmp_path, source)


def _read(folder, source):
    sweep = folder / "sweep.toml"
    sweep.write_text(f'name = "x"\n[data]\nsource = "{source}"\n')
    return read_sweep(sweep, [], "cpu")


@contextmanager
def _without_the_rights_of_root():
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder():
    """A folder that every user may enter, which those of pytest are not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_what_may_not_be_read_is_named_before_and_on_the_ranks(open_folder):
    closed = "texts/closed.txt"
    (open_folder / "texts").mkdir(mode=0o755)
    (open_folder / "texts" / "open.txt").write_text("x" * 500)
    place = open_folder / closed
    place.write_text("y" * 500)
    (open_folder / "sweep.toml").write_text(
        f'name = "x"\n[data]\nsource = "text:{open_folder}/texts"\n'
    )
    place.chmod(0)
    with _without_the_rights_of_root():
        with pytest.raises(DataError, match=f"{closed}: Permission denied"):
            open_tokens(f"text:{open_folder}/texts", None)
        with pytest.raises(SweepFileError, match=f"{closed}: cannot be read: Permission denied"):
            read_sweep(open_folder / "sweep.toml", [], "cpu")
    place.chmod(0o755)


def test_a_source_of_too_many_files_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.model.local_files.MOST_PATHS", 4)  # the folder is one of them
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("a")
    assert len(local_files(f"text:{tmp_path}")) == 3
    for number in range(3, 5):
        (tmp_path / f"{number}.txt").write_text("a")
    for end in ("", "/*", "/**"):
        with pytest.raises(OSError, match="has more than 4 files"):
            local_files(f"text:{tmp_path}{end}")
