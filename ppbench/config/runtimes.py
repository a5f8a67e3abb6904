"""What each of our runtimes cannot run, told before anything starts. Others tell on the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from engine.model.answers import Problem
from ppbench.config.case import VARIABLE, Case
from ppbench.runtimes import ENGINE

TORCH_SCHEDULES: Final = {
    "afab": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Our name -> torch's: the same order of actions."""
SPLIT: Final = ("interleaved_zb", "zbv", "dualpipev")
"""Those that split the backward."""


def problems_of_runtime(case: Case) -> Iterator[Problem]:
    """What is wrong with the case's runtime."""
    if case.runtime == ENGINE:
        return
    if case.is_emulated:
        message = f'device = "emulated" is for runtime = "{ENGINE}" alone: others compute'
        yield Problem("runtime", f"{message}, got {case.runtime!r}".replace("'", '"'))
        return
    if case.runtime == "single":
        yield from _of_single(case)
    elif case.runtime == "torch":
        yield from _of_torch(case)


def _of_single(case: Case) -> Iterator[Problem]:
    if case.world_size != 1:
        message = f'"single" has no pipeline and needs world_size 1, got {case.world_size}'
        yield Problem("runtime", message)
    elif case.schedule != "1f1b":
        message = (
            '"single" runs each microbatch forward and backward, which on one rank is "1f1b"; '
            f'got schedule "{case.schedule}"'
        )
        yield Problem("runtime", message)


def _of_torch(case: Case) -> Iterator[Problem]:
    if case.schedule not in TORCH_SCHEDULES:
        known = ", ".join(TORCH_SCHEDULES)
        yield Problem("runtime", f'"torch" has no schedule "{case.schedule}". It has: {known}')
        return
    if case.seq_len == VARIABLE:
        message = '"torch" fixes the shape of a microbatch; seq_len cannot be "variable"'
        yield Problem("runtime", message)
    if case.schedule == "1f1b" and case.num_microbatches < case.world_size:
        message = (
            f'"torch": its 1F1B needs num_microbatches >= world_size; got num_microbatches '
            f"{case.num_microbatches}, world_size {case.world_size}"
        )
        yield Problem("runtime", message)
    if case.train_compile and case.schedule in SPLIT:
        message = '"torch" cannot split the backward of what is compiled; leave train.compile out'
        yield Problem("runtime", message)
    if case.transfer_policy != Case.transfer_policy:
        message = 'has a meaning only with runtime = "engine": torch places its own receives'
        yield Problem("transfer.policy", message)
    if case.transfer_look_ahead != Case.transfer_look_ahead:
        message = 'has a meaning only with runtime = "engine": torch places its own receives'
        yield Problem("transfer.look_ahead", message)
