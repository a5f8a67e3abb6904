"""The index of a folder of reports: what it lists, in which order, and what it leaves alone."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from html_pages import Page
from stored_runs import NASTY

from ppbench.console import print_notes
from ppbench.display.document import Result
from ppbench.report.pages.provenance import About
from ppbench.report.pages.report import report_runs
from ppbench.report.pages.templates import entries, render_index, write_index
from ppbench.report.pages.templates import page as page_of
from ppbench.report.pages.timeline import timeline_of_runs
from ppbench.store import Store


def page(path: Path, about: About | None = None, **changes) -> Path:
    """A page without content that says of itself what a report does."""
    told = {"kind": "report", "title": "demo", "measured": "2026-01-01 00:00:00", **changes}
    html = page_of(Result(), about or About(**told))
    path.write_text(html, encoding="utf-8")
    return path


def test_reports_are_listed_newest_first_and_timelines_by_themselves(tmp_path: Path) -> None:
    page(tmp_path / "old.html", title="old", measured="2026-01-01 00:00:00")
    page(
        tmp_path / "new.html", title="new", measured="2026-02-01 00:00:00", num_runs=7, num_cases=3
    )
    page(tmp_path / "line.html", title="line", kind="timeline", measured="2026-03-01 00:00:00")
    index = Page(render_index(tmp_path))
    assert index.links() == ["./new.html", "./old.html", "./line.html"]
    assert index.cells[:6] == ["new", "new.html", "2026-02-01 00:00", "3", "7", "0"]


FOREIGN = [
    b"",
    b"\xff\xfe\x00",
    b"<html><script>alert(1)</script>",
    b"<!doctype html><![foo[bar]]>",
    b"<p>" + b"x" * 20_000 + b'<meta name="ppbench-report" content="{}">',
]


def test_what_is_not_a_report_is_left_out(tmp_path: Path) -> None:
    for number, content in enumerate(FOREIGN):
        (tmp_path / f"foreign{number}.html").write_bytes(content)
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "gone.html").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.html")
    page(tmp_path / "ours.html")
    assert [name for name, _ in entries(tmp_path)] == ["ours.html"]


def test_titles_errors_and_file_names_with_markup_are_text(tmp_path: Path) -> None:
    nasty = {"title": NASTY, "answer": NASTY, "commit": NASTY, "measured": NASTY}
    page(tmp_path / "a <b>&\"' ü?#.html", **nasty)
    index = Page(render_index(tmp_path))
    assert index.cells[:2] == [NASTY, "a <b>&\"' ü?#.html"]
    assert "b" not in dict(index.tags)
    assert len(index.scripts) == 1
    assert index.links() == ["./a%20%3Cb%3E%26%22%27%20%C3%BC%3F%23.html"]


def test_an_index_is_rebuilt_from_what_is_there_and_is_the_same_bytes(tmp_path: Path) -> None:
    gone = page(tmp_path / "gone.html")
    page(tmp_path / "kept.html")
    write_index(tmp_path)
    assert Page((tmp_path / "index.html").read_text()).links() == ["./gone.html", "./kept.html"]
    gone.unlink()
    write_index(tmp_path)
    before = (tmp_path / "index.html").read_bytes()
    write_index(tmp_path)
    assert (tmp_path / "index.html").read_bytes() == before
    assert Page(before.decode()).links() == ["./kept.html"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.html", "kept.html"]


def test_reports_and_timelines_enter_the_index_of_their_folder(demo: Store, tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    report = report_runs(demo, [], None, reports)
    ok = demo.runs().iloc[1]["run_id"]
    line = timeline_of_runs(demo, [ok], None, reports)
    elsewhere = tmp_path / "elsewhere" / "a.html"
    report_runs(demo, [], elsewhere, reports)
    index = Page((reports / "index.html").read_text(encoding="utf-8"))
    assert index.links() == [f"./{report.name}", f"./{line.name}"]
    assert [path.name for path in elsewhere.parent.iterdir()] == ["a.html"]


def test_a_foreign_index_is_a_warning_and_the_report_is_written(
    demo: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = tmp_path / "reports"
    reports.mkdir()
    (reports / "index.html").write_text("mine")
    print_notes()
    assert report_runs(demo, [], None, reports).exists()
    told = " ".join(capsys.readouterr().err.split())
    assert re.search("warning: .*not an index written by ppbench.*--reports DIR", told)
    assert (reports / "index.html").read_text() == "mine"
