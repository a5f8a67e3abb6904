"""A command answers with a document of blocks for people, with the same figures as data.

    Result([Text("Two runs."), Table(rows, ["run_id", "tokens_per_s"])], rows)

A block writes itself for a terminal, in markdown and as HTML; a new one is a class with these three
methods. `render` writes a whole result in any format, and applies the columns and the order that a
reader asks for. A notebook shows a result as HTML.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from ppbench.console import wrapped
from ppbench.display.commands import from_anywhere
from ppbench.display.formats import Format
from ppbench.display.markup import as_code, escaped, fragment
from ppbench.display.rows import AS_IT_IS, Record, Rows, View, text_of
from ppbench.display.tables import Table, page_width
from ppbench.errors import printable

_LEAST_VALUE = 20
"""Columns of text that a value keeps beside the longest name."""
_ABOUT = """{% if kind %} class="{{ kind }}"{% endif %}\
{% if cases %} data-cases="{{ cases | join(" ") }}"{% endif %}"""
_SECTION = f"""<section{{% if name %}} id="{{{{ name }}}}"{{% endif %}}\
{{% if name and not heading %}} aria-label="{{{{ name | capitalize }}}}"{{% endif %}}{_ABOUT}>\
{{% if heading %}}\n<h2>{{{{ heading }}}}</h2>{{% endif %}}"""
_FOLD = f"""<details{_ABOUT}{{% if is_open %}} open{{% endif %}}>
<summary>{{% if note %}}<strong>{{{{ title }}}}</strong> <span class="note">{{{{ note }}}}</span>\
{{% else %}}{{{{ title }}}}{{% endif %}}</summary>"""


class Block(Protocol):
    """A part of a document."""

    def terminal(self) -> str: ...

    def markdown(self) -> str: ...

    def html(self) -> str: ...


@dataclass(frozen=True)
class Text:
    """Sentences, a line for each; with a title they are a list."""

    lines: str | Sequence[str]
    title: str = ""
    prefix: str | None = None
    """Each line begins with it in a terminal, in place of the title above them."""
    is_foreign: bool = False
    """Others wrote it, as a commit's subject: in markdown it is code."""
    kind: str = ""
    """A style sheet knows it by this word: a `lead` is a heading, a `note` has small letters."""

    @property
    def _lines(self) -> Sequence[str]:
        return [self.lines] if isinstance(self.lines, str) else self.lines

    def terminal(self) -> str:
        if self.title and self.prefix is None:
            text = "\n".join([f"{self.title}:", *(f"  {line}" for line in self._lines)])
        else:
            text = "\n".join(f"{self.prefix or ''}{line}" for line in self._lines)
        return wrapped(text, sys.stdout)

    def markdown(self) -> str:
        written = as_code if self.is_foreign else escaped
        if not self.title:
            mark = "## " if self.kind == "lead" else "- " if self.is_foreign else ""
            return "\n".join(f"{mark}{written(line)}" for line in self._lines)
        items = "\n".join(f"- {written(line)}" for line in self._lines)
        return f"**{escaped(self.title)}**\n\n{items}"

    def html(self) -> str:
        if self.title:
            template = (
                "<h3>{{ title }}</h3>\n"
                "<ul>{% for line in lines %}<li>{{ line }}</li>{% endfor %}</ul>"
            )
            return fragment(template, title=self.title, lines=self._lines)
        template = '<p{% if kind %} class="{{ kind }}"{% endif %}>{{ line }}</p>'
        return "\n".join(fragment(template, kind=self.kind, line=one) for one in self._lines)


