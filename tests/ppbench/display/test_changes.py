"""What is said of the spans that changed, and of those of which nothing can be said."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from stored_runs import MS
from tracked import stretched

from ppbench.analysis.breakdown import breakdown, launch_figures
from ppbench.display.changes import BY_AXIS, BY_COMMIT, moved_sentences

STEP_NS = 56 * MS
JITTERS = (1.0, 1.001, 0.999)
STEADY = [launch_figures(stretched({}, jitter)) for jitter in JITTERS]


def told(factors: Sequence[float], why: str = BY_COMMIT) -> list[str]:
    """What is said where B of stage 1 takes so many times as long in each launch of head."""
    head = [
        launch_figures(stretched({(1, "B"): factor}, jitter))
        for factor, jitter in zip(factors, JITTERS, strict=True)
    ]
    return moved_sentences(breakdown(STEADY, head, STEP_NS), why)


@pytest.mark.parametrize("why", [BY_COMMIT, BY_AXIS])
def test_spans_too_noisy_to_tell_are_named_and_nothing_is_concluded_from_them(why: str) -> None:
    first, *rest = told((1.4, 2.6, 4.6), why)
    assert first == "too noisy to name a cause; largest: B of stage 1, x2.6 [0.6, 11.2], open"
    assert not [sentence for sentence in rest if "only" in sentence or why in sentence]


def test_a_small_change_that_is_open_is_a_percentage() -> None:
    (first, *_) = told((0.95, 1.0, 1.2))
    assert first.startswith("too noisy to name a cause; largest: B of stage 1, +")
    assert first.endswith("], open")


def test_that_nothing_changed_is_said_where_the_intervals_exclude_it() -> None:
    assert told((1.0, 1.0, 1.0)) == ["no compute, optimizer, transfer or collective time changed"]


def test_a_change_that_is_sure_is_the_cause_however_noisy_it_is() -> None:
    assert told((1.5, 1.5, 1.51))[0].startswith("compute of stage 1 changed: B")
