"""A command answers with one document: its JSON is an object, and its CSV holds the same values."""

import contextlib
import csv
import fcntl
import io
import json
import os
import random
import re
import shlex
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path
from unittest import mock

import pytest
import typer
from command import words_of
from rich.cells import cell_len
from typer.testing import CliRunner

from engine.plan.schedules.registry import SCHEDULES
from ppbench.cli.app import app
from ppbench.cli.emit import catalogue
from ppbench.display.document import Code, Facts, Fold, Picture, Result, Section, Text, render
from ppbench.display.formats import Format
from ppbench.display.rows import Record, Rows, View, Written, text_of
from ppbench.display.tables import Table
from ppbench.errors import UsageError
from ppbench.store import Store

ANSWERS = {
    "ls": [("axes", "ls"), ("axes", "ls --limit 3"), ("axes", "ls --where schedule=none")],
    "show": [
        ("swept", f"show 20260102 --table {table}")
        for table in ("run", "stages", "ranks", "steps", "flight")
    ],
    "query": [("axes", "query 'SELECT run_id, [1, 2] AS two, error, tokens_per_s FROM runs'")],
    "sweep": [("axes", "sweep many.toml --dry-run")],
    "explain": [("swept", "explain 20261122T222659")],
    "stragglers": [("swept", "stragglers 20261122T222659")],
    "compare": [("tracked", "compare HEAD~1 HEAD"), ("swept", "compare --across schedule")],
    "check": [("tracked", "check")],
    "history": [("history", "history --no-page")],
    "bisect": [("bisected", "bisect main~6 main sweep.toml --only schedule=1f1b")],
    "backfill": [("bisected", "backfill main~6.. sweep.toml --dry-run")],
    "plan": [("planned", "plan a_sweep_with_a_name_of_forty_characters.toml --effort 0.02")],
    "simulate": [
        ("empty", "simulate --schedule zbv -p 4 -m 8 --held"),
        ("empty", "simulate --schedule all -p 4 -m 6"),
    ],
    "schedules list": [("empty", "schedules list")],
    "schedules draw": [("empty", "schedules draw zbv -p 2 -m 4")],
    "schedules check": [("empty", "schedules check zbv -p 2 -m 4")],
    "env": [("empty", "env")],
}
MEASURING = {"noise"}
CHANGING = {
    "import": ("traces", "import rank0.json rank1.json"),
    "compact": ("axes", "compact"),
    "init": ("empty", "init"),
    "models check": ("empty", "models check --arch qwen2"),
}
"""No two runs of them have the same values: they change their folder, or take time."""
CASES = [pytest.param(*one, id=one[1]) for answers in ANSWERS.values() for one in answers]


def declared():
    """The commands that have the options of answers."""
    found = [("", typer.main.get_command(app))]
    while found:
        name, command = found.pop()
        names = {parameter.name for parameter in command.params}
        if {"how", "columns", "sort", "output"} <= names:
            yield name.strip()
        found += [(f"{name} {n}", one) for n, one in getattr(command, "commands", {}).items()]


def test_every_command_that_answers_is_tried_here():
    assert set(declared()) == {*ANSWERS, *MEASURING, *CHANGING}


def answered(words, *options):
    arguments = [*shlex.split(words), *options]
    with mock.patch.object(sys, "argv", ["ppbench", *arguments]):
        done = CliRunner().invoke(app, arguments)
    if isinstance(done.exception, UsageError):
        raise done.exception
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code in (0, 1, 3, 4), done.output
    return done.stdout


def take(name):
    """The text of a file, which goes."""
    file = Path(name)
    text = file.read_text()
    file.unlink()
    return text


def as_object_and_rows(words, *options):
    """What one run of a command says as JSON and as CSV."""
    found = json.loads(answered(words, *options, "-o", "all.csv", "--format", "json"))
    return found, list(csv.reader(io.StringIO(take("all.csv")))) or [[]]


def cell(value):
    """A value as CSV has it."""
    return "" if value is None else text_of(value)