@dataclass(frozen=True)
class Facts:
    """Facts by their names, one per line; long values take several."""

    values: Mapping[str, object]
    is_foreign: bool = False
    """Others wrote some of them, as a commit's subject: in markdown they are code."""

    @property
    def _texts(self) -> dict[str, str]:
        return {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in self.values.items()
        }

    def terminal(self) -> str:
        texts = self._texts
        widest = max((len(key) for key in texts), default=0)
        room = max(page_width() - widest - 4, _LEAST_VALUE)
        lines = []
        for key, text in texts.items():
            parts = [
                part
                for line in printable(text).splitlines() or [""]
                for part in textwrap.wrap(line, room, break_on_hyphens=False, drop_whitespace=False)
                or [""]
            ]
            names = [key, *[""] * (len(parts) - 1)]
            pairs = zip(names, parts, strict=True)
            lines += [f" {name:<{widest}}   {part}".rstrip() for name, part in pairs]
        return "\n".join(lines)

    def markdown(self) -> str:
        if self.is_foreign:
            return "\n".join(f"- {key}: {as_code(text)}" for key, text in self._texts.items())
        return Table(Rows(["key", "value"], list(self._texts.items()))).markdown()

    def html(self) -> str:
        template = (
            '<dl class="facts">\n{% for name, text in facts.items() %}'
            "<div><dt>{{ name }}</dt><dd>{{ text }}</dd></div>\n{% endfor %}</dl>"
        )
        return fragment(template, facts=self._texts)


@dataclass(frozen=True)
class Code:
    """A command, or the lines of a file, which a reader copies as a whole."""

    text: str
    title: str = ""
    language: str = ""

    def terminal(self) -> str:
        if not self.title:
            return self.text
        between = "\n\n" if "\n" in self.text else " "
        return f"{self.title}:{between}{self.text}"

    def markdown(self) -> str:
        if self.title and "\n" not in self.text:
            return f"{escaped(self.title)}: {as_code(self.text)}"
        title = f"{escaped(self.title)}:\n\n" if self.title else ""
        return f"{title}```{self.language}\n{self.text}\n```"

    def html(self) -> str:
        """A page adds a button that copies the text; a command works wherever it is pasted."""
        template = (
            "{% if title %}<p>{{ title }}:</p>\n{% endif %}"
            '<div class="copyable"><pre>{{ text }}</pre></div>'
        )
        text = self.text if "\n" in self.text else from_anywhere(self.text)
        return fragment(template, title=self.title, text=text)


@dataclass(frozen=True)
class Fold:
    """Blocks that a page shows when they are asked for; a terminal shows them if it is said."""

    title: str
    blocks: Sequence[Block]
    is_in_terminal: bool = False
    note: str = ""
    """A page has it in small letters beside the title."""
    kind: str = ""
    """The style sheet knows it by this word."""
    is_open: bool = False
    cases: Sequence[str] = ()
    """The cases that it is about: a page's filters hide it with them."""

    def terminal(self) -> str:
        return _joined([one.terminal() for one in self.blocks if self.is_in_terminal])

    def markdown(self) -> str:
        body = _joined([one.markdown() for one in self.blocks])
        return f"<details><summary>{escaped(self.title)}</summary>\n\n{body}\n\n</details>"

    def html(self) -> str:
        return "\n".join(
            [fragment(_FOLD, **vars(self)), *(one.html() for one in self.blocks), "</details>"]
        )


@dataclass(frozen=True)
class Section:
    """Blocks that are a section of a page, with a heading and a name for links.

    Elsewhere they stand without a heading, or not at all if they are `of_page`.
    """

    name: str
    heading: str
    blocks: Sequence[Block]
    of_page: bool = False
    kind: str = ""
    """The style sheet knows it by this word."""
    cases: Sequence[str] = ()
    """The cases that it is about: a page's filters hide it with them."""

    def terminal(self) -> str:
        return "" if self.of_page else _joined([one.terminal() for one in self.blocks])

    def markdown(self) -> str:
        return "" if self.of_page else _joined([one.markdown() for one in self.blocks])

    def html(self) -> str:
        return "\n".join(
            [fragment(_SECTION, **vars(self)), *(one.html() for one in self.blocks), "</section>"]
        )


@dataclass(frozen=True)
class Picture:
    """A drawing in characters, as wide as it is; `of_page` is what a page shows in its place.

    Without characters it is on pages alone.
    """

    text: str = ""
    of_page: str = ""

    def terminal(self) -> str:
        return self.text

    def markdown(self) -> str:
        return f"```\n{self.text}\n```" if self.text else ""

    def html(self) -> str:
        return self.of_page or fragment("<pre>{{ text }}</pre>", text=self.text)


def of_page(template: str, **values: object) -> Picture:
    """What a page alone shows: a template of HTML, filled with these values."""
    return Picture(of_page=fragment(template, **values))


NOTHING = Record({})


