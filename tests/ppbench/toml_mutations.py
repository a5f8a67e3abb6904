"""Sweep files with random mistakes: valid files, each changed in a few places."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ppbench.config.case import CASE_KEYS, SETTINGS, Case, Measure

SWEEPS = Path(__file__).parents[2] / "sweeps"
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
EMULATED = """\
device = "emulated"
world_size = 4
num_microbatches = 16
emulated = {F_ms = 2, I_ms = 1.5, W_ms = 1, link_ms = 0.5, gather_ms = 1, jitter = 0.1, seed = 1}

[grid]
schedule = ["1f1b", "interleaved_1f1b", "zbv", "dualpipev"]
num_microbatches = [8, 16]
emulated.jitter = [0.0, 0.1]
measure.steps = [3]

[[exclude]]
schedule = "zbv"
num_microbatches = 8

[[override]]
where = {schedule = ["zbv", "dualpipev"], num_microbatches = 16}
set = {emulated.F_ms = 3, emulated.W_ms = 2}
"""
VARIABLE = """\
seq_len = "variable"
[data]
source = "synthetic"
max_seq_len = 64
[grid]
model.preset = ["llama-tiny", 'llama-8m']
model.partition = ["uniform", "parameters", "measured"]
measure.verify = [true, false]
"""
BASES = (
    *(path.read_text(encoding="utf-8") for path in sorted(SWEEPS.glob("*.toml"))),
    EVERYTHING,
    EMULATED,
    VARIABLE,
)
VALUES = (
    *("0", "1", "2", "-1", "-0", "3.5", "1e-7", "1e400", "-1e308", "nan", "-nan", "inf", "-inf"),
    *("9" * 30, "9" * 400, "9" * 5000, "0x" + "f" * 300, "0x" + "f" * 5000, "0o17", "0b1", "1_0"),
    *("9007199254740993", "9223372036854775807", "9223372036854775808", "1.0", "00", "1__0"),
    *("true", "false", "True", "null", "none", '"true"', '""', "''", '" "', '"\\n"', '"a\\nb"'),
    *('"""\na\nb"""', "'''\n'''", '"""a\\\n   b"""', '""""quoted""""', '"\\u0000"', '"\\u001b[2J"'),
    *('"\\ud800"', '"\\U0010FFFF"', '"\\U00110000"', '"\\x41"', '"\u202e"', '"\u2028"'),
    *('"' + "x" * 5000 + '"', '"text:' + "a/*/" * 2000 + '"', '"text:/"', '"text:.."', '"text:["'),
    *('"text:**x"', '"text:a\\u0000"', '"files:no"', '"files:"', '"hf:"', '"hf:a/b"', '"text:"'),
    *('"csv:no.csv"', '"csv:"', '"csv:."', '"csv:a\\u0000b"', '"csv:sweep.toml"', '"text:*.toml"'),
    *('"a/b"', '"a.b:c"', '"./none"', '"."', '"/"', '"variable"', '"auto"', '"cuda"', '"emulated"'),
    *('"trace"', '"cosine"', '"measured"', '"just_in_time"', '"gpipe"', '"zbv"', '"1F1B"'),
    *("1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", "1979-05-27 07:32:00.999999-07:00"),
    *("[]", "[[]]", "[[], []]", "[1, 2]", "[1, 1]", "[1, 1.0, true]", "[1, ", "]", "[,]", "[1,,2]"),
    *('["a"]', '["a", "a"]', '["a", 1]', "[[3, 5], [4, 4]]", "[nan, nan]", "[0, -1]", "[[1], [1]]"),
    *("{}", "{a = 1}", "{a = {b = {c = 1}}}", "{a = 1, a = 2}", "{a = 1,}", "{\na = 1}", "[{}]"),
    *("[" * 50 + "]" * 50, "[" * 5000 + "]" * 5000, "{a = " * 60 + "1" + "}" * 60, "[" * 3000),
    *(str(list(range(1, 400))), str(list(range(3000))), "[" + "1, " * 3000 + "]", "#", "", "?"),
)  # fmt: skip
KEYS = (
    *SETTINGS,
    *dict.fromkeys(key.partition(".")[0] for key in SETTINGS),
    *("grid", "exclude", "grid.seq_len", "exclude.x", '""', "''", '"a.b"', '"a\\nb"', "a.b.c"),
    *('"\\u0000"', "é", '"é"', "1", "-", "1.2", "wrold_size", "Schedule", '"train.recompute"', "."),
    *(".".join("a" * 3000), "a" * 500, "__class__", "model_config", "model_fields", '"model "'),
)  # fmt: skip
CHARACTERS = "\0\a\b\t\n\r\v\f\x1b\x7f\x85\xa0\u2028\ufeff\ufffd\U0001f600é\"'\\#=.,[]{}+-_0 "
HEADERS = ("[{}]", "[[{}]]", "[grid.{}]", "[[exclude.{}]]", "[{}.{}]", "[{}", "[]", "[[{}]", "[[]]")
_TOKEN = re.compile(r'"[^"\n]*"|[\w.+-]+|\s+|.', re.DOTALL)
_SETTING = re.compile(r"^([^\s=#\[][^=\n]*)=([^\n]*)$", re.MULTILINE)
_HEADER = re.compile(r"^\[[^\n]*\]\s*$", re.MULTILINE)
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Mutation:
    """A file's bytes, and the overrides that it is read with."""

    content: bytes
    overrides: tuple[str, ...] = ()


