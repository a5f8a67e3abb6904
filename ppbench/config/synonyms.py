"""Other words for settings, accepted wherever a person names one; what is stored keeps one name.

ranks = 4                  in a sweep file, at its top, in [grid], in [[exclude]]
--set ranks=4  --only ranks=4  --where 'ranks>=4'  --columns ranks,microbatches  --sort ranks
results.select(ranks=4)
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

SYNONYMS: Final = {"ranks": "world_size", "microbatches": "num_microbatches"}
"""A word, and the setting that it means."""


def written_as(key: str, words: Container[str]) -> str | None:
    """How a setting is written among some words: by its key or a synonym; None if it is not."""
    if key in words:
        return key
    return next((w for w, meant in SYNONYMS.items() if meant == key and w in words), None)


def setting_named(key: str) -> str:
    """The key of a sweep file that a word means: itself, unless it is a synonym."""
    return SYNONYMS.get(key, key)


def column_named(name: str) -> str:
    """The column of `runs` that a word or a dotted key means, as far as it is one."""
    return setting_named(name).replace(".", "_")
