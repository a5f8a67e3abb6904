"""What each key of a sweep file takes, what it keeps, and what it refuses with which words."""

import pytest

from ppbench.config.case import CASE_KEYS, SETTINGS, Case, Measure, setting_of
from ppbench.config.kinds import MAX_SEQ_LEN, SHARE, minutes_of, name_from, seconds_of

HUGE = 10**400
NO_NUMBERS = (float("nan"), float("inf"), HUGE, True, "1", None, [1], {})
TAKEN = {
    "name": {"a.b-c_1": "a.b-c_1", "x" * 100: "x" * 100},
    "schedule": {"gpipe": "afab", "1f1b": "1f1b", "auto": "auto", "csv:a.csv": "csv:a.csv"},
    "world_size": {1: 1, 1024: 1024},
    "seq_len": {1: 1, MAX_SEQ_LEN: MAX_SEQ_LEN, "variable": "variable"},
    "stages_per_rank": {1: 1, 1024: 1024, "auto": "auto"},
    "memory_limit": {"none": "none", 7: "7", "2048 MiB": "2 GiB", "900 MB": "900 MB"},
    "model.preset": {"a/b": "a/b", "llama-8m": "llama-8m", "my.code:make": "my.code:make"},
    "model.partition": {"measured": "measured", (3, 0, 5): (3, 0, 5)},
    "model.split_points": {("a", "b"): ("a", "b"), (): ()},
    "model.layers": {"transformer.h": "transformer.h", "": ""},
    "model.seed": {0: 0, 2**63 - 1: 2**63 - 1},
    "model.dtype": {"float64": "float64"},
    "data.source": {"stdlib": "stdlib", "hf:a/b": "hf:a/b", "text:x": "text:x"},
    "train.learning_rate": {1: 1.0, 1e-9: 1e-9},
    "train.weight_decay": {0: 0.0, 2.5: 2.5},
    "train.momentum": {0: 0.0, 0.99: 0.99},
    "train.recompute": {True: True, (True, False): (True, False)},
    "train.compile": {False: False},
    "emulated.F_ms": {2: (2.0,), 0: (0.0,), (1, 2.5): (1.0, 2.5), 0.001: (0.001,)},
    "emulated.gather_ms": {2: (2.0,), 3_600_000: (3_600_000.0,)},
    "emulated.replica_factors": {(1, 1.2): (1.0, 1.2), (1000,): (1000.0,)},
    "emulated.jitter": {0: 0.0, 1: 1.0},
    "measure.budget": {"": "", "90s": "90s", "1.5h": "1.5h"},
    "measure.resolution": {0.001: 0.001, 0.5: 0.5},
    "launch.slurm.time": {90: "90", "2-12:00:00": "2-12:00:00"},
    "launch.slurm.memory_gb": {0: 0.0},
    "launch.torchrun.rendezvous": {"": "", "node1:29400": "node1:29400", "[::1]:1": "[::1]:1"},
    "plan.ranks": {4: (4,), (1, 2): (1, 2), (): ()},
    "plan.stages_per_rank": {2: (2,)},
    "plan.memory": {"": "", "80 GB": "80 GB"},
    "plan.schedules": {("gpipe", "auto"): ("afab", "auto")},
    "plan.costs": {"measure": "measure", "file:a": "file:a"},
}
REFUSED = {
    "name": ("", ".a", "a/b", "x" * 101, 3),
    "schedule": ("csv:", "1f1v", "", 3),
    "runtime": ("enginee", 3),
    "world_size": (0, 1025, 1.0, *NO_NUMBERS),
    "seq_len": (0, MAX_SEQ_LEN + 1, "varying", True),
    "stages_per_rank": (0, 1025, "own"),
    "memory_limit": (0, -1, "lots", "0 GiB", True),
    "model.preset": ("llama-9m", "", "./none", 3),
    "model.partition": (3, "x", (), (-1,), (True,), (1.0,)),
    "model.split_points": ("a", ("a", "a"), ("",), (1,)),
    "model.layers": (3, ("h",)),
    "model.weights": ("mine", True),
    "model.seed": (-1, 2**63),
    "model.trust_remote_code": (1, "yes"),
    "data.source": ("fils:x", "text:", "hf", 3),
    "data.tokenizer": ("", 3),
    "train.learning_rate": (0, -1.0, *NO_NUMBERS),
    "train.weight_decay": (-0.1, *NO_NUMBERS),
    "train.momentum": (1.0, -0.1, *NO_NUMBERS),
    "train.recompute": ((), 1, (1,), "true"),
    "emulated.F_ms": (-2, 1e-7, 3_600_001, (), (2,), "2", HUGE, float("nan"), True),
    "emulated.link_ms": ((), -1),
    "emulated.replica_factors": (0, (0,), (1001,), ("1",)),
    "emulated.jitter": (1.01, -0.1, *NO_NUMBERS),
    "measure.budget": ("soon", "10", "0s", 10),
    "measure.resolution": (0.0009, 0.51, *NO_NUMBERS),
    "launch.slurm.time": ("soon", 0, "1:2:3:4", True),
    "launch.slurm.extra": ({"A": 1}, {"a": False}, {"a": [1]}, 3),
    "launch.torchrun.rendezvous": ("node", "node:0", 3),
    "plan.ranks": (0, (1, 1), (True,), 1.0),
    "plan.stages_per_rank": ((), 0),
    "plan.memory": ("80", "0 B", 80),
    "plan.schedules": ("1f1b", ("1f1b", "1f1b"), ("csv:a",), (3,)),
    "plan.costs": ("file:", "run:a", 3),
}


