"""The loop of launches and looks, driven by made-up launches: when it ends, why, and how truly."""

import random
from collections import Counter

import pytest

from ppbench.statistics import sequential
from ppbench.statistics.until_decided import (
    MOST_LAUNCHES,
    Look,
    Looks,
    Stop,
    look_until_decided,
    planned_looks,
)
from ppbench.statistics.verdicts import Metric, Pair, Verdict

SPEED = Metric("tokens_per_s", higher_is_better=True, in_points=False)
NUM_SEQUENCES = 2000


class Script:
    """A launcher whose figures are made up: normal noise around 1000, head changed by a share."""

    def __init__(self, change=0.0, noise=0.008, seed=1, stored=0, cases=1):
        drawn = random.Random(seed)
        self.sides = [
            [
                [1000 * (1 + by) * (1 + drawn.gauss(0, noise)) for _ in range(MOST_LAUNCHES)]
                for by in (0.0, change)
            ]
            for _ in range(cases)
        ]
        self.num_done, self.num_made, self.num_looks = stored, 0, 0

    def bring_to(self, num_launches):
        self.num_made += max(0, num_launches - self.num_done)
        self.num_done = max(self.num_done, num_launches)

    def judged(self, look):
        assert self.num_done >= look.num_launches  # never at launches that are not made
        self.num_looks += 1
        num = look.num_launches
        return look.judge(SPEED, [Pair(tuple(b[:num]), tuple(h[:num])) for b, h in self.sides])

    def run(self, most=MOST_LAUNCHES):
        return look_until_decided(planned_looks(most), self.bring_to, self.judged, list)


def test_a_clear_change_ends_at_the_first_look():
    script = Script(change=-0.1)
    (change,), looks = script.run()
    assert (change.verdict, looks.stop) == (Verdict.slower, Stop.decided)
    assert (looks.num_launches, looks.num_taken, script.num_made) == (3, 1, 3)


def test_without_an_answer_all_launches_are_made_and_the_reason_is_said():
    script = Script(change=-0.015, noise=0.05, seed=5)
    _, looks = script.run(6)
    assert looks.stop is Stop.most
    assert not looks.is_decided
    assert (looks.num_launches, looks.num_taken, script.num_made) == (6, 4, 6)
    assert looks.level_spent == pytest.approx(sequential.LEVEL)  # all of it, and no more


def test_it_ends_when_the_last_case_is_decided():
    several = Script(noise=0.004, seed=8, cases=4)
    alone = [Script(noise=0.004, seed=8, cases=4) for _ in range(4)]
    changes, looks = several.run()
    assert looks.stop is Stop.decided
    assert all(sequential.is_decided([change]) for change in changes)
    for place, script in enumerate(alone):
        script.sides = [several.sides[place]]
    assert looks.num_launches >= max(script.run()[1].num_launches for script in alone)


@pytest.mark.parametrize("stored", range(MOST_LAUNCHES + 1))
@pytest.mark.parametrize(("change", "seed"), [(0.0, 3), (-0.02, 4), (-0.1, 5)])
def test_a_start_that_goes_on_ends_as_one_that_was_not_stopped(stored, change, seed):
    whole = Script(change, seed=seed)
    resumed = Script(change, seed=seed, stored=stored)
    first, again = whole.run(), resumed.run()
    assert again == first
    assert resumed.num_made == max(0, whole.num_done - stored)
    assert resumed.num_looks == whole.num_looks  # none in between, and none left out


def test_the_level_spent_grows_to_the_whole_of_it():
    planned = planned_looks(12)
    spent = [Looks(Look(place, planned), Stop.most).level_spent for place in range(len(planned))]
    assert spent == sorted(spent)
    assert 0 < spent[0] < 0.2 * sequential.LEVEL
    assert spent[-1] == pytest.approx(sequential.LEVEL)


def test_as_data_the_looks_say_how_many_when_and_why():
    _, looks = Script(change=-0.1).run()
    assert looks.as_dict() == {
        "num_looks": 1,
        "launches": [3],
        "max_launches": 12,
        "level_spent": pytest.approx(sequential.LEVEL * (3 / 12) ** sequential.SPENDING),
        "is_decided": True,
        "stop": "decided",
    }


def test_fewer_launches_than_a_verdict_needs_are_refused():
    with pytest.raises(ValueError, match="2 launches; a verdict needs 3"):
        planned_looks(2)
    assert planned_looks(3) == (3,)


@pytest.fixture(scope="module")
def without_change():
    return [Script(seed=seed).run() for seed in range(NUM_SEQUENCES)]


def test_of_many_sequences_without_a_change_at_most_1_percent_claim_one(without_change):
    verdicts = Counter(changes[0].verdict for changes, _ in without_change)
    false = verdicts[Verdict.slower] + verdicts[Verdict.faster]
    assert false / NUM_SEQUENCES <= 0.01 + 3 * (0.01 * 0.99 / NUM_SEQUENCES) ** 0.5
    assert verdicts[Verdict.same] / NUM_SEQUENCES >= 0.8


def test_without_a_change_8_launches_or_fewer_say_so_on_average(without_change):
    decided = [looks.num_launches for _, looks in without_change if looks.is_decided]
    assert sum(decided) / len(decided) <= 8


def test_a_change_of_10_percent_is_found_in_4_launches_on_average():
    runs = [Script(change=-0.1, seed=seed).run() for seed in range(200)]
    assert all(changes[0].verdict is Verdict.slower for changes, _ in runs)
    assert sum(looks.num_launches for _, looks in runs) / len(runs) <= 4


def test_looking_at_every_launch_by_the_rule_of_one_look_would_claim_falsely_far_more_often():
    """The same launches, judged as if each look were the only one."""
    from ppbench.statistics.verdicts import compare

    false = 0
    for seed in range(400):
        script = Script(seed=seed)
        (base, head), changed = script.sides[0], False
        for num in planned_looks(MOST_LAUNCHES):
            (change,) = compare(SPEED, [Pair(tuple(base[:num]), tuple(head[:num]))])
            changed = changed or (change.p is not None and change.p < sequential.LEVEL)
        false += changed
    assert false / 400 > 0.02
