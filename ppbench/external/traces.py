"""`ppbench import`: traces of a training run's ranks become a run in the store.

    files -> ranges -> actions -> steps -> one clock -> spans -> row

A trace shows when actions computed. It shows when messages moved only on GPUs, where transfers are
kernels. Elsewhere a message lasts as long as its receiver verifiably waited for it: from when the
sender had made it and the receiver was idle, to when the receiver went on. A transfer hidden behind
computation thus takes no time, which is what it costs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from engine.plan.action import COMPUTE_OPS, Action, Op
from engine.plan.messages import counterpart, incoming, outgoing
from engine.plan.program import Placement, Program
from engine.plan.rules import fact_needed
from engine.plan.spans import COLUMNS, Span, lane_of
from ppbench.errors import UsageError
from ppbench.external.clocks import Clock, clocks_of
from ppbench.external.kineto import check_pattern
from ppbench.external.record import (
    RecordedRun,
    RunMetadata,
    check_legal,
    check_name,
    named_program,
    same_recording,
    settings_from_text,
    write_run,
)
from ppbench.external.replicas import missing_stage, pipelines_in
from ppbench.external.steps import (
    RankTrace,
    Steps,
    Timed,
    check_whole,
    chosen_steps,
    computations,
    issued,
    leave_out_untrained,
    steps_of,
)
from ppbench.store import Store, check_writable
from ppbench.store.columns import IMPORTED

_MEETINGS = (Op.UNSHARD, Op.REDUCE_GRAD)
"""The collectives that take time."""


@dataclass(frozen=True)
class Imported:
    """The run that was stored."""

    run_id: str
    num_steps: int
    world_size: int
    schedule: str
    clocks: list[Clock]
    job_size: int | None  # its ranks, of this pipeline and others
    num_replicas: int
    notes: list[str]  # sentences on what is left out or doubtful

    def name_of(self, number: int) -> str:
        """Name a rank by its number among those of all replicas."""
        replica, rank = divmod(number, self.world_size)
        return f"rank {rank}" + (f" of replica {replica}" if self.num_replicas > 1 else "")


def import_traces(
    paths: Sequence[Path],
    name: str,
    results: Path,
    *,
    schedule: str | None = None,
    pattern: str | None = None,
    replicas: int | None = None,
    steps: Sequence[int] = (),
    tokens_per_step: int | None = None,
    settings: Sequence[str] = (),
) -> Imported:
    """Read the traces of a pipeline, or of all its replicas, and store them as a run.

    There is a file per rank; a folder stands for those in it. `replicas` is needed only where the
    traces name no stages. `settings` are KEY=VALUE; without `steps` all are stored. Raises
    UsageError, StoreError.
    """
    check_name(name, "--name")
    known = settings_from_text(settings)
    found = pipelines_in(paths, None if pattern is None else check_pattern(pattern), replicas)
    sources = list(itertools.chain(*found))
    ranks = [steps_of(source) for source in sources]
    names = [
        f"rank {source.rank}" + (f" of replica {source.replica}" if len(found) > 1 else "")
        for source in sources
    ]
    notes = [
        f"{name}: {doubt}"
        for name, source in zip(names, sources, strict=True)
        for doubt in source.trace.doubts
    ]
    for number, idle in leave_out_untrained(ranks).items():
        reason = f"{names[idle[0]]} has no backward in it that takes time"
        if number in steps:
            raise UsageError(f"step {number}: {reason}; with --step, choose steps that train")
        notes.append(f"step {number} is left out: {reason}")
    chosen = chosen_steps(ranks, steps)
    check_whole(ranks, chosen)
    size = len(found[0])
    parts = [ranks[first : first + size] for first in range(0, len(ranks), size)]
    program = _program_of(found[0], parts, chosen[0], schedule)
    check_legal(program)
    firsts = [tuple(issued(of_rank[chosen[0]])) for of_rank in parts[0]]
    odd = next(
        (
            (source, number)
            for source, of_rank in zip(sources, ranks, strict=True)
            for number in chosen
            if tuple(issued(of_rank[number])) != firsts[source.rank]
        ),
        None,
    )
    if odd is not None:
        source, number = odd
        notes.append(
            f"collectives are left out: rank {source.rank} of replica {source.replica} has others "
            f"in step {number} than that rank of replica 0 in step {chosen[0]}"
        )
    else:
        program = dataclasses.replace(program, actions=firsts)
    clocks = clocks_of([s.trace.hostname for s in sources], _slack(program, parts, chosen))
    spans: list[Span] = []
    for replica, part in enumerate(parts):
        spans += _spans(program, part, chosen, clocks[replica * len(part) :], replica)
    rank_rows = []
    for source, clock in zip(sources, clocks, strict=True):
        trace = source.trace
        gpu = trace.gpus[0] if trace.gpus and trace.kernels else None
        source_of_clock = "shared with rank 0" if clock.is_shared else "aligned by messages"
        rank_rows.append(
            {
                "hostname": trace.hostname,
                "device": gpu or (trace.accelerator if trace.kernels else "cpu"),
                "clock": "rank 0" if source.rank == source.replica == 0 else source_of_clock,
                "clock_offset_ns": clock.offset_ns,
                "clock_error_ns": clock.error_ns,
            }
        )
    first = sources[0].trace  # the machines, as far as the traces name them
    hosts = sorted({source.trace.hostname or "" for source in sources})
    environment = {
        "hostname": first.hostname,
        "gpus": [{"name": name, "memory_bytes": None} for name in first.gpus],
        "backend": first.backend,
    }
    machines = json.dumps([first.gpus, first.backend, hosts], sort_keys=True)
    facts = {
        "fingerprint": hashlib.sha256(machines.encode()).hexdigest()[:12],
        "environment": json.dumps(environment),
        "transport": first.backend,
        "sweep_file": None,
    }
    frame = pd.DataFrame(spans, columns=list(COLUMNS))
    content = pd.util.hash_pandas_object(frame, index=False).to_numpy().tobytes()
    recorded = RecordedRun(
        *(IMPORTED, program, frame, rank_rows, facts),
        source=hashlib.sha256(content).hexdigest()[:12],
    )
    check_writable(results, "--results")
    devices = [source.trace.accelerator for source in sources if source.trace.kernels]
    device = {"device": devices[0] if devices else "cpu"}
    metadata = RunMetadata(name, {**device, **known}, tokens_per_step)
    store = Store(results)
    if earlier := same_recording(recorded, metadata, store):
        notes.append(f"run {earlier} is of the same recording: both count as one launch")
    run_id = write_run(recorded, metadata, store)
    shape = len(chosen), program.world_size, program.schedule
    return Imported(run_id, *shape, clocks, first.world_size, len(parts), notes)


def _program_of(
    sources: Sequence[RankTrace], parts: Sequence[Sequence[Steps]], step: int, name: str | None
) -> Program:
    """Return the program of every replica, without collectives. Raises UsageError."""
    rows, *others = (tuple(tuple(computations(s[step])) for s in part) for part in parts)
    for replica, theirs in enumerate(others, 1):
        rank = next((r for r, row in enumerate(theirs) if row != rows[r]), None)
        if rank is not None:
            raise UsageError(
                f"rank {rank} of replica {replica} has other actions than that of replica 0, or in "
                "another order; import the replicas of one program"
            )
    owners: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            owners.setdefault(action.stage, rank)
    if set(owners) != set(range(len(owners))):
        raise missing_stage(min(set(range(max(owners) + 1)) - set(owners)), sources)
    placement = Placement(tuple(owners[stage] for stage in range(len(owners))), len(rows))
    microbatches = {action.microbatch for row in rows for action in row}
    return named_program(Program(IMPORTED, placement, max(microbatches) + 1, rows), name)


def _needs(program: Program) -> Iterator[tuple[int, Action, int, Action]]:
    """Yield, for each message: the rank and action that make it, those that need it."""
    rows = program.compute_only().actions
    makers = {a: rank for rank, row in enumerate(rows) for a in row}
    for rank, row in enumerate(rows):
        for action in row:
            fact = None if action.op is Op.W else fact_needed(action, program.placement)
            if fact is None:
                continue
            maker = fact if fact in makers else fact._replace(op=Op.B)
            if makers[maker] != rank:
                yield makers[maker], maker, rank, action


def _slack(
    program: Program, parts: Sequence[Sequence[Steps]], chosen: Sequence[int]
) -> dict[tuple[int, int], int]:
    """Return the least slack of each pair of ranks; see `ppbench.external.clocks`."""
    least: dict[tuple[int, int], int] = {}

    def note(first: int, second: int, slack_ns: int) -> None:
        least[first, second] = min(least.get((first, second), slack_ns), slack_ns)

    needs, size = list(_needs(program)), program.world_size
    for number in chosen:
        for replica, part in enumerate(parts):
            offset = replica * size
            times = [{timed.action: timed for timed in steps[number]} for steps in part]
            for maker, made, taker, taken in needs:
                slack_ns = times[taker][taken].start_ns - times[maker][made].end_ns
                note(offset + maker, offset + taker, slack_ns)
            for rank in range(size) if replica else ():
                steps_of_both = part[rank][number], parts[replica - 1][rank][number]
                met = [[t for t in step if t.action.op in _MEETINGS] for step in steps_of_both]
                if [t.action for t in met[0]] != [t.action for t in met[1]]:
                    continue
                for ours, theirs in zip(*met, strict=True):
                    note(offset + rank, offset - size + rank, theirs.end_ns - ours.start_ns)
                    note(offset - size + rank, offset + rank, ours.end_ns - theirs.start_ns)
    return least


def _spans(
    program: Program,
    ranks: Sequence[Steps],
    chosen: Sequence[int],
    clocks: Sequence[Clock],
    replica: int,
) -> Iterator[Span]:
    for number in chosen:
        times: dict[Action, tuple[int, Timed]] = {}
        found: list[tuple[int, Timed]] = []
        for rank, (steps, clock) in enumerate(zip(ranks, clocks, strict=False)):
            for timed in steps[number]:
                moved = timed._replace(
                    start_ns=timed.start_ns - clock.offset_ns, end_ns=timed.end_ns - clock.offset_ns
                )
                is_meeting = timed.action.op in _MEETINGS
                if timed.action.op is Op.OPT or (is_meeting and program.has_collectives):
                    found.append((rank, moved))
                elif not is_meeting:
                    times[timed.action] = rank, moved
        found += [placed for action, placed in times.items() if action.op in COMPUTE_OPS]
        for rank, timed in (*found, *_messages(program, times)):
            stage, op, microbatch = timed.action
            action = lane_of(op), stage, op, microbatch
            taken = timed.start_ns, timed.end_ns, timed.num_bytes
            yield Span(number, rank, *action, *taken, replica)


def _messages(
    program: Program, times: Mapping[Action, tuple[int, Timed]]
) -> Iterator[tuple[int, Timed]]:
    """Yield both ends of each message: as seen on devices, else while its receiver waited."""
    idle_from = {  # for each computation but a rank's first, when the one before it ended
        action: times[before][1].end_ns
        for row in program.compute_only().actions
        for before, action in itertools.pairwise(row)
    }
    for maker, made, taker, taken in _needs(program):
        send, receive = outgoing(made, program), incoming(taken, program)
        assert send is not None
        assert receive == counterpart(send)
        seen = [times[end][1] for end in (send, receive) if end in times]
        if len(seen) == 2 and all(timed.is_seen for timed in seen):
            yield from zip((maker, taker), seen, strict=True)
            continue
        sent_ns, went_on_ns = times[made][1].end_ns, times[taken][1].start_ns
        waits_ns = min(idle_from.get(taken, sent_ns), went_on_ns)
        # A receiver that was busy until it went on has waited for no message: this took no time.
        over_ns = max(sent_ns, went_on_ns) if waits_ns < went_on_ns else sent_ns
        yield maker, Timed(send, sent_ns, over_ns, is_seen=False)
        yield taker, Timed(receive, waits_ns, went_on_ns, is_seen=False)