def as_toml(value):
    """The value as the TOML parser gives it: a tuple stands for an array here."""
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("key", TAKEN)
def test_a_value_is_kept_in_its_one_form(key):
    for value, kept in TAKEN[key].items():
        found = SETTINGS[key].kind.check(as_toml(value))
        assert (found, type(found)) == (kept, type(kept))


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_no_value_is_refused_with_what_is_expected(key):
    for value in REFUSED[key]:
        with pytest.raises(
            ValueError, match=r"expected |unknown |no such folder|listed twice|needs|is a file"
        ):
            SETTINGS[key].kind.check(as_toml(value))


@pytest.mark.parametrize("key", CASE_KEYS)
def test_every_default_is_a_value_of_its_key(key):
    default = SETTINGS[key].default
    if default not in ((), ""):  # none given
        assert SETTINGS[key].kind.check(as_toml(default)) == default
    if default != "auto":
        assert setting_of(Case(), Measure(), key) == default


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("emulated.F_ms", [2], "a list needs one time per stage; give one number for all ranks"),
        ("plan.schedules", ["csv:a.csv"], '"csv:a.csv" is a file; a plan makes programs itself'),
        ("launch.slurm.extra", {"a": [1]}, "a: expected a string, an integer or true; got [1]"),
        ("name", "a\nb", r'got "a\nb" (a string)'),
    ],
)
def test_a_refusal_says_what_is_expected_and_what_it_got(key, value, words):
    with pytest.raises(ValueError) as raised:
        SETTINGS[key].kind.check(value)
    assert words in str(raised.value)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(("written", "share"), [("2%", 0.02), (".5 %", 0.005), (0.1, 0.1), (1, 1)])
def test_a_share_is_a_percentage_or_a_fraction(written, share):
    assert SHARE.check(written) == pytest.approx(share)


@pytest.mark.parametrize("written", ["2", "-1%", "101%", 2, True, None, "x%", float("nan")])
def test_what_is_no_share_is_refused(written):
    with pytest.raises(ValueError, match=r'such as "2%" or 0\.02'):
        SHARE.check(written)


def test_times_have_their_units():
    assert [seconds_of(text) for text in ("90s", "10m", "1.5h", "9")] == [90, 600, 5400, 0]
    times = ("90", "1:30", "1:30:00", "1-1", "2-12:00:00", "1-2:30", "0-0:0:1")
    assert [minutes_of(text) for text in times] == [90, 2, 90, 1500, 3600, 1590, 1]
    wrong = ("x", "", "0:00", "1:", "-1", "1:2:3:4", "1-1:1:1:1", "²")
    assert {minutes_of(text) for text in wrong} == {0}


def test_a_model_in_a_folder_has_one_name(tmp_path, monkeypatch):
    (tmp_path / "my-model").mkdir()
    (tmp_path / "llama-8m").mkdir()
    monkeypatch.chdir(tmp_path)
    whole = str(tmp_path / "my-model")
    for name, kept in {"my-model": "./my-model", "./my-model": "./my-model", whole: whole}.items():
        assert SETTINGS["model.preset"].kind.check(name) == kept
    assert SETTINGS["model.preset"].kind.check("llama-8m") == "llama-8m"


@pytest.mark.parametrize(
    ("stem", "name"),
    [("a b!c", "a-b-c"), ("…", "mine"), ("-x.", "x"), ("v1.2", "v1.2"), ("a" * 200, "a" * 100)],
)
def test_the_name_of_a_file_is_made_a_name(stem, name):
    assert name_from(stem) == name == SETTINGS["name"].kind.check(name)
