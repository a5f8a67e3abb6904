"""Groups of cases that do the same work, so that a user may choose between them."""

from __future__ import annotations

import json

import pandas as pd

from ppbench.config.case import EMULATED
from ppbench.display.cases import Axes, work_axes

_EMULATED_TIMES = ("emulated_F_ms", "emulated_I_ms", "emulated_W_ms", "emulated_FB_ms")


def alike(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the cases that were not oversubscribed, or all if every one was."""
    sound = cases[~cases["is_oversubscribed"]]
    return cases if sound.empty else sound


def groups_of(
    cases: pd.DataFrame, axes: Axes, *, are_ranks_free: bool = False
) -> list[tuple[list[str], pd.DataFrame]]:
    """Group cases that do the same work on as many ranks and replicas, with the axes that tell.

    The cases are rows of `by_case`; `axes` are the settings that vary. Ranks and replicas are free
    if that leaves no pair, and ranks if they are a choice. Emulated cases compute nothing, so
    beside measured ones they are grouped on their own. Cases without a throughput or with a number
    that is not finite are in no group. Emulated cases do the same work if all their times are the
    same, or those of a sequence are.
    """
    cases = cases[(cases["tokens_per_s"] > 0) & ~cases["is_not_finite"]]
    is_emulated = cases["device"] == EMULATED
    if not is_emulated.any() or is_emulated.all():
        return _of_one_kind(cases, axes, are_ranks_free=are_ranks_free)
    return [
        (["device", *key], group)
        for kind in (cases[~is_emulated], cases[is_emulated])
        for key, group in _of_one_kind(kind, axes, are_ranks_free=are_ranks_free)
    ]


def _is_alike(cases: pd.DataFrame, axis: str) -> bool:
    """Whether an emulated time of a microbatch is the same for each of its sequences."""
    if axis not in _EMULATED_TIMES or not len(cases):
        return False
    of_sequences = {
        tuple(ms / size for ms in json.loads(listed))
        for listed, size in zip(cases[axis], cases["train_microbatch_size"], strict=True)
    }
    return len(of_sequences) == 1


def _of_one_kind(
    cases: pd.DataFrame, axes: Axes, *, are_ranks_free: bool
) -> list[tuple[list[str], pd.DataFrame]]:
    work = [axis for axis in work_axes(axes) if axis != "device" and not _is_alike(cases, axis)]
    fixed = ("replicas",) if are_ranks_free else ("world_size", "replicas")
    sizes = [axis for axis in fixed if axis in axes]
    keys = [[*work, *sizes]]
    if sizes and not (cases["device"] == EMULATED).all():
        keys.append(work)
    groups: list[tuple[list[str], pd.DataFrame]] = []
    for key in keys:
        if key and len(cases):
            texts = cases[key].astype(str).agg("\n".join, axis=1)
            groups = [(key, group) for _, group in cases.groupby(texts, sort=False)]
        else:
            groups = [(key, cases)] if len(cases) else []
        if any(len(alike(group)) > 1 for _, group in groups):
            break
    return groups
