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
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from engine.plan.action import COMPUTE_OPS, Action, Op
from engine.plan.lower import counterpart, incoming, outgoing
from engine.plan.program import Placement, Program
from engine.plan.rules import fact_needed
from engine.plan.spans import COLUMNS, Span, lane_of
from ppbench.errors import UsageError
from ppbench.external.kineto import Trace, check_pattern, named_ranges, read_trace
from ppbench.external.record import (
    RecordedRun,
    RunMetadata,
    check_legal,
    check_name,
    named_program,
    settings_from_text,
    write_run,
)
from ppbench.external.steps import (
    Clock,
    RankTrace,
    Steps,
    Timed,
    check_whole,
    chosen_steps,
    clocks_of,
    computations,
    named_stages,
    steps_of,
)
from ppbench.store import Store, check_writable

IMPORTED = "imported"


@dataclass(frozen=True)
class Imported:
    """The run that was stored."""

    run_id: str
    num_steps: int
    world_size: int
    schedule: str
    clocks: list[Clock]
    job_size: int | None  # its ranks, of this pipeline and others


def import_traces(
    paths: Sequence[Path],
    name: str,
    results: Path,
    *,
    schedule: str | None = None,
    pattern: str | None = None,
    steps: Sequence[int] = (),
    tokens_per_step: int | None = None,
    settings: Sequence[str] = (),
) -> Imported:
    """Read one pipeline's traces, a file per rank, and store them as a run.

    `settings` are KEY=VALUE; without `steps` all are stored. Raises UsageError, StoreError.
    """
    check_name(name, "--name")
    known = settings_from_text(settings)
    sources = _ranks_in_order(paths, None if pattern is None else check_pattern(pattern))
    ranks = [steps_of(source) for source in sources]
    chosen = chosen_steps(ranks, steps)
    check_whole(ranks, chosen)
    rows = tuple(tuple(computations(steps[chosen[0]])) for steps in ranks)
    program = _program_of(sources, rows, schedule)
    check_legal(program)
    clocks = clocks_of([s.trace.hostname for s in sources], _slack(program, ranks, chosen))
    spans = list(_spans(program, ranks, chosen, clocks))
    recorded = RecordedRun(
        IMPORTED,
        program,
        pd.DataFrame(spans, columns=list(COLUMNS)),
        [_rank_row(source, clock) for source, clock in zip(sources, clocks, strict=True)],
        _facts(sources),
    )
    check_writable(results, "--results")
    device = "cuda" if any(source.trace.kernels for source in sources) else "cpu"
    metadata = RunMetadata(name, {"device": device, **known}, tokens_per_step)
    run_id = write_run(recorded, metadata, Store(results))
    job_size = sources[0].trace.world_size
    return Imported(run_id, len(chosen), program.world_size, program.schedule, clocks, job_size)


def _ranks_in_order(paths: Sequence[Path], pattern: re.Pattern[str] | None) -> list[RankTrace]:
    """Read the traces; rank 0 has the first stage, or else is the first of the job."""
    traces = [read_trace(path) for path in paths]
    _check_ranks(traces)
    _check_num_ranks(traces)
    by_job = sorted(
        enumerate(traces), key=lambda item: item[0] if item[1].rank is None else item[1].rank
    )
    sources = [
        RankTrace(rank, trace, named_ranges(trace, pattern))
        for rank, (_, trace) in enumerate(by_job)
    ]
    stages = [named_stages(source) for source in sources]
    _check_stages(sources, stages)
    if all(stages):
        order = sorted(range(len(sources)), key=lambda rank: min(stages[rank]))
        return [dataclasses.replace(sources[old], rank=new) for new, old in enumerate(order)]
    return sources


