import operator

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored_runs import demo_store

from ppbench.config.case import CASE_KEYS, Case
from ppbench.errors import UsageError
from ppbench.store import RUNS, Condition, read_conditions

COMPARE = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
OPERATORS = st.sampled_from(sorted(COMPARE))
NUMBERS = [c.name for c in RUNS if c.type in ("int64", "double") and c.name != "seq_len"]


def read(*texts):
    return list(read_conditions(texts))


def test_keys_are_columns_or_keys_of_sweep_files():
    assert read("train.microbatch_size=2") == read("train_microbatch_size = 2")
    assert read("ranks>=2 and microbatches=8") == read("world_size>=2 and num_microbatches=8")
    assert read("status=ok") == [Condition("status", "=", ("ok",))]
    for key in CASE_KEYS:
        assert key == "device" or read(f"{key}=null")[0].key == key.replace(".", "_")


def test_several_are_joined_with_and_or_repeated():
    wanted = [Condition("status", "=", ("ok",)), Condition("world_size", ">=", (4,))]
    assert read("status=ok and world_size>=4") == read("status=ok", "world_size >= 4") == wanted
    assert read('error="this and that" AND launch<1') == [
        Condition("error", "=", ("this and that",)),
        Condition("launch", "<", (1,)),
    ]


def test_values_are_read_as_the_column_asks():
    for text, value in (
        ("train_compile=true", True),
        ("seq_len=variable", "variable"),
        ("schedule=gpipe", "afab"),
        ("schedule=of_another_version", "of_another_version"),
        ("emulated.F_ms=2", "[2.0]"),
        ("model.partition=[3,5]", "[3, 5]"),
        ("memory_limit=2048 MiB", "2 GiB"),
        ("step_ns>1e9", 1e9),
        ("commit='12'", "12"),
        ("commit=12e4", "12e4"),
        ("error_rank=null", None),
        ("train_recompute_stages=[true, false]", "[true, false]"),  # JSON, as it is stored
        ("is_dirty=FALSE", False),
        ("train.learning_rate=.5", 0.5),
        ("world_size=04", 4),
    ):
        (condition,) = read(text)
        assert condition == Condition(condition.key, condition.operator, (value,))
    assert read("world_size=[2, 4]") == [Condition("world_size", "=", (2, 4))]


@given(st.text())
def test_any_text_is_read_or_refused(text):
    try:
        assert all(isinstance(one, Condition) for one in read(text))
    except UsageError as error:
        assert str(error).startswith("--where: ")


TEXTS = st.text(st.characters(blacklist_characters="\"'[]", blacklist_categories=["Cs"])).filter(
    lambda text: text not in ("null", "") and text == text.strip()
)


@given(st.sampled_from(["error", "commit", "cautions"]), OPERATORS, TEXTS)
def test_quoted_text_is_taken_as_it_is(column, compare, text):
    assert read(f'{column}{compare}"{text}"') == [Condition(column, compare, (text,))]


@given(
    st.lists(
        st.tuples(st.sampled_from(NUMBERS), OPERATORS, st.integers(-(2**63), 2**63 - 1)),
        unique_by=lambda one: one[0],
    )
)
def test_whole_numbers_read_back(wanted):
    text = " and ".join(f"{column} {compare} {value}" for column, compare, value in wanted)
    found = read(*([text] if wanted else []))
    assert found == [Condition(column, compare, (value,)) for column, compare, value in wanted]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = demo_store(tmp_path_factory.mktemp("conditions"))
    failed = {"run_id": "20270101", "status": "crash", "error_rank": 1, **Case().settings()}
    store.write_run({**failed, "seq_len": "variable", "step_ns": None}, {})
    store.compact(pytest.fail)
    return store


@pytest.fixture(scope="module")
def stored(store):
    return store.runs()


@given(
    st.sampled_from(["world_size", "num_microbatches", "tokens_per_s", "step_ns"]),
    OPERATORS,
    st.sampled_from([1, 2, 4, 8, 600.0, 1000, 1100.5, 56e6]),
)
def test_conditions_choose_what_pandas_chooses(store, stored, column, compare, value):
    runs = stored
    cells = runs[column]
    expected = COMPARE[compare](cells, value) & (cells.notna() | (compare == "!="))
    found = store.runs(where=[Condition(column, compare, (value,))])
    pd.testing.assert_frame_equal(found, runs[expected].reset_index(drop=True), check_dtype=False)


def test_null_is_equal_to_nothing_but_null(store):
    def found(text):
        return list(store.runs(["run_id"], read(text))["run_id"])

    every = list(store.runs()["run_id"])
    assert found("error_rank=null") == every[:-1]
    assert found("error_rank!=null") == found("error_rank=1") == every[-1:]
    assert found("error_rank!=1") == every[:-1]
    assert found("error_rank<1") == []
    assert found("seq_len=variable") == every[-1:]
    assert found("error_rank=[1, 2]") == every[-1:]
    assert found("error_rank!=[1, 2]") == every[:-1]
    assert list(store.runs(["run_id"], read("error_rank=null", "error_rank=1"))["run_id"]) == every


def test_columns_and_the_newest_are_those_asked_for(store):
    every = store.runs()
    some = store.runs(["status", "run_id"], newest=2)
    assert list(some) == ["status", "run_id"]
    assert list(some["run_id"]) == list(every["run_id"][-2:])
    assert store.runs(["status"], newest=0).empty
    assert list(store.runs(["run_id"], read("status=ok"), newest=3)["run_id"]) == list(
        every[every["status"] == "ok"]["run_id"][-3:]
    )
