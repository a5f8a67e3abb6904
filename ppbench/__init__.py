"""Benchmarking and profiling of pipeline-parallel training: sweeps, figures, reports, history.

Importing it costs nothing: torch is imported only by the workers.
"""

__version__ = "0.1.0"
