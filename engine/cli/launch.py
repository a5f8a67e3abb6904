"""The ranks of a run: how they meet, and how what is wrong on one of them ends all."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

from engine.cli.options import OptionError
from engine.plan.schedules.registry import ScheduleError

T = TypeVar("T")

PATIENCE = timedelta(days=1)
"""Ranks wait for one that tokenises a data set; torchrun ends them when a rank dies."""


class RefusedError(Exception):
    """A rank found something wrong, and it has been said."""


@dataclass(frozen=True)
class Launch:
    """The ranks of this run as torchrun's environment names them; without it there is one."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> Launch:
        def number(name: str, alone: int) -> int:
            return int(os.environ.get(name, alone))

        return cls(
            number("RANK", 0),
            number("WORLD_SIZE", 1),
            number("LOCAL_RANK", 0),
            number("LOCAL_WORLD_SIZE", 1),
        )

    def gather(self, ours: T) -> list[T]:
        """Every rank's object. Blocks until all are here; the ranks meet at the first call.

        The default process group carries these alone; tensors go by the groups of `Fabric`.
        """
        if self.world_size == 1:
            return [ours]
        import torch.distributed as dist

        if not dist.is_initialized():
            self._meet()
        theirs: list[Any] = [None] * self.world_size
        dist.all_gather_object(theirs, ours)
        return theirs

    def _meet(self) -> None:
        """Make the default process group.

        A prefix per restart (torchrun --max-restarts) keeps gloo from reading the addresses of the
        dead ranks in the agent's store (pytorch issue 135712).
        """
        import torch.distributed as dist
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public

        from engine.interfaces import InterfaceError
        from engine.rank_store import store_of_ranks

        try:
            store = store_of_ranks(PATIENCE)
        except InterfaceError as error:
            self.say(f"rank {self.rank}: {error}")
            sys.exit(2)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        own = PrefixStore(f"train-attempt-{attempt}", store)
        dist.init_process_group(
            "gloo", store=own, rank=self.rank, world_size=self.world_size, timeout=PATIENCE
        )

    def attempt(self, work: Callable[[], T]) -> T:
        """Do what needs no other rank; when it cannot be done on one, no rank goes on.

        Blocks until all ranks have tried. What is wrong on several is said by the first of them.
        """
        result: T | None = None
        problem: str | None = None
        try:
            result = work()
        except Exception as error:
            if not is_known(error):
                raise
            problem = str(error)
        problems = self.gather(problem)
        if any(one is not None for one in problems):
            self._say_once(problem, problems)
            self.gather(None)  # torchrun ends the others with the first to leave: all have spoken
            raise RefusedError
        return cast(T, result)

    def _say_once(self, ours: str | None, problems: list[str | None]) -> None:
        if ours is not None and ours not in problems[: self.rank]:
            is_everywhere = problems.count(ours) == self.world_size
            self.say(ours if is_everywhere else f"rank {self.rank}: {ours}")

    @staticmethod
    def say(problem: str) -> None:
        print(f"error: {problem}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Blocks until all ranks are done."""
        if self.world_size > 1:
            import torch.distributed as dist

            dist.barrier()
            dist.destroy_process_group()


def is_known(error: Exception) -> bool:
    """Whether a user can cause it, and the message says all."""
    if isinstance(error, OptionError | ScheduleError):
        return True
    from engine.model.data import DataError
    from engine.model.partition import PartitionError
    from engine.model.stage_module import ModelError
    from engine.plan.rules import ProgramError
    from engine.run.snapshot import SnapshotError

    return isinstance(error, ModelError | PartitionError | DataError | ProgramError | SnapshotError)
