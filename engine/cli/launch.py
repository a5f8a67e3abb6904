"""The ranks of a run: how they meet, and how an error on one of them ends all."""

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
"""Time limit of collectives: a rank may tokenise a data set while the others wait for it."""


class RefusedError(Exception):
    """A rank cannot go on, and its error message has been printed."""


@dataclass(frozen=True)
class Launch:
    """This process's place among the ranks, from torchrun's environment; alone without it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> Launch:
        def number(name: str, default: int) -> int:
            return int(os.environ.get(name, default))

        return cls(
            number("RANK", 0),
            number("WORLD_SIZE", 1),
            number("LOCAL_RANK", 0),
            number("LOCAL_WORLD_SIZE", 1),
        )

    def gather(self, ours: T) -> list[T]:
        """Every rank's object. Blocks until all ranks call it; the first call connects them.

        Only these objects use the default process group; tensors use the groups of `Fabric`.
        """
        if self.world_size == 1:
            return [ours]
        import torch.distributed as dist

        if not dist.is_initialized():
            from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public

            from engine.interfaces import InterfaceError
            from engine.rank_store import store_of_ranks

            try:
                store = store_of_ranks(PATIENCE)
            except InterfaceError as error:
                self.say(f"rank {self.rank}: {error}")
                sys.exit(2)
            # A prefix per restart (torchrun --max-restarts) keeps gloo from reading the dead ranks'
            # addresses in the agent's store (pytorch issue 135712).
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            own = PrefixStore(f"train-attempt-{attempt}", store)
            dist.init_process_group(
                "gloo", store=own, rank=self.rank, world_size=self.world_size, timeout=PATIENCE
            )
        theirs: list[Any] = [None] * self.world_size
        dist.all_gather_object(theirs, ours)
        return theirs

    def attempt(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; raises RefusedError on all of them if it fails on any.

        Blocks until all ranks have run it. The first rank of those with an error prints it.
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
        if any(other is not None for other in problems):
            if problem is not None and problem not in problems[: self.rank]:
                is_everywhere = problems.count(problem) == self.world_size
                self.say(problem if is_everywhere else f"rank {self.rank}: {problem}")
            self.gather(None)  # torchrun ends all ranks with the first, so all have printed before
            raise RefusedError
        return cast(T, result)

    @staticmethod
    def say(problem: str) -> None:
        print(f"error: {problem}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the process group. Blocks until all ranks are done."""
        if self.world_size > 1:
            import torch.distributed as dist

            dist.barrier()
            dist.destroy_process_group()


def is_known(error: Exception) -> bool:
    """Whether a user can cause the error, so that its message suffices."""
    if isinstance(error, OptionError | ScheduleError):
        return True
    from engine.model.data import DataError
    from engine.model.partition import PartitionError
    from engine.model.stage_module import ModelError
    from engine.plan.rules import ProgramError
    from engine.run.snapshot import SnapshotError

    return isinstance(error, ModelError | PartitionError | DataError | ProgramError | SnapshotError)
