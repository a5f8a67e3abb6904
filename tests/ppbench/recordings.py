"""Commands run in this process, and what they gave as text that can be recorded and compared.

A recording is a transcript: the scene in whose copy it is made, if that is not `empty`; each
command as it is typed, the files that are written before it, what it prints, its exit code if that
is not 0, and the files that it was asked to write. Everything in it is there byte for byte, but for
what `normalised` puts a placeholder for, and for line breaks in long JSON.

So a recording also says what is to be run. For a new one, write its first line and its commands:

    scene: swept

    $ ppbench export --format csv -o runs.csv
    [runs.csv]
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import gc
import io
import itertools
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import typer.main

from engine.arrays import COMPILING
from ppbench.cli import main

RECORDED = Path(__file__).parent / "recorded"
STORE = RECORDED / "store"
RECORD_AGAIN = "pytest tests/ppbench/test_recorded_outputs.py --record"
MOST_LINES, LONGEST_LINE = 60, 400
"""Of a difference, what is shown."""
SETTINGS = {
    "LINES": "40",
    "TERM": "dumb",  # on which nothing is coloured, whatever else the environment says
    "NO_COLOR": "1",
    "LC_ALL": "C",  # in which git speaks
    "CUDA_VISIBLE_DEVICES": "",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
}
UNSET = ("COLUMNS", "FORCE_COLOR", "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
_GROUPS = ([], ["models"], ["schedules"])  # without a command they print their help
_MADE_BY_HAND = ("20260101T", "f1f2")  # how the ids of such runs begin, and their machine
_JUST_NOW = timedelta(minutes=10)
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00")
_RUN_ID = re.compile(r"(\d{8}T\d{6})\d{3}-[0-9a-f]{6}")
_BREAKS = re.compile(r'(?<=,)(?= ?")|(?<=[\]}],)(?= ?[\[{])')
_LONG_NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d{9,}(?:e[+-]\d+)?(?![\w.])")


_SCENE = re.compile(r"scene: (\w+)\n\n")
_STEP = re.compile(r"^\$ (?=(?:cat|ppbench) )", re.MULTILINE)
_SHOWN = re.compile(r"^\[(\S+\.\w+)\]$", re.MULTILINE)
_NO_BREAK = "\n[no line break here]\n"

_command = functools.cache(typer.main.get_command)
"""Of an app; to make it anew for each of some hundred runs takes longer than most of them."""


@dataclass(frozen=True)
class Command:
    """A command to run in a folder; `shown` are the files that are recorded afterwards."""

    words: str
    shown: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    """Written first, and shown before the command."""


@dataclass(frozen=True)
class Script:
    """Commands that are run one after the other in a copy of a scene."""

    scene: str
    commands: Sequence[Command]


def script_of(recorded: str) -> Script:
    """What has to be run for a transcript."""
    scene = _SCENE.match(recorded)
    todo: list[Command] = []
    files: dict[str, str] = {}
    for part in _STEP.split(f"{recorded}\n")[1:]:
        step, _, rest = part.removesuffix("\n").partition("\n")
        program, _, words = step.partition(" ")
        if program == "cat":
            files[words] = rest.removesuffix(_NO_BREAK)
        else:
            todo.append(Command(words, _SHOWN.findall(rest), files))
            files = {}
    return Script("empty" if scene is None else scene[1], todo)


@dataclass(frozen=True)
class Done:
    """The output of a command, and its exit code."""

    stdout: str
    stderr: str
    exit_code: int


def ppbench(words: Sequence[str], folder: Path) -> Done:
    """The whole of `ppbench WORDS` in that folder, as its process would do it, but in this one."""
    with contextlib.chdir(folder), _process_settings_kept(), pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        patch.setenv("GIT_CEILING_DIRECTORIES", str(folder.parent))
        for name in UNSET:
            patch.delenv(name, raising=False)
        if (
            "--help" in words or list(words) in _GROUPS
        ):  # other text is as wide as a page, and sentences are not wrapped
            patch.setenv("COLUMNS", "100")
        streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", newline="") for _ in range(2)]
        patch.setattr(time, "monotonic", lambda: 0.0)  # some tell how long they took
        patch.setattr(typer.main, "get_command", _command)
        patch.setattr(sys, "argv", ["ppbench", *words])
        patch.setattr(sys, "stdout", streams[0])
        patch.setattr(sys, "stderr", streams[1])
        with pytest.raises(SystemExit) as end:
            main()
        for stream in streams:
            stream.flush()
    stdout, stderr = (stream.buffer.getvalue().decode() for stream in streams)
    stderr = stderr.replace(f"{COMPILING}\n", "")  # it depends on what ran before
    return Done(stdout, stderr, 0 if end.value.code is None else end.value.code)


@contextlib.contextmanager
def _process_settings_kept() -> Iterator[None]:
    """A command is a process's only one, and sets what is the whole process's."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    hooks, threshold = (sys.excepthook, sys.unraisablehook), gc.get_threshold()
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        (sys.excepthook, sys.unraisablehook) = hooks
        gc.set_threshold(*threshold)


