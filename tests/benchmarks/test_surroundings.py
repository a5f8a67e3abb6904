"""What a benchmark tells of its machine and code."""

from benchmarks.surroundings import read_surroundings
from ppbench.run.machine.environment import available_cores


def test_the_surroundings_name_machine_software_and_code():
    found = read_surroundings()
    words = found.in_words()
    assert found.num_cores == available_cores()
    assert all(word in words for word in (found.cpu, found.python, found.torch, found.date))
    assert ("with changes" in words) == found.is_dirty
