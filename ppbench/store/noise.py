"""How much launches of the same differ on a machine: what was measured, kept beside the runs.

    results/noise/<fingerprint>-<case_id>.json

A file per case and fingerprint, since noise is of both; not a table, since it is not of a run.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from ppbench.errors import StoreError
from ppbench.files import whole_file


@dataclass(frozen=True)
class StoredNoise:
    """Of one case on one fingerprint."""

    case_id: str
    fingerprint: str
    measured_at: str  # ISO 8601, UTC
    commit: str | None
    num_launches: int
    deviations: dict[str, float]  # figure -> relative standard deviation between launches
    run_ids: list[str] | None = None  # of the launches; None in files of older versions

    def __post_init__(self) -> None:
        values = self.deviations.values()
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise ValueError(f"deviations: expected finite numbers from 0, got {self.deviations}")


def write_noise(folder: Path, noise: StoredNoise) -> None:
    """Replace what was kept of this case and fingerprint. Raises StoreError."""
    with whole_file(_path(folder, noise.fingerprint, noise.case_id)) as file:
        file.write(json.dumps(asdict(noise), indent=1).encode())


def read_noise(folder: Path, fingerprint: str, case_id: str) -> StoredNoise | None:
    """What is kept, None where nothing is. Raises StoreError for a file that cannot be read."""
    path = _path(folder, fingerprint, case_id)
    try:
        return StoredNoise(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{path}: cannot be read: {error}; delete it, and measure again with: ppbench noise"
        ) from error


def _path(folder: Path, fingerprint: str, case_id: str) -> Path:
    return folder / "noise" / f"{fingerprint}-{case_id}.json"
