"""The least step of a small problem, from scipy's solver of integer programs.

Starts are numbers; for two actions of one rank whose order is open, a 0 or 1 says which is first.
What a rank holds at an F is then a sum of what came before it. Microbatches are in order, as
`ppbench.planning.solver.bounds` proves to be enough. Backwards are split, unless a stage's takes
less than its halves: a 0 or 1 then says whether it is whole, which makes I as long and its W follow
at once; and such a stage's W need not be in order, for one of them may be part of a whole backward.

A message takes no longer than what its sender does until the next one, so that none waits for
another. Where ranks meet, the step is from the meeting to the last end. Where they do not, the same
starts in every step, so much later, are a running training if no rank takes longer than that from
its first start to the end of its optimizer.
"""

import itertools

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from ppbench.planning.solver.problem import Problem


def least_step(problem: Problem, within_ns: int, time_limit_s: float) -> int | None:
    """The optimum, known to be at most `within_ns`; None where the time does not prove one."""
    model = _Model(problem, within_ns * (1 if problem.meets else 3))
    result = milp(
        np.array([1.0] + [0.0] * (model.num_columns - 1)),
        integrality=np.array([0] * model.num_starts + [1] * model.num_choices),
        bounds=Bounds(0, [model.within_ns] * model.num_starts + [1] * model.num_choices),
        constraints=model.constraint(),
        options={"time_limit": time_limit_s, "mip_rel_gap": 0},
    )
    return round(result.fun) if result.status == 0 else None


