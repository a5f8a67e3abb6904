"""Builds the site: `make docs`, which is `python docs/site/build.py`.

    python docs/site/build.py --no-gallery    in ten seconds rather than some minutes

    docs/*.md  ->  conf.py, with the reference made by reference.py  ->  FOLDER/index.html
    gallery.py: small sweeps, run here  ->  FOLDER/gallery/*.html

Any warning of Sphinx, any link that leads nowhere and any request to another host is an error.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from sphinx.cmd.build import main as sphinx

sys.path.insert(0, str(Path(__file__).parent))

import gallery
import links

DOCS = Path(__file__).parents[1]
BUILD = DOCS.parent / "build"


def build(site: Path, pages: Path | None = None) -> list[str]:
    """Build the site into a folder, and return what is wrong with it.

    `pages` is the folder of the gallery's pages; without it the gallery lists commands only.
    """
    extra = ["-D", f"html_extra_path={pages}"] if pages else []
    doctrees = site.parent / f"{site.name}.doctrees"
    settings = ["-c", str(DOCS / "site"), "-d", str(doctrees)]
    status = sphinx(
        ["-E", "-b", "html", "-W", "--keep-going", "-q", *settings, *extra, str(DOCS), str(site)]
    )
    return ["Sphinx has warnings, see above"] * (status != 0) or links.problems_of(site)


def main() -> int:
    """Build the gallery and the site, and print where it is."""
    pages = None if "--no-gallery" in sys.argv[1:] else gallery.make(BUILD / "gallery")
    site = BUILD / "site"
    shutil.rmtree(site, ignore_errors=True)
    wrong = build(site, pages)
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    if not wrong:
        print(f"{site}/index.html")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
