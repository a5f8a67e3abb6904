"""Streams of token ids, by source: bytes of a file, or a data set through a tokenizer.

A source is one long stream cut into documents; what is trained on (windows, single documents) is
cut from it in `sequences.py`. Nothing holds a data set's tokens in memory: files are mapped, and
Hugging Face `datasets` keeps what it tokenised in an Arrow file, which is mapped as well.
Reading local files through that library too, rather than by hand, gives all of them its cache:
tokenised once, by whichever process comes first.

    stdlib                      file ──────────────────────────────────────► ByteTokens
    text with bytes             files ─────────────────────────────────────► FileTokens
    files, hf, text             file or hub ─► data set ─► map(tokenizer) ──► ArrowTokens
"""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import re
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from engine.model.local_files import local_files, why_no_file
from engine.packages import missing

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

Array = npt.NDArray[np.int64]

SOURCES = '"stdlib", "synthetic", "text:PATH", "files:PATH" or "hf:DATASET"'
_EXPECTED = {
    "text": "the path of a text file in UTF-8, a folder of them, or a glob",
    "files": "the path of a .json, .jsonl, .parquet, .csv or .txt file, a folder, or a glob",
    "hf": "a data set on the hub that can be reached, or a local folder of data files",
}
FORMATS = {
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".txt": "text",
}
"""How `datasets` calls what a file holds, by the end of its name."""
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_HUB_OPTIONS = {"config": "name", "split": "split", "revision": "revision"}
_BLANK_LINES = re.compile(rb"^(?:[^\S\n]*(?:\n|\Z))+", re.MULTILINE)
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
_MOST_MAPPED = 64
"""Files of a source that are mapped at once."""
_ENCODING_VERSION = 1
"""Raise when `_encode` changes: `datasets` finds cached results by a function's name, not code."""


class DataError(ValueError):
    """The data or the tokenizer cannot be had, do not fit the model, or are too short."""


class Tokens(Protocol):
    """A stream of token ids, cut into documents."""

    def __len__(self) -> int:
        """Tokens of the whole stream."""

    def read(self, start: int, stop: int) -> Array:
        """Tokens `start … stop-1`, across the borders of documents."""

    def documents(self) -> tuple[Array, Array]:
        """Where each document starts, and where it stops (exclusive)."""


class ByteTokens:
    """A text, one token per byte. A document is a paragraph: lines up to the next blank one."""

    def __init__(self, text: npt.NDArray[np.uint8]) -> None:
        self._text = text

    def __len__(self) -> int:
        return len(self._text)

    def read(self, start: int, stop: int) -> Array:
        return self._text[start:stop].astype(np.int64)

    def documents(self) -> tuple[Array, Array]:
        gaps = [match.span() for match in _BLANK_LINES.finditer(self._text.data)]
        borders = np.array([0, *(at for gap in gaps for at in gap), len(self)], dtype=np.int64)
        return borders[0::2], borders[1::2]


class FileTokens:
    """Files end to end, one token per byte. A document is a paragraph, and ends with its file.

    Files are mapped when they are read from, and few at a time, since a process may have only so
    many open.
    """

    def __init__(self, source: str, files: Sequence[Path]) -> None:
        """Raises DataError if a file cannot be opened."""
        self._open = functools.lru_cache(_MOST_MAPPED)(functools.partial(_map_file, source))
        mapped = [(path, len(self._open(path))) for path in files]
        self._files = [path for path, size in mapped if size]
        sizes = [size for _, size in mapped if size]
        self._borders: Array = np.array([0, *sizes], dtype=np.int64).cumsum()

    def __len__(self) -> int:
        return int(self._borders[-1])

    def read(self, start: int, stop: int) -> Array:
        first = int(np.searchsorted(self._borders, start, side="right")) - 1
        last = int(np.searchsorted(self._borders, stop, side="left"))
        parts = [
            self._open(path)[max(0, start - border) : stop - border]
            for path, border in zip(self._files[first:last], self._borders[first:last], strict=True)
        ]
        return np.concatenate([np.empty(0, np.uint8), *parts]).astype(np.int64)

    def documents(self) -> tuple[Array, Array]:
        borders = [
            tuple(border + ends for ends in ByteTokens(self._open(path)).documents())
            for path, border in zip(self._files, self._borders[:-1], strict=True)
        ]
        starts, stops = zip(*borders, strict=True) if borders else ((), ())
        empty = np.empty(0, np.int64)
        return np.concatenate([empty, *starts]), np.concatenate([empty, *stops])


