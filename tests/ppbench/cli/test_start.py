"""The first commands of a newcomer: `init`, and `--open`."""

import re
from pathlib import Path
from urllib.request import url2pathname

import pytest
from command import ppbench, printed

from ppbench.errors import ExitCode, UsageError
from ppbench.run.machine.environment import read_environment
from ppbench.store import Store

pytestmark = pytest.mark.usefixtures("warm_starts")


def test_init_writes_a_sweep_and_lists_its_cases_and_the_command_that_measures_them(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    done = printed("init")
    table, _, command = done.text.rpartition("\nmeasure them: ")
    assert (done.exit_code, command) == (ExitCode.ok, "ppbench sweep sweep.toml")
    assert printed(*command.split()[1:], "--dry-run").text in table
    assert re.search(r"^sweep\.toml: \d+ cases, 3 launches of each$", table, re.MULTILINE)
    assert f"{read_environment().num_cores} core" in Path("sweep.toml").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.toml"]


def test_init_overwrites_nothing_and_names_what_it_cannot_write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text("mine")
    with pytest.raises(UsageError, match=r"^mine\.toml: is there already and is not overwritten"):
        printed("init", "mine.toml")
    assert Path("mine.toml").read_text() == "mine"
    with pytest.raises(UsageError, match=r"^no/x\.toml: cannot be written: No such file"):
        printed("init", "no/x.toml")
    Path("sweep.toml").symlink_to("nowhere")
    with pytest.raises(UsageError, match="is there already"):
        printed("init")


def test_open_opens_the_page_in_the_browser_of_the_user(demo, tmp_path, monkeypatch):
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\necho "$1" >> {opened}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    store = ("--results", str(demo.folder))
    done = ppbench("report", "-o", "my report.html", "--open", *store, folder=tmp_path)
    assert (done.returncode, done.stdout) == (ExitCode.ok, "my report.html\n"), done.stderr
    (address,) = opened.read_text().splitlines()
    assert address.startswith("file:///")
    assert Path(url2pathname(address.removeprefix("file://"))) == tmp_path / "my report.html"


@pytest.mark.parametrize("page", ["report", "timeline"])
def test_where_there_is_no_browser_the_path_is_said_and_nothing_fails(
    demo, tmp_path, monkeypatch, page
):
    for variable in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    runs = ["20260100T000000006"] if page == "timeline" else []
    done = printed(page, *runs, "-o", "page.html", "--open", "--results", demo.folder)
    assert (done.exit_code, done.text) == (ExitCode.ok, "page.html")
    (said,) = [line for line in done.notes if "browser" in line]
    assert said == f"no browser can be opened here; the page is {tmp_path / 'page.html'}"


def test_a_shipped_sweep_opens_its_report_and_is_noted_as_it_was_typed(tmp_path, monkeypatch):
    for variable in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    times = [f"emulated.{op}_ms=1" for op in "FIW"]
    typed = ["device=emulated", *times, "measure.steps=1", "num_microbatches=2", "schedule=1f1b"]
    options = [word for setting in typed for word in ("--set", setting)]
    with pytest.raises(UsageError, match="--open: opens the report, which --no-report leaves out"):
        printed("sweep", "quick", *options, "--open", "--no-report")
    done = printed("sweep", "quick", *options, "--open")
    (page,) = Path("reports").glob("quick-*.html")
    assert done.exit_code == ExitCode.ok
    assert f"report: {page}" in done.text
    assert f"no browser can be opened here; the page is {page.resolve()}" in done.notes
    note = Store(Path("results")).last_sweep().note
    assert note.command == f"ppbench sweep quick {' '.join(options)}"
