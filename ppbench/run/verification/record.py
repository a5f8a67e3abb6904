"""Results of verifications on this machine, so that each is done once: small files in the store.

    results/verified/KEY.json

A key is a hash of everything that the computation depends on: the measuring code, torch,
transformers and the machine, the runtime, the model with its factory's sources or its checkpoint's
files, how it is cut, the program with its number of microbatches, the optimizer. The length of
sequences, the data and the learning rate are not in it: they change values, not the computation. A
file that cannot be written or read only costs another verification.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from ppbench.config.case import Case
from ppbench.errors import StoreError
from ppbench.files import whole_file
from ppbench.run.machine.environment import fingerprint_here, read_environment, runtime_code
from ppbench.run.machine.measuring_code import VERIFYING, code_hash

_SETTINGS = (
    "schedule",
    "program_digest",
    "runtime",
    "world_size",
    "stages_per_rank",
    "transfer_policy",
    "transfer_look_ahead",
    "device",
    "model_preset",
    "model_weights",
    "model_trust_remote_code",
    "model_dtype",
    "model_partition",
    "model_split",
    "model_split_points",
    "model_seed",
    "train_optimizer",
    "train_autocast",
    "train_recompute",
    "train_recompute_stages",
    "train_compile",
)


@dataclass(frozen=True)
class Verified:
    """The way in which a run was verified, or `no: ` and the reason why it was not."""

    how: str
    difference: float | None = None  # the largest, relative


NOT_VERIFIED = Verified("no: nothing has been compared")


def is_asked_for(case: Case, is_preset: bool) -> bool:
    """Whether a case is verified the first time even if `measure.verify` is off.

    Presets on built-in schedules are compared with their unsplit model by our tests.
    """
    return not is_preset or bool(case.program_digest) or case.model_split == "trace"


def key_of(case: Case, num_microbatches: int, is_full: bool) -> str:
    """Return the key of a case verified with `num_microbatches`; its factory must be imported."""
    environment = read_environment()
    facts = {
        **{name: getattr(case, name) for name in _SETTINGS},
        "num_microbatches": num_microbatches,
        "is_full": (case.seq_len, case.train_microbatch_size, case.num_microbatches)
        if is_full
        else None,
        "is_variable": not isinstance(case.seq_len, int),
        "has_momentum": case.train_momentum != 0,
        "is_clipped": case.train_clip_norm != 0,
        "code": code_hash(VERIFYING),
        "runtime_code": runtime_code(case.runtime),
        "transformers": environment.transformers,
        "machine": fingerprint_here(case.device, case.num_processes, case.launch_threads_per_rank),
        "model": (_sources if ":" in case.model_preset else _stamps)(case.model_preset),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def read_verified(results: Path, key: str) -> Verified | None:
    """Read the key's file; None if there is none that can be read."""
    try:
        content = json.loads(_file(results, key).read_text())
        return Verified(str(content["how"]), float(content["difference"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_verified(results: Path, key: str, verified: Verified) -> None:
    with contextlib.suppress(StoreError), whole_file(_file(results, key)) as file:
        file.write(json.dumps(dataclasses.asdict(verified)).encode())


def _file(results: Path, key: str) -> Path:
    return results / "verified" / f"{key}.json"


def _sources(factory: str) -> list[tuple[str, str]]:
    """Hash the loaded source files on which the factory may depend.

    They are all but those of Python, of ppbench and of installed packages other than the factory's
    own. A file that the factory does not use costs at most another verification.
    """
    package = factory.partition(":")[0].partition(".")[0]
    files = {
        str(getattr(module, "__file__", None) or ""): name.partition(".")[0]
        for name, module in list(sys.modules.items())
    }
    wanted = (
        file
        for file, owner in files.items()
        if file.endswith(".py") and (owner == package or not _is_installed(file))
    )
    hashes = []
    for file in sorted(wanted):
        digest = "unreadable"
        with contextlib.suppress(OSError):
            digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        hashes.append((file, digest))
    return hashes


def _is_installed(file: str) -> bool:
    """Whether a file is Python's, ppbench's or an installed package's: its version is known."""
    if file.startswith(_known_folders()):
        return True
    path = Path(file)
    is_made_in_memory = not path.is_absolute()
    return is_made_in_memory or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


@functools.cache
def _known_folders() -> tuple[str, ...]:
    """Python's and ppbench's, each with a separator at its end. Thousands of files are asked of."""
    paths, own = sysconfig.get_paths(), Path(__file__).parents[3]
    known = (paths["stdlib"], paths["platstdlib"], own / "engine", own / "ppbench")
    return tuple(f"{folder}{os.sep}" for folder in known)


def _stamps(name: str) -> list[tuple[str, int, int, int]]:
    """Return sizes and times of a checkpoint's files, whose contents are too large to be read.

    The last of the times is the kernel's own, which programs cannot set back.
    """
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        with contextlib.suppress(ValueError):  # no hub id
            cached = try_to_load_from_cache(name, "config.json")
            folder = Path(cached).parent if isinstance(cached, str) else folder
    if not folder.is_dir():
        return []
    files = sorted(path for path in folder.iterdir() if path.is_file())
    stats = [(path.name, path.stat()) for path in files]
    return [(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats]
