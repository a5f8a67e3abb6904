"""What a leader orders its members to do, over real connections; no ranks are started."""

from __future__ import annotations

import select
import socket

import pytest
from processes import wait_until

from engine.interfaces import listen
from ppbench.config.case import Supervision
from ppbench.run.launch import meeting
from ppbench.run.launch.meeting import GAVE_UP, End, Leader, Leave, Member, Start

HOST = "127.0.0.1"


class Nodes:
    """A leader and its members, each of which says another name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_nodes: int, max_restarts: int) -> None:
        self._monkeypatch, self.all = monkeypatch, []
        listener = listen(HOST, 0)
        self._port = listener.getsockname()[1]
        self._name("b")
        self.all.append(Leader(num_nodes, max_restarts, HOST, listener))

    def _name(self, name: str) -> None:
        self._monkeypatch.setattr(meeting.platform, "node", lambda: name)

    def join(self, name: str) -> Member:
        member = Member(HOST, self._port)
        self._name(name)
        member.hear(())  # which connects
        self.all.append(member)
        return member

    def order(self, node: Leader | Member) -> Start | End | Leave:
        """The next order that a node is given."""

        def has_come() -> bool:
            for one in self.all:
                sockets: list[socket.socket] = list(one.sockets)
                ready = select.select(sockets, [], [], 0)[0] if sockets else []
                one.hear([each.fileno() for each in ready])
            return bool(node.orders)

        wait_until(has_come, "an order", 20)
        return node.orders.popleft()


def test_nodes_are_numbered_by_name_and_one_that_comes_later_gets_the_number_of_a_lost_one(
    monkeypatch,
):
    nodes = Nodes(monkeypatch, 3, max_restarts=5)
    leader, first, last = nodes.all[0], nodes.join("a"), nodes.join("c")
    starts = [nodes.order(node) for node in (first, leader, last)]
    assert [(start.node, start.num_nodes, start.host) for start in starts] == [
        (0, 3, HOST),
        (1, 3, HOST),
        (2, 3, HOST),
    ]
    nodes.all.remove(first)
    first.close()
    assert [nodes.order(node) for node in (leader, last)] == [End(), End()]
    for node in (leader, last):
        node.report(1)
    spare = nodes.join("z")
    again = [nodes.order(node) for node in (spare, leader, last)]
    assert [start.node for start in again] == [0, 1, 2]
    assert {start.port for start in again}.isdisjoint({starts[0].port})  # a store of its own
    for node in (spare, leader, last):
        node.report(0)
    assert [nodes.order(node) for node in (spare, leader, last)] == [Leave(0)] * 3


def test_a_failure_anywhere_restarts_all_as_often_as_is_allowed(monkeypatch):
    nodes = Nodes(monkeypatch, 2, max_restarts=1)
    leader, member = nodes.all[0], nodes.join("c")
    for failing, other in ((leader, member), (member, leader)):
        assert {type(nodes.order(node)) for node in (leader, member)} == {Start}
        failing.report(1)
        assert nodes.order(other) == End()
        other.report(1)
    why = "the ranks have failed in each of 2 starts"
    assert [nodes.order(node) for node in (leader, member)] == [Leave(1, why)] * 2


def test_ranks_that_give_up_are_not_started_again(monkeypatch):
    nodes = Nodes(monkeypatch, 1, max_restarts=5)
    assert isinstance(nodes.order(nodes.all[0]), Start)
    nodes.all[0].report(GAVE_UP)
    assert nodes.order(nodes.all[0]) == Leave(GAVE_UP)


def test_who_came_is_told_when_others_did_not(monkeypatch):
    for name, value in Supervision(patience_s=2).variables().items():
        monkeypatch.setenv(name, value)
    nodes = Nodes(monkeypatch, 3, max_restarts=5)
    nodes.join("c")
    leave = nodes.order(nodes.all[0])
    assert isinstance(leave, Leave)
    assert leave.code == 1
    assert leave.why.startswith("2 of 3 nodes came within 2 s: b, c; start the same command")


def test_a_stranger_who_says_what_is_no_message_is_turned_away(monkeypatch):
    nodes = Nodes(monkeypatch, 2, max_restarts=0)
    stranger = socket.create_connection((HOST, nodes.all[0].sockets[0].getsockname()[1]))
    stranger.sendall(b"[1]\n")
    member = nodes.join("c")
    assert isinstance(nodes.order(member), Start)
    assert stranger.recv(10) == b""
