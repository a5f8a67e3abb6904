"""Which combination of a grid is at fault, in words, when one of its cases cannot be run."""

from __future__ import annotations

from collections.abc import Sequence

from engine.model.answers import Problem
from ppbench.config.case import Case, Measure, setting_of
from ppbench.config.problems import brief

Planned = tuple[Case, Measure]


def axes_at_fault(
    first: int,
    planned: Sequence[Planned],
    problems: Sequence[Problem | None],
    axes: Sequence[str],
) -> list[str]:
    """The axes whose values tell case `first` from all those that do not have its problem.

    `problems` has the first problem of each case, or None.
    """
    problem = problems[first]
    assert problem is not None
    others = [
        case
        for case, other in zip(planned, problems, strict=True)
        if other is None or other.key != problem.key
    ]
    return _that_matter(planned[first], others, axes)


def in_words(one: Planned, keys: Sequence[str], *, is_rest_fine: bool) -> str:
    """For the end of a message: the values on these axes; empty if there are none.

    Names `[[exclude]]` as the remedy where other combinations have nothing wrong with them.
    """
    if not keys:
        return ""
    values = ", ".join(f"{key} = {_value(setting_of(*one, key))}" for key in keys)
    remedy = "; leave it out with [[exclude]], or change the grid" if is_rest_fine else ""
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
