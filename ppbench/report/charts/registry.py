"""The charts of a sweep by name, in the order of a report."""

from __future__ import annotations

from ppbench.report.charts import bubble, idle, memory, pareto, scaling, steps, throughput

CHARTS = {
    module.CHART.name: module.CHART
    for module in (throughput, scaling, bubble, memory, pareto, idle, steps)
}
