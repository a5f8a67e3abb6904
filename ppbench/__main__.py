"""Entry point of the command `ppbench`, and of `python -m ppbench`.

It imports almost nothing, so that Ctrl-C ends the process quietly while the rest is imported.
"""

import _signal  # type: ignore[import-not-found]  # part of Python; `signal` imports more
import os
import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command line. Windows lacks what it stands on, and is refused in one line."""
    if sys.platform == "win32":
        print("error: ppbench does not run on Windows; use Linux, or WSL there", file=sys.stderr)
        sys.exit(2)
    for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP):
        if _signal.getsignal(number) != _signal.SIG_IGN:  # as under nohup
            _signal.signal(number, _leave)
    from ppbench import cli

    cli.main()


def _leave(_number: int, _frame: object) -> None:
    """End the process at once: nothing has to be cleaned up yet."""
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
