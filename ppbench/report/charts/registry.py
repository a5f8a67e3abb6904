"""The charts of a sweep by name, in the order of a report: each `CHART` in this package."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from ppbench.report import charts
from ppbench.report.charts.canvas import Chart

_FILES = (file.name for file in pkgutil.iter_modules(charts.__path__) if file.name != "registry")
_FOUND = (getattr(import_module(f"{charts.__name__}.{name}"), "CHART", None) for name in _FILES)
CHARTS: dict[str, Chart] = {
    chart.name: chart for chart in sorted(filter(None, _FOUND), key=lambda chart: chart.order)
}