class _Model:
    """Column 0 is the step, then come the starts of F, I and W, then the open orders."""

    def __init__(self, problem: Problem, within_ns: int) -> None:
        self.problem, self.within_ns = problem, within_ns
        self.num_stages, self.width = problem.placement.num_stages, problem.num_each
        self.depth = problem.placement.depth
        times = problem.durations
        self.took = (times.forward_ns, times.input_ns, times.weight_ns)
        halves = map(sum, zip(*self.took[1:], strict=True))
        self.gains = [both > whole for both, whole in zip(halves, times.whole_ns, strict=True)]
        self.num_starts = 1 + 3 * self.num_stages * self.width
        actions = itertools.product(range(3), range(self.num_stages), range(self.width))
        self.actions = list(actions)
        rank = problem.placement.ranks
        pairs = itertools.combinations(self.actions, 2)
        is_open = (pair for pair in pairs if rank[pair[0][1]] == rank[pair[1][1]])
        left = [pair for pair in is_open if self.known_order(*pair) is None]
        self.orders = {pair: self.num_starts + at for at, pair in enumerate(left)}
        self.num_choices = len(self.orders) + sum(self.gains) * self.width
        self.num_columns = self.num_starts + self.num_choices
        cheap = [(s, n) for s in range(self.num_stages) for n in range(self.width) if self.gains[s]]
        self.whole = {pair: at for at, pair in enumerate(cheap, self.num_starts + len(self.orders))}
        self.rows: list[tuple[list[tuple[int, float]], float]] = []  # sum of them >= a number
        self.add_times()
        self.add_memory()

    def known_order(self, one, other) -> bool | None:
        """Whether the first of two actions of a rank is before the other; None if that is open."""
        (op, stage, n), (op2, stage2, n2) = one, other
        if n == n2 and op < 2 and op2 < 2 and stage // self.depth == stage2 // self.depth:
            place, place2 = (
                s if o == 0 else 2 * self.num_stages - s for o, s in ((op, stage), (op2, stage2))
            )
            return place < place2
        if stage == stage2 and op == op2 == 2 and self.gains[stage]:
            return None
        if stage == stage2 and (n - n2) * (op - op2) >= 0:
            return (op, n) < (op2, n2)
        return None

    def column(self, action) -> int:
        op, stage, n = action
        return 1 + (op * self.num_stages + stage) * self.width + n

    def busy(self, action) -> int:
        return self.took[action[0]][action[1]]

    def change(self, action) -> list[tuple[int, float]]:
        """How much longer an action is if its backward is whole: a term, or none."""
        op, stage, n = action
        if op == 0 or not self.gains[stage]:
            return []
        whole_ns = self.problem.durations.whole_ns[stage] if op == 1 else 0
        return [(self.whole[stage, n], float(whole_ns - self.busy(action)))]

    def after(self, one, other, delay: int = 0, unless=()) -> None:
        """`other` starts when `one` is over; `unless` are columns and what they must lack."""
        terms = [(self.column(other), 1.0), (self.column(one), -1.0), *unless]
        terms += [(column, -value) for column, value in self.change(one)]
        self.rows.append((terms, self.busy(one) + delay))

    def at_once(self, stage: int, n: int) -> None:
        """The W of a whole backward has no time of its own, and is where the backward ends."""
        whole, big = self.whole[stage, n], float(self.within_ns)
        terms = [(self.column((1, stage, n)), 1.0), (self.column((2, stage, n)), -1.0)]
        self.rows.append(([*terms, (whole, -big)], -self.problem.durations.whole_ns[stage] - big))

    def add_times(self) -> None:
        ranks, transfer_ns = self.problem.placement.ranks, self.problem.transfers.duration_ns
        for op, stage, n in self.actions:
            ends = [(column, -value) for column, value in self.change((op, stage, n))]
            own = ranks[stage]
            terms = [(0, 1.0), (self.column((op, stage, n)), -1.0), *ends]
            optimizer_ns = self.problem.optimizers[own]
            if self.problem.meets:
                self.rows.append((terms, self.busy((op, stage))))
                self.rows.append(([(self.column((op, stage, n)), 1.0)], optimizer_ns))
            for first in range(0 if self.problem.meets else self.num_stages):
                if ranks[first] == own:
                    since = [*terms, (self.column((0, first, 0)), 1.0)]
                    self.rows.append((since, self.busy((op, stage)) + optimizer_ns))
            if op == 2 and self.gains[stage]:
                self.at_once(stage, n)
            if op == 2 or (op == 1 and self.problem.placement.is_last(stage)):
                self.after((op - 1, stage, n), (op, stage, n))
            elif not (op == 0 and stage % self.depth == 0):
                other = stage + (1 if op == 1 else -1)
                delay = transfer_ns if ranks[stage] != ranks[other] else 0
                self.after((op, other, n), (op, stage, n), delay)
        for one, other in itertools.combinations(self.actions, 2):
            if ranks[one[1]] != ranks[other[1]]:
                continue
            if (order := self.orders.get((one, other))) is not None:
                longest = max(*map(max, self.took), *self.problem.durations.whole_ns)
                big = float(self.within_ns + longest)
                self.after(other, one, unless=[(order, big)])
                self.after(one, other, delay=-round(big), unless=[(order, -big)])
            else:
                is_first = self.known_order(one, other)
                self.after(*((one, other) if is_first else (other, one)))

    def add_memory(self) -> None:
        problem, ranks = self.problem, self.problem.placement.ranks
        for taking in self.actions:
            if taking[0] != 0:
                continue
            terms, held = [], 0
            for other in self.actions:
                if other == taking or ranks[other[1]] != ranks[taking[1]]:
                    continue
                taken = problem.held_after_forward[other[1]]
                left = problem.held_after_input[other[1]]
                change = (taken, left - taken, -left)[other[0]]
                pair = min(taking, other), max(taking, other)
                if (order := self.orders.get(pair)) is None:
                    held += change * (self.known_order(*pair) == (other < taking))
                elif other < taking:
                    terms.append((order, -float(change)))
                else:
                    held += change
                    terms.append((order, float(change)))
            left = problem.limits[ranks[taking[1]]] - problem.held_after_forward[taking[1]]
            self.rows.append((terms, held - left))

    def constraint(self) -> LinearConstraint:
        entries = [
            (at, column, value)
            for at, (terms, _) in enumerate(self.rows)
            for column, value in terms
        ]
        row, column, value = zip(*entries, strict=True)
        matrix = coo_array((value, (row, column)), shape=(len(self.rows), self.num_columns))
        return LinearConstraint(matrix.tocsc(), [least for _, least in self.rows], np.inf)
