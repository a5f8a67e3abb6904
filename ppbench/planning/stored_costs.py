"""Costs in a store: a row for each part of a model in each setting, with where they come from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import pandas as pd

from engine.plan.model_costs import LayerCosts, LinkCosts, ModelCosts
from ppbench.errors import UsageError
from ppbench.planning.cost_set import MEASURED, CostSet, Setting, parts_of, problem_of
from ppbench.store import Store

TABLE = "costs"
_OF_SET = {
    "model": "model_preset",
    "dtype": "model_dtype",
    "seq_len": "seq_len",
    "optimizer": "train_optimizer",
    "device": "device",
    "origin": "origin",
}
_OF_SETTING = ("train_microbatch_size", "train_recompute")
"""Columns of the fields of `CostSet` and of `Setting`: where runs have them, the same."""
_RENAMED = {
    "error": "relative_error",
    "held_after_forward": "held_after_forward_bytes",
    "held_after_input": "held_after_input_bytes",
}
"""Columns of the fields of `LayerCosts` that have another name there."""
_OF_PART = {name: _RENAMED.get(name, name) for name in LayerCosts.__dataclass_fields__}
_TIMES = frozenset(name for name in _OF_PART if name.endswith("_ns") or name == "error")


@dataclass(frozen=True)
class Wanted:
    """The set of costs that is looked for; fingerprint and code None: of any machine and code."""

    model: str
    dtype: str
    seq_len: int
    optimizer: str
    device: str
    settings: tuple[Setting, ...] = ()  # that it must have costs of
    fingerprint: str | None = None
    code: str | None = None


def store_costs(
    store: Store, costs: CostSet, *, fingerprint: str | None = None, code: str | None = None
) -> str:
    """Add a set of costs to the store; returns its id.

    `fingerprint` and `code` are of the machine and the code that it was measured with. Raises
    StoreError, and UsageError for costs that are impossible.
    """
    if (problem := problem_of(costs)) is not None:
        raise UsageError(f"costs ({costs.origin}): {problem}; they are not stored")
    of_set = {
        **{column: getattr(costs, name) for name, column in _OF_SET.items()},
        "device_name": costs.device_name or None,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "fingerprint": fingerprint,
        "code": code,
        "link_latency_ns": costs.link.latency_ns,
        "link_bytes_per_s": _finite(costs.link.bytes_per_s),
        "link_relative_error": costs.link.error,
    }
    rows = [{**of_set, **row} for row in _rows_of(costs)]
    frame = pd.DataFrame(rows).astype({"layer": "Int64"})
    return store.write_rows(TABLE, frame)


def stored_cost_set(store: Store, wanted: Wanted) -> CostSet | None:
    """The newest measured set of costs in the store that is as wanted; None: there is none.

    Sets that are damaged or not whole are passed over.
    """
    rows = store.every_row(TABLE)
    if rows.empty:
        return None
    fits = rows["origin"].eq(MEASURED)
    for name in ("model", "dtype", "seq_len", "optimizer", "device", "fingerprint", "code"):
        if (value := getattr(wanted, name)) is not None:
            fits &= rows[_OF_SET.get(name, name)].eq(value)
    for _, of_set in sorted(rows[fits].groupby("run_id"), reverse=True):
        costs = cost_set_of(of_set)
        if costs is not None and set(wanted.settings) <= set(costs.by_setting):
            return costs
    return None


def cost_set_of(rows: pd.DataFrame) -> CostSet | None:
    """The set of costs of rows that were stored together; None where they are not whole."""
    first = rows.iloc[0]
    by_setting: dict[Setting, ModelCosts] = {}
    for _, of_setting in rows.groupby(list(_OF_SETTING), sort=False):
        costs = _model_costs(of_setting)
        if costs is None:
            return None
        size, recompute = (of_setting[name].iloc[0] for name in _OF_SETTING)
        by_setting[Setting(int(size), bool(recompute))] = costs
    latency_ns, bytes_per_s = first["link_latency_ns"], first["link_bytes_per_s"]
    link = LinkCosts(
        float(latency_ns),
        math.inf if pd.isna(bytes_per_s) else float(bytes_per_s),
        float(first["link_relative_error"]),
    )
    texts = {name: str(first[column]) for name, column in _OF_SET.items() if name != "seq_len"}
    device_name = "" if pd.isna(first["device_name"]) else str(first["device_name"])
    costs_ = CostSet(
        **texts,
        seq_len=int(first["seq_len"]),
        by_setting=by_setting,
        link=link,
        device_name=device_name,
    )
    return None if problem_of(costs_) is not None else costs_


def _rows_of(costs: CostSet) -> Iterator[dict[str, object]]:
    for setting, of_model in costs.by_setting.items():
        for name, part in parts_of(of_model).items():
            kind, _, index = name.partition(" ")
            yield {
                **dict(zip(_OF_SETTING, setting, strict=True)),
                "place": kind,
                "layer": int(index) if index else None,
                "action_ns": of_model.action_ns,
                **{column: getattr(part, field) for field, column in _OF_PART.items()},
            }


def _model_costs(rows: pd.DataFrame) -> ModelCosts | None:
    """The costs of one setting; None where a part or number is missing, or a part there twice."""
    parts = {str(kind): of_kind for kind, of_kind in rows.groupby("place")}
    counts = [len(parts.get(kind, ())) for kind in ("before", "layer", "after")]
    has_gaps = bool(rows[["action_ns", *_OF_PART.values()]].isna().any(axis=None))
    if has_gaps or counts[0] != 1 or counts[2] != 1 or not counts[1]:
        return None
    layers = parts["layer"].sort_values("layer")
    if list(layers["layer"]) != list(range(len(layers))):
        return None
    (before,), (after,) = _parts(parts["before"]), _parts(parts["after"])
    return ModelCosts(before, tuple(_parts(layers)), after, float(rows["action_ns"].iloc[0]))


def _parts(rows: pd.DataFrame) -> list[LayerCosts]:
    named = rows[list(_OF_PART.values())].itertuples(index=False)
    return [
        LayerCosts(
            **{
                field: float(value) if field in _TIMES else int(value)
                for field, value in zip(_OF_PART, row, strict=True)
            }  # type: ignore[arg-type]  # each by its kind
        )
        for row in named
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
