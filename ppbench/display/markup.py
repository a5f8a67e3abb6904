"""Text in markdown and HTML, none of whose own markup takes effect."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment, Template


def escaped(text: str) -> str:
    """Text in markdown, or in a cell of its tables: one line, without HTML markup."""
    line = " ".join(text.splitlines())
    return line.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def as_code(text: str) -> str:
    """Foreign text as markdown code: no markup, mention or reference in it takes effect."""
    return f"`{' '.join(text.split()).replace('`', chr(39))}`"


def fragment(template: str, **values: object) -> str:
    """Fill a template of HTML, in which every value is escaped."""
    return _template(template).render(values)


@functools.cache
def _template(text: str) -> Template:
    return _environment().from_string(text)


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment

    return Environment(autoescape=True)
