"""Which cases nobody beats: the Pareto front of memory and speed."""

from __future__ import annotations

from collections.abc import Sequence


def pareto_front(memory: Sequence[float], speed: Sequence[float]) -> list[int]:
    """Indices of the points that no other one equals or betters in both, and beats in one.

    Little memory and much speed are good. In order of memory, so of speed as well; of points that
    are equal in both, the first.
    """
    order = sorted(range(len(memory)), key=lambda i: (memory[i], -speed[i], i))
    front: list[int] = []
    for index in order:
        if not front or speed[index] > speed[front[-1]]:
            front.append(index)
    return front
