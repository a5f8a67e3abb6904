"""The shell completes names."""

import pytest
from stored_runs import demo_store
from typer.testing import CliRunner

from ppbench.cli.app import app
from ppbench.store import Store


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("completion")
    demo_store(place / "results")
    (place / "mine.toml").write_text("")
    return place


@pytest.fixture
def completed(folder, monkeypatch):
    monkeypatch.chdir(folder)

    def run(*words):
        line = {"COMP_WORDS": " ".join(["ppbench", *words]), "COMP_CWORD": str(len(words))}
        shell = {"_PPBENCH_COMPLETE": "complete_bash", **line}
        return CliRunner().invoke(app, [], prog_name="ppbench", env=shell).stdout.split()

    return run


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sch"], ["schedules"]),
        (["schedules", "draw", "zb"], ["zb_h1", "zb_h2", "zbv"]),
        (["schedules", "li"], ["list"]),
        (["simulate", "--schedule", "af"], ["afab"]),
        (["sweep", "qu"], ["quick"]),
        (["sweep", "min"], ["mine.toml"]),
        (["sweep", "x", "--set", "micro"], ["microbatches="]),
        (
            ["sweep", "x", "--set", "runtime="],
            ["runtime=engine", "runtime=torch", "runtime=single"],
        ),
        (["sweep", "x", "--only", "schedule=zb_"], ["schedule=zb_h1", "schedule=zb_h2"]),
        (["ls", "--columns", "run_id,rank"], ["run_id,ranks"]),
        (["ls", "--sort", "micro"], ["microbatches"]),
        (["compare", "--metric", "tok"], ["tokens_per_s"]),
        (["figure", "thr"], ["throughput"]),
        (["export", "--table", "ed"], ["edges"]),
        (["ls", "--so"], ["--sort"]),
        (["show", "las"], ["last"]),
    ],
    ids=" ".join,
)
def test_names_are_completed(completed, words, expected):
    assert completed(*words) == expected


def test_runs_are_completed_by_both_ends_newest_first(completed, folder):
    store = Store(folder / "results")
    short = store.short_ids(store.runs(["run_id"])["run_id"])
    run_id, end = list(short.items())[-1]
    assert completed("show", "2026")[0] == run_id
    assert completed("show", end) == [end]
    assert len(completed("report", "2026")) == len(short)


def test_a_missing_store_completes_no_run(completed):
    assert completed("show", "--results", "none", "") == ["last"]
