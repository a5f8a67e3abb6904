"""Broken sweep files: each is accepted, or refused in one line that says where."""

import collections
import json
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from damage import VALUES, damaged_bytes, damaged_text
from recordings import Done, ppbench

from engine.model import local_files
from ppbench.config import described
from ppbench.config.case import CASE_KEYS, SETTINGS, Case, Measure
from ppbench.config.reader import read_sweep
from ppbench.errors import UsageError

SWEEPS = Path(__file__).parents[3] / "sweeps"
_DEFAULTS = {**Case().settings(), **Measure().settings()}
_KEYS = {key: _DEFAULTS[key.replace(".", "_")] for key in CASE_KEYS}
EVERYTHING = (
    "".join(
        f"{key} = {json.dumps(value)}\n"
        for key, value in _KEYS.items()
        if value != "[]" and key != "emulated.costs"  # for emulated ranks
    )
    + """\
[grid]
schedule = ["afab", "1f1b", "zb_h1"]
world_size = [
    1,
    2,  # a comment, with a bracket ]
]
"train.microbatch_size" = [1, 2]
launch = {threads_per_rank = [1, 2]}

[[exclude]]
world_size = 1
schedule = "1f1b"

[[exclude]]
train.microbatch_size = 2
world_size = 2
"""
)
BASES = (
    *(path.read_text(encoding="utf-8") for path in sorted(SWEEPS.glob("*.toml"))),
    EVERYTHING,
)
KEYS = (*SETTINGS, "grid", "exclude", "grid.seq_len", '""', "a.b.c", "é", "wrold_size", "a" * 500)


@dataclass(frozen=True)
class Mutation:
    """A file's bytes, and the overrides that it is read with."""

    content: bytes
    overrides: tuple[str, ...] = ()


def mutate(seed: int) -> Mutation:
    """A valid sweep file with one to three changes, the same for the same seed."""
    draw = random.Random(seed)
    text = draw.choice(BASES)
    for _ in range(draw.choice((1, 1, 2, 3))):
        text = damaged_text(text, draw, KEYS)
    content = text.encode("utf-8", "surrogatepass")
    if draw.random() < 0.15:
        content = damaged_bytes(content, draw)
    key, value = draw.choice(KEYS), draw.choice(VALUES)
    overrides = (f"{key}={value}", f"grid.{key}={value}", f"{key} = [{value}]", key, f"={value}")
    return Mutation(content, (draw.choice(overrides),) if draw.random() < 0.2 else ())


NUM_MUTATIONS = 2200
NUM_IN_A_SAMPLE = 150
NUM_COMMANDS = 5
ANSWER = """\
import json, sys
facts = dict(num_layers=6, max_positions=512, vocab_size=300, num_parameters=1,
             tokenizer_size=None, problem=None)
print(json.dumps([facts for one in json.load(sys.stdin)]))
"""
LOCATED = re.compile(r"sweep\.toml:\d+: |--[a-z-]+")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with a process at hand that knows every model at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(described, "COMMAND", (sys.executable, "-S", "-c", ANSWER))
    monkeypatch.setattr(local_files, "MOST_PATHS", 1000)  # some mutations name the root
    return tmp_path


def refusal(mutation: Mutation) -> UsageError | None:
    Path("sweep.toml").write_bytes(mutation.content)
    try:
        sweep = read_sweep(Path("sweep.toml"), mutation.overrides, "cpu")
    except UsageError as error:
        return error
    assert 1 <= len(sweep.cases) == len(set(sweep.cases))
    case, measure = sweep.cases[-1]
    json.dumps([case.settings(), measure.settings()], ensure_ascii=False).encode()
    return None


@pytest.mark.parametrize("text", BASES, ids=range(len(BASES)))
def test_what_is_mutated_is_valid(folder, text):
    assert refusal(Mutation(text.encode())) is None


