"""Writes the store's parquet files, with the documented types and checksums of their pages."""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ppbench.config.case import UNKNOWN, VARIABLE, Case
from ppbench.errors import MOST_OF_ERROR, encodable, readable
from ppbench.files import whole_file
from ppbench.store.columns import TABLES

if TYPE_CHECKING:  # listings import neither
    import pandas as pd
    import pyarrow as pa

_REPLICA, _VARIABLE = "replica", "is_seq_len_variable"


def write_rows(name: str, rows: pd.DataFrame, path: Path, option: str = "") -> None:
    """Write rows of a table to one parquet file, with the types that the store documents.

    Raises StoreError, which names the `option` to change if there is one.
    """
    write_parquet(as_table(rows, name), path, option)


def write_parquet(table: pa.Table, path: Path, option: str = "") -> None:
    """Write a table. Raises StoreError."""
    import pyarrow.parquet as pq

    written = io.BytesIO()  # a pipe can be neither sought nor read back
    pq.write_table(table, written, compression="zstd", write_page_checksum=True)
    with whole_file(path, option) as file:
        file.write(written.getbuffer())


@functools.cache
def schema_of(name: str) -> pa.Schema:
    """The arrow schema of a table."""
    import pyarrow as pa

    types = {kind: pa.type_for_alias(kind) for kind in ("string", "int64", "int32", "bool")}
    types["double"] = pa.float64()
    return pa.schema([(column.name, types[column.type]) for column in TABLES[name]])


def as_table(frame: pd.DataFrame, name: str) -> pa.Table:
    """Convert rows to the columns and types of a table; columns that `frame` lacks are null.

    A row that names no replica is of replica 0.
    """
    import pyarrow as pa

    schema = schema_of(name)
    unknown = set(frame.columns) - set(schema.names)
    assert not unknown, f"undocumented columns: {sorted(unknown)}"
    if _REPLICA in schema.names and _REPLICA not in frame:
        frame = frame.assign(**{_REPLICA: 0})
    if name == "runs" and "seq_len" in frame:
        words = frame["seq_len"]
        frame = frame.assign(
            seq_len=words.where(~words.isin([VARIABLE, UNKNOWN]), None),
            **{_VARIABLE: words.eq(VARIABLE)},
        )
    return pa.Table.from_pandas(
        frame.reindex(columns=schema.names), schema=schema, preserve_index=False
    )


def row_as_table(row: Mapping[str, object], name: str) -> pa.Table:
    """Convert one row as `as_table` does: a frame of a hundred columns takes 20 times as long."""
    import pyarrow as pa

    schema = schema_of(name)
    unknown = row.keys() - set(schema.names)
    assert not unknown, f"undocumented columns: {sorted(unknown)}"
    stored = dict(row)
    if "seq_len" in row:
        stored[_VARIABLE] = row["seq_len"] == VARIABLE
        stored["seq_len"] = None if row["seq_len"] in (VARIABLE, UNKNOWN) else row["seq_len"]
    columns = []
    for column in schema:
        cell = [stored.get(column.name)]
        if pa.types.is_string(column.type):  # a number is no text
            columns.append(pa.array(cell, column.type, from_pandas=True))
        else:  # the cast refuses half an integer
            columns.append(pa.array(cell, from_pandas=True).cast(column.type))
    return pa.Table.from_arrays(columns, schema=schema)


def storable(run: Mapping[str, object]) -> dict[str, object]:
    """A row of `runs` whose text can be stored: its error bounded, and no lone surrogates."""
    row = {name: encodable(v) if isinstance(v, str) else v for name, v in run.items()}
    error = run.get("error")
    return {**row, "error": readable(error, MOST_OF_ERROR)} if isinstance(error, str) else row


def as_frame(table: pa.Table, name: str) -> pd.DataFrame:
    """Rows as a frame; a `seq_len` is written as in a case.

    A setting that a run does not have is newer than the run, which had the setting's default.
    """
    import pandas as pd

    frame: pd.DataFrame = table.to_pandas()
    if name == "runs":
        for setting, default in Case().settings().items():
            if setting in frame and setting != "seq_len" and frame[setting].isna().any():
                known = frame[setting].where(frame[setting].notna(), default)
                frame[setting] = known.astype(type(default))
    if name == "runs" and {"seq_len", _VARIABLE} <= set(frame):
        lengths, is_variable = frame["seq_len"], frame[_VARIABLE].eq(True)
        if lengths.isna().any():
            words = [
                VARIABLE if variable else UNKNOWN if isna else int(length)
                for length, isna, variable in zip(lengths, lengths.isna(), is_variable, strict=True)
            ]
            frame["seq_len"] = pd.Series(words, frame.index, dtype=object)
    return frame
