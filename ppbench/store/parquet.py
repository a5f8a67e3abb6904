"""One parquet file of a table: from rows, and back to them whatever version wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ppbench.config.case import UNKNOWN, VARIABLE, Case
from ppbench.error_text import MOST_OF_ERROR, encodable, readable
from ppbench.files import whole_file
from ppbench.store.columns import RUN_ID, schema_of

_NEEDED = (RUN_ID, "status")  # every version of `runs` has them; all tables have the first
_EFFECT_BEFORE = {"launch_bind": False}
"""What a setting's absence means in a file that is older than the setting, if not its default."""
_STORED = {VARIABLE: 0, UNKNOWN: -1}  # keeps `seq_len` a number for readers of the files
Unreadable = (OSError, pa.ArrowException)
"""What reading a file that is not one of ours may raise."""


def write_rows(name: str, rows: pd.DataFrame, path: Path, option: str = "") -> None:
    """Write rows of a table to one parquet file, with the types that the store documents.

    Raises StoreError, which names the `option` to change if there is one.
    """
    write_parquet(as_table(rows, name), path, option)


def write_parquet(table: pa.Table, path: Path, option: str = "") -> None:
    """Raises StoreError."""
    with whole_file(path, option) as file:
        pq.write_table(table, file, compression="zstd")


def as_table(frame: pd.DataFrame, name: str) -> pa.Table:
    """Rows with the columns and types of a table; what `frame` lacks is null."""
    schema = schema_of(name)
    unknown = set(frame.columns) - set(schema.names)
    assert not unknown, f"columns without a meaning: {sorted(unknown)}"
    frame = _with_settings_stored(frame)
    return pa.Table.from_pandas(
        frame.reindex(columns=schema.names), schema=schema, preserve_index=False
    )


def storable(run: Mapping[str, object]) -> dict[str, object]:
    """A row of `runs` whose text can be stored: its error bounded, and no lone surrogates."""
    row = {name: encodable(v) if isinstance(v, str) else v for name, v in run.items()}
    return {**row, **({"error": _readable_error(run["error"])} if "error" in run else {})}


def _readable_error(value: object) -> object:
    return readable(value, MOST_OF_ERROR) if isinstance(value, str) else value


def open_parquet(path: Path, name: str, footer: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """A file of a table. Raises ArrowException for one of another kind, OSError."""
    file = pq.ParquetFile(path, metadata=footer)
    for needed in _NEEDED if name == "runs" else _NEEDED[:1]:
        if needed not in file.schema_arrow.names:
            file.close()
            raise pa.ArrowInvalid(f"it has no column {needed}")
    return file


def read_rows(path: Path, name: str, columns: Sequence[str] | None = None) -> pa.Table:
    """What a file has of a table, or of the given columns of it. Raises as `open_parquet`."""
    with open_parquet(path, name) as file:
        return rows_of(file.read(columns=known_in(file, columns)), name, columns)


def known_in(file: pq.ParquetFile, columns: Iterable[str] | None) -> list[str] | None:
    """Those of the columns that a file has, `run_id` among them; None for all."""
    if columns is None:
        return None
    wanted = {RUN_ID, *columns}
    return [column for column in file.schema_arrow.names if column in wanted]


def rows_of(table: pa.Table, name: str, columns: Iterable[str] | None = None) -> pa.Table:
    """Rows of a file: columns as documented, null where its version lacks them.

    Of the given columns only, if any are given, and `run_id`. Rows that belong to no run are left
    out. Raises ArrowException for what cannot be had with the documented types.
    """
    schema = schema_of(name, columns)
    if table.schema != schema:
        cast = [
            table[field.name].cast(field.type)
            if field.name in table.schema.names
            else pa.nulls(table.num_rows, field.type)
            for field in schema
        ]
        table = pa.table(cast, schema=schema)
    return table.filter(table[RUN_ID].is_valid()) if table[RUN_ID].null_count else table


def with_settings_filled(table: pa.Table) -> pa.Table:
    """Rows of `runs` in which every setting has the value that was in force.

    A setting that an older version did not know had its default's effect, as case ids assume too,
    or the one in `_EFFECT_BEFORE`.
    """
    for name, effect in effects_when_absent().items():
        index = table.schema.get_field_index(name)
        if index >= 0 and table[name].null_count:
            table = table.set_column(
                index, table.schema.field(index), table[name].fill_null(effect)
            )
    return table


def effects_when_absent() -> dict[str, object]:
    """Setting -> what it was in runs that are older than it."""
    return {**Case().settings(), **_EFFECT_BEFORE}


def as_frame(table: pa.Table, name: str) -> pd.DataFrame:
    """Rows for people to work with; settings of `runs` are as a case has them."""
    filled = with_settings_filled(table) if name == "runs" else table
    frame: pd.DataFrame = filled.to_pandas()
    if name == "runs" and "error" in frame:  # an older version stored it as it was
        frame["error"] = frame["error"].map(_readable_error)
    if name != "runs" or "seq_len" not in frame:
        return frame
    for word, number in _STORED.items():
        is_word = frame["seq_len"] == number
        if is_word.any():
            frame["seq_len"] = frame["seq_len"].astype(object).mask(is_word, word)
    return frame


def stored_seq_len(value: object) -> object:
    """A `seq_len` as a case has it, the way that files hold it."""
    return _STORED.get(value, value) if isinstance(value, str) else value


def _with_settings_stored(frame: pd.DataFrame) -> pd.DataFrame:
    if "seq_len" not in frame:
        return frame
    return frame.assign(seq_len=frame["seq_len"].map(stored_seq_len))
