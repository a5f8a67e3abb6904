"""`ppbench stragglers` of a stored job: who is named, in each format and as a figure."""

from __future__ import annotations

import csv
import json
from io import StringIO

import numpy as np
import pytest
from command import output_of
from stored_runs import run_row

import ppbench
from benchmarks.made_up_jobs import Shape, make
from engine.plan.program import to_json
from ppbench import figures
from ppbench.cli.stragglers import stragglers
from ppbench.config.case import Case
from ppbench.display.formats import Format
from ppbench.errors import StoreError
from ppbench.store import Store

SHAPE = Shape(ranks=4, microbatches=6, replicas=12)
JOB = make(SHAPE, "worker", np.random.default_rng(5))
_, REPLICA, RANK = JOB.culprit
CASE = Case(world_size=SHAPE.ranks, num_microbatches=6, replicas=SHAPE.replicas, device="emulated")


def stored(folder, program=SHAPE.lowered, spans=None):
    """A store with the job as its only run; by default with all its spans."""
    run = run_row(1, CASE) | {"program": to_json(program)}
    spans = JOB.walk.spans() if spans is None else spans
    Store(folder).write_run(run, {"spans": spans.assign(waiting_ns=0)})
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return stored(tmp_path_factory.mktemp("stragglers") / "results")


def printed(results, how: Format) -> str:
    return output_of(stragglers, "last", results=results, how=how)


def test_the_first_sentence_names_the_slow_worker_and_its_cost(results):
    text = printed(results, Format.table)
    sentence = text.split("\n\n")[1].splitlines()[0]
    assert sentence.startswith(f"A worker is slow, rank {RANK} of replica {REPLICA}: ")
    assert json.loads(printed(results, Format.json))["sentences"][0] == sentence
    worst = f"{REPLICA:>7}   {'·' * RANK}█{'·' * (SHAPE.ranks - 1 - RANK)}"
    assert text.splitlines()[text.splitlines().index(worst) - 1].startswith("replica   S of ranks")


def test_programs_get_every_worker(results):
    found = json.loads(printed(results, Format.json))
    rows = list(csv.DictReader(StringIO(printed(results, Format.csv))))
    assert len(rows) == len(found["by_worker"]) == SHAPE.replicas * SHAPE.ranks
    assert found["slowness"] == pytest.approx(JOB.slowness, rel=0.01)
    assert (found["cause"]["replica"], found["cause"]["index"]) == (REPLICA, RANK)


def test_collectives_that_the_stored_program_lacks_are_placed_by_the_policy_of_the_run(
    results, tmp_path
):
    other = stored(tmp_path / "results", SHAPE.lowered.without_collectives())
    assert printed(other, Format.json) == printed(results, Format.json)


def test_the_heat_map_has_a_cell_for_each_worker(results):
    (cells,) = figures.stragglers(ppbench.load(results)).data
    z = np.array(cells.z)
    assert z.shape == (SHAPE.replicas, SHAPE.ranks)
    assert np.unravel_index(z.argmax(), z.shape) == (REPLICA, RANK)


def test_a_run_without_all_its_computations_is_refused(tmp_path):
    spans = JOB.walk.spans()
    folder = stored(tmp_path / "results", spans=spans[spans["op"] != "B"])
    with pytest.raises(StoreError, match="0B0 has no span in some step"):
        printed(folder, Format.table)