def transcript(script: Script, folder: Path, *, is_of_this_machine: bool) -> str:
    """The outputs of all commands, run in the folder, ready to be compared."""
    parts = [] if script.scene == "empty" else [f"scene: {script.scene}\n"]
    for command in script.commands:
        for name, text in command.files.items():
            (folder / name).write_text(text)
            parts.append(f"$ cat {name}\n{_ended(text)}")
        done = ppbench(shlex.split(command.words), folder)
        parts.append(f"$ ppbench {command.words}\n{_ended(_as_lines(done.stdout))}")
        if done.stderr:
            parts.append(f"[standard error]\n{_ended(done.stderr)}")
        if done.exit_code:
            parts.append(f"[exit code {done.exit_code}]\n")
        parts += [
            f"[{name}]\n{_ended(readable(folder / name))}"
            for name in command.shown
            if (folder / name).exists() or done.exit_code == 0
        ]
    known = _of_this_machine(folder) if is_of_this_machine else {}
    return normalised("\n".join(parts), folder, known)


def _of_this_machine(folder: Path) -> dict[str, str]:
    """Words in the rows of runs that were made just now, or as if on this machine."""
    known = {}
    for run in json.loads(ppbench(["ls", "--format", "json"], folder).stdout)["rows"]:
        start, machine = _MADE_BY_HAND
        is_as_here = run["run_id"].startswith(start) and run["fingerprint"] != machine
        names = ["fingerprint"] if is_as_here else []
        if _is_now(run["created_at"][:19], "%Y-%m-%dT%H:%M:%S"):
            names += ["code", "resume_key", "ppbench_version"]
        known |= {run[name]: f"[{name}]" for name in names if run[name]}
    return known


def _is_now(written: str, form: str) -> bool:
    try:
        told = datetime.strptime(written, form).replace(tzinfo=UTC)
    except ValueError:
        return False
    return abs(told - datetime.now(UTC)) < _JUST_NOW


def _ended(text: str) -> str:
    return text if text.endswith("\n") or not text else f"{text}{_NO_BREAK}"


def normalised(text: str, folder: Path, known: Mapping[str, str]) -> str:
    """The text with placeholders for all that depends on the machine or the moment.

    `known` are words, such as a hash of ppbench's own code, and what stands for them.
    """
    places = {str(folder.resolve()): "[folder]", str(folder): "[folder]", sys.prefix: "[python]"}
    for place in sorted(places, key=len, reverse=True):
        text = text.replace(place, places[place])
    for word, placeholder in known.items():
        text = re.sub(rf"(?<![\w.]){re.escape(word)}(?![\w.])", placeholder, text)

    text = _TIME.sub(lambda m: "[now]" if _is_now(m[0][:19], "%Y-%m-%dT%H:%M:%S") else m[0], text)
    new = {
        m[0].rpartition("-")[2] for m in _RUN_ID.finditer(text) if _is_now(m[1], "%Y%m%dT%H%M%S")
    }
    text = _RUN_ID.sub(lambda m: "[new run]" if _is_now(m[1], "%Y%m%dT%H%M%S") else m[0], text)
    for end in new:  # as a table shortens it; the columns beside it keep their places
        text = re.sub(rf"\b{end}\b", "[new]", text)
    return _LONG_NUMBER.sub(_rounded, text)


def _rounded(number: re.Match[str]) -> str:
    """A number of a run's figures in ten digits: the last ones depend on the processor."""
    text = f"{float(number[0]):.10g}"
    return text if "." in text or "e" in text else f"{text}.0"


def readable(path: Path) -> str:
    """A file's content as text in lines; of parquet the columns, then the rows."""
    if path.suffix != ".parquet":
        return path.read_text()
    table = pq.read_table(path)
    names = [f"{column.name}: {column.type}" for column in table.schema]
    rows = [json.dumps(row, default=str) for row in table.to_pylist()]
    return "\n".join([*names, *rows, ""])


def _as_lines(text: str) -> str:
    """JSON in one long line broken at its keys."""
    if len(text) < 1000 or not text.lstrip().startswith(("{", "[")) or text.count("\n") > 5:
        return text
    return _BREAKS.sub("\n", text)


def difference(name: str, recorded: str, now: str) -> str:
    """The first lines of what differs, and what to do about it."""
    sides = recorded.split("\n"), now.split("\n")
    lines = difflib.unified_diff(*sides, f"{name}, recorded", f"{name}, now", lineterm="")
    shown = [line if len(line) < LONGEST_LINE else f"{line[:LONGEST_LINE]}…" for line in lines]
    left_out = [f"... {len(shown) - MOST_LINES} more lines"] if len(shown) > MOST_LINES else []
    first = next(pair for pair in itertools.zip_longest(*sides) if pair[0] != pair[1])
    fix = f"If this is meant, record it again: {RECORD_AGAIN}, and commit what it writes."
    return "\n".join(["", *shown[:MOST_LINES], *left_out, _where(*first), fix])


def _where(recorded: str | None, now: str | None) -> str:
    """The first difference of two lines with some characters around it: lines may be long."""
    pair = recorded or "", now or ""
    place = len(os.path.commonprefix(pair))  # noqa: RUF071  # of characters, not of folders
    here = slice(max(0, place - 40), place + 40)
    return f"first difference: {pair[0][here]!r} was recorded, and now it is {pair[1][here]!r}"
