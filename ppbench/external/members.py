"""The ranks of a pipeline of a foreign job with its replicas, and a communicator between them.

The communicator is ppbench's own, over gloo, and torch's registry does not know it.
`dist.new_group` would not do: by default it is collective over all ranks of the job, and if only
the members call it, it is named after how many groups each of them has, so that it hangs where that
differs, or makes the script's own next group hang.

Before they talk, the ranks `meet` over the job's store, where no rank can hang: the others learn
that one does not come or has given up. They wait for less than NCCL's watchdog lets the script's
own messages wait, which torchtitan sets to 100 s.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from engine.run.p2p.fabric import Processes
from ppbench.errors import UsageError

PATIENCE_S = 60
_POLL_S = 0.01
_GAVE_UP = "gave up"
_made: Counter[Processes] = Counter()  # how often these ranks have attached; the same on each rank


class Members:
    """The ranks of a pipeline and its replicas. Every call but `give_up` and `close` blocks."""

    def __init__(self, ranks: Processes, num_replicas: int, backend: str) -> None:
        """`ranks` are the job's: those of the first replica in their order, then the next one's."""
        self.ranks, self.num_replicas, self.backend = ranks, num_replicas, backend
        self.rank = ranks.index(dist.get_rank())
        _made[self.ranks] += 1
        name = f"ppbench/{'_'.join(map(str, self.ranks))}/{_made[self.ranks]}"
        c10d: Any = dist.distributed_c10d  # whose private names torch's stubs leave out
        self._store = c10d.PrefixStore(name, c10d._get_default_store())
        self._group: Any = None

    @property
    def replica(self) -> int:
        """That of this rank."""
        return self.rank // (len(self.ranks) // self.num_replicas)

    def name_of(self, rank: int) -> str:
        """Name a member for people."""
        if self.num_replicas == 1:
            return f"rank {rank} of the pipeline"
        replica, in_pipeline = divmod(rank, len(self.ranks) // self.num_replicas)
        return f"rank {in_pipeline} of replica {replica}"

    def meet(self, where: str, text: str) -> list[str]:
        """Return every member's text, once all are there; `where` differs at each meeting.

        Raises UsageError if one gives up or does not come.
        """
        keys = [f"{where}/{rank}" for rank in range(len(self.ranks))]
        self._store.set(keys[self.rank], text)
        until_s = time.monotonic() + PATIENCE_S
        while True:
            is_late = time.monotonic() > until_s
            if self._store.check([_GAVE_UP]):
                raise UsageError(self._store.get(_GAVE_UP).decode())
            absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            if not absent:
                break
            if is_late:
                self.give_up(
                    f"{self.name_of(absent[0])} did not reach {where} within {PATIENCE_S} s; every "
                    "rank of the pipeline, and of its replicas, must"
                )
            time.sleep(_POLL_S)
        return [self._store.get(key).decode() for key in keys]

    def post(self, what: str, text: str) -> None:
        """Leave a text where rank 0 finds it; `what` differs each time."""
        self._store.set(f"{what}/{self.rank}", text)

    def posted(self, what: str) -> list[str] | None:
        """Take every member's text if all are there, which are then gone; does not wait."""
        keys = [f"{what}/{rank}" for rank in range(len(self.ranks))]
        if not self._store.check(keys):
            return None
        texts = [self._store.get(key).decode() for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return texts

    def give_up(self, reason: str) -> None:
        """Let every rank that waits now or later fail with `reason`. Never raises."""
        with contextlib.suppress(Exception):
            self._store.set(_GAVE_UP, reason)

    @property
    def _gloo(self) -> Any:
        """The communicator. It is made when it is first needed, after a meeting."""
        if self._group is None:
            c10d: Any = dist.distributed_c10d
            patience = timedelta(seconds=PATIENCE_S)
            self._group = c10d.ProcessGroupGloo(self._store, self.rank, len(self.ranks), patience)
        return self._group

    def close(self) -> None:
        """End the communicator's threads."""
        self._group = None

    def gather_objects(self, ours: Any, processes: Processes) -> list[Any]:
        """Return every member's object, in the pipeline's order, on all of them."""
        data = torch.frombuffer(bytearray(pickle.dumps(ours)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in processes]
        self._gloo.allgather(sizes, torch.tensor([len(data)])).wait()
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = data
        theirs = [torch.zeros_like(padded) for _ in processes]
        self._gloo.allgather(theirs, padded).wait()
        parts = (their[: int(size)] for their, size in zip(theirs, sizes, strict=True))
        return [pickle.loads(bytes(part.numpy())) for part in parts]  # noqa: S301  # our own

    def place_in(self, processes: Processes) -> int:  # noqa: ARG002  # all are members
        return self.rank

    def send(self, tensor: torch.Tensor, place: int, processes: Processes) -> None:  # noqa: ARG002
        self._gloo.send([tensor], place, 0).wait()

    def receive(self, tensor: torch.Tensor, place: int, processes: Processes) -> None:  # noqa: ARG002
        self._gloo.recv([tensor], place, 0).wait()


def members_of(stage: Any, replicas: Processes | None) -> Members:
    """Return the members of a stage's pipeline, and of its replicas where the stages show them.

    `replicas` are the job's ranks that have this rank's stages. Collective over the pipeline, and
    blocks, where the job has other ranks. Raises UsageError.
    """
    group = stage.group if stage.group is not None else dist.group.WORLD
    backend = str(dist.get_backend(group))
    pipeline = Members(tuple(dist.get_process_group_ranks(group)), 1, backend)
    if dist.get_world_size() == len(pipeline.ranks):
        return pipeline
    texts = pipeline.meet("attach() with its replicas", json.dumps(replicas))
    columns = [json.loads(text) for text in texts]
    if not any(columns):
        return pipeline
    pipeline.close()
    places = {
        None if column is None else (column.index(own), len(column))
        for own, column in zip(pipeline.ranks, columns, strict=True)
    }
    if len(places) > 1:
        raise UsageError(
            f"the replicas of ranks {', '.join(map(str, pipeline.ranks))} are the ranks "
            f"{', '.join(map(str, columns))}; expected the same number of each, in one order"
        )
    ranks = tuple(itertools.chain(*zip(*columns, strict=True)))
    return Members(ranks, len(columns[0]), backend)
