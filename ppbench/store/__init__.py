"""Runs on disk, as parquet. Only this room uses pyarrow and DuckDB.

results/runs/<run_id>.parquet    one row: the workload, its figures, its circumstances
results/steps/<run_id>.parquet   a row per measured step
results/ranks/<run_id>.parquet   a row per rank
results/spans/<run_id>.parquet   a row per timed action
results/costs/<model>-<hash>.toml  measured costs of a model's layers, for plans
results/.../<run_id>.parquet     further tables: see TABLES
results/profiles/<run_id>/       Chrome traces of extra steps, where requested
"""

from ppbench.config.conditions import Condition
from ppbench.store.columns import (
    RUNS,
    SCHEMA_VERSION,
    SPANS,
    TABLES,
    Column,
)
from ppbench.store.conditions import read_conditions
from ppbench.store.folder import (
    LAST,
    ReadOnce,
    Store,
    check_ok,
    check_writable,
    in_order,
    missing_spans,
    new_run_id,
    newest_of,
)
from ppbench.store.parquet import write_rows
from ppbench.store.reader import ConsoleNote
from ppbench.store.sweeps import last_sweep_in, write_sweep_note

__all__ = [
    "LAST",
    "RUNS",
    "SCHEMA_VERSION",
    "SPANS",
    "TABLES",
    "Column",
    "Condition",
    "ConsoleNote",
    "ReadOnce",
    "Store",
    "check_ok",
    "check_writable",
    "in_order",
    "last_sweep_in",
    "missing_spans",
    "new_run_id",
    "newest_of",
    "read_conditions",
    "write_rows",
    "write_sweep_note",
]