@pytest.mark.parametrize(("place", "words"), CASES)
def test_json_is_one_object_with_the_values_of_csv_and_tables_fit(
    place, words, places, monkeypatch, is_thorough
):
    rng = random.Random(words)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the output for a terminal
    with contextlib.chdir(places / place):
        whole, (header, *lines) = as_object_and_rows(words)
        assert isinstance(whole, dict)
        is_record = header == ["key", "value"]
        names = [line[0] for line in lines] if is_record else header
        for _ in range(12 if is_thorough else 1):
            chosen = rng.sample(names, rng.randint(1, len(names))) if names else []
            order = rng.choice(["", "-"]) + rng.choice(names) if names else ""
            options = ["--columns", ",".join(chosen)] if chosen and rng.random() < 0.7 else []
            options += ["--sort", order] if order and rng.random() < 0.7 else []
            found, (header, *lines) = as_object_and_rows(words, *options)
            if "--columns" in options:
                assert header == (["key", "value"] if is_record else chosen)
            if is_record:
                own = found.get("run", found)
                assert [[key, cell(own[key])] for key, _ in lines] == lines
            else:
                held = next((one for one in found.values() if is_rows(one, header)), [])
                assert [[cell(row[name]) for name in header] for row in held] == lines
            width = rng.choice([80, 100, 120])
            monkeypatch.setenv("COLUMNS", str(width))
            drawn = answered(words, *options, "-o", "all.md")
            assert take("all.md") or not lines
            shown = re.sub(r"\x1b\[[0-9;]*m", "", drawn).splitlines()
            assert shown or not lines
            # A command is copied as a whole: no line break parts it.
            assert [s for s in shown if cell_len(s) > width and "ppbench " not in s] == []


@pytest.mark.parametrize("name", CHANGING)
def test_one_run_says_the_same_as_an_object_and_as_rows(name, places, tmp_path):
    place, words = CHANGING[name]
    shutil.copytree(places / place, tmp_path / place)
    with contextlib.chdir(tmp_path / place):
        found, (header, *lines) = as_object_and_rows(words)
    (rows,) = (value for value in found.values() if is_rows(value, header))
    assert lines
    assert [[cell(row[name]) for name in header] for row in rows] == lines


def is_rows(value, header):
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(isinstance(v, dict) and [*v] == header for v in value)


def planning(rng):
    """A program of any size, in a file whose name has up to 40 characters, or by its name."""
    name, p, m = rng.choice([*SCHEDULES]), rng.randint(1, 16), rng.randint(1, 64)
    if SCHEDULES[name].is_two_way:
        p += p % 2
        m += -m % p
    shape = f"-p {p} -m {m}{rng.choice(['', ' -v 2'])}"
    if rng.random() < 0.4:
        path = "x" * rng.randint(1, 32) + ".csv"
        with contextlib.suppress(UsageError):
            answered(f"schedules export {name} {shape} -o {path}")
            name, shape = f"csv:{path}", ""
    cost = rng.choice(["F=1,I=1,W=1", "F=1,I=1.1,W=0.7", "F=123456.789,I=1,W=0.001"])
    several = "--replicas 12 --sharding zero2,residency=1,look_ahead=1"
    options = f"{shape} --cost {cost} {rng.choice(['', '', several])}"
    yield f"schedules draw {name} {options}"
    yield f"simulate --schedule {name} {options}"
    yield f"simulate --schedule all {options}"
    yield f"schedules check {name} {shape}"


def test_no_line_is_wider_than_a_pipe_of_80_columns(tmp_path, monkeypatch, is_thorough):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.chdir(tmp_path)
    rng, num_read = random.Random(41), 0
    for _ in range(100 if is_thorough else 12):
        for words in planning(rng):
            with contextlib.suppress(UsageError):  # a schedule may not have this shape
                lines = answered(words).splitlines()
                num_read += bool(lines)
                assert [line for line in lines if cell_len(line) > 80] == [], words
    assert num_read > 20


def test_a_terminal_of_80_columns_cuts_no_line():
    """In a real one, whose size is no variable."""
    own, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    words = words_of(*["schedules", "draw", "zbv", "-p", "8", "-m", "32"])
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")}
    with subprocess.Popen(words, stdout=theirs, env={**environment, "TERM": "xterm-256color"}):
        os.close(theirs)
        text = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(own, 1 << 16):
                text += part
    os.close(own)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text.decode()).splitlines()
    assert max(map(cell_len, lines)) in range(75, 81)
    row = "".join(line.removeprefix("rank 7") for line in lines if line.startswith("rank 7"))
    assert len(re.findall(r"\d+[FIW]\d+", row)) == 3 * 2 * 32


