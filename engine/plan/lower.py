"""Adds the transfers to a program, and proves that the result cannot hang.

A message travels on a channel, and a channel keeps order. SEND follows its producer. A policy
decides where RECV is posted:

    compute order     F0        F1        B0
    just_in_time      RECV0 F0  RECV1 F1  ...     each transfer is exposed
    early, 1 ahead    RECV0 RECV1 F0  RECV2 F1    transfer 1 hides behind F0

`early` posts a receive a bounded number of compute actions ahead of its consumer: far enough for
the transfer to hide, not so far that buffers pile up or that a receive is posted before a send
that its peer is waiting for (pytorch issues 188833 and 175225).

What has to keep order with what depends on how channels are shared. The engine gives each directed
stage edge its own; with fewer, legal programs can hang, which `prove_no_deadlock` detects.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from engine.arrays import filled, run
from engine.plan import kernels
from engine.plan.check import prove_no_deadlock
from engine.plan.program import Program
from engine.plan.rules import check_facts, kinds_of, num_links
from engine.plan.table import Table

DEFAULT_LOOK_AHEAD = 1


class Policy(StrEnum):
    """Where receives are posted."""

    EARLY = "early"
    JUST_IN_TIME = "just_in_time"


def lower(
    program: Program, policy: Policy = Policy.EARLY, look_ahead: int = DEFAULT_LOOK_AHEAD
) -> Program:
    """The program with SEND and RECV inserted; each rank's compute order is unchanged.

    `look_ahead` is how many compute actions ahead of its consumer `early` posts a receive. Receives
    of one channel keep the order in which its sender produces them. A program that has transfers of
    its own keeps them, but no collectives. Raises ProgramError if the result could hang.
    """
    if look_ahead < 0:
        raise ValueError(f"look_ahead is {look_ahead}; expected at least 0")
    lowered = program = program.without_collectives()
    if not program.has_transfers:
        check_facts(program)
        ahead = min(look_ahead, program.table.num_actions) if policy is Policy.EARLY else 0
        table, width, links = program.table, program.num_microbatches, num_links(program)
        kinds = kinds_of(program.placement, width)
        sent = filled(0, links * width), filled(0, links * width)  # in which order
        num_sent = filled(0, links)
        run(table.num_actions, kernels.order_messages, table.arrays, kinds, width, num_sent, *sent)
        crossings = zip(program.num_of_kind, kinds.edge, strict=True)
        num_messages = sum(num for num, edge in crossings if edge != kernels.NONE)
        size = table.num_actions + 2 * num_messages
        out = Table(filled(0, len(table) + 1), *(filled(0, size) for _ in range(3)))
        posted = filled(0, links)
        arguments = table.arrays, kinds, width, ahead, sent, posted, program.mates, out.arrays
        run(table.num_actions, kernels.insert_transfers, *arguments)
        lowered = replace(program, actions=out)
    prove_no_deadlock(lowered)
    return lowered