def _check_ranks(traces: Sequence[Trace]) -> None:
    """Check that each file is of another rank, and that all or none name their rank."""
    seen: dict[int, Path] = {}
    for trace in traces:
        if trace.rank is None:
            continue
        if trace.rank in seen:
            raise UsageError(
                f"{trace.path}: belongs to rank {trace.rank}, as does {seen[trace.rank]}; give one "
                "file per rank"
            )
        seen[trace.rank] = trace.path
    if seen and len(seen) < len(traces):
        unnamed = next(trace.path for trace in traces if trace.rank is None)
        raise UsageError(
            f"{unnamed}: does not name its rank, though others do; put it into the file's name, "
            "such as rank3.json"
        )


def _check_num_ranks(traces: Sequence[Trace]) -> None:
    """Check that there is a file of each rank: not every form of ranges names its stage."""
    given, sizes = len(traces), {trace.world_size for trace in traces} - {None}
    if len(sizes) > 1:
        listed = " and ".join(sorted(map(str, sizes)))
        raise UsageError(
            f"{traces[0].path}: the traces are of jobs of {listed} ranks; give those of one"
        )
    size = max(map(int, filter(None, sizes)), default=given)
    if size % given or (given == 1 < size and traces[0].has_messages):
        raise UsageError(
            f"{traces[0].path}: is of a job of {size} ranks, of which {given} cannot be a whole "
            "pipeline; give the files of all ranks of the pipeline"
        )


def _check_stages(sources: Sequence[RankTrace], stages: Sequence[set[int]]) -> None:
    """Check that the ranks are one pipeline: no stage twice, and none missing."""
    owners: dict[int, RankTrace] = {}
    for source, stages_of_rank in zip(sources, stages, strict=True):
        for stage in sorted(stages_of_rank):
            if stage in owners:
                raise UsageError(
                    f"{source.trace.path}: has stage {stage}, as has {owners[stage].trace.path}: "
                    "these are two pipelines (data parallel); import one at a time"
                )
            owners[stage] = source
    actions = [named for source in sources for named in source.named]
    named = {action.stage for action in actions if action.stage is not None}
    ahead = {(a.stage or 0) + 1 for a in actions if a.op in (Op.SEND_F, Op.RECV_B)}
    highest = max((named | ahead) - {None}, default=0)
    missing = [stage for stage in range(int(highest) + 1) if owners and stage not in owners]
    if missing:
        raise _missing_stage(missing[0], sources)


def _missing_stage(stage: int, sources: Sequence[RankTrace]) -> UsageError:
    return UsageError(
        f"stage {stage} is in none of the {len(sources)} traces, though the pipeline has it: ranks "
        "are missing; give the files of all ranks of the pipeline"
    )


def _program_of(
    sources: Sequence[RankTrace], rows: tuple[tuple[Action, ...], ...], name: str | None
) -> Program:
    owners: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            owners.setdefault(action.stage, rank)
    if set(owners) != set(range(len(owners))):
        raise _missing_stage(min(set(range(max(owners) + 1)) - set(owners)), sources)
    placement = Placement(tuple(owners[stage] for stage in range(len(owners))), len(rows))
    microbatches = {action.microbatch for row in rows for action in row}
    return named_program(Program(IMPORTED, placement, max(microbatches) + 1, rows), name)


def _needs(program: Program) -> Iterator[tuple[int, Action, int, Action]]:
    """Yield, for each message: the rank and action that make it, those that need it."""
    makers = {a: rank for rank, row in enumerate(program.actions) for a in row}
    for rank, row in enumerate(program.actions):
        for action in row:
            fact = None if action.op is Op.W else fact_needed(action, program.num_stages)
            if fact is None:
                continue
            maker = fact if fact in makers else fact._replace(op=Op.B)
            if makers[maker] != rank:
                yield makers[maker], maker, rank, action


def _times(step: Sequence[Timed]) -> dict[Action, Timed]:
    return {timed.action: timed for timed in step}


def _slack(
    program: Program, ranks: Sequence[Steps], chosen: Sequence[int]
) -> dict[tuple[int, int], int]:
    """Return the least slack of each pair of ranks; see `ppbench.external.steps`."""
    least: dict[tuple[int, int], int] = {}
    needs = list(_needs(program))
    for number in chosen:
        times = [_times(steps[number]) for steps in ranks]
        for maker, made, taker, taken in needs:
            slack_ns = times[taker][taken].start_ns - times[maker][made].end_ns
            pair = (maker, taker)
            least[pair] = min(least.get(pair, slack_ns), slack_ns)
    return least


