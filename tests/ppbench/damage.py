"""Damage to files, as a disk, another program or a slip of the hand may do it; the same by a seed.

What reads such a file refuses it in one line that says where, or answers as for a whole file.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

VALUES = (
    *("0", "1", "2", "-1", "-0", "3.5", "1e-7", "1e400", "nan", "-inf", "0x" + "f" * 300, "0b1"),
    *("9" * 30, "9" * 400, "9" * 5000, "9223372036854775808", "1.0", "00", "1__0", "true", "None"),
    *('""', "''", '"\\n"', '"""\na\nb"""', "'''\n'''", '"\\u0000"', '"\\u001b[2J"', '"\\ud800"'),
    *('"\u202e"', '"' + "x" * 5000 + '"', '"text:' + "a/*/" * 2000 + '"', '"text:/"', '"text:"'),
    *('"files:no"', '"hf:a/b"', '"csv:no.csv"', '"csv:."', '"a/b"', '"a.b:c"', '"."', '"/"'),
    *('"variable"', '"auto"', '"cuda"', '"emulated"', '"trace"', '"measured"', '"zbv"', '"1F1B"'),
    *("1979-05-27", "07:32:00", "[]", "[[]]", "[1, 2]", "[1, 1]", "[1, 1.0, true]", "[1, ", "]"),
    *('["a"]', '["a", 1]', "[[3, 5], [4, 4]]", "[nan]", "{}", "{a = 1}", "{a = 1, a = 2}", "[{}]"),
    *("[" * 50 + "]" * 50, "[" * 5000, "{a = " * 60 + "1" + "}" * 60, str(list(range(3000))), "?"),
)  # fmt: skip
CHARACTERS = "\0\b\t\n\r\f\x1b\x85\u2028\ufeff\U0001f600é\"'\\#=.,[]{}+-_0 "
_WORD = re.compile(r'"[^"\n]*"|[\w.+-]+')
_VALUE = re.compile(r"(?<==)[^\n]*$", re.MULTILINE)


def damaged_text(text: str, draw: random.Random, words: Sequence[str] = ()) -> str:
    """The text with a change of some characters, of lines, or of a word or value to another one."""
    start = draw.randrange(len(text) + 1)
    end = start + draw.choice((1, 2, 20))
    lines = text.split("\n")
    one, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    odd = draw.choice(VALUES)
    match draw.choice(("characters", "lines", "word", "value", "end")):
        case "characters":
            put_in = draw.choice(("", text[start:end] * 2, draw.choice(CHARACTERS) * 3))
            return text[:start] + put_in + text[end:]
        case "lines":
            added = f"{draw.choice(words)} = {odd}" if words else odd
            others = ([], [lines[one], lines[other]], [lines[one], added])
            lines[one : one + 1] = draw.choice(others)
            return "\n".join(lines)
        case "word":
            return _replaced(text, _WORD, draw.choice(words or VALUES), draw)
        case "value":
            odd = draw.choice((f" {odd}", f" [{odd}]", f" {odd} # 1"))
            return _replaced(text, _VALUE, odd, draw)
    ends = (text[:start], text.replace("\n", "\r\n"), text + "# filler\n" * 1000)
    return draw.choice(ends)


def _replaced(text: str, pattern: re.Pattern[str], new: str, draw: random.Random) -> str:
    """The text with one of the places of a pattern replaced."""
    found = list(pattern.finditer(text))
    if not found:
        return text
    place = draw.choice(found)
    return text[: place.start()] + new + text[place.end() :]


def damaged_bytes(content: bytes, draw: random.Random) -> bytes:
    """The content cut, with bits turned in a byte, or with other bytes among it."""
    start, flipped = draw.randrange(len(content) + 1), bytearray(content or b"x")
    flipped[draw.randrange(len(flipped))] ^= draw.randrange(1, 256)
    put_in = draw.choice((b"\0", bytes(1000), draw.randbytes(64)))
    more = content[:start] + put_in + content[start:]
    return draw.choice((bytes(flipped), bytes(flipped), content[:start], more))
