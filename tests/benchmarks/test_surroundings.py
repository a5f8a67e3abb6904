"""A benchmark records its machine and its code."""

from benchmarks.surroundings import read_surroundings
from ppbench.run.machine.environment import available_cores


def test_the_surroundings_name_machine_software_and_code():
    surroundings = read_surroundings()
    words = surroundings.in_words()
    assert surroundings.num_cores == available_cores()
    assert all(
        word in words
        for word in (surroundings.cpu, surroundings.python, surroundings.torch, surroundings.date)
    )
    assert ("with changes" in words) == surroundings.is_dirty
