"""Charts over the cases of a sweep: functions from DataFrames to plotly figures.

They are pure, so notebooks and pages draw the same figures. Every mark is a bar, a box or a marker
in one of a few traces with typed numeric arrays. A trace whose points belong to cases has `ids`:
the case of each point, followed by a slash and a number where a case has several points. To filter
a chart, keep the matching points in every array that is as long as `ids`.
"""

from ppbench.report.charts.memory import pareto, peak_memory
from ppbench.report.charts.speed import bubble, idle, scaling, step_times, throughput

__all__ = ["bubble", "idle", "pareto", "peak_memory", "scaling", "step_times", "throughput"]