@dataclass(frozen=True)
class Result:
    """The answer of a command."""

    blocks: Sequence[Block] = ()
    rows: Rows | Record = NOTHING
    """CSV holds them, and `--columns` and `--sort` choose of them."""
    data: Mapping[str, object] = field(default_factory=dict)
    """JSON holds it beside the rows."""
    exit_code: int = 0
    key: str = "rows"
    """Where rows are in JSON; a record without a key is the object itself."""
    notes: Sequence[str] = ()
    """CSV has no place for them, so they are noted beside it. Blocks and data hold them too."""
    asides: Sequence[str] = ()
    """They say what else was made, as `page: FILE`; a terminal shows them below its text."""
    own_page: Callable[[], str] | None = None
    """Makes the page of its own that a command has, as HTML."""
    page: Path | None = None
    """Where the page is written if no other place is asked for."""
    is_opened: bool = False
    """Whether the page is shown in the browser."""
    is_printed: bool = False
    """Whether standard output has what was asked for already, so that nothing follows."""

    def html(self) -> str:
        """The document as a part of a page."""
        return "\n".join(block.html() for block in self.blocks)

    def _repr_html_(self) -> str:
        """The document in a notebook, without what the style and the scripts of a page draw."""

        def kept(blocks: Sequence[Block]) -> list[Block]:
            seen: list[Block] = []
            for one in blocks:
                if isinstance(one, Section):
                    seen += [] if one.of_page else [replace(one, blocks=kept(one.blocks))]
                elif isinstance(one, Table):
                    seen.append(replace(one, details=()))
                elif not isinstance(one, Picture) or one.text:
                    seen.append(one)
            return seen

        return replace(self, blocks=kept(self.blocks)).html()


def render(result: Result, how: Format, view: View = AS_IT_IS) -> str:
    """Write a result in a format, with the columns and the order that are asked for."""
    match how:
        case Format.json:
            return _json(result, view)
        case Format.csv:
            return result.rows.csv(view)
        case Format.markdown:
            return _joined([block.markdown() for block in seen_blocks(result, view)])
        case Format.table:
            return _joined([block.terminal() for block in seen_blocks(result, view)])


def _json(result: Result, view: View) -> str:
    """One object: the rows under their key, and the other data unless columns are chosen."""
    if result.rows is NOTHING:
        return _indented(result.data)
    rows = result.rows.viewed(view)
    rest = {} if view.columns else result.data
    if isinstance(rows, Record) and not result.key:
        return _indented({**rest, **rows.records()})
    return _indented({**rest, result.key: rows.records()})


def _indented(value: object, indent: str = "") -> str:
    """JSON with a line per key and per object; a list of plain values is a line."""
    deeper = f"{indent}  "
    if isinstance(value, Mapping) and value:
        pairs = (f"{deeper}{json.dumps(k)}: {_indented(v, deeper)}" for k, v in value.items())
        return "{\n" + ",\n".join(pairs) + f"\n{indent}}}"
    if isinstance(value, list | tuple) and any(isinstance(one, Mapping) for one in value):
        items = (f"{deeper}{_indented(one, deeper)}" for one in value)
        return "[\n" + ",\n".join(items) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False, default=str)


def seen_blocks(result: Result, view: View) -> Sequence[Block]:
    """The blocks, in which the table of the rows is as asked for.

    If there is no such table, the rows that are asked for are all that is shown.
    """
    if view == AS_IT_IS:
        return result.blocks
    blocks, is_there = [], False
    for block in result.blocks:
        one: Block = block
        inside = block.blocks if isinstance(block, Section) else [block]
        if any(isinstance(each, Table) and each.rows is result.rows for each in inside):
            is_there = True
            chosen = [
                replace(each, view=view)
                if isinstance(each, Table) and each.rows is result.rows
                else each
                for each in inside
            ]
            one = replace(block, blocks=chosen) if isinstance(block, Section) else chosen[0]
        blocks.append(one)
    if is_there:
        return blocks
    if isinstance(result.rows, Record):
        facts = result.rows.viewed(view).records()
        return [Facts({name: text_of(value) for name, value in facts.items()})]
    return [Table(result.rows, view=view)]


def _joined(parts: Sequence[str]) -> str:
    return "\n\n".join(part for part in parts if part)
