"""The schema of a sweep file: the settings in their sections, and the dotted keys of both.

Sections are made from the settings classes of `config.case`, so that a setting is declared once.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from ppbench.config.case import (
    TIMES,
    Case,
    Measure,
    PlanSettings,
    Slurm,
    Torchrun,
    settings_in,
)
from ppbench.config.kinds import Kind


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class AcceptSection(_Section):
    """A table of `[[track.accept]]`."""

    commit: str = Field(min_length=1)
    reason: str = Field(min_length=1)
    cases: str | None = None
    metric: str | None = None
    up_to: str | float | None = None


class TrackSection(_Section):
    """`[track]`; see `config.sweep`."""

    repo: str = ""
    setup: str = ""
    thresholds: dict[str, str | float] = {}
    accept: list[AcceptSection] = []


_SECTIONS = ("model", "data", "train", "measure", "launch", "transfer", "sharding", "emulated")
_PLACES = {"torchrun": Torchrun, "slurm": Slurm}


def _fields(owner: type, section: str = "") -> dict[str, Any]:
    """The settings of a class that are in a section (or in none), as pydantic's fields."""
    fields = {}
    for name, declared in settings_in(owner):
        prefix = name.partition("_")[0]
        is_inside = prefix == section if section else prefix not in _SECTIONS
        if declared.kind is not None and is_inside:
            fields[name.removeprefix(f"{section}_")] = (checked(declared.kind), declared.in_file)
    return fields


def checked(kind: object) -> object:
    """A type as pydantic takes it, with its checks."""
    if not isinstance(kind, Kind):
        return kind
    check: Any = Field(**kind.bounds) if kind.check is None else BeforeValidator(kind.check)
    return Annotated[kind.type, check]


def _section(**fields: Any) -> Any:
    """A section whose keys have defaults, and its default."""
    section = create_model("Section", __base__=_Section, **fields)
    return section, section()


_FIELDS = {name: _fields(Case, name) for name in _SECTIONS} | {"measure": _fields(Measure)}
_FIELDS["launch"] |= {name: _section(**_fields(owner)) for name, owner in _PLACES.items()}
_NAME: Any = (Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")], ...)
SweepFile = create_model(
    "SweepFile",
    __base__=_Section,
    name=_NAME,
    **_fields(Case),
    **{name: _section(**fields) for name, fields in _FIELDS.items()},
    track=(TrackSection, TrackSection()),
    plan=_section(**_fields(PlanSettings)),
)
"""A whole sweep file but for `[grid]`, `[[exclude]]` and `[[override]]`, which name other keys."""

CostsFile = create_model(
    "CostsFile",
    __base__=_Section,
    **{key: _FIELDS["emulated"][key] for key in (t.removeprefix("emulated_") for t in TIMES)},
)
"""A file of emulated costs."""


def known_keys() -> list[str]:
    """Every dotted key that may be an axis, or set for all cases."""
    keys = []
    for name, field in SweepFile.model_fields.items():
        section = section_of(field.annotation)
        if section is None:
            keys.append(name)
        elif name not in ("track", "plan"):
            inner = section.model_fields.items()
            keys += [f"{name}.{key}" for key, f in inner if section_of(f.annotation) is None]
    return keys


def shared_keys() -> list[str]:
    """Every dotted key that is shared by all cases: where launches run, `[track]`, `[plan]`."""
    places = [f"launch.{name}.{key}" for name, owner in _PLACES.items() for key in _fields(owner)]
    plan = (f"plan.{key}" for key in _fields(PlanSettings))
    return [*places, *(f"track.{key}" for key in TrackSection.model_fields), *plan]


def section_of(annotation: object) -> type[BaseModel] | None:
    """The section that a field holds; None for a setting."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None
