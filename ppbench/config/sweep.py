"""A sweep file, expanded into what is to be measured, where, and whose history it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.model.answers import Facts, Identity
from ppbench.config.case import Case, Measure
from ppbench.config.places import Slurm, Torchrun
from ppbench.config.track import Track


@dataclass(frozen=True)
class Sweep:
    """A sweep file, expanded."""

    name: str
    file: str
    cases: tuple[tuple[Case, Measure], ...]
    axes: tuple[str, ...]  # columns that vary, in the file's order
    torchrun: Torchrun = field(default_factory=Torchrun)
    slurm: Slurm = field(default_factory=Slurm)
    track: Track = field(default_factory=Track)
    facts: Mapping[Identity, Facts] = field(default_factory=dict)  # of the models looked at
