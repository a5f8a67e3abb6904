import torch

from engine.run.memory import measure_peaks, process_peak_bytes, reset_process_peak, total_bytes

CPU = torch.device("cpu")
MIB = 2**20


def bytes_of(num_mib):
    return torch.empty(num_mib * MIB, dtype=torch.uint8)


def test_the_peak_is_the_most_that_is_alive_at_once():
    def step():
        first = bytes_of(3)
        del first
        second, third = bytes_of(2), bytes_of(2)
        del second, third

    assert measure_peaks(CPU, step, []).peak_bytes == 4 * MIB


def test_what_was_alive_before_counts():
    alive = bytes_of(5)
    assert measure_peaks(CPU, lambda: bytes_of(1), [alive]).peak_bytes == 6 * MIB


def test_views_of_one_storage_count_once():
    whole = bytes_of(2)
    assert total_bytes([whole, whole[:100], whole.view(2, -1)]) == 2 * MIB


def test_the_process_peak_starts_again_when_reset():
    high = torch.ones(400 * MIB, dtype=torch.uint8)
    before = process_peak_bytes()
    del high
    reset_process_peak()
    assert process_peak_bytes() < before - 300 * MIB
