"""Tells the replicas of a pipeline apart among the traces of a job's ranks.

    stage      0        1        2        3
    traces   rank 0   rank 1   rank 2   rank 3     replica 0: a file of each stage
             rank 4   rank 5   rank 6   rank 7     replica 1

Ranks that name the same stages are replicas of each other. Which of them form one pipeline is known
from the process groups that the traces list, or else they are taken in the order of their ranks. If
the ranges name no stages, the number of replicas has to be given.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from engine.plan.action import Op
from ppbench.errors import UsageError
from ppbench.external.kineto import Trace, named_ranges, read_traces
from ppbench.external.steps import RankTrace, named_stages

_SUFFIXES = (".json", ".json.gz")


def pipelines_in(
    paths: Sequence[Path], pattern: re.Pattern[str] | None, num_replicas: int | None
) -> list[list[RankTrace]]:
    """Read the traces of files and folders; return them by replica and rank. Raises UsageError."""
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        inside = sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES))
        if not inside:
            raise UsageError(f"{path}: has no traces; expected files *.json or *.json.gz")
        files += inside
    traces = [trace for file in files for trace in read_traces(file, pattern)]
    _check_ranks(traces)
    by_job = sorted(
        enumerate(traces), key=lambda item: item[0] if item[1].rank is None else item[1].rank
    )
    sources = [
        RankTrace(rank, trace, named_ranges(trace, pattern))
        for rank, (_, trace) in enumerate(by_job)
    ]
    columns = _columns(sources, num_replicas)
    _check_stages([column[0] for column in columns])
    return [
        [
            dataclasses.replace(
                column[replica],
                rank=rank,
                replica=replica,
                replicas=tuple(other.trace.rank for other in column),
            )
            for rank, column in enumerate(columns)
        ]
        for replica in range(len(columns[0]))
    ]


def _columns(sources: Sequence[RankTrace], num_replicas: int | None) -> list[list[RankTrace]]:
    """Return the traces by rank of the pipeline, and then by replica; the first stage first."""
    stages = [named_stages(source) for source in sources]
    if not all(stages):  # by their numbers alone
        num_each = num_replicas or 1
        size, rest = divmod(len(sources), num_each)
        if rest:
            raise UsageError(
                f"--replicas {num_each}: {len(sources)} traces are not so many pipelines of one "
                "length; give the files of all ranks of each replica"
            )
        listed = {tuple(sorted(group)) for group in sources[0].trace.groups.values()}
        is_strided = tuple(range(0, len(sources), num_each)) in listed
        if is_strided and tuple(range(size)) not in listed:
            return [list(sources[rank * num_each :][:num_each]) for rank in range(size)]
        return [list(sources[rank::size]) for rank in range(size)]
    found: dict[frozenset[int], list[RankTrace]] = {}
    for source, owned in zip(sources, stages, strict=True):
        found.setdefault(frozenset(owned), []).append(source)
    columns = [found[owned] for owned in sorted(found, key=min)]
    fewest, most = min(columns, key=len), max(columns, key=len)
    if len(fewest) < len(most):
        lacking, given = (min(named_stages(column[0])) for column in (fewest, most))
        raise UsageError(
            f"{most[-1].trace.path}: stage {given} is in {len(most)} of the traces, stage "
            f"{lacking} in {len(fewest)}: replicas are incomplete; give the files of all ranks of "
            "each replica"
        )
    if num_replicas not in (None, len(most)):
        raise UsageError(
            f"--replicas {num_replicas}: each stage is in {len(most)} of the {len(sources)} traces"
        )
    # The traces of one pipeline get the same place in all columns.
    places = {source.trace.rank: rank for rank, column in enumerate(columns) for source in column}
    by_rank = {source.trace.rank: source for column in columns for source in column}
    joined = []
    for replica, first in enumerate(columns[0]):
        in_order = [column[replica] for column in columns]
        groups = [
            group
            for group in first.trace.groups.values()
            if sorted(places.get(rank, -1) for rank in group) == list(range(len(columns)))
        ]
        ranks = {source.trace.rank for source in in_order}
        if groups and not any(ranks == set(group) for group in groups):
            in_order = [by_rank[rank] for rank in sorted(groups[0], key=lambda rank: places[rank])]
        joined.append(in_order)
    return [list(column) for column in zip(*joined, strict=True)]


def _check_ranks(traces: Sequence[Trace]) -> None:
    """Check that each file is of another rank, that all or none name theirs, and none is missing.

    Not every form of ranges names its stage.
    """
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


def _check_stages(sources: Sequence[RankTrace]) -> None:
    """Check that the ranks of a replica are one pipeline: no stage twice, and none missing."""
    owners: dict[int, RankTrace] = {}
    for source in sources:
        for stage in sorted(named_stages(source)):
            if stage in owners:
                raise UsageError(
                    f"{source.trace.path}: has stage {stage}, as has {owners[stage].trace.path}, "
                    "but not the same stages; give the traces of one job"
                )
            owners[stage] = source
    actions = [named for source in sources for named in source.named]
    named = {action.stage for action in actions if action.stage is not None}
    ahead = {(a.stage or 0) + 1 for a in actions if a.op in (Op.SEND_F, Op.RECV_B)}
    highest = max((named | ahead) - {None}, default=0)
    missing = [stage for stage in range(int(highest) + 1) if owners and stage not in owners]
    if missing:
        raise missing_stage(missing[0], sources)


def missing_stage(stage: int, sources: Sequence[RankTrace]) -> UsageError:
    """Return the error that the ranks with a stage are not given."""
    return UsageError(
        f"stage {stage} is in none of the {len(sources)} traces, though the pipeline has it: ranks "
        "are missing; give the files of all ranks of the pipeline"
    )
