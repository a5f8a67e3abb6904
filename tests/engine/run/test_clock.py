"""A line between two clocks is exact where its ties are, and never further off than it says."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from engine.run.clock import MAX_DRIFT_PPB, Bracket, Line, Tie, line_of_events, line_through

DRIFTS = st.fractions(-1, 1).map(lambda share: share * MAX_DRIFT_PPB * Fraction(999, 10**12))


def test_a_line_goes_through_the_middle_of_its_ties_and_keeps_their_larger_error():
    line = line_through(Tie(0, 5_000, 100), Tie(1_000_000, 1_005_100, 999))
    assert line == Line(500_000, 505_050, 100 / 1_000_000, 1000 + 3)
    assert [line.to_second(time) for time in (0, 500_000, 1_000_000)] == [5_000, 505_050, 1_005_100]
    assert [line.to_first(time) for time in (5_000, 505_050, 1_005_100)] == [0, 500_000, 1_000_000]


def test_clocks_of_a_year_lose_no_nanosecond():
    year_ns = 365 * 86_400 * 10**9
    line = line_through(Tie(year_ns, 7, 0), Tie(year_ns + 10**9, 7 + 10**9, 0))
    assert line.to_second(year_ns + 123_456_789) == 7 + 123_456_789
    assert line.to_first(7 + 123_456_789) == year_ns + 123_456_789


def test_a_line_is_turned_about_its_middle_where_its_ties_are_too_close_to_tell_the_drift():
    line = line_through(Tie(0, 0, 500), Tie(1_000, 1_400, 500))
    assert (line.first_ns, line.second_ns, line.drift) == (500, 700, 0.001)
    at_one_moment = line_through(Tie(10, 20, 3), Tie(10, 20, 3))
    assert (at_one_moment.drift, at_one_moment.to_second(11)) == (0.0, 21)


@given(
    offset=st.integers(-(10**15), 10**15),
    drift=DRIFTS,
    length=st.integers(1, 10**12),
    errors=st.tuples(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6)),
    share=st.fractions(0, 1),
)
def test_between_its_ties_a_line_is_off_by_no_more_than_it_says(
    offset, drift, length, errors, share
):
    def second(first):
        return offset + first + first * drift

    ties = [
        Tie(first, round(second(first)) + error, abs(error))
        for first, error in zip((0, length), errors, strict=True)
    ]
    line, moment = line_through(*ties), round(share * length)
    assert abs(line.to_second(moment) - second(moment)) <= line.error_ns
    assert abs(line.to_first(round(second(moment))) - moment) <= line.error_ns


def test_an_event_happened_in_the_middle_of_its_bracket_give_or_take_half():
    assert Bracket(1_000, 1_600).tie(0, 0) == Tie(0, 1_300, 300)
    assert Bracket(1_000, 1_601).tie(7, 10) == Tie(7, 1_300, 311)


def test_events_are_read_along_the_line_between_two_brackets():
    # Ten milliseconds of the device are 10.001 of the host: 100 ppm.
    line = line_of_events(Bracket(0, 20_000), Bracket(10_000_000, 10_022_000), 10.0)
    assert [line.to_second(device) for device in (0, 5_000_000, 10_000_000)] == [
        10_000,
        5_010_500,
        10_011_000,
    ]
    half, resolution = 11_000, 2 * 501
    assert line.error_ns == half + resolution + 13 + 3  # 13: 0.1 % longer on a faster clock


def test_a_long_step_is_told_less_exactly_as_events_are_read_as_float32():
    brackets = Bracket(0, 2_000), Bracket(60_000_000_000, 60_000_002_000)
    line = line_of_events(*brackets, 60_000.0)
    rounding = 60_000_000_000 >> 24
    assert rounding == 3576
    assert line.error_ns == 1_000 + 2 * (500 + rounding + 1) + 10 + 3
