from __future__ import annotations

from datetime import UTC, datetime, timedelta

from tracked import CASE, STEADY, add_launches

from ppbench.comparison.launches import MEASURED_ALIKE, fresh, keys_of, newest_launches
from ppbench.store import Store

ONE, OTHER = "0e" * 20, "07" * 20
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def newest(store: Store, **how: bool) -> list[str]:
    return list(newest_launches(store.runs(), **how)["run_id"])


def test_the_newest_row_of_each_launch_counts_but_for_interrupted_ones(store):
    add_launches(store, STEADY[:1], ONE)
    (new,) = add_launches(store, STEADY[:1], ONE)
    add_launches(store, STEADY[:1], ONE, status="interrupted")
    (elsewhere,) = add_launches(store, STEADY[:1], ONE, fingerprint="f9")
    (shorter,) = add_launches(store, STEADY[:1], ONE, measure_steps=1)
    assert newest(store) == [new, elsewhere, shorter]


def test_launches_of_other_commits_and_changes_are_others_where_states_are_told_apart(store):
    (first,) = add_launches(store, STEADY[:1], ONE)
    (changed,) = add_launches(store, STEADY[:1], ONE, is_dirty=True, changes="c4")
    (last,) = add_launches(store, STEADY[:1], OTHER)
    assert newest(store) == [last]
    assert newest(store, by_state=True) == [first, changed, last]


def test_a_key_is_the_same_whatever_else_its_column_holds(store):
    add_launches(store, STEADY[:1], ONE, measure_steps=50)
    (alone,) = keys_of(store.runs())
    add_launches(store, STEADY[:1], ONE, measure_steps=None)
    mixed, unknown = keys_of(store.runs())
    assert alone == mixed == (CASE.case_id, "f1f2", "", "", "50", "", "")
    assert dict(zip(MEASURED_ALIKE, unknown, strict=True))["measure_steps"] == ""


def test_fresh_are_launches_of_the_last_hour_by_the_code_of_the_newest(store):
    def ago(minutes: float) -> dict[str, str]:
        return {"created_at": (NOW - timedelta(minutes=minutes)).isoformat()}

    add_launches(store, STEADY[:1], ONE, **ago(61))
    add_launches(store, STEADY[:1], ONE, code="01d", **ago(30))
    mine = add_launches(store, STEADY[:2], ONE, **ago(20))
    assert list(fresh(store.runs(), NOW)["run_id"]) == mine
    assert fresh(store.runs(), NOW + timedelta(days=1)).empty