def test_a_mutation_is_accepted_or_refused_in_one_line_that_tells_where(
    folder, capsys, is_thorough
):
    counts: collections.Counter[str] = collections.Counter()
    num = NUM_MUTATIONS if is_thorough else NUM_IN_A_SAMPLE
    for seed in range(num):
        error = refusal(mutate(seed))
        counts[type(error).__name__] += 1
        if error is not None:
            message = str(error)
            assert LOCATED.match(message), (seed, message)
            assert message.isprintable(), (seed, message)
            assert error.exit_code == 2
    assert list(Path().iterdir()) == [Path("sweep.toml")]
    with capsys.disabled():
        print(f"\n{num} mutations: {counts['NoneType']} accepted, {dict(counts)}")
    assert counts["NoneType"] > num // 10
    assert counts["SweepFileError"] > num // 2


def test_the_command_writes_nothing_when_it_refuses(folder):
    for seed in range(NUM_COMMANDS):
        mutation = mutate(seed)
        error = refusal(mutation)
        overrides = [word for text in mutation.overrides for word in ("--set", text)]
        listed = ppbench(["sweep", "sweep.toml", "--dry-run", *overrides], folder)
        assert listed.exit_code == (0 if error is None else 2), seed
        if error is not None:
            assert listed == Done("", f"error: {error}\n", 2)
            assert ppbench(["sweep", "sweep.toml", *overrides], folder) == listed
        assert list(Path().iterdir()) == [Path("sweep.toml")]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b'\n[data]\nsource="text:/"', ":3: data.source: /: cannot be read: has more than"),
        (b'data.source="text:' + b"a/*/" * 2000 + b'"', ":1: data.source: no such file: a/*/"),
        (b'"a\\nb" = "\\u001b[2J"', r':1: "a\nb": unknown key, set to "\u001b[2J"'),
        (b"a = 1\nseq_len = " + b"9" * 5000, ":2: a number has too many digits"),
        (b"a = 1\n\nseq_len = " + b"[" * 5000, ":3: nested too deeply"),
        (b"seq_len = 8\rworld_size = 2", ":1: not valid TOML: "),
        (b"name = 'x'\n\xff\xfe", ":2: not a text file in UTF-8: invalid start byte at byte 11"),
        (b"[grid]\nseq_len = [\n 8,\n # 9,\n 'a,]',\n]", ":5: grid.seq_len: expected 1 to"),
        (b'name = """a\xe2\x80\xa8b"""\nseq_len = 0', r'got "a\u2028b" (a string)'),
        (b"name = '''\nx'''\nseq_len = 0", ":3: seq_len: "),
        (b"[grid]\n'train.recompute' = [true]\ntrain.recompute = [false]",
         ":3: grid.train.recompute: is given twice"),
        (b"[train]\nwarmup_steps = 3", 'did you mean "measure.warmup_steps"?'),
        (b"[train]\nworld_size = 3", 'did you mean "world_size"?'),
        (b"world_size = [1, 2]", "got [1, 2] (an array); several values of a key go into [grid]"),
        (b"grid = {seq_len = [", ":1: not valid TOML: invalid value at the end of the file: grid"),
        (b"[grid]\nworld_size = [\n1,\n2,\n\nname = 3",
         ":6: not valid TOML: invalid value at column 1 (in the statement that begins on line 2)"),
        (b"seq_len = [" + b"1.5," * 200_000 + b"]", "; got [1.5"),
        (b"[grid]\nW_ms = [1]", ', set to [1] (an array); did you mean "emulated.W_ms"?'),
        (b"[train]\nLEARNING_RATE = 1.0",
         'did you mean "train.learning_rate"? Known: train.optimizer, '),
        (b"[model]\npartition = [" + b"1," * 999 + b"]", "1,... names 999 stages; there are 2"),
        (b"x" * 2_000_000, "sweep.toml: too large for the sweep file (at most 1 MiB)"),
    ],
    ids=range(21),
)  # fmt: skip
def test_what_mutations_found(folder, content, what):
    error = refusal(Mutation(content))
    assert what in str(error)
    assert str(error).isprintable()
