"""`schedule = "auto"` and `memory_limit` in sweep files."""

import pytest
from sweep_files import only_case, read

from engine.plan.check import check
from engine.plan.rules import peak_activations
from engine.plan.schedules.registry import ScheduleError
from ppbench.config.programs import lowered_of, planned_step_ns, program_of
from ppbench.planning.automatic import program_of_times

EMULATED = """\
schedule = "auto"
device = "emulated"
world_size = {ranks}
num_microbatches = 6
stages_per_rank = {stages}
memory_limit = {limit}
[emulated]
F_ms = {times}
I_ms = {times}
W_ms = 3
link_ms = 1
"""
REAL = 'schedule = "auto"\nworld_size = 2\nmemory_limit = {}\n'


@pytest.mark.parametrize(
    ("ranks", "stages", "limit", "times"),
    [(2, 2, 3, [2, 2, 2, 3]), (2, 1, '"none"', [4, 6])],
)
def test_emulated_stages_have_a_program_within_the_limit(tmp_path, ranks, stages, limit, times):
    text = EMULATED.format(ranks=ranks, stages=stages, limit=limit, times=times)
    case = only_case(read(tmp_path, text))
    program = program_of_times(case)
    check(program)
    assert (program.schedule, program.num_stages) == ("auto", ranks * stages)
    assert limit == '"none"' or max(peak_activations(program)) <= limit
    busiest_ns = 6 * (2 * sum(times[ranks - 1 :: ranks]) + 3) * 1_000_000
    assert planned_step_ns(case, lowered_of(case, program)) >= busiest_ns


def test_a_case_alone_has_no_program(tmp_path):
    case = only_case(read(tmp_path, REAL.format('"1536 MiB"')))
    assert (case.memory_limit, case.stages_per_rank) == ("1.5 GiB", 1)
    with pytest.raises(ScheduleError, match="found when the case runs"):
        program_of(case)