def test_an_unknown_column_is_refused_before_anything_is_measured(places):
    with contextlib.chdir(places / "bisected"):
        for command in ("noise sweep.toml", "bisect a b sweep.toml", "sweep sweep.toml"):
            done = CliRunner().invoke(app, [*command.split(), "--sort", "no_such"])
            assert '--sort: unknown column "no_such"' in str(done.exception)
    assert {"case", "ratio", "verdict"} <= {*catalogue()}


def test_a_document_says_the_same_in_every_format():
    rows = Rows.of_records(
        [{"case": Written("a, b", "a\nb"), "loss": 2}, {"case": Written("a, b", "a\nb"), "loss": 1}]
    )
    result = Result(
        [
            Text("Mind <this>."),
            Text(["one", "two"], "Listed"),
            Table(rows, ["case", "loss"], grouped="case"),
            Facts({"key": "value"}),
            Code("ppbench ls", "go on with"),
            Fold("More", [Picture("#")]),
        ],
        rows,
        {"more": 1},
    )
    drawn = [*map(str.split, render(result, Format.table).splitlines())]
    assert ["a", "2.0000"] in drawn
    assert ["b", "1.0000"] in drawn
    assert ["key", "value"] in drawn
    assert "#" not in render(result, Format.table)
    markdown = render(result, Format.markdown)
    assert "Mind &lt;this>." in markdown
    assert "go on with: `ppbench ls`" in markdown
    assert "<details><summary>More</summary>\n\n```\n#\n```" in markdown
    page = result._repr_html_()
    assert "<p>Mind &lt;this&gt;.</p>" in page
    assert "<summary>More</summary>" in page
    ordered = json.loads(render(result, Format.json, View.of(None, "loss")))
    assert ordered == {
        "more": 1,
        "rows": [{"case": "a, b", "loss": 1}, {"case": "a, b", "loss": 2}],
    }
    assert render(result, Format.csv, View.of(["loss"], None)) == "loss\n2\n1"
    assert json.loads(render(Result(rows=Record({"a": [1]}), key=""), Format.json)) == {"a": [1]}


@pytest.mark.parametrize("name", ["x.html", "x.md", "x.json", "x.csv"])
def test_a_result_is_written_as_the_ending_of_its_file_says(name, places, tmp_path):
    with contextlib.chdir(places / "axes"):
        said = answered("ls --limit 1", "-o", str(tmp_path / name)).splitlines()[-1]
    text = (tmp_path / name).read_text()
    assert said.endswith(str(tmp_path / name))
    assert text.startswith(
        {"html": "<!doctype", "md": "| run", "json": "{"}.get(name[2:], "run_id")
    )


def test_a_short_id_of_a_listing_is_taken_by_every_command(places):
    folder = places / "axes"
    with contextlib.chdir(folder):
        listed = CliRunner().invoke(app, ["ls"]).stdout
        short = next(line.split()[0] for line in listed.splitlines() if " ok " in line)
        whole = Store(Path("results")).find(short)["run_id"]
        assert len(short) < len(whole)
        assert whole.endswith(short)
        for words in (["show", short], ["export", "--format", "csv", short], ["report", short]):
            assert CliRunner().invoke(app, words).exit_code == 0


@pytest.mark.parametrize("how", ["table", "json", "csv"])
def test_what_a_command_writes_on_standard_output_is_all_that_is_there(how):
    words = ["schedules", "export", "1f1b", "-p", "2", "-m", "2", "-o", "-"]
    done = CliRunner().invoke(app, [*words, "--format", how])
    assert done.stdout.splitlines() == ["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"]


def test_columns_choose_of_the_rows_of_an_answer_alone():
    own, other = (Table(Rows(list(names), [(1, 2)])) for names in ("ab", "cd"))
    result = Result([Section("tables", "Tables", [own, other])], own.rows)
    shown = render(result, Format.markdown, View(("b",)))
    assert shown.splitlines()[0] == "| b |"
    assert "| c | d |" in shown


def test_a_cell_of_a_page_is_aligned_and_sorted_as_a_number_and_links():
    rows = Rows(["schedule", "launches"], [(Written("x", "zbv", "#zbv"), 12), ("1f1b", 3)])
    page = Table(rows, name="Cases", cases=["c1", "c2"]).html()
    assert '<th scope="col" class="number"' in page
    assert '<td class="number" data-number="12">12</td>' in page
    assert '<a href="#zbv">zbv</a>' in page
    assert '<tr data-cases="c2">' in page
