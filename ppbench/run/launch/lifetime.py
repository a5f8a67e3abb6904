"""Processes that do not outlive the one that started them, even when that one is killed.

A parent that is killed cannot end its children, so each child does that itself, before it imports
anything that takes long.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.2


def die_with_parent(parent_pid: int) -> None:
    """Have this process killed when its parent ends, however that ends, or has ended already.

    On Linux the kernel counts the *thread* that started this process as its parent: start processes
    from a thread that lives on.
    """
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
