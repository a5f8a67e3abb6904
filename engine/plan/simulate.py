"""Predicts the spans of a program: what would happen with given costs and transfers.

The simulator emits the same `Span` that the executor measures, so that every figure can be
computed for a plan as for a run. It walks the program once; the cost grows with its length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.plan.action import COMPUTE_OPS, Action, Op
from engine.plan.lower import Channel, channel_of, incoming, outgoing
from engine.plan.program import Program
from engine.plan.rules import execution_order, facts_made, facts_needed
from engine.plan.spans import Lane, Span

Cost = Callable[[Action], int]
"""Nanoseconds that a compute action takes."""


@dataclass(frozen=True)
class TransferModel:
    """A message takes `latency_ns` plus its bytes over `bytes_per_s`; one at a time per channel."""

    latency_ns: int = 0
    bytes_per_s: float = float("inf")
    message_bytes: int = 0

    @property
    def duration_ns(self) -> int:
        return self.latency_ns + round(self.message_bytes / self.bytes_per_s * 1e9)


FREE_TRANSFERS = TransferModel()


def simulate(program: Program, cost: Cost, transfers: TransferModel = FREE_TRANSFERS) -> list[Span]:
    """Spans of one step (step 0) that starts at 0 ns, transfers included.

    Transfers overlap compute. `program` holds compute actions only (transfers follow from the
    placement). Raises ProgramError if the program can never finish.
    """
    spans: list[Span] = []
    fact_at: dict[Action, int] = {}  # when a fact became true on the rank that made it
    arrival_at: dict[Action, int] = {}  # when a RECV's message was there
    rank_free = [0] * program.world_size
    channel_free: dict[Channel, int] = {}
    for rank, action in execution_order(program):
        receive = incoming(action, program)
        needed = facts_needed(action, program.num_stages)
        local = [fact_at[f] for f in needed if program.placement.ranks[f.stage] == rank]
        arrived = arrival_at[receive] if receive is not None else 0
        start = max(rank_free[rank], arrived, *local, 0)
        end = start + cost(action)
        rank_free[rank] = end
        spans.append(
            Span(0, rank, Lane.COMPUTE, action.stage, action.op, action.microbatch, start, end, 0)
        )
        fact_at.update(dict.fromkeys(facts_made(action), end))
        if (send := outgoing(action, program)) is not None:
            spans += _transfer(program, send, end, transfers, channel_free, arrival_at)
    return spans


def _transfer(
    program: Program,
    send: Action,
    ready_ns: int,
    transfers: TransferModel,
    channel_free: dict[Channel, int],
    arrival_at: dict[Action, int],
) -> tuple[Span, Span]:
    """Both ends of one message, and its arrival noted."""
    channel = channel_of(send)
    op = Op.RECV_F if send.op is Op.SEND_F else Op.RECV_B
    receive = Action(channel.target, op, send.microbatch)
    start = max(ready_ns, channel_free.get(channel, 0))
    end = start + transfers.duration_ns
    channel_free[channel] = arrival_at[receive] = end
    ranks, moved = program.placement.ranks, transfers.message_bytes
    microbatch = send.microbatch
    return (
        Span(0, ranks[channel.source], Lane.SEND, *send[:2], microbatch, start, end, moved),
        Span(0, ranks[channel.target], Lane.RECV, *receive[:2], microbatch, start, end, moved),
    )


def peak_activations(program: Program) -> list[int]:
    """For each rank, the most microbatch activations it holds at once, over all its stages.

    A forward adds one; the action that makes W true (B or W) releases it.
    """
    peaks = []
    for row in program.actions:
        held = peak = 0
        for action in row:
            if action.op is Op.F:
                held += 1
                peak = max(peak, held)
            elif action.op in (Op.B, Op.W):
                held -= 1
        peaks.append(peak)
    return peaks


def draw_timeline(spans: list[Span], unit_ns: int = 1) -> str:
    """Compute spans as a text grid, one column per `unit_ns`; idle is `.`."""
    compute = [span for span in spans if span.op in COMPUTE_OPS]
    num_columns = max((span.end_ns for span in compute), default=0) // unit_ns
    num_ranks = max((span.rank for span in compute), default=-1) + 1
    grid = [["."] * num_columns for _ in range(num_ranks)]
    for span in compute:
        for column in range(span.start_ns // unit_ns, span.end_ns // unit_ns):
            grid[span.rank][column] = f"{span.op.value}{span.microbatch}"
    width = max((len(cell) for row in grid for cell in row), default=0)
    return "\n".join(
        f"rank {rank}: " + " ".join(cell.ljust(width) for cell in row).rstrip()
        for rank, row in enumerate(grid)
    )
