"""Random damage to the files of a store: what a disk, a person or another program may do."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

_OPTIONAL = ("memory", "telemetry")  # of a run of an older version nothing says if it had them
STORES = Path(__file__).parent / "stores"
Change = Callable[[Path, random.Random], bool]


@dataclass(frozen=True)
class Mutation:
    """The damage done to a file; `is_certain` if the file cannot pass for a sound one."""

    kind: str
    path: Path
    is_certain: bool


def some_versions(folder: Path, versions: Iterable[str]) -> None:
    """A store with a run of each of these versions of the tables."""
    for version in versions:
        shutil.copytree(STORES / version, folder, dirs_exist_ok=True)


def mutate(folder: Path, rng: random.Random) -> Mutation:
    """Damage one file of the store, at random."""
    paths = sorted(path for path in folder.rglob("*.parquet") if path.is_file())
    table = rng.choice(sorted({path.relative_to(folder).parts[0] for path in paths}))
    path = rng.choice([path for path in paths if path.relative_to(folder).parts[0] == table])
    is_sealed = b"PPB\x00SEAL" in path.read_bytes()
    while True:
        kind = rng.choice(sorted(CHANGES))
        if CHANGES[kind](path, rng):
            is_certain = is_sealed or kind not in ("flipped", "bytes")
            is_optional = table in _OPTIONAL and kind == "deleted"
            return Mutation(kind, path, is_certain and not is_optional)


def _truncated(path: Path, rng: random.Random) -> bool:
    os.truncate(path, rng.randrange(path.stat().st_size))
    return True


def _flipped(path: Path, rng: random.Random) -> bool:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return True


def _bytes(path: Path, rng: random.Random) -> bool:
    data = bytearray(path.read_bytes())
    start = rng.randrange(len(data))
    for place in range(start, min(start + 16, len(data))):
        data[place] = rng.randrange(256)
    path.write_bytes(data)
    return True


def _deleted(path: Path, _rng: random.Random) -> bool:
    path.unlink()
    return True


def _emptied(path: Path, _rng: random.Random) -> bool:
    path.write_bytes(b"")
    return True


def _text(path: Path, _rng: random.Random) -> bool:
    path.write_text("run_id,status\nx,ok\n")
    return True


def _folder(path: Path, _rng: random.Random) -> bool:
    path.unlink()
    path.mkdir()
    return True


def _dangling(path: Path, _rng: random.Random) -> bool:
    path.unlink()
    path.symlink_to("nowhere.parquet")
    return True


def _pipe(path: Path, _rng: random.Random) -> bool:
    path.unlink()
    os.mkfifo(path)
    return True


def _other_table(path: Path, rng: random.Random) -> bool:
    root = path.parent.parent if path.parent.name != "compacted" else path.parents[2]
    table = path.relative_to(root).parts[0]
    files = [other for other in root.rglob("*.parquet") if other.is_file()]
    others = [other for other in files if other.relative_to(root).parts[0] != table]
    shutil.copy(rng.choice(sorted(others)), path)
    return True


def _other_run(path: Path, rng: random.Random) -> bool:
    others = sorted(o for o in path.parent.glob("*.parquet") if o != path and o.is_file())
    if not others or path.parent.name == "compacted":
        return False
    shutil.copy(rng.choice(others), path)
    return True


def _rewritten(change: Callable[[pa.Table, random.Random], pa.Table | None]) -> Change:
    def changed(path: Path, rng: random.Random) -> bool:
        table = change(pq.read_table(path), rng)
        if table is None:
            return False
        pq.write_table(table, path)
        return True

    return changed


NEEDED = ("run_id", "step", "rank", "op", "start_ns", "status", "time_ns", "source", "num_bytes")


def _renamed(table: pa.Table, rng: random.Random) -> pa.Table | None:
    name = rng.choice([name for name in NEEDED[:8] if name in table.column_names])
    return table.rename_columns([f"{n}_" if n == name else n for n in table.column_names])


def _retyped(table: pa.Table, rng: random.Random) -> pa.Table | None:
    names = [n for n in table.column_names if pa.types.is_integer(table.schema.field(n).type)]
    index = table.column_names.index(rng.choice(names))
    words = pa.array(["word"] * table.num_rows)
    return table.set_column(index, table.column_names[index], words)


def _nulled(table: pa.Table, rng: random.Random) -> pa.Table | None:
    names = [
        n
        for n in ("step", "rank", "op", "start_ns", "status", "time_ns", "source")
        if n in table.column_names
    ]
    index = table.column_names.index(rng.choice(names))
    field = table.schema.field(index)
    return table.set_column(index, field.name, pa.nulls(table.num_rows, field.type))


def _negative(table: pa.Table, rng: random.Random) -> pa.Table | None:
    names = [
        n
        for n in ("step", "rank", "step_ns", "world_size", "num_bytes", "memory_used_bytes")
        if n in table.column_names
    ]
    if not names:
        return None
    index = table.column_names.index(rng.choice(names))
    field = table.schema.field(index)
    return table.set_column(index, field.name, pa.array([-5] * table.num_rows).cast(field.type))


def _infinite(table: pa.Table, rng: random.Random) -> pa.Table | None:
    names = [
        n
        for n in table.column_names
        if pa.types.is_floating(table.schema.field(n).type) and not n.endswith("loss")
    ]
    if not names:
        return None
    index = table.column_names.index(rng.choice(names))
    value = rng.choice([float("nan"), float("inf"), float("-inf")])
    return table.set_column(index, table.column_names[index], pa.array([value] * table.num_rows))


def _unknown_word(table: pa.Table, rng: random.Random) -> pa.Table | None:
    names = [
        n
        for n in ("status", "op", "lane", "program", "op_costs_ns", "layers_per_stage")
        if n in table.column_names
    ]
    if not names:
        return None
    index = table.column_names.index(rng.choice(names))
    return table.set_column(index, table.column_names[index], pa.array(["???"] * table.num_rows))


def _twice(table: pa.Table, _rng: random.Random) -> pa.Table | None:
    keyed = {"status", "step", "source"} & set(table.column_names)
    return pa.concat_tables([table, table]) if keyed and table.num_rows else None


def _later(table: pa.Table, _rng: random.Random) -> pa.Table | None:
    index = table.column_names.index("schema_version")
    return table.set_column(index, "schema_version", pa.array([99] * table.num_rows, pa.int64()))


CHANGES: dict[str, Change] = {
    "truncated": _truncated,
    "flipped": _flipped,
    "bytes": _bytes,
    "deleted": _deleted,
    "emptied": _emptied,
    "text": _text,
    "folder": _folder,
    "dangling": _dangling,
    "pipe": _pipe,
    "other table": _other_table,
    "other run": _other_run,
    **{
        name: _rewritten(change)
        for name, change in {
            "renamed": _renamed,
            "retyped": _retyped,
            "nulled": _nulled,
            "negative": _negative,
            "infinite": _infinite,
            "unknown word": _unknown_word,
            "twice": _twice,
            "later": _later,
        }.items()
    },
}
