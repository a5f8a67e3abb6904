"""Charts over the cases of a sweep: DataFrame in, plotly Figure out.

Pure, so that notebooks and pages draw the same. Every mark is a bar, a box or a marker of a few
traces with typed numeric arrays, and a trace whose points belong to cases has `ids`: the case of
each point, up to the slash that tells further points of one case apart. Who keeps, in every array
of a trace as long as `ids`, the points of some cases, has the chart of these cases.
"""

from ppbench.report.charts.idleness import bubble, idle
from ppbench.report.charts.memory import pareto, peak_memory
from ppbench.report.charts.speed import scaling, throughput
from ppbench.report.charts.steps import step_times

__all__ = ["bubble", "idle", "pareto", "peak_memory", "scaling", "step_times", "throughput"]
