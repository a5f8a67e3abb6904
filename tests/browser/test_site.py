"""The documentation's site: built without a warning, no dead link, no request when it is opened."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from chromium import Browser, Tab
from screens import needs_browser

DOCS = Path(__file__).parents[2] / "docs"
_BUILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import build
print(*build.build(Path(sys.argv[2])), sep="\\n", end="")
"""
OPENED = [
    "index.html",
    pytest.param("tutorial.html", marks=pytest.mark.thorough),
    pytest.param("reference/commands.html", marks=pytest.mark.thorough),
    "reference/columns.html",
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, warm_starts: None) -> Path:
    """The site without its gallery, built in a process of its own as `make docs` does."""
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "-c", _BUILD, str(DOCS / "site"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
    return folder


@contextmanager
def opened(browser: Browser, page: Path, width: int, scheme: str = "light") -> Iterator[Tab]:
    tab = Tab(browser, page, width, scheme)
    try:
        yield tab
    finally:
        tab.close()


def test_the_reference_is_made_from_the_code(site: Path) -> None:
    assert "--retry-failed" in (site / "reference" / "commands.html").read_text()
    assert "max_warmup_steps" in (site / "reference" / "sweep-file.html").read_text()
    assert "clock_error_ns" in (site / "reference" / "columns.html").read_text()
    assert "ppbench.simulate" in (site / "reference" / "python.html").read_text()
    assert "smollm-360m" in (site / "reference" / "models.html").read_text()
    assert "busy_machine" in (site / "troubleshooting.html").read_text()


def test_a_dead_link_an_anchor_and_a_request_are_found(tmp_path: Path) -> None:
    sys.path.insert(0, str(DOCS / "site"))
    import links

    (tmp_path / "a.html").write_text(
        '<h1 id="x"></h1><a href="#x"></a><a href="b.html"></a><a href="#y"></a>'
        '<a href="https://elsewhere"></a><script src="https://cdn/x.js"></script>'
        '<link rel="next" href="https://ok"><link rel="stylesheet" href="//fonts/y.css">'
    )
    (tmp_path / "s.css").write_text('@import "https://fonts/z.css"; a { background: url(ok.png) }')
    assert links.problems_of(tmp_path) == [
        "a.html: loads https://cdn/x.js",
        "a.html: loads //fonts/y.css",
        "a.html: b.html leads to no file",
        "a.html: #y leads to no anchor",
        "s.css: loads https://fonts/z.css",
    ]


@needs_browser
@pytest.mark.parametrize("page", OPENED)
def test_pages_open_from_disk_without_a_request_at_every_width(
    site: Path, browser: Browser, page: str
) -> None:
    with opened(browser, site / page, 390) as tab:
        for width, scheme in ((390, "light"), (1024, "dark"), (1440, "light")):
            tab.show_as(width, scheme)
            shown = "[innerWidth, matchMedia('(prefers-color-scheme: dark)').matches]"
            assert tab.evaluate(shown) == [width, scheme == "dark"]
            assert [url for url in tab.requests() if not url.startswith(("file:", "data:"))] == []
            assert tab.problems() == []
            assert tab.evaluate("document.documentElement.scrollWidth") <= width


@needs_browser
def test_the_search_works_from_disk(site: Path, browser: Browser) -> None:
    page = f"{(site / 'search.html').as_uri()}?q=oversubscribed"
    with opened(browser, page, 1440) as tab:
        found = """new Promise(done => {
            const look = () => {
                const links = [...document.querySelectorAll('#search-results li a')];
                links.length ? done(links.map(a => a.textContent)) : setTimeout(look, 50);
            };
            look();
        })"""
        assert "Troubleshooting" in tab.evaluate(found)
