"""What is asked for is checked before a rank builds anything."""

import pytest
from pipeline import CPU, config

from engine.configuration import lowered_of
from engine.connection import agree
from engine.model.partition import PartitionError
from engine.plan.collectives import Zero3
from engine.plan.lower import Policy
from engine.plan.program import from_csv
from engine.plan.rules import ProgramError
from engine.plan.schedules.registry import ScheduleError, build_program
from engine.run.clock import HostClock
from engine.run.p2p.fabric import Fabric


def test_collectives_of_a_file_that_the_sharding_does_not_allow_are_refused():
    program = from_csv("0F0,0B0,0REDUCE_GRAD\n", "mine")
    settings = config("1f1b", 1, 1, program=program, replicas=2, sharding=Zero3())
    with pytest.raises(ProgramError, match="position 0"):
        lowered_of(settings)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (1, 2)])
def test_a_program_of_other_ranks_or_microbatches_is_refused(num_ranks, num_microbatches):
    program = build_program("1f1b", num_ranks, num_microbatches)
    with pytest.raises(ScheduleError, match=f"has {num_ranks} ranks and {num_microbatches} micro"):
        lowered_of(config("1f1b", 1, 4, program=program))


def test_a_policy_may_be_given_by_its_name():
    assert config("1f1b", 2, 2, policy="early").policy is Policy.EARLY
    with pytest.raises(ValueError, match="soon"):
        config("1f1b", 2, 2, policy="soon")


@pytest.mark.parametrize("partition", ["evenly", (3, 1)])
def test_a_partition_that_several_ranks_cannot_have_one_rank_cannot_have(partition):
    fabric = Fabric(CPU, HostClock(), is_device_shared=False)
    with pytest.raises(PartitionError):
        agree(config("1f1b", 1, 1, partition=partition), fabric)
