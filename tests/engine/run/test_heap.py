"""Memory that is freed is used again without the system, and given back when asked."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch
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

faults()  # until every size has found its place
otherwise = faults()
keep_freed_memory()
faults()
count, held = faults(), resident()
give_back_freed_memory()
print(otherwise, count, held - resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_memory_is_kept_for_what_comes_next_until_it_is_given_back():
    """Five microbatches need new pages until memory is kept, and hardly any afterwards."""
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    faults_otherwise, faults, given_back = map(int, done.stdout.split())
    assert faults < 200 < faults_otherwise
    assert given_back > 90 * 2**20
