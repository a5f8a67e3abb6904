"""Finds the programs of cases with `schedule = "auto"`, before their ranks start.

emulated stages --------------------------------> solver --program-N.json--> ranks
a model --costs of its layers, measured here----/
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pandas as pd

from engine.model.descriptions import Facts, Identity
from engine.model.partition import PartitionError
from engine.plan.program import Program
from ppbench.config.case import Case
from ppbench.config.programs import identity_of
from ppbench.errors import UsageError, first_line
from ppbench.run.failures.evidence import Diagnosis
from ppbench.run.job import Attempt, Event, Job, Journal, keep_program
from ppbench.run.records import write_failure
from ppbench.store import new_run_id

Found = dict[Case, Program | str]
"""The program of each case, or why there is none."""


def find_programs(
    cases: Iterable[Case], facts: Mapping[Identity, Facts], results: Path, found: Found
) -> None:
    """Add the programs of cases that have none yet. Takes seconds for each."""
    for case in cases:
        if case not in found:
            try:
                found[case] = program_found(case, facts, results)
            except (UsageError, PartitionError) as error:
                found[case] = str(error)


def program_found(case: Case, facts: Mapping[Identity, Facts], results: Path) -> Program:
    """The program of a case. Raises PartitionError, and UsageError where there is none."""
    # Here, so that other sweeps start without the solver.
    from ppbench.planning.automatic import partition_of, program_of_costs, program_of_times
    from ppbench.planning.solving import one_by_one
    from ppbench.planning.space import placements_of
    from ppbench.run.costs import costs_here, of_one_replica

    if case.is_emulated:
        return program_of_times(case)
    if case.world_size == 1 and case.memory_limit == Case.memory_limit:
        (placement,) = placements_of(1, case.stages_per_rank)
        alone = one_by_one(placement, case.num_microbatches)  # it waits for nobody
        return replace(alone, schedule=case.schedule)
    known = facts[identity_of(case)]
    longest = case.seq_len if isinstance(case.seq_len, int) else case.data_max_seq_len
    longest = known.targets_per_sample or min(longest, known.max_positions or longest)
    modes = {*case.train_recompute_stages} or {case.train_recompute}
    settings = tuple((case.train_microbatch_size, is_on) for is_on in sorted(modes))
    costs = of_one_replica(costs_here(case, longest, settings, results), case)
    return program_of_costs(case, partition_of(case, costs, known), costs)


def hand_over(job: Job, folder: Path, found: Found) -> None:
    """Keep the programs of a launch's cases for its ranks; a case without one gets its row.

    Raises StoreError.
    """
    for index, item in enumerate(job.items):
        program = found.get(item.case)
        if isinstance(program, Program):
            keep_program(folder, index, program)
        elif program is not None:
            begun = Attempt(index, new_run_id(), 1)
            diagnosis = Diagnosis("invalid", program, None, [], None, 0, pd.DataFrame())
            write_failure(job, item, begun, diagnosis)
            noted: Event = {"index": index, "run_id": begun.run_id}
            outcome: Event = {"status": diagnosis.status, "summary": first_line(program)}
            Journal(folder).add({"event": "case", **noted})
            Journal(folder).add({"event": "row", **noted, **outcome})
