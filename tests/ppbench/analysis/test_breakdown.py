from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import pytest
from stored_runs import MS, spans, store_of_replicas
from tracked import stretched

from ppbench.analysis.breakdown import Kind, Moved, SpanClass, breakdown, launch_figures
from ppbench.judge.verdicts import Verdict

STEP_NS = 56 * MS
F1, B1 = SpanClass(Kind.compute, 1, "F"), SpanClass(Kind.compute, 1, "B")
OPTIMIZER1 = SpanClass(Kind.optimizer, 1)
JITTERS = (1.0, 1.001, 0.999, 1.0005, 0.9995)


def launches(stretch: Mapping[tuple[int, str], float]) -> list[dict]:
    return [launch_figures(stretched(stretch, jitter)) for jitter in JITTERS]


def moved(base: list[dict], head: list[dict]) -> dict[SpanClass, Moved]:
    return {one.of: one for one in breakdown(base, head, STEP_NS)}


def test_a_launch_has_one_figure_per_class():
    figures = launch_figures(pd.concat([spans(1), spans(2, 100)], ignore_index=True))
    told = {one: (of.ns / MS, of.num_per_step) for one, of in figures.items()}
    assert told == {
        SpanClass(Kind.compute, 0, "F"): (10, 1),
        F1: (10, 1),
        SpanClass(Kind.compute, 0, "B"): (20, 1),
        B1: (12, 1),
        SpanClass(Kind.optimizer, 0): (4, 1),
        OPTIMIZER1: (4, 1),
        SpanClass(Kind.transfer, 0, target=1): (2, 1),
        SpanClass(Kind.transfer, 1, target=0): (2, 1),
        SpanClass(Kind.waiting, 0): (56 - 30, 1),
        SpanClass(Kind.waiting, 1): (56 - 22, 1),
    }


def test_replicas_do_the_same_work_and_their_collectives_are_apart(tmp_path):
    store = store_of_replicas(tmp_path)
    of_replicas = store.table("spans", list(store.runs()["run_id"]))
    figures = launch_figures(of_replicas)
    gathers, sums = (
        [figures[SpanClass(Kind.collective, stage, op)] for stage in (0, 1)]
        for op in ("UNSHARD", "REDUCE_GRAD")
    )
    assert [of.ns / MS for of in (*gathers, *sums)] == [2, 2, 4, 4]  # without waiting
    assert [of.num_per_step for of in sums] == [1, 1]
    forward = figures[SpanClass(Kind.compute, 0, "F")]
    assert forward.num_per_step == 4  # microbatches of each replica
    alike = pd.concat([spans(1).assign(replica=replica) for replica in range(3)])
    assert launch_figures(alike) == launch_figures(spans(1))


def test_what_takes_longer_is_named_and_nothing_else():
    changes = moved(launches({}), launches({(1, "F"): 1.08}))
    assert [
        span for span, part in changes.items() if part.has_moved and part.of.kind != Kind.waiting
    ] == [F1]
    ratio = changes[F1].change.ratio
    assert ratio is not None
    assert ratio.estimate == pytest.approx(1.08, abs=1e-6)
    assert changes[F1].contribution_ns == pytest.approx(0.8 * MS, rel=1e-3)
    assert changes[F1].change.verdict is Verdict.slower


def test_causes_come_by_what_they_add_and_waiting_comes_last():
    changes = list(moved(launches({}), launches({(1, "F"): 1.1, (1, "B"): 1.2, (-1, "OPT"): 1.5})))
    optimizers = [SpanClass(Kind.optimizer, 0), OPTIMIZER1]
    assert changes[:4] == [B1, *optimizers, F1]
    assert {one.kind for one in changes[-2:]} == {Kind.waiting}


def test_what_a_step_hardly_feels_has_not_moved():
    changes = moved(launches({}), launches({(-1, "OPT"): 1.05}))  # 0.2 of 56 ms
    assert changes[OPTIMIZER1].change.verdict is Verdict.slower
    assert not changes[OPTIMIZER1].has_moved


def test_one_launch_a_side_is_shown_and_not_tested():
    changes = moved(launches({})[:1], launches({(1, "F"): 1.5})[:1])
    assert not any(part.is_tested or part.has_moved for part in changes.values())
    change = changes[F1].change
    assert (change.base, change.head, change.ratio) == (10 * MS, 15 * MS, None)


def test_a_class_that_one_side_lacks_is_left_out():
    without = [{one: of for one, of in f.items() if one != F1} for f in launches({})]
    assert F1 not in moved(without, launches({}))
