"""Rows of actions as arrays, and those that take turns."""

from __future__ import annotations

from array import array

from engine.plan.action import Op, parse_action
from engine.plan.table import Row, Table, woven


def test_woven_rows_give_an_action_a_turn_each_from_its_own_turn_on() -> None:
    forwards = Row.alike(Op.F, 0, array("q", range(4)))
    inputs = forwards.as_op(Op.I)
    row = woven((-2, forwards), (0, inputs), (1, inputs.as_op(Op.W)))
    words = "0F0 0F1 0F2 0I0 0F3 0I1 0W0 0I2 0W1 0I3 0W2 0W3"
    assert Table.of([row])[0] == tuple(map(parse_action, words.split()))


def test_a_row_that_begins_when_another_is_over_comes_behind_it() -> None:
    first, last = (Row.alike(Op.F, stage, array("q", [0, 1])) for stage in range(2))
    words = "0F0 0F1 1F0 1F1"
    for later in (2, 5):
        assert Table.of([woven((later, last), (0, first))])[0] == tuple(
            map(parse_action, words.split())
        )
