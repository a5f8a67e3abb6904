"""Reads what is handed over to other trainers, each form by its documented grammar.

    layout    = { repeat }                          Megatron-LM, once commas are dropped
    repeat    = ( symbol | "(" { item } ")" ) [ "*" number ]     parentheses need their number
    item      = symbol [ "*" number ]
    symbol    = "E" | "t" | "L" | "m" | "|"

    modules   = a list of lists of names                          torchtitan

The readers know nothing of the writers: they find out what the other trainer would understand.
"""

from __future__ import annotations

import json
import re

_SYMBOLS = "EtLm|"
_LAYER = re.compile(r"layers\.(0|[1-9]\d*)", re.ASCII)


class GrammarError(ValueError):
    """A text is not of its form; the message says where."""


def layers_in_layout(text: str, num_ranks: int) -> tuple[int, ...]:
    """The number of layers of each stage of a Megatron-LM layout for so many pipeline ranks.

    Raises GrammarError where Megatron-LM refuses the text, and for layers that predict further
    tokens (m), which no model here has.
    """
    stages = _Layout(text.replace(",", "")).read().split("|")
    if len(stages) % num_ranks:
        raise GrammarError(f"{len(stages)} stages cannot be shared evenly by {num_ranks} ranks")
    whole = "".join(stages)
    if "m" in whole:
        raise GrammarError("has m: layers that predict further tokens are not known here")
    if not re.fullmatch("Et*L", whole):
        raise GrammarError(f"expected one E, then layers, then one L; got {whole}")
    return tuple(stage.count("t") for stage in stages)


class _Layout:
    """A layout's text and the place that has been read up to."""

    def __init__(self, text: str) -> None:
        self._text, self._place = text, 0

    def read(self) -> str:
        """Every symbol as often as it stands for."""
        parts = []
        while self._place < len(self._text):
            if self._text[self._place] == "(":
                parts.append(self._group())
            else:
                parts.append(self._item())
        return "".join(parts)

    def _group(self) -> str:
        opened = self._place
        self._place += 1
        parts = []
        while self._next() != ")":
            if self._next() in ("", "("):
                raise GrammarError(f"place {opened}: a parenthesis is not closed, or holds another")
            parts.append(self._item())
        self._place += 1
        times = self._times()
        if not parts or times is None:
            raise GrammarError(f"place {opened}: parentheses need a content and a number: (t|)*2")
        return "".join(parts) * times

    def _item(self) -> str:
        symbol = self._next()
        if symbol not in _SYMBOLS:
            raise GrammarError(f"place {self._place}: {symbol!r} is none of {_SYMBOLS}")
        self._place += 1
        times = self._times()
        return symbol * (1 if times is None else times)

    def _times(self) -> int | None:
        """The number of a repeat; None where there is none."""
        if self._next() != "*":
            return None
        begin = self._place + 1
        end = begin
        while end < len(self._text) and self._text[end] in "0123456789":
            end += 1
        if begin == end:
            raise GrammarError(f"place {self._place}: * needs a number")
        self._place = end
        return int(self._text[begin:end])

    def _next(self) -> str:
        return self._text[self._place : self._place + 1]


def layers_in_modules(text: str, head: str) -> tuple[int, ...]:
    """The number of layers of each stage of torchtitan's lists of modules.

    Raises GrammarError unless every module stands once, in the order of the model: embeddings,
    layers from 0 on, norm, head.
    """
    try:
        stages = json.loads(text)
    except ValueError as error:
        raise GrammarError(f"is no list: {error}") from None
    is_list_of_lists = isinstance(stages, list) and all(isinstance(one, list) for one in stages)
    if not is_list_of_lists or not all(isinstance(name, str) for one in stages for name in one):
        raise GrammarError("expected a list with a list of names for each stage")
    names = [name for stage in stages for name in stage]
    counts = tuple(sum(bool(_LAYER.fullmatch(name)) for name in stage) for stage in stages)
    numbered = [f"layers.{layer}" for layer in range(sum(counts))]
    expected = ["tok_embeddings", *numbered, "norm", head]
    if names != expected:
        wrong = next((n for n, e in zip(names, expected, strict=False) if n != e), names[-1:])
        raise GrammarError(f"modules are missing, twice, unknown or out of order at {wrong}")
    if stages[0][:1] != ["tok_embeddings"] or stages[-1][-1:] != [head]:
        raise GrammarError("embeddings belong to the first stage, and the head to the last")
    return counts
