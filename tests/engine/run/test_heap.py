"""Memory that is freed is used again without the system, and given back when asked."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
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

if sys.argv[1] == "kept":
    keep_freed_memory()
faults()  # until every size has found its place
count, held = faults(), resident()
give_back_freed_memory()
print(count, held - resident())
"""


def of_a_process(how):
    """Page faults of five microbatches, and bytes that are given back afterwards."""
    command = [sys.executable, "-c", SCRIPT, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return tuple(map(int, done.stdout.split()))


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_memory_is_kept_for_what_comes_next_until_it_is_given_back():
    faults, given_back = of_a_process("kept")
    faults_otherwise, _ = of_a_process("as it comes")
    assert faults < 200 < faults_otherwise
    assert given_back > 90 * 2**20