class ArrowTokens:
    """The column `tokens` of a data set, one document per row, read from its mapped file."""

    def __init__(self, dataset: Dataset) -> None:
        self._rows = dataset.with_format("arrow")
        chunks = self._rows[:]["tokens"].chunks
        lengths = [chunk.value_lengths().to_numpy() for chunk in chunks]
        self._borders: Array = np.concatenate([[0], *lengths]).astype(np.int64).cumsum()

    def __len__(self) -> int:
        return int(self._borders[-1])

    def read(self, start: int, stop: int) -> Array:
        first = int(np.searchsorted(self._borders, start, side="right")) - 1
        last = int(np.searchsorted(self._borders, stop, side="left"))
        chunks = [c.flatten().to_numpy() for c in self._rows[first:last]["tokens"].chunks]
        # One chunk is the rule, and stays a view of the file: a window costs no more out of a
        # book than out of a line.
        tokens = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
        offset = int(self._borders[first])
        window: Array = tokens[start - offset : stop - offset].astype(np.int64)
        return window

    def documents(self) -> tuple[Array, Array]:
        return self._borders[:-1], self._borders[1:]


def open_tokens(
    source: str, tokenizer: PreTrainedTokenizerBase | None, text_column: str = "text"
) -> Tokens:
    """The tokens of a source other than "synthetic"; without a tokenizer, its bytes in UTF-8.

    - `stdlib`: the sources of the standard library; always bytes, whatever the tokenizer.
    - `text:PATH`: without a tokenizer the bytes of its files; with one, a document per line.
    - `files:PATH`: a document per row of `text_column`, in the format that the files' names end in.
      PATH is a file, a folder, a glob (see `local_files`) or a URL.
    - `hf:NAME`, a hub id or a local folder that `datasets.load_dataset` understands, with options:
      `hf:NAME?config=CONFIG&split=SPLIT&revision=REVISION`. The split is "train" if not given.

    A tokenizer sees each document alone, adds the special tokens that it always adds, and then
    its end-of-text token, if it has one, closes the document. Empty documents vanish.

    Raises DataError: unknown source, nothing that can be read there, no such column, or `datasets`
    not installed.
    """
    if source == "stdlib":
        return ByteTokens(np.frombuffer(_stdlib_text(), dtype=np.uint8))
    kind, _, place = source.partition(":")
    if kind not in _EXPECTED or not place:
        raise DataError(f'unknown data source "{source}"; expected {SOURCES}')
    if kind == "text" and tokenizer is None:
        return FileTokens(source, _files_of(source))
    try:
        return ArrowTokens(_load(source, text_column, tokenizer))
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f'data source "{source}": {_reason(error)}; expected {_EXPECTED[kind]}'
        ) from error


def load_tokenizer(
    name: str, model: str | None, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """The tokenizer that `DataSpec.tokenizer` names; None stands for bytes.

    `model` is the model's hub id or folder, None for a preset or a factory. "auto" is the model's
    own tokenizer, and bytes where there is no model or its folder has none. Raises DataError when
    the tokenizer cannot be loaded.
    """
    if name == "bytes" or (name == "auto" and (model is None or _is_bare_folder(model))):
        return None
    place = str(model) if name == "auto" else name
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    try:
        _check_folder(place)
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise DataError(
            f'tokenizer "{place}": {_reason(error)}; expected a folder with tokenizer files, '
            'a hub id that can be reached, or "bytes"'
        ) from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def identity_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of what a tokenizer makes of text: its vocabulary, and the ids of a sample."""
    # Some tokenizers have bytes as words, which JSON cannot hold.
    words = tokenizer.get_vocab().items()
    vocabulary = sorted((w if isinstance(w, str) else repr(w), index) for w, index in words)
    sample = tokenizer(_SAMPLE)["input_ids"]
    return hashlib.sha256(json.dumps([vocabulary, sample]).encode()).hexdigest()[:16]


_SAMPLE = "The 3 quick brown foxes\n\tjump über 1,024 lazy dogs: don't they? 狐 🦊 e^{i\\pi}"


def _is_bare_folder(place: str) -> bool:
    """Whether `place` is a folder without a tokenizer."""
    folder = Path(place)
    return folder.is_dir() and not any(any(folder.glob(name)) for name in _TOKENIZER_FILES)


def _check_folder(place: str) -> None:
    """Spares what is plainly no hub id the attempts to reach it there."""
    if _is_bare_folder(place):
        raise DataError("the folder has no tokenizer files")
    if place.startswith((".", "/", "~")) and not Path(place).is_dir():
        raise DataError("no such folder")


@functools.cache
def _stdlib_text() -> bytes:
    """The sources of the standard library's top-level modules, in order of name."""
    folder = Path(sysconfig.get_path("stdlib"))
    return b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))


def _files_of(source: str) -> list[Path]:
    """The files of a local source. Raises DataError if there are none."""
    files = local_files(source)
    if not files:
        kind = source.partition(":")[0]
        raise DataError(
            f'data source "{source}": {why_no_file(source)}; expected {_EXPECTED[kind]}'
        )
    return files


