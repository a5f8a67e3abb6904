"""Which combination of a grid is at fault, in words, when one of its cases cannot be run."""

from __future__ import annotations

from collections.abc import Sequence

from engine.model.answers import Problem
from ppbench.config.case import Case, Measure, setting_of
from ppbench.config.problems import brief

Planned = tuple[Case, Measure]


def combination_of(
    first: int,
    planned: Sequence[Planned],
    problems: Sequence[Problem | None],
    axes: Sequence[str],
) -> str:
    """For the end of the message about case `first`: its values on the axes that matter.

    Empty if no axis does. `problems` has the first problem of each case. Names `[[exclude]]` as
    the remedy where it is one: where other combinations have nothing wrong with them.
    """
    problem = problems[first]
    assert problem is not None
    others = [
        case
        for case, other in zip(planned, problems, strict=True)
        if other is None or other.key != problem.key
    ]
    keys = _that_matter(planned[first], others, axes)
    if not keys:
        return ""
    values = ", ".join(f"{key} = {_value(setting_of(*planned[first], key))}" for key in keys)
    is_remedy = any(other is None for other in problems)
    remedy = "; leave it out with [[exclude]], or change the grid" if is_remedy else ""
    return f" (in the combination {values}{remedy})"


def _that_matter(one: Planned, others: Sequence[Planned], axes: Sequence[str]) -> list[str]:
    """The fewest axes, found greedily, whose values tell a case from all the others."""
    keys = list(axes)
    for key in axes:
        fewer = [kept for kept in keys if kept != key]
        wanted = [setting_of(*one, kept) for kept in fewer]
        if not any([setting_of(*other, kept) for kept in fewer] == wanted for other in others):
            keys = fewer
    return keys


def _value(value: object) -> str:
    """As an `[[exclude]]` would have it: one time for all stages is written as a number."""
    match value:
        case (float() as number,):
            return brief(number)
        case _:
            return brief(value)
