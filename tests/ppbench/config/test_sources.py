"""Texts and models in folders, as far as they are known before a sweep runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.model.local_files import local_files
from engine.model.sequences import PackedSequences
from engine.model.tokens import FileTokens
from ppbench.config.case import Case
from ppbench.config.conditions import checked_value
from ppbench.config.feasibility import notes_on_sources
from ppbench.config.programs import facts_of, identity_of


def test_a_source_has_its_files_bytes_and_the_sequences_of_a_training(tmp_path: Path) -> None:
    for name, size in (("a.txt", 1000), ("b.txt", 24)):
        (tmp_path / name).write_bytes(b"x" * size)
    source = f"text:{tmp_path}"
    case = Case(data_source=source, seq_len=128)
    cases = [case, replace(case, seq_len=64), replace(case, schedule="afab"), Case()]
    tokens = FileTokens(source, local_files(source))
    short, long = (PackedSequences(tokens, n, source).num_sequences for n in (64, 128))
    assert (short, long) == (15, 7)  # the last token is a target only
    (told,) = notes_on_sources(cases, facts_of(map(identity_of, cases)))
    assert told == (
        f"{source}: 2 files, 1,024 bytes, {short} sequences of 64 tokens, "
        f"{long} sequences of 128 tokens"
    )


def test_sequences_of_variable_length_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 1000)
    case = Case(data_source=f"text:{tmp_path}/a.txt", seq_len="variable")
    (told,) = notes_on_sources([case], facts_of([identity_of(case)]))
    assert told.endswith("a.txt: 1 file, 1,000 bytes")


def test_a_model_in_a_folder_has_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-model").mkdir()
    (tmp_path / "llama-8m").mkdir()
    monkeypatch.chdir(tmp_path)
    names = ("my-model", "./my-model", str(tmp_path / "my-model"), "llama-8m", ".")
    assert [checked_value("model.preset", name) for name in names] == [
        "./my-model", "./my-model", str(tmp_path / "my-model"), "llama-8m", ".",
    ]  # fmt: skip
