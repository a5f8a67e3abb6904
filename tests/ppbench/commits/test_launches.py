from __future__ import annotations

from datetime import UTC, datetime, timedelta

from tracked import CASE, STEADY, add_launches

from ppbench.comparison.launches import MEASURED_ALIKE, fresh, keys_of

ONE, OTHER = "0e" * 20, "07" * 20
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def test_a_key_is_the_same_whatever_else_its_column_holds(store):
    add_launches(store, STEADY[:1], ONE, measure_steps=50)
    (alone,) = keys_of(store.runs())
    add_launches(store, STEADY[:1], ONE, measure_steps=None)
    mixed, unknown = keys_of(store.runs())
    assert alone == mixed == (CASE.case_id, "f1f2", "", "", "50", "", "", "")
    assert dict(zip(MEASURED_ALIKE, unknown, strict=True))["measure_steps"] == ""


def test_fresh_are_launches_of_the_last_hour_by_the_code_of_the_newest(store):
    def ago(minutes: float) -> dict[str, str]:
        return {"created_at": (NOW - timedelta(minutes=minutes)).isoformat()}

    add_launches(store, STEADY[:1], ONE, **ago(61))
    add_launches(store, STEADY[:1], ONE, code="01d", **ago(30))
    mine = add_launches(store, STEADY[:2], ONE, **ago(20))
    assert list(fresh(store.runs(), NOW)["run_id"]) == mine
    assert fresh(store.runs(), NOW + timedelta(days=1)).empty
