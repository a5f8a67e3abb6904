"""Memory that is freed is used again without the system, and given back when asked."""

import resource
import sys

import pytest
import torch
from ranks import in_a_process

from engine.run.heap import give_back_freed_memory, keep_freed_memory
from engine.run.memory import process_peak_bytes, reset_process_peak

MIB = 2**20


def microbatch():
    return [torch.ones(size * MIB, dtype=torch.uint8) for size in (1, 40, 3, 60)]


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        microbatch()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident():
    reset_process_peak()
    return process_peak_bytes()


def faults_and_bytes_given_back():
    """New pages of microbatches, otherwise and while memory is kept; and what is given back."""
    torch.set_num_threads(1)
    faults()  # until every size has found its place
    otherwise = faults()
    keep_freed_memory()
    faults()
    count, held = faults(), resident()
    give_back_freed_memory()
    return otherwise, count, held - resident()


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_memory_is_kept_for_what_comes_next_until_it_is_given_back():
    """Five microbatches need new pages until memory is kept, and hardly any afterwards."""
    faults_otherwise, faults, given_back = in_a_process(faults_and_bytes_given_back)
    assert faults < 200 < faults_otherwise
    assert given_back > 90 * 2**20
