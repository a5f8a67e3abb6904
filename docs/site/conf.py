"""Sphinx's settings: the pages are the Markdown files of docs/, see build.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import gallery
import reference
from sphinx.application import Sphinx

import ppbench

project = "ppbench"
author = "ppbench"
copyright = "ppbench"  # noqa: A001  # Sphinx's name for it
release = version = ppbench.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["site", "ci", "pictures"]
language = "en"
nitpicky = True
suppress_warnings = ["misc.highlighting_failure"]  # csv has no lexer
default_role = "code"

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

html_theme = "pydata_sphinx_theme"
html_title = "ppbench"
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_context = {"default_mode": "auto"}
html_sidebars: dict[str, list[str]] = {
    name: []
    for name in ("install", "tutorial", "faq", "limits", "glossary", "troubleshooting", "gallery")
}
html_theme_options = {
    "navbar_end": ["theme-switcher"],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_nav_level": 2,
    "navigation_depth": 2,
    "header_links_before_dropdown": 7,
}


def _with_parts(app: Sphinx, _page: str, source: list[str]) -> None:
    pages = [Path(folder) for folder in app.config.html_extra_path]
    parts = {**reference.PARTS, "gallery": lambda: gallery.listing(pages[0] if pages else None)}
    source[0] = reference.with_parts(source[0], parts)


def setup(app: Sphinx) -> dict[str, bool]:
    """Put what is made from code into each page when it is read."""
    app.connect("source-read", _with_parts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