def _map_file(source: str, path: Path) -> npt.NDArray[np.uint8]:
    try:
        if path.stat().st_size == 0:  # which cannot be mapped
            return np.empty(0, dtype=np.uint8)
        return np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise DataError(f'data source "{source}": {error.filename}: {error.strerror}') from error


def _load(source: str, text_column: str, tokenizer: PreTrainedTokenizerBase | None) -> Dataset:
    """The tokenised data set, of one column `tokens`. Blocks while another process makes it."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(missing("datasets", f'data source "{source}"')) from error
    datasets.disable_progress_bars()  # each rank would draw its own
    with _turn(source):
        dataset = datasets.load_dataset(**_load_arguments(source))
        names = ", ".join(dataset.column_names)
        if text_column not in dataset.column_names:
            raise DataError(
                f'data source "{source}" has no column "{text_column}"; '
                f"set text_column to one of: {names}"
            )
        feature = dataset.features[text_column]
        if getattr(feature, "dtype", None) not in ("string", "large_string"):
            raise DataError(
                f'data source "{source}": column "{text_column}" holds {feature}, '
                f"expected text; the columns are: {names}"
            )
        kind = datasets.Value("uint8" if tokenizer is None else "int32")
        return dataset.map(
            _encode,
            batched=True,
            input_columns=[text_column],
            remove_columns=dataset.column_names,
            fn_kwargs={"tokenizer": tokenizer, "version": _ENCODING_VERSION},
            features=datasets.Features({"tokens": datasets.Sequence(kind)}),
        )


def _load_arguments(source: str) -> dict[str, str | list[str]]:
    """What `datasets.load_dataset` is called with."""
    kind, _, place = source.partition(":")
    if kind == "hf":
        name, _, query = place.partition("?")
        arguments: dict[str, str | list[str]] = {"path": name, "split": "train"}
        for option in filter(None, query.split("&")):
            key, _, value = option.partition("=")
            if key not in _HUB_OPTIONS or not value:
                raise DataError(
                    f'data source "{source}": unknown option "{option}"; '
                    "expected hf:NAME?config=CONFIG&split=SPLIT&revision=REVISION"
                )
            arguments[_HUB_OPTIONS[key]] = value
        return arguments
    if "://" in place:
        return {"path": _format_of(source, [place]), "data_files": place, "split": "train"}
    files = _files_of(source)
    if not any(file.stat().st_size for file in files):
        what = "the file is empty" if len(files) == 1 else "all files are empty"
        raise DataError(f'data source "{source}": {what}; expected {_EXPECTED[kind]}')
    # Escaped: `datasets` takes every path for a pattern.
    return {
        "path": _format_of(source, [file.name for file in files]),
        "data_files": [glob.escape(str(file)) for file in files],
        "split": "train",
    }


def _format_of(source: str, names: Sequence[str]) -> str:
    """The format in which `datasets` reads the files of a source. Raises DataError."""
    if source.startswith("text:"):
        return "text"
    ends = set()
    for name in names:
        path = Path(name)
        ends.add(Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix)
    formats = {FORMATS.get(end, "") for end in ends}
    if len(formats) > 1 or "" in formats:
        raise DataError(
            f'data source "{source}": the files end in {", ".join(sorted(map(repr, ends)))}; '
            f"expected one format: {', '.join(FORMATS)}; choose files by a pattern such as *.json"
        )
    return formats.pop()


def _encode(
    texts: list[str | None],
    tokenizer: PreTrainedTokenizerBase | None,
    version: int,  # noqa: ARG001 - part of the key under which the result is cached
) -> dict[str, list[list[int]]]:
    """A batch of documents as token ids, each closed by the end-of-text token."""
    present = [text or "" for text in texts]
    if tokenizer is None:
        return {"tokens": [list(text.encode()) for text in present]}
    # Not verbose: it would warn of documents longer than the model's context, which are cut later.
    encoded = tokenizer(present, return_attention_mask=False, verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    documents = []
    for text, tokens in zip(present, encoded, strict=True):
        is_closed = end is None or tokens[-1:] == [end]  # some tokenizers close a text themselves
        documents.append((tokens if is_closed else [*tokens, end]) if text else [])
    return {"tokens": documents}


@contextmanager
def _turn(source: str) -> Iterator[None]:
    """One process at a time: the others find the result in the cache instead of repeating it.

    Speed only: `datasets` writes beside and renames, so that no lock would be safe as well.
    """
    from datasets import config
    from filelock import FileLock

    folder = Path(config.HF_DATASETS_CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(source.encode()).hexdigest()[:16]
    with FileLock(folder / f"engine-{key}.lock"):
        yield


def _reason(error: BaseException) -> str:
    """The first line of the error that started it; `datasets` wraps what went wrong."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(" .:") if lines else type(error).__name__
