"""Claims in files: JSON that is read back strictly, and refused where it is not what was written.

    {"format": "ppbench claim", "version": 1, ...the fields of `Claim`..., "checksums": {...}}

Each part has a checksum, over its canonical text: sorted keys, no blanks. So a file may be indented
anew, and an edited figure is refused with the name of its part. A checksum is no signature: it
finds accidents and touched-up figures, not somebody who computes it anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from ppbench.commits.claims import Claim
from ppbench.comparison.sessions import UNKNOWN
from ppbench.display.metrics import METRICS
from ppbench.errors import UsageError, first_line
from ppbench.files import whole_file

FORMAT = "ppbench claim"
VERSION = 1
"""Raised whenever a file of the older version would be read wrongly."""
LARGEST_BYTES = 64 * 2**20
WRITE_AGAIN = "write it again with: ppbench compare BASE HEAD SWEEP --claim FILE.json"
_OPTION = "--claim"
_SHOWN = 12


def write_claim(claim: Claim, file: Path) -> None:
    """Write a claim so that `read_claim` reads it. Raises StoreError."""
    with whole_file(file, _OPTION) as opened:
        opened.write(f"{json.dumps(content_of(claim), indent=1, allow_nan=False)}\n".encode())


def content_of(claim: Claim) -> dict[str, object]:
    """A claim as JSON has it, with the checksum of each part."""
    parts = {"format": FORMAT, "version": VERSION, **asdict(claim)}
    return {**parts, "checksums": {name: _checksum(value) for name, value in parts.items()}}


def _checksum(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_claim(file: Path) -> Claim:
    """Read a claim. Raises UsageError, with the place, for a file that is not one whole claim."""
    content = _parsed(file, _bytes_of(file))
    if content.get("format") != FORMAT:
        raise UsageError(
            f'{file}: format: is {_brief(content.get("format"))}; expected "{FORMAT}": it is not a '
            f"claim; {WRITE_AGAIN}"
        )
    if content.get("version") != VERSION or isinstance(content["version"], bool):
        raise UsageError(
            f"{file}: version: is {_brief(content.get('version'))}; expected {VERSION}, which this "
            f"version of ppbench reads; read it with the one that wrote it, or {WRITE_AGAIN}"
        )
    _check_sums(file, content)
    inner = {name: value for name, value in content.items() if name not in _AROUND}
    try:
        claim = _ADAPTER.validate_json(json.dumps(inner))
    except (ValidationError, ValueError) as error:
        raise _damaged(file, *_place_and_reason(error)) from None
    for place, problem in _problems(claim):
        raise _damaged(file, place, problem)
    return claim


_AROUND = ("format", "version", "checksums")


def _bytes_of(file: Path) -> bytes:
    try:
        if not file.is_file():
            what = "is no file" if file.exists() else "no such file"
            raise UsageError(f"{file}: {what}; expected a claim; {WRITE_AGAIN}")
        if file.stat().st_size > LARGEST_BYTES:
            size = f"{LARGEST_BYTES // 2**20} MiB"
            raise UsageError(f"{file}: too large for a claim; expected at most {size}")
        return file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}; choose another path") from None


def _parsed(file: Path, data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(
            data.decode(), object_pairs_hook=_without_repeats, parse_constant=_no_constant
        )
    except RecursionError:
        raise _damaged(file, "", "is nested too deeply for a claim") from None
    except ValueError as error:  # also no UTF-8
        raise _damaged(file, "", f"is not whole JSON: {first_line(error)}") from None
    if not isinstance(content, dict):
        raise _damaged(file, "", "is JSON, but not an object")
    return content


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f'the key "{twice}" stands twice in one object')
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _check_sums(file: Path, content: Mapping[str, Any]) -> None:
    sums = content.get("checksums")
    if not isinstance(sums, dict):
        raise _damaged(file, "checksums", "are missing")
    for name in (*content, *sums):
        if name == "checksums":
            continue
        found = _checksum(content[name]) if name in content else "missing"
        if found != sums.get(name):
            wanted = str(sums.get(name, "none, since claims have no such part"))
            raise _damaged(
                file,
                name,
                f"was edited or damaged: its checksum is {found[:_SHOWN]}, expected "
                f"{wanted[:_SHOWN] if name in sums else wanted}",
            )


def _damaged(file: Path, place: str, problem: str) -> UsageError:
    where = f"{file}: {place}: " if place else f"{file}: "
    return UsageError(f"{where}{problem}; expected a claim as --claim wrote it; {WRITE_AGAIN}")


def _place_and_reason(error: ValueError) -> tuple[str, str]:
    if not isinstance(error, ValidationError):
        return "", first_line(error)
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return ".".join(map(str, first["loc"])), first["msg"]


def _brief(value: object) -> str:
    text = json.dumps(value)
    return "missing" if value is None else text if len(text) <= 40 else f"{text[:39]}…"


def _problems(claim: Claim) -> Iterator[tuple[str, str]]:
    """What no claim has: places that do not exist, times that are none, ends in disorder."""
    yield from _of_launches(claim)
    for index, effect in enumerate(claim.effects):
        place, change = f"effects.{index}", effect.change
        if not 0 <= effect.case < len(claim.cases):
            yield f"{place}.case", f"is {effect.case}, and there are {len(claim.cases)} cases"
        if effect.metric not in METRICS:
            yield f"{place}.metric", f'is "{effect.metric}", which is no figure'
        ends = (change.low, change.estimate, change.high)
        known = [end for end in ends if end is not None]
        if known != sorted(known):
            yield (
                f"{place}.change",
                f"has the interval [{change.low}, {change.high}] around no estimate",
            )


def _of_launches(claim: Claim) -> Iterator[tuple[str, str]]:
    numbers = {UNKNOWN, *(session.number for session in claim.sessions)}
    for index, launch in enumerate(claim.launches):
        place = f"launches.{index}"
        if not 0 <= launch.case < len(claim.cases):
            yield f"{place}.case", f"is {launch.case}, and there are {len(claim.cases)} cases"
        if launch.session not in numbers:
            yield f"{place}.session", f"is {launch.session}, which is no session of the claim"
        if launch.ended_at is not None and not _is_moment(launch.ended_at):
            yield f"{place}.ended_at", f'is "{launch.ended_at}", which is no time with its zone'


def _is_moment(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


_ADAPTER = TypeAdapter(
    with_config(ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))(Claim)
)
