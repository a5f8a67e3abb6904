"""How the ranks of a launch find each other, also after some or all of them were restarted.

The agent's store outlives the workers. Entries of dead ranks (gloo's addresses) must not be read by
those that follow (pytorch issue 135712), and a count of restarts cannot distinguish them: a node
that restarts its workers because another node's failed does not count it. So the ranks agree on a
name of their own, and meet under that.

    every rank   1  writes a nonce, new with each process
    rank 0       2  publishes the roll of all nonces that it sees, again whenever one has changed
    every rank   3  confirms the roll, if its own nonce is in it
    rank 0       4  says go, once all have confirmed the same roll

The hash of that roll is the name. A nonce that a dead rank has left is in rolls at first, but
no rank confirms those.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # public
    PrefixStore,
    Store,
)

from engine.rank_store import store_of_ranks

WAIT_FOREVER = timedelta(days=30)
"""Ranks outside a case wait for its end, however long it takes; the agent ends a broken launch."""

PATIENCE_S = 600.0
"""Time for the slowest rank to start; a launch's ranks are started together."""

_POLL_S = 0.01
_PREFIX = "ppbench-meeting"


class MeetingError(RuntimeError):
    """Not all ranks came to the meeting."""


def join_other_ranks(patience_s: float = PATIENCE_S) -> None:
    """Make the default process group, which carries control messages only.

    Blocks until all ranks are here. Raises MeetingError if one is not within the time given,
    InterfaceError if this machine has no address at which the others could reach it.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = store_of_ranks(timedelta(seconds=patience_s))
    name = agree_on_name(store, rank, world_size, patience_s)
    dist.init_process_group(
        "gloo",
        store=PrefixStore(f"ppbench-{name}", store),
        rank=rank,
        world_size=world_size,
        timeout=WAIT_FOREVER,
    )


def agree_on_name(
    store: Store, rank: int, world_size: int, patience_s: float, nonce: str | None = None
) -> str:
    """Return a name that exactly these processes share. Blocks until all have come."""
    ours = _Meeting(PrefixStore(_PREFIX, store), rank, world_size, nonce or uuid.uuid4().hex)
    return ours.hold(patience_s)


class _Meeting:
    """One rank's side of the meeting; the numbers in comments are the module's steps."""

    def __init__(self, store: Store, rank: int, world_size: int, nonce: str) -> None:
        self._store, self._rank, self._nonce = store, rank, nonce
        self._ranks = range(world_size)

    def hold(self, patience_s: float) -> str:
        until = time.monotonic() + patience_s
        self._store.set(_nonce_of(self._rank), self._nonce)  # 1
        while time.monotonic() < until:
            if self._rank == 0:
                self._publish()
            roll = self._roll()
            name = _name_of(roll)
            if self._rank < len(roll) and roll[self._rank] == self._nonce:
                self._store.set(_confirmed(name, self._rank), "yes")  # 3
                if self._may_go(name):
                    return name
            time.sleep(_POLL_S)
        raise MeetingError(self._who_is_missing(patience_s))

    def _publish(self) -> None:
        nonces = self._nonces()
        if None not in nonces and nonces != self._roll():
            self._store.set("roll", json.dumps(nonces))  # 2

    def _may_go(self, name: str) -> bool:
        """Whether rank 0 says go.

        It reads the nonces after the confirmations: a late nonce voids them.
        """
        if self._rank == 0 and self._is_confirmed(name) and _name_of(self._nonces()) == name:
            self._store.set(_go(name), "yes")  # 4
        return bool(self._store.check([_go(name)]))

    def _is_confirmed(self, name: str) -> bool:
        return bool(self._store.check([_confirmed(name, rank) for rank in self._ranks]))

    def _nonces(self) -> list[str | None]:
        return [self._read(_nonce_of(rank)) for rank in self._ranks]

    def _roll(self) -> list[str | None]:
        text = self._read("roll")
        roll: list[str | None] = [] if text is None else json.loads(text)
        return roll

    def _read(self, key: str) -> str | None:
        """Return None for a key that is absent; `get` would wait for it."""
        if not self._store.check([key]):
            return None
        text: str = self._store.get(key).decode()
        return text

    def _who_is_missing(self, patience_s: float) -> str:
        """Name the ranks that never came; if all did, those that have not confirmed the roll."""
        nonces, name = self._nonces(), _name_of(self._roll())
        missing = [rank for rank in self._ranks if nonces[rank] is None] or [
            rank for rank in self._ranks if not self._store.check([_confirmed(name, rank)])
        ]
        named = ", ".join(map(str, missing)) or "none, but rank 0 has not said go"
        return (
            f"rank {self._rank} of {len(self._ranks)} waited {patience_s:g} s for the others; "
            f"missing: {named}. Are all nodes started, with the same rendezvous?"
        )


def _name_of(roll: Sequence[str | None]) -> str:
    return hashlib.sha256(json.dumps(roll).encode()).hexdigest()[:16]


def _nonce_of(rank: int) -> str:
    return f"nonce/{rank}"


def _confirmed(name: str, rank: int) -> str:
    return f"{name}/confirmed/{rank}"


def _go(name: str) -> str:
    return f"{name}/go"
