"""Costs from files and from this machine; every fault of a file has its place."""

import dataclasses
import math
import random
import sys

import pytest
from damage import damaged_bytes, damaged_text

from engine.model.descriptions import CostRequest, Identity
from engine.model.spec import ModelSpec
from engine.plan.model_costs import LinkCosts, ModelCosts, StageCosts
from ppbench.config import described
from ppbench.errors import SweepFileError, UsageError
from ppbench.planning.cost_file import read_costs_file, write_costs_file
from ppbench.planning.cost_measurement import measure_costs
from ppbench.planning.cost_set import CostSet, Setting

FILE = """\
model = "mine"
dtype = "bfloat16"
seq_len = 4096
optimizer = "adamw"
device = "cuda"

[link]
latency_ms = 0.02
gb_per_s = 25.0

[[setting]]
microbatch_size = 1

[setting.before]
forward_ms = 0.5
backward_ms = 0.25
static_mib = 8

[[setting.layers]]
repeat = 3
forward_ms = 10
input_ms = 12
weight_ms = 7
held_after_forward_mib = 1.5
static_mib = 12
message_mib = 2
error = 0.03

[[setting.layers]]
forward_ms = 20
backward_ms = 30
held_after_forward_mib = 1
held_after_input_mib = 0.5
transient_mib = 0.25
static_mib = 4
message_mib = 2
optimizer_ms = 3

[setting.after]
forward_ms = 2
backward_ms = 5
input_ms = 3
weight_ms = 1
static_mib = 8
"""
MS, MIB = 1_000_000, 2**20


def read(tmp_path, text):
    file = tmp_path / "costs.toml"
    file.write_text(text)
    return read_costs_file(file)


