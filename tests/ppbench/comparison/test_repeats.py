"""How often launches on a disturbed machine are made again."""

import pytest

from ppbench.comparison.repeats import is_lacking, most_repeats, num_taken

X, OK = True, False


@pytest.mark.parametrize(
    ("disturbed", "num_launches", "is_more", "num"),
    [
        ([], 3, True, 0),
        ([OK, OK], 3, True, 2),
        ([OK, OK, OK], 3, False, 3),
        ([OK, OK, OK, OK, OK], 3, False, 3),  # launches beyond those looked at
        ([OK, X, OK], 3, True, 3),
        ([OK, X, OK, OK], 3, False, 4),
        ([X, X, OK, OK], 3, False, 4),  # one repeat for three launches, no more
        ([X, X, X, X, X, X], 4, False, 6),
        ([X], 1, False, 1),  # a single launch is not repeated
    ],
)
def test_a_disturbed_launch_is_replaced_by_the_next_as_far_as_is_allowed(
    disturbed, num_launches, is_more, num
):
    assert is_lacking(disturbed, num_launches) is is_more
    assert num_taken(disturbed, num_launches) == num


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
def test_launching_ends_however_disturbed_the_machine_is(share):
    for num_launches in range(1, 20):
        disturbed = []
        while is_lacking(disturbed, num_launches):
            disturbed.append(len(disturbed) < share * 20)
        assert num_launches <= len(disturbed) <= num_launches + most_repeats(num_launches)
        assert num_taken(disturbed, num_launches) == len(disturbed)


def test_later_launches_change_nothing_of_an_earlier_look():
    disturbed = [OK, X, OK, OK, X, OK, OK, X, X, OK]
    for num_launches in (2, 3, 4, 5):
        taken = num_taken(disturbed, num_launches)
        for end in range(taken, len(disturbed)):
            assert num_taken(disturbed[:end], num_launches) == taken
