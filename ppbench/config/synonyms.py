"""Other words for settings, accepted wherever a person names one; what is stored keeps one name.

ranks = 4                  in a sweep file, at its top, in [grid], in [[exclude]]
--set ranks=4  --only ranks=4  --where 'ranks>=4'  --columns ranks,microbatches  --sort ranks
results.select(ranks=4)
"""

from __future__ import annotations

from typing import Final

SYNONYMS: Final = {"ranks": "world_size", "microbatches": "num_microbatches"}
"""A word, and the setting that it means."""


def setting_named(key: str) -> str:
    """The key of a sweep file that a word means: itself, unless it is a synonym."""
    return SYNONYMS.get(key, key)


def column_named(name: str) -> str:
    """The column of `runs` that a word or a dotted key means, as far as it is one."""
    return setting_named(name).replace(".", "_")