def test_a_file_has_its_costs_in_nanoseconds_and_bytes(tmp_path):
    costs = read(tmp_path, FILE)
    assert (costs.model, costs.dtype, costs.seq_len) == ("mine", "bfloat16", 4096)
    assert (costs.optimizer, costs.device, costs.origin) == ("adamw", "cuda", "file costs.toml")
    assert costs.link == LinkCosts(20_000, 25e9)
    (of_model,) = costs.by_setting.values()
    assert list(costs.by_setting) == [Setting(1, recompute=False)]
    first, second, third, last = of_model.layers
    held = 3 * MIB // 2
    assert first == second == third
    assert first == StageCosts(
        *(10 * MS, 19 * MS, 12 * MS, 7 * MS, 0.03, held, held, 0, 0, 0, 0, 12 * MIB, 2 * MIB, 0)
    )
    assert last == StageCosts(
        *(20 * MS, 30 * MS, 15 * MS, 15 * MS, 0.0),
        *(MIB, MIB // 2, MIB // 4, 0, 0, 0, 4 * MIB, 2 * MIB, 3 * MS),
    )
    assert of_model.after == StageCosts(2 * MS, 5 * MS, 3 * MS, 1 * MS, static_bytes=8 * MIB)
    assert of_model.action_ns == 0


def drawn(numbers):
    def part():
        times = [numbers.uniform(0, 1e9) for _ in range(4)]
        sizes = [numbers.randrange(2**40) for _ in range(8)]
        return StageCosts(*times, numbers.random(), *sizes, numbers.uniform(0, 1e6))

    def model(num_layers):
        layers = [part() for _ in range(num_layers)]
        equal = layers[:1] * numbers.randint(0, 3)
        return ModelCosts(part(), (*equal, *layers), part(), numbers.uniform(0, 1e5))

    first = model(numbers.randint(1, 5))
    second = dataclasses.replace(first, action_ns=0.0)
    settings = {Setting(2 ** numbers.randint(0, 5), recompute=True): first}
    settings[Setting(100, recompute=False)] = second
    speed = numbers.choice([math.inf, 1e9, 12.5e9])
    link = LinkCosts(numbers.uniform(0, 1e6), speed, numbers.random())
    text = numbers.choice(["a", 'quo"ted', "ünï", "p:q/r"])
    return CostSet(text, "float32", 128, "sgd", "cpu", "measured", settings, link, "Some CPU")


def assert_like(found, expected):
    """Equal but for the last digits, which milliseconds do not keep, and for the origin."""
    for setting, of_model in expected.by_setting.items():
        ours, theirs = (dataclasses.asdict(one) for one in (found.by_setting[setting], of_model))
        both = [[one.pop("before"), *one.pop("layers"), one.pop("after")] for one in (ours, theirs)]
        for mine, other in zip(*both, strict=True):
            assert mine.pop("layers") == other.pop("layers") == ()
            assert mine == pytest.approx(other, rel=1e-14)
        assert ours == pytest.approx(theirs, rel=1e-14)
    assert dataclasses.astuple(found.link) == pytest.approx(dataclasses.astuple(expected.link))
    rest = ("model", "dtype", "seq_len", "optimizer", "device", "device_name")
    assert [getattr(found, key) for key in rest] == [getattr(expected, key) for key in rest]
    assert found.by_setting.keys() == expected.by_setting.keys()


def test_what_is_written_is_read(tmp_path):
    numbers = random.Random(1)
    for _ in range(40):
        costs = drawn(numbers)
        write_costs_file(costs, tmp_path / "written.toml")
        found = read_costs_file(tmp_path / "written.toml")
        assert found.origin == "file written.toml"
        assert_like(found, costs)


FAULTS = [
    ('model = "mine"\n', "", None, "model: is missing"),
    ("seq_len = 4096", 'seq_len = "long"', 3, "seq_len: expected a whole number from 1 to"),
    ("latency_ms = 0.02", "latency_ms = -1", 8, "link.latency_ms: expected a number of at"),
    (
        "gb_per_s = 25.0",
        "gb_per_s = 0",
        9,
        "link.gb_per_s: expected a number above 0; got 0",
    ),
    ("microbatch_size = 1", "microbatch_size = true", 12, "setting.microbatch_size: expected"),
    ("forward_ms = 0.5\n", "", 14, "setting.before.forward_ms: is missing"),
    ("backward_ms = 0.25\n", "", 14, "setting.before.backward_ms: is missing"),
    ("repeat = 3", "repeat = 10001", 20, "setting.layers.repeat: more than 10,000 layers"),
    (
        "forward_ms = 10",
        "forward_ms = nan",
        21,
        "setting.layers.forward_ms: expected a number of at least 0; got nan",
    ),
    ("forward_ms = 10", 'forward_ms = "1"', 21, "setting.layers.forward_ms: expected a number"),
    ("weight_ms = 7\n", "", 19, "setting.layers.weight_ms: is missing"),
    ("held_after_forward_mib = 1.5\n", "", 19, "setting.layers.held_after_forward_mib: is missing"),
    ("static_mib = 12", "static_bytes = 12", 25, "setting.layers.static_bytes: unknown key"),
    (
        "forward_ms = 20\nbackward_ms = 30",
        "forward_ms = 0\nbackward_ms = 0",
        30,
        "setting.layers.f",
    ),
    ("[setting.after]", "[setting.behind]", 39, "setting.behind: unknown key"),
]


@pytest.mark.parametrize(("old", "new", "line", "message"), FAULTS)
def test_a_fault_is_told_with_its_place(tmp_path, old, new, line, message):
    assert old in FILE
    with pytest.raises(SweepFileError) as raised:
        read(tmp_path, FILE.replace(old, new, 1))
    where = f"{tmp_path}/costs.toml" + (f":{line}" if line else "")
    assert str(raised.value).startswith(f"{where}: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FILE[: FILE.index("[[setting]]")], "setting: is missing"),
        (FILE.replace("[[setting]]", "[setting]", 1), "11: setting: expected tables"),
        (FILE + FILE[FILE.index("[[setting]]") :], "a second entry for microbatches of 1"),
        (FILE.replace("forward_ms", "= 1"), "not valid TOML"),
        ("\0", "not valid TOML"),
        (
            FILE
            + FILE[FILE.index("[[setting]]") :]
            .replace("size = 1", "size = 2")
            .replace("= 3", "= 2"),
            "3 layers, but the first setting has 4",
        ),
    ],
)
def test_a_file_that_is_not_whole_is_refused(tmp_path, text, message):
    with pytest.raises(UsageError, match=message):
        read(tmp_path, text)


