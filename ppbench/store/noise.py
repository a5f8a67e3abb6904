"""Measured noise between equal launches on a machine, kept beside the runs.

    results/noise/<fingerprint>-<case_id>.json

One file per case and fingerprint, since noise depends on both; no table, since it belongs to no
run.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from ppbench.files import whole_file
from ppbench.statistics.verdicts import Noise
from ppbench.store.damage import ConsoleNote, DamagedFile, Skip, brief


@dataclass(frozen=True)
class StoredNoise:
    """The noise of one case on one fingerprint."""

    case_id: str
    fingerprint: str
    measured_at: str  # ISO 8601, UTC
    commit: str | None
    num_launches: int
    deviations: dict[str, float]  # figure -> relative standard deviation between launches
    run_ids: list[str] | None = None  # of the launches; None in older files

    def __post_init__(self) -> None:
        if not isinstance(self.deviations, dict):
            raise TypeError(f"deviations: expected an object, got {self.deviations!r}")
        values = self.deviations.values()
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise ValueError(f"deviations: expected finite numbers from 0, got {self.deviations}")
        if not isinstance(self.num_launches, int) or self.num_launches < 1:
            raise ValueError(f"num_launches: expected a number from 1, got {self.num_launches!r}")
        ids = [] if self.run_ids is None else self.run_ids
        if not isinstance(ids, list) or not all(isinstance(run_id, str) for run_id in ids):
            raise TypeError(f"run_ids: expected a list of ids, got {self.run_ids!r}")

    def of_metric(self, name: str) -> Noise | None:
        """The noise of a metric; None if it was not measured."""
        deviation = self.deviations.get(name)
        return None if deviation is None else Noise(deviation, self.num_launches)


def write_noise(folder: Path, noise: StoredNoise) -> None:
    """Replace the stored noise of this case and fingerprint. Raises StoreError."""
    with whole_file(_path(folder, noise.fingerprint, noise.case_id)) as file:
        file.write(json.dumps(asdict(noise), indent=1).encode())


def read_noise(
    folder: Path, fingerprint: str, case_id: str, on_skip: Skip | None = None
) -> StoredNoise | None:
    """The stored noise; None if it is missing or unusable.

    `on_skip` receives a line for a file that is damaged; by default it is printed to stderr.
    """
    path = _path(folder, fingerprint, case_id)
    try:
        return _noise_in(json.loads(path.read_bytes()), fingerprint, case_id)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        fix = "delete it, and measure again with: ppbench noise"
        (on_skip or ConsoleNote())(str(DamagedFile(path, "noise", brief(error), fix=fix)))
        return None


def _noise_in(data: object, fingerprint: str, case_id: str) -> StoredNoise:
    """Parse a record. Raises ValueError, TypeError."""
    if not isinstance(data, dict):
        raise TypeError("it is not a JSON object")
    noise = StoredNoise(**data)
    if (noise.fingerprint, noise.case_id) != (fingerprint, case_id):
        raise ValueError("its content is of another case or machine than its name")
    return noise


def _path(folder: Path, fingerprint: str, case_id: str) -> Path:
    return folder / "noise" / f"{fingerprint}-{case_id}.json"
