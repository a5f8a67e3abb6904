"""The page on figures, made from the catalogue: `python -m ppbench.display.figures_page`."""

from __future__ import annotations

from collections.abc import Iterable

from ppbench.display.fields import COMPUTED, SETTINGS, field_of, meaning_of
from ppbench.display.tables import escaped

_COMMAND = "python -m ppbench.display.figures_page > docs/reference/figures.md"
_INTRODUCTION = """\
# Figures

Every column that ppbench shows, as terminal, reports, charts and exports have it.

- **column**: its name in the store, in JSON and in CSV, and for `--metric`, `--where` and
  `ppbench query`. Values there are raw: nanoseconds, bytes, fractions.
- **heading**: what a table calls it.
- **unit**: the unit of its values in a table. Sentences and charts have GiB for large sizes.
- **better**: which values are better, higher or lower; `ppbench history` colours changes by it.

`ppbench compare` and `ppbench check` judge `tokens_per_s`, `bubble_fraction`, `peak_memory_bytes`
and `step_ns`. Bubbles are compared by their difference, in percentage points, all else by ratio.
The store's columns with their types are in [Columns of the store](columns.md).
"""
_HEADER = "| column | heading | unit | better | meaning |\n|---|---|---|---|---|"
_TITLES = {
    "runs": "Runs: the table `runs`",
    "steps": "Steps: the table `steps`",
    "ranks": "Ranks: the table `ranks`",
    "spans": "Timed actions: the table `spans`",
    "planned": "Modelled actions: the table `planned`",
    "attribution": "Idle time by cause: the table `attribution`",
    "edges": "Messages: the table `edges`",
    "collectives": "Collectives: the table `collectives`",
    "memory": "Memory over time: the table `memory`",
    "telemetry": "The machine over time: the table `telemetry`",
    "flight": "Failed runs: the table `flight`",
}


def figures_page() -> str:
    """Return the text of the page."""
    from ppbench.config.case import Case, Measure, settings_in
    from ppbench.store.columns import RUN_ID, TABLES

    sections = [_section("Settings shown as columns", SETTINGS, "runs")]
    settings = {name for name, _ in settings_in(Case)}
    settings |= {f"measure_{name}" for name, _ in settings_in(Measure)}
    for table, columns in TABLES.items():
        hidden = settings if table == "runs" else {RUN_ID, "schema_version"}
        shown = [column.name for column in columns if column.name not in hidden]
        sections.append(_section(_TITLES[table], shown, table))
    sections += [_section(title, group) for title, group in COMPUTED.items()]
    foot = f"Made from `ppbench/display/fields.py`; after a change there: `{_COMMAND}`"
    return "\n".join([_INTRODUCTION, *sections, foot, ""])


def _section(title: str, columns: Iterable[str], table: str = "") -> str:
    rows = []
    for column in columns:
        field, meaning = field_of(column), meaning_of(column, table)
        better, unit = field.direction.value or "–", field.unit.name or "–"
        cells = f"`{column}`", field.heading, unit, better, meaning
        rows.append(f"| {' | '.join(map(escaped, cells))} |")
    lines = "\n".join(rows)
    return f"## {title}\n\n{_HEADER}\n{lines}\n"


if __name__ == "__main__":
    print(figures_page(), end="")
