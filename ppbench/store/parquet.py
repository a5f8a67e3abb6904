"""One parquet file of a table: from rows, and back to them whatever version wrote it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ppbench.config.case import VARIABLE, Case
from ppbench.files import whole_file
from ppbench.store.columns import schema_of

_NEEDED = ("run_id", "status")  # every version of `runs` has them; all tables have the first
_EFFECT_BEFORE = {"launch_bind": False}
"""What a setting's absence means in a file that is older than the setting, if not its default."""
_STORED_VARIABLE = 0  # keeps `seq_len` a number for readers of the files


def write_rows(name: str, rows: pd.DataFrame, path: Path, option: str = "") -> None:
    """Write rows of a table to one parquet file, with the types that the store documents.

    Raises StoreError, which names the `option` to change if there is one.
    """
    write_parquet(as_table(rows, name), path, option)


def write_parquet(table: pa.Table, path: Path, option: str = "") -> None:
    with whole_file(path, option) as file:
        pq.write_table(table, file, compression="zstd")


def as_table(frame: pd.DataFrame, name: str) -> pa.Table:
    schema = schema_of(name)
    unknown = set(frame.columns) - set(schema.names)
    assert not unknown, f"columns without a meaning: {sorted(unknown)}"
    frame = _with_settings_stored(frame)
    return pa.Table.from_pandas(
        frame.reindex(columns=schema.names), schema=schema, preserve_index=False
    )


def rows_of(table: pa.Table, name: str) -> pa.Table:
    """What a file has of a table: columns as documented here, null where its version lacks them.

    Rows that belong to no run are left out. Raises ArrowException for a file of another kind.
    """
    schema = schema_of(name)
    for needed in _NEEDED if name == "runs" else _NEEDED[:1]:
        if needed not in table.schema.names:
            raise pa.ArrowInvalid(f"it has no column {needed}")
    cast = [
        table[field.name].cast(field.type)
        if field.name in table.schema.names
        else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    rows = pa.table(cast, schema=schema)
    return rows.filter(rows["run_id"].is_valid())


def with_settings_read(table: pa.Table) -> pd.DataFrame:
    """Rows of `runs` with settings as a case has them.

    A setting that an older version did not know had its default's effect, as case ids assume too,
    or the one in `_EFFECT_BEFORE`.
    """
    for name, effect in {**Case().settings(), **_EFFECT_BEFORE}.items():
        filled = table[name].fill_null(effect)
        table = table.set_column(table.schema.get_field_index(name), name, filled)
    frame: pd.DataFrame = table.to_pandas()
    is_variable = frame["seq_len"] == _STORED_VARIABLE
    if is_variable.any():
        frame["seq_len"] = frame["seq_len"].astype(object).mask(is_variable, VARIABLE)
    return frame


def _with_settings_stored(frame: pd.DataFrame) -> pd.DataFrame:
    if "seq_len" not in frame:
        return frame
    lengths = frame["seq_len"]
    return frame.assign(seq_len=lengths.mask(lengths == VARIABLE, _STORED_VARIABLE))
