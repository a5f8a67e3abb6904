"""The private folder for the files of a node's ranks: flight records, errors and samples.

    ppbench-<launch>-<random>/current/      files of the ranks that were started last
                              collected/    those of the ranks before, once they have been read

Whoever starts a node's agent makes it, in shared memory if that has room, and hands its path down
in an environment variable, so that ranks which are started anew find what those before them left.
A launch notes its folders in the store: where all its processes are killed at once, the next sweep
into that store reads them and removes them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from ppbench.errors import StoreError

VARIABLE = "PPBENCH_NODE_FOLDER"
"""Environment variable of an agent and its ranks, with the path of `current`."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # a folder that is made there is private
ROOM_BYTES = 16 * 2**20
"""Free memory from which on the folder is there: a node's samples, and the records of 80 ranks."""


def make_node_folder(launch_id: str = "") -> Path:
    """Make a node's folder; return the path for the files of its ranks, which is not there yet.

    Raises StoreError where no folder can be made.
    """
    prefix = f"ppbench-{launch_id}-"
    memory = None
    with contextlib.suppress(OSError):  # there is none
        has_room = shutil.disk_usage(SHARED_MEMORY).free >= ROOM_BYTES
        memory = SHARED_MEMORY if has_room and os.access(SHARED_MEMORY, os.W_OK) else None
    try:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=memory)) / "current"
    except OSError as error:
        raise StoreError(
            f"no folder for the ranks' flight records can be made: {error}; set TMPDIR to a folder "
            "of your own"
        ) from error


def node_folder_of_rank() -> Path:
    """Return where this rank and the others of its node keep their files."""
    if folder := os.environ.get(VARIABLE):
        return Path(folder)
    # Plain torchrun hands down no folder; its agent is the parent of each rank, also of later ones.
    job = f"{os.environ['TORCHELASTIC_RUN_ID']}-{os.getppid()}"
    return Path(tempfile.gettempdir()) / f"ppbench-{job}" / "current"


def collected_path(current: Path) -> Path:
    """Return where the files of the ranks are moved once they have been read."""
    return current.with_name("collected")


def remove_node_folder(current: Path) -> None:
    shutil.rmtree(current.parent, ignore_errors=True)
