"""What is known of the texts of a sweep before it runs: their files, and how many sequences.

Only a dry run asks: files are looked at anyway, and bytes are counted without being read. How many
tokens another tokenizer makes of them is not known without reading all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.model.descriptions import Facts, Identity
from engine.model.local_files import LOCAL_KINDS, local_files
from ppbench.config.case import Case
from ppbench.config.feasibility import look_at_files
from ppbench.config.programs import identity_of


def notes_on_sources(cases: Iterable[Case], facts: Mapping[Identity, Facts]) -> list[str]:
    """A line on each local source: its files, bytes and, where text is bytes, its sequences.

    A sequence is as long as `seq_len`, and the token after its last one is its last target.
    """
    lengths: dict[str, set[int]] = {}
    for case in cases:
        kind = case.data_source.partition(":")[0]
        if kind not in LOCAL_KINDS:
            continue
        found = lengths.setdefault(case.data_source, set())
        known = facts.get(identity_of(case))
        is_bytes = kind == "text" and known is not None and known.tokenizer_size is None
        if is_bytes and isinstance(case.seq_len, int):
            found.add(case.seq_len)
    notes = []
    for source, found in lengths.items():
        num_files, num_bytes = len(local_files(source)), look_at_files(source)[1]
        files = f"{num_files:,} file{'s' if num_files != 1 else ''}"
        sequences = (f"{(num_bytes - 1) // n:,} sequences of {n:,} tokens" for n in sorted(found))
        notes.append(", ".join([f"{source}: {files}", f"{num_bytes:,} bytes", *sequences]))
    return notes
