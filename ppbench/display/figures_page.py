"""The pages of columns, made from their declaration: `python -m ppbench.display.figures_page`.

They are `docs/reference/figures.md` and the columns in `results/README.md`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ppbench.config.case import Case, Measure, settings_in
from ppbench.config.toml import column_named
from ppbench.display.markup import escaped
from ppbench.display.units import UNITS
from ppbench.store.columns import (
    COMPUTED,
    RUN_ID,
    SETTINGS,
    TABLES,
    Column,
    columns_as_markdown,
)

_COMMAND = "python -m ppbench.display.figures_page"
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
    runs = {column.name: column for column in TABLES["runs"]}
    sections = [_section("Settings shown as columns", [runs[name] for name in SETTINGS])]
    settings = {column_named(one.key) for one in (*settings_in(Case), *settings_in(Measure))}
    for table, columns in TABLES.items():
        hidden = settings if table == "runs" else {RUN_ID}
        shown = [column for column in columns if column.name not in hidden]
        sections.append(_section(_TITLES[table], shown))
    sections += [_section(title, columns) for title, columns in COMPUTED.items()]
    foot = f"Made from `ppbench/store/columns.txt`; after a change there: `{_COMMAND}`"
    return "\n".join([_INTRODUCTION, *sections, foot, ""])


def _section(title: str, columns: Iterable[Column]) -> str:
    rows = []
    for column in columns:
        heading = UNITS[column.unit].heading(column.heading)
        cells = (
            f"`{column.name}`",
            heading,
            column.unit or "–",
            column.better or "–",
            column.meaning,
        )
        rows.append(f"| {' | '.join(map(escaped, cells))} |")
    lines = "\n".join(rows)
    return f"## {title}\n\n{_HEADER}\n{lines}\n"


def page_of_store(page: str) -> str:
    """Return `results/README.md` with the columns as they are declared now."""
    return f"{page.partition('## runs')[0]}{columns_as_markdown()}"


if __name__ == "__main__":
    root = Path(__file__).parents[2]
    (root / "docs" / "reference" / "figures.md").write_text(figures_page())
    readme = root / "results" / "README.md"
    readme.write_text(page_of_store(readme.read_text()))
