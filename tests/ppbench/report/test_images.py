"""Figures as files: drawn by a real browser, and what is said where that cannot be."""

from __future__ import annotations

import json
import re
import shutil
import struct
import sys
import warnings
from pathlib import Path

import kaleido
import pytest
from stored_runs import NASTY, demo_store

import ppbench
from ppbench.cli.figure import figure
from ppbench.display.formats import Theme
from ppbench.errors import UsageError
from ppbench.report import images
from ppbench.report.images import Size, drawn
from ppbench.results import Results
from ppbench.store import Store

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no browser; install it with: apt-get install chromium"
)
OK_RUNS = slice(0, 6)


def write(store: Store, path: Path, theme: Theme = Theme.light, size: Size | None = None) -> bytes:
    ids = list(store.runs()["run_id"][OK_RUNS])
    size = size or Size()
    shape = {"width": size.width, "height": size.height, "scale": size.scale}
    figure("throughput", path, ids, theme=theme, results=store.folder, **shape)
    return path.read_bytes()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The same SVG twice and a PNG, all from one browser: to start it takes most of the time."""
    folder = tmp_path_factory.mktemp("pictures")
    store = demo_store(folder / "results")
    kaleido.start_sync_server(mathjax=False, silence_warnings=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the browser is started already
        drawings = [write(store, folder / f"{n}.svg", Theme.dark) for n in (1, 2)]
        drawings.append(write(store, folder / "a.png", size=Size(600, 300, scale=1.5)))
    kaleido.stop_sync_server(silence_warnings=True)
    return drawings


@needs_chromium
def test_an_svg_is_the_same_bytes_each_time_with_a_background_and_text(
    pictures: list[bytes],
) -> None:
    first, second, _ = pictures
    text = first.decode()
    assert first == second
    assert "fill: rgb(21, 23, 26)" in text  # the paper
    assert "fill: rgb(230, 232, 234)" in text  # the ink
    assert ">1f1b</text>" in text
    assert 'id="clip000000' in text
    assert "url(#legend000000)" in text


@needs_chromium
def test_a_png_has_the_size_that_was_asked_for(pictures: list[bytes]) -> None:
    png = pictures[2]
    assert png.startswith(b"\x89PNG")
    assert struct.unpack(">II", png[16:24]) == (900, 450)


def test_a_page_and_a_json_are_complete_and_the_same_each_time(demo: Store, tmp_path: Path) -> None:
    page = write(demo, tmp_path / "a.html").decode()
    assert page == write(demo, tmp_path / "b.html").decode()
    assert "default-src 'none'" in page
    assert not re.search(r"<(script|link|img)[^>]* (src|href)=", page)
    read = json.loads(write(demo, tmp_path / "a.json", size=Size(width=500)))
    assert read["layout"]["width"] == 500
    assert read["layout"]["template"]["layout"]["paper_bgcolor"] == "#ffffff"


def test_names_stay_text_in_a_page(demo: Store) -> None:
    figure = ppbench.figures.throughput(ppbench.load(demo.folder)).update_layout(title_text=NASTY)
    page = str(drawn(figure, ".html", Size()))
    assert "<script>alert" not in page
    assert "<title>&lt;/script&gt;" in page


def test_panels_of_one_scale_stand_side_by_side_below_one_legend(demo: Store) -> None:
    runs = ppbench.load(demo.folder).runs.assign(status="ok")  # of two lengths: two panels
    layout = ppbench.figures.throughput(Results(demo, runs)).layout
    assert layout.xaxis.domain[1] < layout.xaxis2.domain[0]
    assert layout.yaxis.domain == layout.yaxis2.domain
    assert layout.yaxis2.matches == "y"
    narrow = ppbench.figures.draw("throughput", Results(demo, runs), width=400).layout
    assert narrow.xaxis.domain == narrow.xaxis2.domain  # one below the other
    pareto = ppbench.figures.pareto(Results(demo, runs))
    names = [trace.name for trace in pareto.data if trace.showlegend]
    assert len(names) == len(set(names)) >= 4


def test_what_is_missing_is_named_with_the_way_to_install_it(
    demo: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kaleido", None)
    with pytest.raises(UsageError, match=r"pip install 'ppbench-torch\[images\]'"):
        write(demo, tmp_path / "a.png")
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "none"))
    with pytest.raises(UsageError, match=r"browser .*apt-get install chromium.* BROWSER_PATH"):
        write(demo, tmp_path / "a.png")
    (tmp_path / "broken").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "broken").chmod(0o755)
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "broken"))
    with pytest.raises(UsageError, match=r"the browser failed to draw the picture: .*apt-get"):
        write(demo, tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_dates_of_a_pdf_are_settled() -> None:
    dated = b"%PDF-1.4 /CreationDate (D:20261121203830+00'00')/ModDate (D:20261121203831+00'00')"
    other = dated.replace(b"2026", b"2027")
    assert images.reproducible(dated) == images.reproducible(other)
    assert len(images.reproducible(dated)) == len(dated)
