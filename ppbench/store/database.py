"""Imports DuckDB. A signal meanwhile waits: an exception inside its import ends the process."""

from __future__ import annotations

from ppbench.signals import held_back

with held_back():
    import duckdb

__all__ = ["duckdb"]