def mutate(seed: int) -> Mutation:
    """A valid sweep file with one to three changes, the same for the same seed."""
    rng = random.Random(seed)
    text = rng.choice(BASES)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        text = changed_text(rng.choice(OF_TEXT), text, rng)
    content = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.15:
        content = changed_bytes(content, rng)
    overrides = []
    if rng.random() < 0.2:
        for _ in range(rng.choice((1, 1, 2))):
            key = rng.choice(KEYS[: len(SETTINGS)])
            value = rng.choice(VALUES)
            forms = (f"{key}={value}", f"{key}={value}", f"grid.{key}={value}",
                     f"{key} = [{value}]", f"{key}", f"={value}", f"{rng.choice(KEYS)}={value}",
                     f"{key}={value}\nname = 'x'")  # fmt: skip
            overrides.append(rng.choice(forms))
    return Mutation(content, tuple(overrides))


OF_TEXT = (
    *("delete", "insert", "repeat", "truncate", "line", "token", "value", "number", "key"),
    *("setting", "header", "table", "nest", "many lines", "line ends"),
)


def changed_text(kind: str, text: str, rng: random.Random) -> str:
    """The text after a change of one of the kinds `OF_TEXT`."""
    start = rng.randrange(len(text) + 1)
    end = min(len(text), start + rng.choice((1, 1, 2, 5, 20)))
    lines, tokens = text.split("\n"), _TOKEN.findall(text)
    value = rng.choice(VALUES)

    def replaced(pattern: re.Pattern[str], new: Callable[[re.Match[str]], str]) -> str:
        """The text with one match of a pattern replaced."""
        found = list(pattern.finditer(text))
        if not found:
            return text
        match = rng.choice(found)
        return text[: match.start()] + new(match) + text[match.end() :]

    def other_key(match: re.Match[str]) -> str:
        key = match[1].strip()
        keys = (rng.choice(KEYS), f'"{key}"', f"'{key}'", f"grid.{key}", key[1:], key.upper(),
                key + key[-1], f"{key}.x", key.replace("_", "-"), f"{key} {key}")  # fmt: skip
        return f"{rng.choice(keys)} ={match[2]}"

    match kind:
        case "delete":
            return text[:start] + text[end:]
        case "insert":
            inserted = rng.choice(CHARACTERS) * rng.choice((1, 1, 2, 3, 200))
            return text[:start] + inserted + text[start:]
        case "repeat":
            return text[:end] + text[start:end] * rng.choice((1, 2, 50)) + text[end:]
        case "truncate":
            return text[:start]
        case "line":
            one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
            here = lines[one]
            others = ([], [here, lines[other]], [f"# {here}"], [here.replace(" ", "\n")])
            lines[one : one + 1] = rng.choice(others)
            return "\n".join(lines)
        case "token" if tokens:
            one = rng.randrange(len(tokens))
            tokens[one] = rng.choice(
                ("", rng.choice(tokens), rng.choice(_TOKEN.findall(rng.choice(BASES))))
            )
            return "".join(tokens)
        case "value":
            written = rng.choice((value, value, f"[{value}]", f"[1, {value}]", f"{value} # 1"))
            return replaced(_SETTING, lambda match: f"{match[1]}= {written}")
        case "number":
            return replaced(_NUMBER, lambda _: rng.choice(VALUES[:27]))
        case "key":
            return replaced(_SETTING, other_key)
        case "setting":
            lines.insert(rng.randrange(len(lines) + 1), f"{rng.choice(KEYS)} = {value}")
            return "\n".join(lines)
        case "header":
            header = rng.choice(HEADERS).format(rng.choice(KEYS), rng.choice(KEYS))
            return replaced(_HEADER, lambda _: header)
        case "table":
            tables = re.split(r"(?m)^(?=\[)", text)
            one, other = rng.randrange(len(tables)), rng.randrange(len(tables))
            moved = tables.pop(one)
            return "".join([*tables[:other], *[moved] * rng.choice((0, 1, 2)), *tables[other:]])
        case "nest":
            depth = rng.choice((3, 50, 1200))
            nested = ("[" * depth, "]" * depth)
            return replaced(_SETTING, lambda match: f"{match[1]}= {match[2].join(nested)}")
        case "many lines":
            filler = rng.choice(("# filler\n", "\n", "[[exclude]]\nseq_len = 7\n", "x = 1\n"))
            return text + filler * rng.choice((10, 1000))
        case "line ends":
            start, end = rng.choice((("", "\r\n"), ("", "\r"), ("\ufeff", "\n")))
            return start + text.replace("\n", end)
    return text


def changed_bytes(content: bytes, rng: random.Random) -> bytes:
    """The bytes with one bit turned, with others among them, or as another encoding has them."""
    flipped, start = bytearray(content or b"x"), rng.randrange(len(content) + 1)
    flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    put_in = rng.choice((b"\0", bytes(1000), rng.randbytes(1), rng.randbytes(64)))
    text = content.decode("utf-8", "replace")
    encoded = text.encode("utf-16"), text.encode("latin-1", "replace")
    return rng.choice((bytes(flipped), content[:start] + put_in + content[start:], *encoded))
