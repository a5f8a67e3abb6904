"""Slices of time: exact sums, whatever lies across their edges."""

import numpy as np
from stored_runs import MS, spans

from ppbench.report.timeline.marks import Step
from ppbench.report.timeline.overview import overview


def seen(num_slices: int, start_ms: float = 0, end_ms: float = 60):
    kinds = [m for m in Step("", spans()).marks() if m.kind.has_text]
    return overview(kinds, 2, start_ms * MS, end_ms * MS, num_slices)


def test_a_span_gives_each_slice_what_lies_in_it():
    # Forward: rank 0 at 0 to 10, rank 1 at 12 to 22; backward: rank 0 at 36 to 56, rank 1 22 to 34.
    forward, backward = seen(4).shares
    np.testing.assert_allclose(forward * 15, [[10, 0, 0, 0], [3, 7, 0, 0]])
    np.testing.assert_allclose(backward * 15, [[0, 0, 9, 11], [0, 8, 4, 0]])


def test_a_part_of_the_step_is_sliced_by_itself():
    forward, _ = seen(2, 8, 12).shares
    np.testing.assert_allclose(forward, [[1, 0], [0, 0]])


def test_a_slice_that_no_op_has_four_fifths_of_is_several():
    assert seen(4).mostly.tolist() == [[0, 0, 1, 1], [0, 2, 1, 0]]


def test_computations_are_counted_where_they_begin():
    assert seen(4).counts.tolist() == [[1, 0, 1, 0], [1, 1, 0, 0]]
