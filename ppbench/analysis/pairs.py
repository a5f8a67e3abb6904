"""Contention within pairs: how long a forward and a backward side by side took, beside alone.

pair over the longer   1: one half hid behind the other; more: they slowed each other down
pair over the sum      1: nothing overlapped
"""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

from engine.plan.action import Action, Op
from engine.plan.program import Program


class Contention(NamedTuple):
    """Means over the pairs of a run, in nanoseconds; those alone are of the same stages."""

    num_pairs: int  # in a step of one replica
    pair_ns: float
    longer_ns: float
    sum_ns: float


def stages_of_pairs(spans: pd.DataFrame, program: Program) -> pd.Series:
    """By span, the stage of the forward of its pair; null for what is not half of one."""
    table, own = program.table, enumerate(program.mates)
    pairs = [table.those([at, mate]) for at, mate in own if mate >= 0]
    known = {half: pair[0].stage for pair in pairs for half in pair}
    keys = zip(spans["stage"], spans["op"].map(Op), spans["microbatch"], strict=True)
    return pd.Series([known.get(Action(*key)) for key in keys], spans.index, dtype="Int64")


def contention_of(spans: pd.DataFrame, program: Program) -> Contention | None:
    """Compare the pairs of a run with the same stages' actions alone.

    `spans` has those of its steps. None without pairs, and where a stage has no action alone.
    """
    table, own = program.table, enumerate(program.mates)
    pairs = [table.those([at, mate]) for at, mate in own if mate >= 0]
    if not pairs:
        return None
    took = (spans["end_ns"] - spans["start_ns"]).astype(float)
    is_paired = stages_of_pairs(spans, program).notna()
    alone = took[~is_paired].groupby([spans["stage"], spans["op"]]).mean().to_dict()
    for stage in {backward.stage for _, backward in pairs}:  # a whole backward is its two halves
        whole, *halves = [(stage, op.value) for op in (Op.B, Op.I, Op.W)]
        if whole not in alone and all(half in alone for half in halves):
            alone[whole] = sum(alone[half] for half in halves)
    num, rows = len(pairs), spans["step"].nunique() * spans["replica"].nunique()
    wanted = [[(half.stage, half.op.value) for half in pair] for pair in pairs]
    if not {half for pair in wanted for half in pair} <= alone.keys():
        return None
    longer_ns = sum(max(alone[half] for half in pair) for pair in wanted)
    sum_ns = sum(alone[half] for pair in wanted for half in pair)
    return Contention(num, took[is_paired].sum() / rows / num, longer_ns / num, sum_ns / num)


IN_ORDER = "Pairs of a forward and a backward ran in order: nothing of them overlapped."


def words_of(contention: Contention | None) -> str | None:
    """Say it; None where it is not known."""
    if contention is None:
        return None
    pair_ns = contention.pair_ns
    return (
        f"Pairs of a forward and a backward, {contention.num_pairs} in a step: one took "
        f"{pair_ns / contention.longer_ns:.2f} of its longer half alone, and "
        f"{pair_ns / contention.sum_ns:.2f} of both halves one after the other."
    )
