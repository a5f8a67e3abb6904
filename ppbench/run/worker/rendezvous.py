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


def agree_on_name(store: Store, rank: int, world_size: int, patience_s: float) -> str:
    """Return a name that exactly these processes share. Blocks until all have come.

    The numbers in comments are the module's steps. Raises MeetingError.
    """
    store, nonce, ranks = PrefixStore(_PREFIX, store), uuid.uuid4().hex, range(world_size)

    def read(key: str) -> str | None:
        """Return None for a key that is absent; `get` would wait for it."""
        if not store.check([key]):
            return None
        text: str = store.get(key).decode()
        return text

    def read_nonces() -> list[str | None]:
        return [read(f"nonce/{one}") for one in ranks]

    def read_roll() -> list[str | None]:
        roll: list[str | None] = json.loads(read("roll") or "[]")
        return roll

    def has_confirmed(name: str, some: Sequence[int]) -> bool:
        return bool(store.check([f"{name}/confirmed/{one}" for one in some]))

    until = time.monotonic() + patience_s
    store.set(f"nonce/{rank}", nonce)  # 1
    while time.monotonic() < until:
        if rank == 0:
            nonces = read_nonces()
            if None not in nonces and nonces != read_roll():
                store.set("roll", json.dumps(nonces))  # 2
        roll = read_roll()
        name = _name_of(roll)
        if rank < len(roll) and roll[rank] == nonce:
            store.set(f"{name}/confirmed/{rank}", "yes")  # 3
            # Nonces are read after the confirmations: a late nonce voids them.
            if rank == 0 and has_confirmed(name, ranks) and _name_of(read_nonces()) == name:
                store.set(f"{name}/go", "yes")  # 4
            if store.check([f"{name}/go"]):
                return name
        time.sleep(_POLL_S)
    # Those that never came are missing; if all did, those that have not confirmed the roll.
    nonces, name = read_nonces(), _name_of(read_roll())
    missing = [one for one in ranks if nonces[one] is None] or [
        one for one in ranks if not has_confirmed(name, [one])
    ]
    named = ", ".join(map(str, missing)) or "none, but rank 0 has not said go"
    raise MeetingError(
        f"rank {rank} of {world_size} waited {patience_s:g} s for the others; "
        f"missing: {named}. Are all nodes started, with the same rendezvous?"
    )


def _name_of(roll: Sequence[str | None]) -> str:
    return hashlib.sha256(json.dumps(roll).encode()).hexdigest()[:16]