def _spans(
    program: Program, ranks: Sequence[Steps], chosen: Sequence[int], clocks: Sequence[Clock]
) -> Iterator[Span]:
    for number in chosen:
        times: dict[Action, tuple[int, Timed]] = {}
        for rank, (steps, clock) in enumerate(zip(ranks, clocks, strict=True)):
            for timed in steps[number]:
                moved = timed._replace(
                    start_ns=timed.start_ns - clock.offset_ns, end_ns=timed.end_ns - clock.offset_ns
                )
                if timed.action.op is Op.OPT:
                    yield _span(number, rank, moved.action, moved.start_ns, moved.end_ns)
                else:
                    times[timed.action] = rank, moved
        for action, (rank, timed) in times.items():
            if action.op in COMPUTE_OPS:
                yield _span(number, rank, action, timed.start_ns, timed.end_ns)
        yield from _messages(number, program, times)


def _span(step: int, rank: int, action: Action, start_ns: int, end_ns: int) -> Span:
    stage, op, microbatch = action
    return Span(step, rank, lane_of(op), stage, op, microbatch, start_ns, end_ns, 0)


def _messages(
    step: int, program: Program, times: Mapping[Action, tuple[int, Timed]]
) -> Iterator[Span]:
    """Yield both ends of each message: as seen on devices, else while its receiver waited."""
    idle_from = _idle_from(program, times)
    for maker, made, taker, taken in _needs(program):
        send, receive = outgoing(made, program), incoming(taken, program)
        assert send is not None
        assert receive == counterpart(send)
        seen = [times[end][1] for end in (send, receive) if end in times]
        if len(seen) == 2 and all(timed.is_seen for timed in seen):
            for rank, end, timed in zip((maker, taker), (send, receive), seen, strict=True):
                yield _span(step, rank, end, timed.start_ns, timed.end_ns)
            continue
        sent_ns, went_on_ns = times[made][1].end_ns, times[taken][1].start_ns
        waits_ns = min(idle_from.get(taken, sent_ns), went_on_ns)
        yield _span(step, maker, send, sent_ns, max(sent_ns, went_on_ns))
        yield _span(step, taker, receive, waits_ns, max(waits_ns, went_on_ns))


def _idle_from(program: Program, times: Mapping[Action, tuple[int, Timed]]) -> dict[Action, int]:
    """Return, for each computation but a rank's first, when the one before it ended."""
    return {
        action: times[before][1].end_ns
        for row in program.actions
        for before, action in itertools.pairwise(row)
    }


def _rank_row(source: RankTrace, clock: Clock) -> dict[str, object]:
    trace = source.trace
    gpu = trace.gpus[0] if trace.gpus and trace.kernels else None
    source_of_clock = "shared with rank 0" if clock.is_shared else "aligned by messages"
    return {
        "hostname": trace.hostname,
        "device": gpu or ("cuda" if trace.kernels else "cpu"),
        "clock": "rank 0" if source.rank == 0 else source_of_clock,
        "clock_offset_ns": clock.offset_ns,
        "clock_error_ns": clock.error_ns,
    }


def _facts(sources: Sequence[RankTrace]) -> dict[str, object]:
    """Return the columns of `runs` about the machines, as far as the traces name them."""
    first = sources[0].trace
    hosts = sorted({source.trace.hostname or "" for source in sources})
    environment = {
        "hostname": first.hostname,
        "gpus": [{"name": name, "memory_bytes": None} for name in first.gpus],
        "backend": first.backend,
    }
    facts = json.dumps([first.gpus, first.backend, hosts], sort_keys=True)
    return {
        "fingerprint": hashlib.sha256(facts.encode()).hexdigest()[:12],
        "environment": json.dumps(environment),
        "transport": first.backend,
        "sweep_file": None,
    }
