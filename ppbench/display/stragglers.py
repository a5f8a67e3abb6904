"""Who slows a job down, in sentences; see `ppbench.analysis.stragglers` for the figures."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from ppbench.analysis.stragglers import LEAST_COST, WORST_WORKERS, Kind, Straggler, Stragglers
from ppbench.display.units import milliseconds, percent

_MARKS = "·░▒▓█"
"""The marks of a heat map in text, from S = 1 to the largest."""


def sentences_of(found: Stragglers) -> Iterator[str]:
    """Who is slow and what that costs; then S, who explains it, and how far to trust the replay."""
    yield cause_in_words(found)
    yield (
        f"S = {found.slowness:.3f}: as replayed, a step takes {milliseconds(found.step_ns)}, and "
        f"{milliseconds(found.ideal_ns)} with ideal times only; {percent(found.wasted)} of the "
        "job is wasted."
    )
    if len(found.by_replica) > 1 and found.slowness >= 1 + LEAST_COST:
        yield (
            f"The slowest {WORST_WORKERS:.0%} of workers explain {percent(found.worst_workers)} of "
            f"the slowness, the last rank {percent(found.last_stage)}; forward and backward times "
            f"of a microbatch correlate with r = {found.correlation:.2f}."
        )
    off = found.step_ns / found.measured_ns - 1
    yield (
        f"Measured steps take {milliseconds(found.measured_ns)}, host time between actions "
        f"included: the replay differs by {off:+.1%}."
    )


def cause_in_words(found: Stragglers) -> str:
    """Who is slow, and what it costs."""
    if found.cause is None:
        return (
            f"Nobody is slow: no worker, link, replica, stage, op type or sequence length costs "
            f"{LEAST_COST:.0%} of the step beyond chance."
        )
    name, with_it = name_of(found.cause, len(found.by_replica)), "its times like the others'"
    match found.cause.kind:
        case Kind.LENGTHS:
            who = "Microbatches are unequal, by their sequence lengths"
            with_it = "equal sequences"
        case Kind.OP:
            who = f"{found.cause.op} now and then takes long"
        case Kind.WORKER:
            who = f"A worker is slow, {name}"
        case Kind.STAGE:
            who = f"A stage is slow, that of {name}"
        case _:
            who = f"{name[0].upper()}{name[1:]} is slow"
    return (
        f"{who}: with {with_it}, a step would take {milliseconds(found.cause.cost_ns)} less, "
        f"which is {percent(found.cause.share)} of it."
    )


def name_of(straggler: Straggler, replicas: int) -> str:
    """Return who it is, in a table."""
    everywhere = " of every replica" if replicas > 1 else ""
    replica, index = straggler.replica, straggler.index
    match straggler.kind:
        case Kind.WORKER:
            return f"rank {index} of replica {replica}"
        case Kind.LINK:
            return f"link {index}-{int(index or 0) + 1} of replica {replica}"
        case Kind.REPLICA:
            return f"replica {replica}"
        case Kind.STAGE:
            return f"rank {index}{everywhere}"
        case Kind.LINKS:
            return f"link {index}-{int(index or 0) + 1}{everywhere}"
        case Kind.LENGTHS:
            return "sequence lengths"
        case Kind.OP:
            return f"all {straggler.op}"


def table_of(found: Stragglers) -> pd.DataFrame:
    """A row for each that was replayed like the others, the costliest first."""
    rows = [
        {
            "straggler": name_of(one, len(found.by_replica)),
            "cost_ns": one.cost_ns,
            "share_of_step": one.share,
            "explained": one.explained,
        }
        for one in found.tried
    ]
    return pd.DataFrame(rows)


def heat_map(by_worker: pd.DataFrame, most: int) -> str:
    """S of each worker as a mark, a line per replica: the `most` slowest ones, slowest first."""
    grid = by_worker.pivot_table(index="replica", columns="rank", values="slowness")
    largest = max(float(grid.to_numpy().max()) - 1, LEAST_COST)
    worst = grid.max(axis=1).nlargest(most).index
    marks = f"{_MARKS[0]} 1 to {_MARKS[-1]} {1 + largest:.3f}"
    lines = [f"replica   S of ranks 0 to {grid.shape[1] - 1}: {marks}"]
    for replica, row in grid.loc[worst].iterrows():
        levels = ((row - 1) / largest * (len(_MARKS) - 1)).round().clip(0, len(_MARKS) - 1)
        lines.append(f"{replica:>7}   {''.join(_MARKS[int(level)] for level in levels)}")
    return "\n".join(lines)