def test_a_damaged_file_never_gives_a_traceback(tmp_path, is_thorough):
    numbers = random.Random(5)
    file = tmp_path / "costs.toml"
    with pytest.raises(UsageError, match="cannot read the costs file"):
        read_costs_file(file)
    for _ in range(1000 if is_thorough else 30):
        text = damaged_text(FILE, numbers).encode("utf-8", "surrogatepass")
        file.write_bytes(damaged_bytes(text, numbers) if numbers.random() < 0.5 else text)
        try:
            read_costs_file(file)
        except UsageError as error:
            assert str(file) in str(error)


@pytest.mark.parametrize(
    ("key", "value"),
    [("model", "other"), ("dtype", "float32"), ("seq_len", 8), ("optimizer", "sgd")],
)
def test_costs_of_something_else_are_refused(tmp_path, key, value):
    costs = read(tmp_path, FILE)
    wanted = {"model": "mine", "dtype": "bfloat16", "seq_len": 4096, "optimizer": "adamw"}
    costs.check_is_of(**wanted)
    with pytest.raises(UsageError, match=f"{key} is .*, but the plan is for {value}"):
        costs.check_is_of(**{**wanted, key: value})


def request_for(model, **changes):
    identity = Identity(ModelSpec(model, weights="random"), "bytes")
    given = {"settings": ((1, False), (1, True)), "budget_s": 0.0, **changes}
    return CostRequest(identity, 16, **given)


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize("has_link", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_costs_are_measured_by_a_process_of_their_own(has_link):
    told = []
    costs = measure_costs(request_for("llama-tiny", has_link=has_link), told.append)
    assert (costs.model, costs.seq_len, costs.origin) == ("llama-tiny", 16, "measured")
    assert list(costs.by_setting) == [Setting(1, False), Setting(1, True)]
    assert [len(of_model.layers) for of_model in costs.by_setting.values()] == [4, 4]
    kept, recomputed = (of_model.layers[0] for of_model in costs.by_setting.values())
    assert recomputed.held_after_forward < kept.held_after_forward
    assert math.isfinite(costs.link.bytes_per_s) is has_link
    assert told[0] == "llama-tiny, microbatches of 1: 6 of 6 parts"


def answering(monkeypatch, program):
    monkeypatch.setattr(described, "COMMAND", (sys.executable, "-c", program))


def test_a_process_that_dies_is_told_with_its_last_words(monkeypatch):
    answering(monkeypatch, "import sys; print('no luck', file=sys.stderr); sys.exit(3)")
    with pytest.raises(UsageError, match="ended with exit code 3: no luck"):
        measure_costs(request_for("llama-tiny"))


def test_a_problem_and_settings_without_room_are_told(monkeypatch):
    answering(monkeypatch, """print('{"problem": {"key": "seq_len", "message": "too long"}}')""")
    with pytest.raises(UsageError, match="costs cannot be measured: seq_len: too long"):
        measure_costs(request_for("llama-tiny"))
    left_out = '[{"microbatch_size": 8, "recompute": true, "reason": "no room for it"}]'
    answering(monkeypatch, f"""print('{{"problem": null, "costs": [], "left_out": {left_out}}}')""")
    told = []
    with pytest.raises(UsageError, match="in any setting: no room for it"):
        measure_costs(request_for("llama-tiny"), told.append)
    assert told == ["llama-tiny, microbatches of 8, recomputed: left out: no room for it"]
