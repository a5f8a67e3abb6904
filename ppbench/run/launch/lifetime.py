"""Processes that do not outlive the one that started them, even when that one is killed.

    python -m ppbench.run.launch.lifetime PARENT_PID MODULE [ARGUMENT ...]

runs a module as `python -m` would, as a process that ends with its parent. A parent that is killed
cannot end its children, so each child does that itself, before it imports anything that takes long.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.2


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have this process killed when its parent ends, however that ends.

    `parent_pid` is the process that started this one; without it, a parent that is gone already is
    not noticed. On Linux the kernel counts the *thread* that started this process as its parent:
    start processes from a thread that lives on.
    """
    parent_pid = os.getppid() if parent_pid is None else parent_pid
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    else:

        def watch() -> None:
            while os.getppid() == parent_pid:
                time.sleep(_POLL_S)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, daemon=True).start()
    if os.getppid() != parent_pid:  # it ended before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def command(module: str, *arguments: str) -> list[str]:
    """Return the command of a child of this process that ends with it."""
    return [sys.executable, "-m", __spec__.name, str(os.getpid()), module, *arguments]


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    module = sys.argv[2]
    del sys.argv[1:3]  # the module sees only its own arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
